"""The analyzer of the loss: mistakes in how it is computed from the model's outputs; and `preflight`, on one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, final

import torch
from pydantic import Field
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Schedule, Series, Snapshot, rarely
from gradtrack.analyzers.loss_graph.graph import Guess, Operation, guess_of, operations
from gradtrack.analyzers.loss_graph.verdict import LossFunction, Mistake, judge, mistakes
from gradtrack.analyzers.tools.modules import evaluating, first_floating, replace, tensors
from gradtrack.analyzers.tools.offline import call, untouched
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.reports import Issue, IssueType, Report
from gradtrack.reports.base import measured
from gradtrack.support.names import listed, plural

FAR_ABOVE: Final = 4.0
"""How many times ln(classes) a first loss may be without a word."""


class LossGraphReport(Report):
    """The operations that compute the loss from the outputs of the last layers, those next to the loss first."""

    operations: list[str] = Field(default_factory=list)
    num_issues: float | None = measured("loss_graph/issues", "Mistakes in how the loss is computed.")


@final
class LossGraphAnalyzer(Analyzer):
    """An analyzer of how the loss is computed.

    It finds, with certainty and at its first look: a softmax or sigmoid before a loss that applies its own, a ReLU
    behind the logits, a negative log-likelihood without a log-softmax, a softmax over the batch or over places, a loss
    that broadcasts [B] against [B, 1], a squared error of the probabilities of classes, a loss or a likelihood with the
    wrong sign, and targets that the loss or the last function does not reach. With the values of the loss it finds one
    that stays at that of the best guess, ln(classes) or the variance of the targets. Gradients alone show none of
    these. Targets are known where `safe_backward` or `manager.step` runs the backward pass. A type that is on purpose
    is muted by the setting `mute`. It needs the loss as a tensor, not as a number. For [B, 1] outputs and B targets a
    broadcast loss is a mean over B² differences: its least is at the mean of the targets.

    References: Karpathy 2019, A Recipe for Training Neural Networks; the documentation of the losses of torch.

    Cost: on its steps one walk over the operations between the loss and the last layers, the loss of that batch once
    more, and memory for some copies of its targets, of 16 million numbers at most.

    >>> import torch
    >>> from gradtrack import GradientManager
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with GradientManager(analyzers=["loss_graph"]) as manager:
    ...     for step in range(2):
    ...         optimizer.zero_grad()
    ...         loss = nn.functional.cross_entropy(model(torch.ones(4, 2)), torch.zeros(4, dtype=torch.long))
    ...         report = manager.step(model, optimizer, loss)
    ...         optimizer.step()
    >>> [issue.key for issue in manager.diagnose()]
    ['ACTIVATED_TWICE:0']
    """

    report_type: ClassVar[type[Report]] = LossGraphReport
    schedule: ClassVar[Schedule] = staticmethod(rarely)
    foresees: ClassVar[bool] = True

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        return "every training has a loss"

    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = {
        IssueType.CHANCE_LEVEL: tuple(kind for kind in IssueType if kind is not IssueType.CHANCE_LEVEL),
    }

    def __init__(self) -> None:
        self._issues: list[Issue] = []
        self._function: LossFunction | None = None
        self._series: Series | None = None
        self._note: str | None = None
        self._has_compared = False
        self._seen: tuple[list[Operation], list[Mistake]] | None = None
        self._guesses: list[Guess | None] = []
        self._functions: list[LossFunction] = []

    def before_backward(self, loss: Tensor) -> None:
        if loss.grad_fn is not None:
            self._seen = _look(loss.grad_fn)
            self._guesses.append(guess_of(self._seen[0][0], loss))

    def disarm(self) -> None:
        self._seen, self._guesses = None, []

    def inspect(self, snapshot: Snapshot) -> Report | None:
        if snapshot.loss_graph is None:
            return None
        found, wrong = self._seen or _look(snapshot.loss_graph)
        guesses = [guess for guess in self._guesses if guess is not None]
        known_guesses = guesses if len(guesses) == len(self._guesses) else []
        function, self._series = LossFunction.of(found[0], snapshot.params(), known_guesses), snapshot.series
        self._function = None if function is None else function.after(self._functions)
        self._functions = [*self._functions[-_LAST:], *([] if function is None else [function])]
        self._compare_first(snapshot.series)
        known = {issue.key: issue.step for issue in self._issues}
        judged = judge(wrong, snapshot.params(), snapshot.step)
        self._issues = [one.model_copy(update={"step": known.get(one.key, one.step)}) for one in judged]
        return LossGraphReport(operations=[operation.name for operation in found], num_issues=len(judged))

    def issues(self) -> list[Issue]:
        if self._function is None or self._series is None:
            return list(self._issues)
        return [*self._issues, *self._function.judge(self._series)]

    def notes(self) -> list[str]:
        note, self._note = self._note, None
        return [] if note is None else [note]

    def _compare_first(self, series: Series | None) -> None:
        """Tell of a first loss far above that of guessing, which is information: much of it is soon made good."""
        classes = None if self._function is None else self._function.num_classes
        first = series.first_losses[0] if series is not None and series.first_losses else 0.0
        chance = None if self._function is None else self._function.chance
        if classes is not None and chance is not None and first > FAR_ABOVE * chance and not self._has_compared:
            self._has_compared = True
            self._note = (
                f"the first loss was {first:.3g}; guessing among {classes} classes gives {chance:.3g}: the "
                "first logits are large, which smaller weights of the last layer avoid."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"issues": [issue.model_dump(mode="json") for issue in self.issues()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._issues = [Issue.model_validate(issue) for issue in state["issues"]]


_LAST: Final = 3


def _look(node: Any) -> tuple[list[Operation], list[Mistake]]:
    """Return the operations of a loss's graph and the mistakes in it."""
    found = list(operations(node))
    return found, mistakes(found)


