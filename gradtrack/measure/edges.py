"""Whether one block's output reaches another block's input, told without keeping either of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

_MOST_NODES: Final = 100_000


class Origin:
    """The output of a block, remembered by a weak reference and by the number of the graph's node that made it."""

    __slots__ = ("_number", "_tensor")

    def __init__(self, output: Tensor) -> None:
        self._tensor = weakref.ref(output)
        self._number = None if output.grad_fn is None else _number(output.grad_fn)

    def reaches(self, inputs: Iterable[Tensor]) -> bool | None:
        """Say whether an input is this output or was computed from it; None where the graph does not show it.

        A recomputation by a reentrant checkpoint starts from detached inputs, and shows nothing about what led there.
        """
        given = list(inputs)
        output = self._tensor()
        if output is not None and any(tensor is output for tensor in given):
            return True
        if self._number is None:
            return True if output is not None and any(_shares(output, tensor) for tensor in given) else None
        nodes = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        if nodes:
            return _descends(nodes, self._number)
        return None if inside_backward() else False


def inside_backward() -> bool:
    """Say whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _shares(output: Tensor, tensor: Tensor) -> bool:
    return tensor.numel() > 0 and output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _descends(nodes: list[Any], number: int) -> bool:
    """Walk back from nodes to one with a number; every node on the way was made after it, and has a higher number."""
    seen = set(map(_number, nodes))
    stack = list(nodes)
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if _number(node) == number:
            return True
        for following, _ in node.next_functions:
            if following is None or not following.next_functions:
                continue
            later = _number(following)
            if later >= number and later not in seen:
                seen.add(later)
                stack.append(following)
    return False


def _number(node: Any) -> int:
    return int(node._sequence_nr())
