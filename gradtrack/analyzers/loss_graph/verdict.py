"""The verdict on a loss: mistakes that its graph shows with certainty, and what its values tell together with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.loss_graph.graph import (
    BINARY,
    CLASSES,
    DISTANCES,
    NEAR,
    Guess,
    Operation,
    are_one_hot,
    compared,
    is_multiplied,
    keeps_axes,
    layer_of,
    num_classes,
    targets_of,
    terms,
    whole_loss,
)
from gradtrack.reports import Issue, IssueSeverity, IssueType, usual_confidence

_NORMALISED: Final = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_ACTIVATIONS: Final = frozenset(("Softmax", "Sigmoid", "Tanh", "Relu", "Gelu", "Silu"))
_NEGATIONS: Final = frozenset(("Neg", "Rsub"))


@dataclass(frozen=True)
class Mistake:
    """A mistake in how a loss is computed; `{}` in the message stands for the layer below the operation `at`."""

    issue_type: IssueType
    at: Operation
    message: str
    recommendation: str
    severity: IssueSeverity = IssueSeverity.HIGH


def mistakes(found: Sequence[Operation]) -> list[Mistake]:
    """Return the mistakes in a loss's graph."""
    of_one = (check(operation) for operation in found for check in _CHECKS)
    of_whole = (check(root) for root in found[:1] for check in _CHECKS_OF_WHOLE)
    return [mistake for mistake in (*of_one, *of_whole) if mistake is not None]


def judge(found: Iterable[Mistake], params: Mapping[str, nn.Parameter], step: int) -> list[Issue]:
    """Return the issues of the mistakes in a loss's graph, one for each type and layer."""
    issues: dict[str, Issue] = {}
    for mistake in found:
        layer = layer_of(mistake.at, params)
        issue = Issue(
            issue_type=mistake.issue_type,
            severity=mistake.severity,
            layer=layer,
            message=mistake.message.replace("{}", layer or "the model"),
            recommendation=mistake.recommendation,
            confidence=usual_confidence(mistake.issue_type),
            step=step,
        )
        issues.setdefault(issue.key, issue)
    return list(issues.values())


def _activated_twice(operation: Operation) -> Mistake | None:
    """Find probabilities where a loss expects logits: it applies its own softmax or sigmoid to them."""
    logits = _logits_of(operation)
    if logits is None or logits.name not in _NORMALISED:
        return None
    activation = _NORMALISED[logits.name]
    loss = "cross-entropy" if operation.name in CLASSES else "binary cross-entropy with logits"
    return Mistake(
        IssueType.ACTIVATED_TWICE,
        logits,
        f"The {activation} over the output of {{}} goes into a {loss}, which applies its own: the loss cannot come "
        "near zero, and gradients shrink.",
        f"Give the loss the logits: remove the {activation}, or use it for predictions alone.",
    )


def _rectified(operation: Operation) -> Mistake | None:
    """Find logits that a ReLU has cut off."""
    logits = _logits_of(operation)
    if logits is None or logits.name != "Relu":
        return None
    return Mistake(
        IssueType.RECTIFIED_LOGITS,
        logits,
        "A ReLU cuts off the output of {}, which the loss takes as logits: no logit can be negative, and a class whose "
        "logit is cut off gets no gradient.",
        "Remove the activation behind the last layer.",
        IssueSeverity.MEDIUM,
    )


def _without_logarithm(operation: Operation) -> Mistake | None:
    """Find a negative log-likelihood of numbers that are no logarithms of probabilities."""
    source = operation.source if operation.name in CLASSES else None
    if source is None or not (source.is_layer or source.name in _ACTIVATIONS):
        return None
    return Mistake(
        IssueType.MISSING_LOG_SOFTMAX,
        source,
        "The negative log-likelihood takes the output of {} as logarithms of probabilities, but no log-softmax "
        "computed it: the loss is minus one output, and falls without bound.",
        "Use cross_entropy, or nll_loss over log_softmax.",
    )


