"""The verdict on the values of a loss: targets out of range, and a loss that stays at that of guessing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.loss_graph.graph import (
    BINARY,
    CLASSES,
    DISTANCES,
    Operation,
    layer_of,
    num_classes,
    targets_of,
    whole_loss,
)
from gradtrack.reports import Issue, IssueSeverity, IssueType


class Guess(NamedTuple):
    """What a loss is on a batch, what its function is without weights, and what that is for the best constant guess."""

    loss: float
    function: float
    constant: float


def guess_of(root: Operation, loss: Tensor) -> Guess | None:
    """Return the value of a loss beside that of the best guess that does not look at the inputs; before backward alone.

    None where it is no function of torch, weighs classes, or where its targets are not known.
    """
    operation = whole_loss(root)
    if operation is None or operation.saved("weight") is not None or operation.saved("pos_weight") is not None:
        return None
    output, target = operation.saved("self"), targets_of(operation)
    if output is None or target is None or not target.numel():
        return None
    with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
        if operation.name in CLASSES and (classes := num_classes(operation)) is not None:
            values = _of_classes(output, target, classes, operation.node._saved_ignore_index)
        elif len(target) < _FEW or not target.is_floating_point():
            return None
        elif operation.name in BINARY:
            values = _of_labels(output, target.float(), with_logits="Logits" in operation.name)
        elif operation.name in _FUNCTIONS:
            values = _of_numbers(_FUNCTIONS[operation.name](operation.node), output.float(), target.float())
        else:
            return None
        found = Guess(*torch.stack([loss.detach().float(), *values]).tolist())
    return found if min(found) > 0 and all(map(math.isfinite, found)) else None


def _of_classes(output: Tensor, target: Tensor, num_classes: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Return a cross-entropy, and the entropy of the classes where a batch shows that some are rarer than others."""
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    value, counted = F.nll_loss(output, target, ignore_index=ignored).float(), target.ne(ignored).flatten().float()
    alike = value.new_tensor(math.log(num_classes))
    if target.numel() < _ENOUGH * num_classes:
        return value, alike
    places = target.flatten().clamp(0, num_classes - 1)
    counts = counted.new_zeros(num_classes).scatter_add_(0, places, counted)
    missing = (counts.gt(0).sum() - 1) / (2 * counts.sum())  # of the entropy of a sample, on average
    entropy = torch.special.entr(counts / counts.sum()).sum() + missing
    return value, entropy.where(entropy < _NEAR * alike, alike)


def _of_labels(output: Tensor, target: Tensor, *, with_logits: bool) -> tuple[Tensor, Tensor]:
    """Return a binary cross-entropy, and that of the share of each label."""
    output = output.float() if with_logits else output.float().logit(1e-6)
    share = target.flatten(1).mean(0) if target.ndim > 1 else target.mean()
    entropy = torch.special.entr(share) + torch.special.entr(1 - share) + 0.5 / len(target)
    return F.binary_cross_entropy_with_logits(output, target), entropy.clamp(max=math.log(2)).mean()


def _of_numbers(function: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a distance, and that from the mean of the batch."""
    return function(output, target), function(target.mean(0).expand_as(target), target) * len(target) / (
        len(target) - 1
    )


_FUNCTIONS: Final[dict[str, Callable[[Any], Callable[[Tensor, Tensor], Tensor]]]] = {
    "MseLoss": lambda node: F.mse_loss,
    "SmoothL1Loss": lambda node: partial(F.smooth_l1_loss, beta=node._saved_beta),
    "HuberLoss": lambda node: partial(F.huber_loss, delta=node._saved_delta),
}


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
            exact = classes is not None and constant >= _NEAR * math.log(classes)
            return cls(name, layer, classes, weight * constant, function / constant, exact)
        if _is_multiplied(root, operation):
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
            confidence=0.95,
            recommendation="Give it targets of 0 and 1: labels of -1 and 1 become (labels + 1) / 2.",
        )

    def _at_chance(self, series: Series) -> Iterator[Issue]:
        """Open where a loss stays at that of the best guess, which says nothing of the inputs at all.

        That is a hypothesis: there are tasks of which the beginning is flat.
        """
        last, near = list(series.losses)[-_LONG // 2 :], _NEAR if self.exact else _NEAR_OF_SAMPLES
        if self.chance is None or self.ratio < _NEAR_OF_SAMPLES or series.num_steps < _LONG or len(last) < _LONG // 2:
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


def _is_multiplied(root: Operation, function: Operation) -> bool:
    while root.node is not function.node and root.name != "Mul":
        root = root.known[0]
    return root.name == "Mul"


_FEW: Final = 8
_ENOUGH: Final = 20
"""How many targets of each class tell how frequent the classes are."""
_LONG: Final = 96
_NEAR: Final = 0.97
_NEAR_OF_SAMPLES: Final = 0.9
_ABOVE: Final = 1.25
"""Where a loss is that of guessing, which some batches tell less exactly than the number of classes."""
_ALIKE: Final = 2.0
_STILL: Final = 0.015
_STILL_ABOVE: Final = 0.04
