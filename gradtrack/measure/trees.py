"""Tensors in what modules take and return: tuples, lists, mappings and dataclasses of them, and nested tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_DEEPEST: Final = 8


def tensors(value: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors in a nested value, in its own order."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in _parts(value):
            yield from tensors(part, depth - 1)


def first_floating(value: Any) -> Tensor | None:
    """Return the first floating tensor that requires a gradient, else the first floating one, else None."""
    found = [tensor for tensor in tensors(value) if tensor.is_floating_point() or tensor.is_complex()]
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def unnested(tensor: Tensor) -> Tensor:
    """Return the rows of all parts of a nested tensor one after the other, and any other tensor as it is."""
    if not tensor.is_nested:
        return tensor
    parts = tensor.unbind()
    widths = {part.shape[-1] if part.dim() > 1 else 1 for part in parts}
    width = widths.pop() if len(widths) == 1 else 1
    return torch.cat([part.reshape(-1, width) for part in parts]) if parts else tensor.new_zeros(0, width)


def replace(value: Any, change: Callable[[Tensor], Any], depth: int = _DEEPEST) -> Any:
    """Return a nested value with every tensor changed; what is not a tuple, list or mapping stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {key: replace(part, change, depth - 1) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [replace(part, change, depth - 1) for part in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts)
    return value


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name)