def _over_wrong_dimension(operation: Operation) -> Mistake | None:
    """Find a softmax over the examples of a batch, or over a single class."""
    source = operation.source if operation.name in CLASSES else None
    softmax = source.source if source is not None and source.name == "Log" else source
    if softmax is None or softmax.name not in ("LogSoftmax", "Softmax") or softmax.dim is None:
        return None
    shape, dim = softmax.shape, softmax.dim
    if shape[dim] == 1:
        what, remedy = "over a single class, so that it is always 1", "Use a loss with a sigmoid for one output."
    elif len(shape) == 2 and dim == 0 and operation.name == "NllLoss":
        what, remedy = f"over the {shape[0]} examples of a batch instead of their {shape[1]} classes", "Use dim=1."
    elif operation.name == "NllLoss2D" and dim != 1 and keeps_axes(operation, shape):
        what, remedy = f"over axis {dim} of {list(shape)} instead of the {shape[1]} classes of axis 1", "Use dim=1."
    elif operation.name == "NllLoss" and len(shape) > 2 and dim != len(shape) - 1 and keeps_axes(operation, shape):
        what, remedy = f"over axis {dim} of {list(shape)} instead of the {shape[-1]} classes of the last", "Use dim=-1."
    else:
        return None
    return Mistake(IssueType.SOFTMAX_DIMENSION, softmax, f"The softmax over the output of {{}} runs {what}.", remedy)


def _broadcast(operation: Operation) -> Mistake | None:
    """Find predictions [B] or [B, 1] that broadcasting compares with every target of a batch: [B, B]."""
    known = [one for one in operation.inputs if one is not None]
    if operation.name in DISTANCES:
        expanded = operation.inputs[0]
        if expanded is None or expanded.name != "Expand":
            return None
        given, compared = expanded.inputs[0], expanded.shape
    elif operation.name in ("Sub", "Rsub") and len(known) == 1 and len(operation.inputs) == 2:
        given, compared = known[0], operation.shape
    else:
        return None
    if given is None or len(compared) != 2 or compared[0] != compared[1] or compared[0] < 2:
        return None
    if given.shape not in ((compared[0],), (compared[0], 1)):
        return None
    return Mistake(
        IssueType.BROADCAST_LOSS,
        given,
        f"The loss compares each of {compared[0]} predictions of {{}} with the targets of all: broadcasting made "
        f"{list(compared)} of {list(given.shape)}. The model learns the mean of the targets.",
        "Give predictions and targets one shape: output.squeeze(1), or target.unsqueeze(1).",
    )


def _negated(root: Operation) -> Mistake | None:
    """Find a loss that is nothing but a loss function with the wrong sign."""
    negative = False
    operation: Operation | None = root
    while operation is not None and (operation.keeps_sign or operation.name in _NEGATIONS):
        negative ^= operation.name in _NEGATIONS
        operation = operation.known[0] if len(operation.known) == 1 else None
    if operation is None or not negative or operation.name not in CLASSES | DISTANCES:
        return None
    return Mistake(
        IssueType.NEGATED_LOSS,
        operation,
        "The loss is a loss function with the opposite sign: the training makes predictions worse, and the loss falls "
        "without bound.",
        "Remove the minus before the loss. Where that is on purpose, mute NEGATED_LOSS.",
        IssueSeverity.HIGH if operation.name in CLASSES else IssueSeverity.MEDIUM,
    )


def _not_negated(root: Operation) -> Mistake | None:
    """Find a log-likelihood that is the whole loss, or a divergence in it, with the opposite sign."""
    found = terms(root)
    added = {operation.node for sign, operation in found if sign}
    taken = [operation for sign, operation in found if not sign]
    squares = [one.source for one in taken if one.name == "Pow" and one.source is not None]
    of_data = [one for one in squares if one.name == "Sub" and len(one.known) == 1]
    others = {operation.name for operation in taken} - {"Pow"}
    if not added and of_data and others == {"Log"}:
        at, what = of_data[0], "The loss is the logarithm of a likelihood over the output of {}, and not minus it"
    elif len(found) == 1 and added and found[0][1].name == "LogSoftmax":
        at, what = found[0][1], "The loss is the logarithm of the probability over the output of {}, and not minus it"
    elif len(found) == 2 and others == {"Logsumexp"} and added == {one.node for one in taken[0].known}:
        at, what = taken[0], "The loss is the logarithm of the probability over the output of {}, and not minus it"
    elif grown := [one for one in taken if one.name == "Exp" and one.source is not None and one.source.node in added]:
        at, what = grown[0], "The loss has a term v - exp(v) of the output v of {}, a divergence with the wrong sign"
    else:
        return None
    text = f"{what}: it falls without bound, and the training makes the model worse."
    return Mistake(IssueType.NEGATED_LOSS, at, text, "Change the sign: likelihoods go into a loss with a minus.")


