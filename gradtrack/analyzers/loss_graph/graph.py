"""The autograd graph of a loss: its operations, from the loss down to the last layers, and which function it is.

The walk goes by the edges and the sizes that autograd keeps of each operation. What it keeps for the backward pass, as
targets, is read before that pass alone, and never where unpacking it would run code of the user's: checkpointing,
offloading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES: Final = frozenset(("NllLoss", "NllLoss2D"))
BINARY: Final = frozenset(("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"))
DISTANCES: Final = frozenset(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss"))
_SUFFIX: Final = re.compile(r"Backward\d*$")
_MOST: Final = 4096
"""The most operations that are visited."""
_MOST_TERMS: Final = 64
_LARGE: Final = 2**24
"""The most targets that are read, of which copies are made."""

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
    while (start.is_reshape or start.name == "Add") and len(start.known) == 1:
        start = start.known[0]
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


def terms(root: Operation) -> list[tuple[bool, Operation]]:
    """Return what a loss adds up, each with whether it is added, past means, numbers and changes of shape.

    What is divided by a variance, which is above zero, counts as what it is without.
    """
    waiting, found = [(True, root)], list[tuple[bool, Operation]]()
    while waiting and len(found) < _MOST_TERMS:
        added, operation = waiting.pop()
        given = operation.inputs
        if operation.name in ("Add", "Sub", "Rsub"):
            signs = {"Add": (added, added), "Sub": (added, not added), "Rsub": (not added, added)}[operation.name]
            waiting += [(sign, one) for sign, one in zip(signs, given, strict=False) if one is not None]
        elif operation.keeps_sign or operation.name == "Gather" or (operation.factor or 0.0) < 0:
            waiting += [(added == ((operation.factor or 1.0) > 0), one) for one in operation.known]
        elif operation.name == "Div" and given[0] is not None and given[1] is not None and _is_positive(given[1]):
            waiting.append((added, given[0]))
        else:
            found.append((added, operation))
    return found


def _is_positive(operation: Operation) -> bool:
    while operation.keeps_sign and len(operation.known) == 1:
        operation = operation.known[0]
    return operation.name in ("Pow", "Exp", "Softplus")


def compared(operation: Operation) -> Operation | None:
    """Return what computed the predictions of a distance, past changes of shape: of a function, or of a difference."""
    if operation.name in DISTANCES:
        return operation.source
    difference = operation.source if operation.name in ("Pow", "Abs") else None
    if difference is None or difference.name not in ("Sub", "Rsub") or len(difference.known) != 1:
        return None
    source: Operation | None = difference.known[0]
    while source is not None and source.is_reshape:
        source = source.inputs[0]
    return source


def targets_of(operation: Operation) -> Tensor | None:
    """Return the targets of a loss function, or of a difference from an activation; None if not known, or too many."""
    targets = operation.saved("target")
    if targets is not None or operation.name not in ("Pow", "Abs"):
        return targets if targets is not None and targets.numel() <= _LARGE else None
    difference, outputs = operation.saved("self"), compared(operation)
    values = None if outputs is None else outputs.saved("result")
    if difference is None or values is None or operation.source is None or values.numel() > _LARGE:
        return None
    if [size for size in values.shape if size > 1] != [size for size in difference.shape if size > 1]:
        return None
    comes_first = operation.source.name == "Sub" and operation.source.inputs[0] is not None
    return values.reshape(difference.shape) - (difference if comes_first else -difference)


def keeps_axes(operation: Operation, shape: tuple[int, ...]) -> bool:
    """Whether the classes of what a loss takes lie on the axis of a shape where they lay before."""
    given, in_rows = operation.inputs[0], operation.name == "NllLoss"
    same = given is not None and (given.shape[1:] == shape[-1:] if in_rows else given.shape[:2] == shape[:2])
    while given is not None and given.is_reshape:
        same, given = same and given.name not in ("Transpose", "Permute", "T"), given.inputs[0]
    return same


def is_multiplied(root: Operation, function: Operation) -> bool:
    """Whether something multiplies a loss function on its way to the loss."""
    while root.node is not function.node and root.name != "Mul":
        root = root.known[0]
    return root.name == "Mul"


def are_one_hot(targets: Tensor | None) -> bool:
    """Whether each of several rows names one class of three or more."""
    if targets is None or targets.ndim < 2 or targets.shape[0] < 2 or targets.shape[1] < 3:
        return False
    rounded = targets.round()
    is_near, is_one = (targets - rounded).abs().max() < _ROUNDING, rounded.sum(1).eq(1) & rounded.ge(0).all(1)
    return bool(is_near & is_one.all())


_ROUNDING: Final = 1e-3


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
        elif len(target) < _FEW_ROWS or not target.is_floating_point():
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
    return value, entropy.where(entropy < NEAR * alike, alike)


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


_FEW_ROWS: Final = 8
_ENOUGH: Final = 20
"""How many targets of each class tell how frequent the classes are."""
NEAR: Final = 0.97
"""Where a loss, or the entropy of classes, is that of classes that are alike."""