class Check(Report):
    """One line of a preflight; `passed` is None where it could not be said, or is information."""

    name: str
    passed: bool | None
    text: str

    def __str__(self) -> str:
        return f"{_SIGNS[self.passed]:>5}  {self.name}: {self.text}"


_SIGNS: Final = {True: "ok", False: "look", None: "-"}


class PreflightReport(Report):
    """What one batch shows of a training before its first step."""

    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether no check has found anything."""
        return all(check.passed is not False for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def preflight(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, optimizer: Any = None) -> PreflightReport:
    """Check a training on one batch before its first step, print what it shows, and return that.

    `batch` is a pair of inputs and targets, for `loss_fn(model(inputs), targets)`; of anything else the whole goes into
    the model, for `loss_fn(output)`. Inputs may be a tensor, a tuple of arguments or a mapping of keywords. Weights,
    gradients, buffers, modes and random numbers stay as they were, and the optimizer makes no step.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> report = preflight(model, nn.CrossEntropyLoss(), batch, optimizer)  # doctest: +ELLIPSIS
       ok  optimizer: owns all 2 trainable parameters.
       ok  modes: the model is in training mode.
     look  loss: The softmax over the output of 0 goes into a cross-entropy, which applies its own: ...
       ok  gradients: every trainable parameter gets one.
       ok  first loss: ..., that of guessing among 3 classes.
       ok  examples: the output of one does not change with the others.
    >>> report.passed
    False
    """
    wanted: tuple[object, object] = (model, loss_fn)
    if not isinstance(wanted[0], nn.Module) or not callable(wanted[1]):
        given = f"{type(model).__name__}, {type(loss_fn).__name__}"
        raise InputTypeError(f"preflight({given}): expected a model, a loss function, a batch and an optimizer.")
    paired = isinstance(batch, (tuple, list)) and len(batch) == 2
    inputs, targets = (batch[0], (batch[1],)) if paired else (batch, ())
    checks = [*_ownership(model, optimizer), _mode(model)]
    with untouched(model):
        output = call(model, inputs)
        loss: object = loss_fn(output, *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise UsageError(f"loss_fn returned {loss!r}: expected a single number that depends on the model's output.")
        checks += _loss(model, loss)
        with evaluating(model), torch.no_grad():
            checks.append(_independence(model, inputs))
    report = PreflightReport(checks=checks)
    print(report)  # noqa: T201
    return report


def _ownership(model: nn.Module, optimizer: Any) -> Iterator[Check]:
    """Compare the parameters of the optimizers with those of the model."""
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    if not optimizers:
        return
    held = [id(param) for one in optimizers for group in one.param_groups for param in group["params"]]
    owned = set(held)
    params = dict(model.named_parameters())
    trainable = [name for name, param in params.items() if param.requires_grad]
    missing = [name for name in trainable if id(params[name]) not in owned]
    frozen = [name for name, param in params.items() if not param.requires_grad and id(param) in owned]
    foreign = len(owned - {id(param) for param in params.values()})
    said = [f"no optimizer has {listed(missing)}"] if missing else []
    said += [f"{listed(frozen)} are frozen, and an optimizer has them"] if len(frozen) == len(owned) else []
    said += [f"it has {plural(foreign, 'parameter')} that the model has not"] if foreign else []
    said += ["two groups or optimizers have the same parameter"] if len(held) > len(owned) else []
    yield Check(
        name="optimizer",
        passed=not said,
        text=f"{'; '.join(said)}." if said else f"owns all {len(trainable)} trainable parameters.",
    )


def _mode(model: nn.Module) -> Check:
    still = [
        name
        for name, part in model.named_modules()
        if not part.training and isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd))
    ]
    if model.training and not still:
        return Check(name="modes", passed=True, text="the model is in training mode.")
    what = f", {listed(still)} among it" if still else ""
    return Check(name="modes", passed=not still, text=f"in evaluation mode{what}: model.train() comes before training.")


def _loss(model: nn.Module, loss: Tensor) -> Iterator[Check]:
    """Look at the graph of a loss, at its value, and at the parameters that its gradient reaches."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = list(operations(loss.grad_fn))
    for issue in judge(mistakes(found), params, 0):
        yield Check(name="loss", passed=False, text=f"{issue.message} {issue.recommendation}")
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        loss, list(params.values()), allow_unused=True, retain_graph=True
    )
    without = [name for name, gradient in zip(params, gradients, strict=True) if gradient is None]
    broken = [
        name
        for name, gradient in zip(params, gradients, strict=True)
        if gradient is not None and not bool(gradient.isfinite().all())
    ]
    text = f"{listed(without)} get none." if without else "every trainable parameter gets one."
    text = f"{listed(broken)} get NaN or Inf." if broken else text
    yield Check(name="gradients", passed=not (without or broken), text=text)
    function, value = LossFunction.of(found[0], params), float(loss.detach())
    classes = None if function is None else function.num_classes
    if classes is None or classes < 2:
        yield Check(name="first loss", passed=None if math.isfinite(value) else False, text=f"{value:.3g}.")
        return
    chance = math.log(classes)
    far = not value < FAR_ABOVE * chance
    than = "that of" if 0.5 * chance < value < 1.5 * chance else "and not that of"
    yield Check(
        name="first loss",
        passed=not far,
        text=f"{value:.3g}, {than} guessing among {classes} classes"
        + (f", {chance:.3g}: weights of the last layer are large, or targets are wrong." if "not" in than else "."),
    )


def _independence(model: nn.Module, inputs: Any) -> Check:
    """Compare the output of the first example beside others with that beside copies of itself."""
    size = next((len(one) for one in tensors(inputs) if one.ndim), 0)
    copies = replace(inputs, lambda one: one[:1].expand_as(one) if one.ndim and len(one) == size else one)
    first, second = (first_floating(call(model, given)) for given in (inputs, copies))
    name = "examples"
    if size < 2 or first is None or second is None or not first.ndim or len(first) != size or len(second) != size:
        return Check(name=name, passed=None, text="the outputs do not lie in the order of the batch.")
    apart = float((first[0] - second[0]).abs().max()) if first[0].numel() else 0.0
    if apart <= _ROUNDING * max(float(first[0].abs().max()), 1e-6):
        return Check(name=name, passed=True, text="the output of one does not change with the others.")
    return Check(
        name=name,
        passed=False,
        text="the output of one changes with the others, in evaluation mode: look for a view, a softmax or a sum over "
        "the first axis.",
    )


_ROUNDING: Final = 1e-3