def _squared(root: Operation) -> Mistake | None:
    """Find a squared error between the probabilities of classes and their targets that is the whole loss.

    Behind a sigmoid, which labels that do not exclude each other have as well, the targets have to be seen.
    """
    operation = whole_loss(root)
    source = None if operation is None or operation.name not in ("Pow", "MseLoss") else compared(operation)
    if operation is None or source is None or source.name not in _NORMALISED:
        return None
    if source.name == "Softmax" and (source.dim is None or source.shape[source.dim] < 2):
        return None
    if source.name == "Sigmoid" and not are_one_hot(targets_of(operation)):
        return None
    return Mistake(
        IssueType.SQUARED_CLASSES,
        source,
        f"The loss is the squared error of a {_NORMALISED[source.name]} over the output of {{}}: where the "
        "model is sure and wrong, its gradient vanishes.",
        "Use cross_entropy on the logits. Where probabilities are to be matched, kl_div on log_softmax.",
        IssueSeverity.MEDIUM,
    )


def _out_of_reach(root: Operation) -> Mistake | None:
    """Find targets that are no probabilities, or that the last function cannot return.

    A function that reaches most of what its targets say is left alone: some that lie outside may be outliers.
    """
    operation = whole_loss(root, weighted=True)
    source = None if operation is None or operation.name in BINARY else compared(operation)
    if operation is None or (operation.name not in BINARY and (source is None or source.name not in _RANGES)):
        return None
    targets = targets_of(operation)
    if targets is None or not targets.is_floating_point() or targets.numel() < 2:
        return None
    low, high = _RANGES["Sigmoid" if source is None else source.name]
    targets = targets.float()
    apart = targets - targets.clamp(low, high)
    outside, lost, spread = torch.stack(
        [(apart.abs() > _FAR).float().mean(), apart.square().mean(), targets.var()]
    ).tolist()
    if not outside > _RARE or (source is not None and not lost > _LOST * spread):
        return None
    if source is None:
        what = f"{outside:.0%} of the targets of the binary cross-entropy are not between 0 and 1: it has no end."
        remedy = "Give it targets of 0 and 1: labels of -1 and 1 become (labels + 1) / 2. Numbers take a squared error."
    else:
        name = source.name.lower()
        within = f"{low:g} to {high:g}" if math.isfinite(high) else "nothing below 0"
        what = f"{outside:.0%} of the targets are not what the {name} over the output of {{}} can return, {within}: it "
        what += "goes to its end, where its gradient vanishes."
        remedy = f"Leave the {name} out, or scale the targets into its range."
    return Mistake(IssueType.TARGET_RANGE, source or operation, what, remedy)


