"""The verdict on how a loss is computed: mistakes that its autograd graph shows with certainty.

The graph between the loss and the last layers is walked by the edges and the sizes that autograd keeps of each
operation. What it keeps for the backward pass, as targets, is read before that pass alone, and never where unpacking it
would run code of the user's: checkpointing, offloading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from gradtrack.reports import Issue, IssueSeverity, IssueType

CLASSES: Final = frozenset(("NllLoss", "NllLoss2D"))
BINARY: Final = frozenset(("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"))
DISTANCES: Final = frozenset(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss"))
_NORMALISED: Final = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_ACTIVATIONS: Final = frozenset(("Softmax", "Sigmoid", "Tanh", "Relu", "Gelu", "Silu"))
_NEGATIONS: Final = frozenset(("Neg", "Rsub"))
_SUFFIX: Final = re.compile(r"Backward\d*$")
_MOST: Final = 4096
"""The most operations that are visited."""

_RESHAPES: Final = re.compile(
    "View|UnsafeView|ReshapeAlias|Alias|Squeeze|Unsqueeze|Transpose|Permute|T|Clone|ToCopy|Select|Slice|Index|"
    "IndexSelect|MaskedSelect|Unfold|_DDPSink|SplitWithSizes|Split|Unbind"
)
_LAYERS: Final = re.compile(
    "Addmm|Mm|Bmm|Baddbmm|Mv|Addmv|Dot|Linear|Convolution|Embedding|NativeLayerNorm|NativeGroupNorm|NativeBatchNorm|"
    "CudnnBatchNorm|MiopenBatchNorm|FusedRmsNorm|CompiledFunction|MkldnnRnnLayer|CudnnRnn"
)


@dataclass(frozen=True)
class Operation:
    """One operation of the forward pass, by its node of the graph; the `output`-th of its outputs."""

    node: Any
    output: int = 0

    @property
    def name(self) -> str:
        """Return its name without the word for the backward pass: `LogSoftmax`, `Addmm`."""
        return _SUFFIX.sub("", str(self.node.name()).rpartition("::")[2])

    @property
    def is_reshape(self) -> bool:
        """Whether each element of its output is an unchanged element of its input."""
        return _RESHAPES.fullmatch(self.name) is not None

    @property
    def is_layer(self) -> bool:
        """Whether it is the work of a layer, at which the part of the graph that computes the loss ends."""
        return _LAYERS.fullmatch(self.name) is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its output."""
        return tuple(int(size) for size in self.node._input_metadata[self.output].shape)

    @property
    def inputs(self) -> list[Operation | None]:
        """Return the operations that computed its inputs; None for one that needs no gradient, as targets."""
        return [None if node is None else Operation(node, output) for node, output in self.node.next_functions]

    @property
    def known(self) -> list[Operation]:
        """Return the operations that computed those of its inputs that need a gradient."""
        return [one for one in self.inputs if one is not None]

    def saved(self, name: str) -> Tensor | None:
        """Return a tensor kept for the backward pass; None after that, or where code of the user's has packed it."""
        try:
            if getattr(getattr(self.node, f"_raw_saved_{name}"), "unpack_hook", self) is not None:
                return None
            found = getattr(self.node, f"_saved_{name}")
        except (AttributeError, RuntimeError):
            return None
        return found.detach() if isinstance(found, Tensor) else None

    @property
    def factor(self) -> float | None:
        """Return the number that it multiplies by, NaN for one that is not kept any more; None if it does not."""
        if self.name == "Neg":
            return -1.0
        if self.name not in ("Mul", "Div") or len(self.known) != 1 or (self.name == "Div" and self.inputs[0] is None):
            return None
        number = self.saved("self" if self.inputs[0] is None else "other")
        if number is None:
            return math.nan if self.name == "Div" or not self.shape else None
        if number.numel() != 1:
            return None
        return float(number) if self.name == "Mul" else 1.0 / (float(number) or math.nan)

    @property
    def keeps_sign(self) -> bool:
        """Whether what is after it falls where what is before it does: means, sums, positive numbers, other shapes."""
        factor = self.factor
        positive = factor is not None and (factor > 0 or (self.name == "Div" and math.isnan(factor)))
        return positive or self.is_reshape or self.name in ("Mean", "Sum")

    @property
    def source(self) -> Operation | None:
        """Return the operation that computed the values of its first input, past changes of shape and type."""
        found = self.inputs[0] if self.inputs else None
        while found is not None and found.is_reshape:
            found = found.inputs[0]
        return found

    @property
    def dim(self) -> int | None:
        """Return the dimension that a softmax runs over, counted from the first."""
        dim = getattr(self.node, "_saved_dim", None)
        if not isinstance(dim, int):
            return None
        dim = dim - 2**64 if dim >= 2**63 else dim
        return dim + len(self.shape) if dim < 0 else dim


