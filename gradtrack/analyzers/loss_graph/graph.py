"""The part of the autograd graph between the loss and the last layers: which operations, on which shapes.

The graph is walked by the edges and the sizes that autograd keeps of each operation. No saved tensor is read, since
unpacking one may run code of the user's: checkpointing, offloading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

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
    """Yield the operations that compute the loss from the outputs of the last layers, those next to the loss first."""
    waiting, seen = [Operation(root)], {root}
    while waiting and len(seen) < _MOST:
        operation = waiting.pop(0)
        yield operation
        if operation.is_layer:
            continue
        for found in operation.inputs:
            if found is not None and found.node not in seen:
                seen.add(found.node)
                waiting.append(found)


def layer_of(operation: Operation | None, params: Mapping[str, nn.Parameter]) -> str:
    """Return the name of the module whose parameter is the nearest below an operation; empty without one."""
    names = {id(param): name for name, param in params.items()}
    waiting, seen = [operation] if operation is not None else [], set[Any]()
    while waiting and len(seen) < _MOST:
        found = waiting.pop(0)
        name = names.get(id(getattr(found.node, "variable", None)))
        if name is not None:
            return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
        for further in found.inputs:
            if further is not None and further.node not in seen:
                seen.add(further.node)
                waiting.append(further)
    return ""
