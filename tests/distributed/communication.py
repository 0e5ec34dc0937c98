"""Counting what is sent, by the list of collectives that torch's own communication-counting mode has."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import c10d_collective_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Counts every collective that runs while it is entered, and the bytes that this rank gives to each.

    Torch's `CommDebugMode` counts the same ones; it follows modules as well, which may not run again meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self._collectives = CommDebugMode().comm_registry | c10d_collective_ops  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the size of the operands of a collective."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if func._overloadpacket in self._collectives:
            operands = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.sizes.append(sum(leaf.numel() * leaf.element_size() for leaf in operands))
        return func(*args, **(kwargs or {}))