def operations(root: Any) -> Iterator[Operation]:
    """Yield the operations that compute the loss from the outputs of the last layers, those next to the loss first.

    A sum with constants, as with the losses of the micro-batches before, is passed over.
    """
    start = Operation(root)
    while start.is_reshape or start.name == "Add":
        known = [one for one in start.inputs if one is not None]
        if len(known) != 1:
            break
        start = known[0]
    return _walk(start, ends_at_layers=True)


def layer_of(operation: Operation, params: Mapping[str, nn.Parameter]) -> str:
    """Return the name of the module whose parameter is the nearest below an operation; empty without one."""
    names = {id(param): name for name, param in params.items()}
    for found in _walk(operation, ends_at_layers=False):
        name = names.get(id(getattr(found.node, "variable", None)))
        if name is not None:
            return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
    return ""


def _walk(start: Operation, *, ends_at_layers: bool) -> Iterator[Operation]:
    """Yield an operation and those below it, the nearest first."""
    waiting, seen = [start], {start.node}
    while waiting and len(seen) < _MOST:
        operation = waiting.pop(0)
        yield operation
        if ends_at_layers and operation.is_layer:
            continue
        for found in operation.inputs:
            if found is not None and found.node not in seen:
                seen.add(found.node)
                waiting.append(found)


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
            confidence=0.95,
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


def _squared(root: Operation) -> Mistake | None:
    """Find a squared error between the probabilities of classes and their targets that is the whole loss."""
    operation = whole_loss(root)
    if operation is None:
        return None
    if operation.name == "Pow":
        difference = operation.source
        known = [] if difference is None else [one for one in difference.inputs if one is not None]
        source = known[0] if difference is not None and difference.name in ("Sub", "Rsub") and len(known) == 1 else None
        while source is not None and source.is_reshape:
            source = source.inputs[0]
    else:
        source = operation.source if operation.name == "MseLoss" else None
    if source is None or source.name != "Softmax" or source.dim is None or source.shape[source.dim] < 2:
        return None
    return Mistake(
        IssueType.SQUARED_CLASSES,
        source,
        "The loss is the squared error of a softmax over the output of {}: where the model is sure and wrong, its "
        "gradient vanishes.",
        "Use cross_entropy on the logits. Where probabilities are to be matched, kl_div on log_softmax.",
        IssueSeverity.MEDIUM,
    )


def whole_loss(root: Operation, *, weighted: bool = False) -> Operation | None:
    """Return the loss function that is all of a loss, past means, sums, positive numbers and changes of shape.

    There is none of a sum of several, nor of one that has changed its sign, nor, unless `weighted` is meant as well, of
    one that has a weight for each example.
    """
    weights = ("Div", "Mul") if weighted else ("Div",)
    operation: Operation | None = root
    while operation is not None:
        weighs = operation.factor is None and operation.name in weights
        if not (operation.keeps_sign or weighs or math.isnan(operation.factor or 0.0)):
            break
        operation = operation.known[0] if len(operation.known) == 1 else None
    return operation


def num_classes(operation: Operation) -> int | None:
    """Return the number of classes of a cross-entropy; None for any other loss function."""
    softmax = operation.source if operation.name in CLASSES else None
    if softmax is None or softmax.name != "LogSoftmax" or softmax.dim != min(1, len(softmax.shape) - 1):
        return None
    return softmax.shape[softmax.dim]


def _logits_of(operation: Operation) -> Operation | None:
    """Return what a loss that normalises by itself takes as logits; None for any other operation."""
    if operation.name == "BinaryCrossEntropyWithLogits":
        return operation.source
    if operation.name in CLASSES and (source := operation.source) is not None and source.name == "LogSoftmax":
        return source.source
    return None


_CHECKS: Final = (_activated_twice, _rectified, _without_logarithm, _over_wrong_dimension, _broadcast)
_CHECKS_OF_WHOLE: Final = (_negated, _squared)
