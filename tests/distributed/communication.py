"""Torch's own communication-counting mode, with the sizes of what it counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_leaves


class Counted(CommDebugMode):  # type: ignore[no-untyped-call]
    """Counts every collective that torch runs while it is entered, and the bytes that this rank gives to each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the size of the operands of a collective."""
        before = self.get_total_counts()
        found = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.get_total_counts() > before:
            operands = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.sizes.append(sum(leaf.numel() * leaf.element_size() for leaf in operands))
        return found