_RANGES: Final = {"Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, math.inf), "Softplus": (0.0, math.inf)}
_FAR: Final = 0.01
_RARE: Final = 0.01
_LOST: Final = 0.25
"""Which part of the variance of targets may lie out of reach, as a mean square."""


def _logits_of(operation: Operation) -> Operation | None:
    """Return what a loss that normalises by itself takes as logits; None for any other operation."""
    if operation.name == "BinaryCrossEntropyWithLogits":
        return operation.source
    if operation.name in CLASSES and (source := operation.source) is not None and source.name == "LogSoftmax":
        return source.source
    return None


_CHECKS: Final = (_activated_twice, _rectified, _without_logarithm, _over_wrong_dimension, _broadcast)
_CHECKS_OF_WHOLE: Final = (_negated, _not_negated, _squared, _out_of_reach)


@dataclass(frozen=True)
class LossFunction:
    """The loss function that is all of a loss, with what its values tell together with it.

    `chance` is what the loss is for a guess, which is `exact` where it is ln(classes), and `ratio` how much of that it
    was on the last batch that was looked at.
    """

    name: str
    layer: str
    num_classes: int | None
    chance: float | None = None
    ratio: float = 1.0
    exact: bool = True

    @classmethod
    def of(
        cls, root: Operation, params: Mapping[str, nn.Parameter], guesses: Sequence[Guess] = ()
    ) -> LossFunction | None:
        """Return that of a graph, with the guess on each micro-batch; None of a sum, or where a number is not known."""
        operation = whole_loss(root)
        if operation is None or operation.name not in CLASSES | BINARY | DISTANCES:
            return None
        name, layer, classes = operation.name, layer_of(operation, params), num_classes(operation)
        if guesses:
            function, constant = (statistics.fmean(column) for column in list(zip(*guesses, strict=True))[1:])
            weight = sum(guess.loss for guess in guesses) / function
            exact = classes is not None and constant >= NEAR * math.log(classes)
            return cls(name, layer, classes, weight * constant, function / constant, exact)
        if is_multiplied(root, operation):
            return None
        return cls(name, layer, classes, math.log(classes) if classes is not None and classes > 1 else None)

    def after(self, earlier: Sequence[LossFunction]) -> LossFunction:
        """Return it with the chance of the batches of earlier looks as well; without one where they differ."""
        known = [one.chance for one in (*earlier, self) if one.chance is not None]
        alike = self.chance is not None and max(known) < _ALIKE * min(known)
        return replace(self, chance=statistics.fmean(known) if alike else None)

    def judge(self, series: Series) -> list[Issue]:
        """Return what the values of the loss show that its graph does not."""
        return [*self._below_zero(series), *self._at_chance(series)]

    def _below_zero(self, series: Series) -> Iterator[Issue]:
        """Open where a binary cross-entropy is negative, which it is for targets outside of 0 to 1 alone."""
        last = list(series.losses)[-_FEW:]
        if self.name not in BINARY or len(last) < _FEW or not statistics.median(last) < 0:
            return
        yield Issue(
            issue_type=IssueType.TARGET_RANGE,
            severity=IssueSeverity.HIGH,
            layer=self.layer,
            message=f"The binary cross-entropy is {statistics.median(last):.3g}: it is below zero only where targets "
            "are not between 0 and 1, and then has no least value.",
            statistic="loss",
            value=statistics.median(last),
            threshold=0.0,
            window=_FEW,
            step=series.num_steps,
            confidence=usual_confidence(IssueType.TARGET_RANGE),
            recommendation="Give it targets of 0 and 1: labels of -1 and 1 become (labels + 1) / 2.",
        )

    def _at_chance(self, series: Series) -> Iterator[Issue]:
        """Open where a loss stays at that of the best guess, which says nothing of the inputs at all.

        That is a hypothesis: there are tasks of which the beginning is flat. Labels of yes and no may be mostly noise:
        a loss that is right is then hardly below that of guessing, and comes there late.
        """
        enough = _LONG_OF_LABELS if self.name in BINARY else _LONG
        last, near = list(series.losses)[-_LONG // 2 :], NEAR if self.exact else _NEAR_OF_SAMPLES
        if self.chance is None or self.ratio < _NEAR_OF_SAMPLES or series.num_steps < enough or len(last) < _LONG // 2:
            return
        levels = [statistics.median(last[: _LONG // 4]), statistics.median(last[_LONG // 4 :])]
        if not all(near < level / self.chance < _ABOVE for level in levels):
            return
        scatter = statistics.median(abs(loss - levels[1]) for loss in last)
        still = _STILL if levels[1] < self.chance else _STILL_ABOVE
        if levels[0] - levels[1] > max(still * self.chance, 0.0 if self.exact else scatter):
            return
        guess = f"guessing among {self.num_classes} classes" if self.num_classes else "the best guess"
        yield Issue(
            issue_type=IssueType.CHANCE_LEVEL,
            severity=IssueSeverity.LOW,
            layer="",
            message=f"Perhaps nothing is learned: after {series.num_steps} steps the loss is {levels[1]:.3g}, and "
            f"{guess} without a look at the inputs gives {self.chance:.3g}.",
            statistic="loss",
            value=levels[1],
            threshold=self.chance,
            window=_LONG // 2,
            step=series.num_steps,
            confidence=0.5,
            recommendation="If no other issue is open, the gradients are not to blame: check that inputs and labels "
            "belong together, by training on a single batch.",
        )


_FEW: Final = 8
_LONG: Final = 96
_LONG_OF_LABELS: Final = 384
_NEAR_OF_SAMPLES: Final = 0.9
_ABOVE: Final = 1.25
"""Where a loss is that of guessing, which some batches tell less exactly than the number of classes."""
_ALIKE: Final = 2.0
_STILL: Final = 0.015
_STILL_ABOVE: Final = 0.04
