"""The arrays inside of nested gradients, read in float64 blocks and rebuilt in the same containers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import InputTypeError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

Leaf: TypeAlias = "NDArray[Any] | torch.Tensor"
BLOCK_ELEMENTS = 1 << 15
_REMEDY = "Pass arrays, tensors or numbers, or lists, tuples and dicts of them"


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Tell whether the value is a torch tensor, without importing torch."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)


def leaves(gradients: object) -> Iterator[Leaf]:
    """Yield every array of a nesting in order, and skip what is None."""
    if gradients is None:
        return
    if is_tensor(gradients):
        yield _tensor_values(gradients)
    elif isinstance(gradients, Mapping):
        for value in gradients.values():
            yield from leaves(value)
    elif _is_array_like(gradients):
        yield as_array(gradients)
    elif isinstance(gradients, Iterable) and not isinstance(gradients, str | bytes):
        yield from _iterable_leaves(gradients)
    else:
        raise _unusable(gradients)


def _iterable_leaves(gradients: Iterable[object]) -> Iterator[Leaf]:
    if isinstance(gradients, list | tuple) and gradients and all(type(item) is float for item in gradients):
        yield np.array(gradients, dtype=np.float64)  # a long history of norms is one array, not thousands
        return
    for item in gradients:
        yield from leaves(item)


def as_array(value: object) -> NDArray[Any]:
    """Turn a number or anything that numpy reads as an array into a numeric array."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.array(float(value))
    array = np.asarray(value)
    if array.dtype.kind not in "fiuc":
        raise _unusable_dtype(array.dtype)
    return array


def float64_blocks(leaf: Leaf) -> Iterator[NDArray[np.float64]]:
    """Yield the elements as flat float64 pieces, complex ones as their magnitude."""
    if is_tensor(leaf):
        yield from _tensor_blocks(leaf)
        return
    flat = np.asarray(leaf).ravel(order="K")
    for start in range(0, flat.size, BLOCK_ELEMENTS):
        block = flat[start : start + BLOCK_ELEMENTS]
        with np.errstate(all="ignore"):
            if flat.dtype.kind == "c":
                yield np.abs(block.astype(np.complex128))
            else:
                yield block.astype(np.float64, copy=False)


def _tensor_blocks(tensor: torch.Tensor) -> Iterator[NDArray[np.float64]]:
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), BLOCK_ELEMENTS):
        # To the host first: some devices have no float64.
        block = flat[start : start + BLOCK_ELEMENTS].cpu()
        if block.is_complex():
            with np.errstate(all="ignore"):
                yield np.abs(block.resolve_conj().resolve_neg().numpy().astype(np.complex128))
        else:
            yield block.double().resolve_neg().numpy()


def has_wide_range(leaf: Leaf) -> bool:
    """Tell whether the square of an element can leave the range of float64."""
    width = leaf.element_size() if is_tensor(leaf) else leaf.itemsize
    is_complex = leaf.is_complex() if is_tensor(leaf) else np.iscomplexobj(leaf)
    return width >= (16 if is_complex else 8)


def rebuild(gradients: object, change: Callable[[Leaf], None]) -> object:
    """Return the same nesting with every array copied, and each copy changed in place by `change`."""
    if gradients is None:
        return None
    if is_tensor(gradients):
        return _rebuild_tensor(gradients, change)
    if isinstance(gradients, Mapping):
        return _rebuild_mapping(gradients, change)
    if _is_array_like(gradients):
        return _rebuild_array(gradients, change)
    if isinstance(gradients, Iterator) or not isinstance(gradients, Iterable):
        raise _unusable(gradients)
    items = [rebuild(item, change) for item in gradients]
    if isinstance(gradients, tuple):
        make = getattr(type(gradients), "_make", type(gradients))
        return make(items)
    return _refill(gradients, items) if isinstance(gradients, MutableSequence) else items


def _rebuild_mapping(gradients: Mapping[Any, object], change: Callable[[Leaf], None]) -> dict[Any, object]:
    # A shallow copy keeps what the constructor would ask for again, such as the factory of a defaultdict.
    rebuilt: dict[Any, object] = copy.copy(gradients) if isinstance(gradients, dict) else {}
    for key, value in gradients.items():
        rebuilt[key] = rebuild(value, change)
    return rebuilt


def _refill(sequence: MutableSequence[object], items: list[object]) -> MutableSequence[object]:
    refilled = copy.copy(sequence)
    for index, item in enumerate(items):
        refilled[index] = item
    return refilled


def _rebuild_array(gradients: object, change: Callable[[Leaf], None]) -> object:
    array = as_array(gradients)
    floating = np.float64 if array.dtype.kind in "iu" else array.dtype
    copied = np.array(array, dtype=floating, order="C")
    change(copied.reshape(-1))
    if isinstance(gradients, np.generic):
        return copied[()]
    return copied.item() if isinstance(gradients, int | float | complex) else copied


def _rebuild_tensor(tensor: torch.Tensor, change: Callable[[Leaf], None]) -> torch.Tensor:
    values = _tensor_values(tensor)
    detached = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        detached = detached.double()
    if detached.is_sparse:
        detached = detached.coalesce()
    copied = detached.clone().resolve_conj().resolve_neg()
    if copied.layout is values.layout:
        copied = copied.contiguous()
    flat = (copied if copied.layout is values.layout else copied.values()).view(-1)
    for part in (flat.real, flat.imag) if flat.is_complex() else (flat,):
        change(part)
    return copied


def _tensor_values(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    if "bool" in str(detached.dtype):
        raise _unusable_dtype(detached.dtype)
    if detached.is_sparse:
        return detached.coalesce().values()
    return detached.values() if "sparse" in str(detached.layout) else detached


def _is_array_like(value: object) -> bool:
    return isinstance(value, np.ndarray | np.generic | int | float | complex) or hasattr(value, "__array__")


def _unusable_dtype(dtype: object) -> InputTypeError:
    return InputTypeError(f"Gradients of dtype {dtype}: expected floating point numbers. {_REMEDY}.")


def _unusable(value: object) -> InputTypeError:
    remedy = f"{_REMEDY}; of a module take [parameter.grad for parameter in module.parameters()]"
    return InputTypeError(f"{type(value).__name__} as gradients: expected numbers. {remedy}.")
