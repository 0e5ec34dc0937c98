"""Norm, statistics and clipping of gradients in any container, right in float64 for every dtype and magnitude."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import InputTypeError, UsageError

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
    elif isinstance(gradients, list | tuple) and gradients and all(type(item) is float for item in gradients):
        yield np.array(gradients, dtype=np.float64)  # a long history of norms is one array, not thousands
    elif isinstance(gradients, Iterable) and not isinstance(gradients, str | bytes):
        for item in gradients:
            yield from leaves(item)
    else:
        raise _unusable(gradients)


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
    flat = leaf.reshape(-1) if is_tensor(leaf) else np.asarray(leaf).ravel(order="K")
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        piece = flat[start : start + BLOCK_ELEMENTS]
        block = _on_host(piece) if is_tensor(piece) else np.asarray(piece)
        with np.errstate(all="ignore"):
            if block.dtype.kind == "c":
                yield np.abs(block.astype(np.complex128))
            else:
                yield block.astype(np.float64, copy=False)


def _on_host(piece: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array; some devices have no float64, and numpy lacks some of torch's types."""
    hosted = piece.cpu().resolve_conj().resolve_neg()
    return (hosted if hosted.is_complex() else hosted.double()).numpy()


def rebuild(gradients: object, change: Callable[[Leaf], None]) -> object:
    """Return the same nesting with every array copied, and each copy changed in place by `change`."""
    if gradients is None:
        return None
    if is_tensor(gradients):
        return _rebuild_tensor(gradients, change)
    if isinstance(gradients, Mapping):
        # A shallow copy keeps what the constructor would ask for again, such as the factory of a defaultdict.
        rebuilt: dict[Any, object] = copy.copy(gradients) if isinstance(gradients, dict) else {}
        for key, value in gradients.items():
            rebuilt[key] = rebuild(value, change)
        return rebuilt
    if _is_array_like(gradients):
        return _rebuild_array(gradients, change)
    if isinstance(gradients, Iterator) or not isinstance(gradients, Iterable):
        raise _unusable(gradients)
    items = [rebuild(item, change) for item in gradients]
    if isinstance(gradients, tuple):
        return getattr(type(gradients), "_make", type(gradients))(items)
    if not isinstance(gradients, MutableSequence):
        return items
    refilled = copy.copy(gradients)
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


NEAR_ZERO: Final = 1e-7
VERY_LARGE: Final = 1e3
_SAFE_TO_SQUARE: Final = (1e-100, 1e100)


class GradientStats(TypedDict):
    """What `compute_gradient_stats` found; its docstring defines every entry."""

    norm: float
    mean: float
    std: float
    min: float
    max: float
    near_zero_fraction: float
    very_large_fraction: float
    element_count: int
    nan_count: int
    inf_count: int


def compute_gradient_norm(gradients: object) -> float:
    """Return the L2 norm of all elements together.

    Of several arrays it is the root of the summed squares. A NaN anywhere gives NaN, otherwise an infinity
    gives infinity. None counts as no gradient, the norm of nothing is 0.0. Complex elements enter by their
    magnitude, a sparse tensor by its coalesced values.

    >>> compute_gradient_norm([3.0, [4.0, None], {"bias": 12.0}])
    13.0
    """
    return norm_of(list(leaves(gradients)))


def norm_of(arrays: Sequence[Leaf]) -> float:
    """Return the L2 norm over arrays that are already unpacked."""
    scale = _common_scale(arrays)
    with np.errstate(all="ignore"):
        blocks = (block for array in arrays for block in float64_blocks(array))
        squares = [float(np.dot(x, x)) for x in (block if scale == 1.0 else block / scale for block in blocks)]
    return math.sqrt(math.fsum(squares)) * scale


def compute_gradient_stats(gradients: object) -> GradientStats:
    """Return the statistics of all elements together, over the finite ones.

    - `norm`, `mean`, `min`, `max`: as they say; mean, min and max are NaN where no element is finite.
    - `std`: the root of the unbiased sample variance (division by n - 1), and 0.0 under two elements.
    - `near_zero_fraction`, `very_large_fraction`: the share, from 0 to 1, of elements with a magnitude of at
      most 1e-7, and of at least 1e3; 0.0 where no element is finite.
    - `element_count`: all elements, finite or not; `nan_count` and `inf_count`: those that are not.

    Several arrays are merged exactly: the result is that of their concatenation. Complex elements enter by
    their magnitude, a sparse tensor by its coalesced values, and None not at all.
    """
    arrays = list(leaves(gradients))
    scale = _common_scale(arrays)
    element_count = nan_count = near_zero_count = very_large_count = 0
    sizes, means, deviations, squares, lowest, highest = [0], [0.0], [0.0], [0.0], [math.nan], [math.nan]
    with np.errstate(all="ignore"):
        for block in (block for array in arrays for block in float64_blocks(array)):
            finite_mask = np.isfinite(block)
            finite = block if finite_mask.all() else block[finite_mask]
            element_count += block.size
            nan_count += int(np.count_nonzero(np.isnan(block))) if finite.size < block.size else 0
            if not finite.size:
                continue
            magnitudes = np.abs(finite)
            near_zero_count += int(np.count_nonzero(magnitudes <= NEAR_ZERO))
            very_large_count += int(np.count_nonzero(magnitudes >= VERY_LARGE))
            lowest.append(float(finite.min()))
            highest.append(float(finite.max()))
            scaled = finite if scale == 1.0 else finite / scale
            sizes.append(finite.size)
            means.append(float(scaled.mean()))
            from_mean = scaled - means[-1]
            deviations.append(float(np.dot(from_mean, from_mean)))
            squares.append(float(np.dot(scaled, scaled)))
    count = sum(sizes)
    known = max(count, 1)
    mean = math.fsum(map(math.prod, zip(sizes, means, strict=True))) / known
    # Chan's merge: the deviations within the blocks, and those of their means.
    between = (size * (own - mean) ** 2 for size, own in zip(sizes, means, strict=True))
    variance = math.fsum((*deviations, *between)) / (count - 1) if count > 1 else 0.0
    return GradientStats(
        norm=math.sqrt(math.fsum(squares)) * scale,
        mean=mean * scale if count else math.nan,
        std=math.sqrt(variance) * scale,
        min=float(np.fmin.reduce(lowest)),
        max=float(np.fmax.reduce(highest)),
        near_zero_fraction=near_zero_count / known,
        very_large_fraction=very_large_count / known,
        element_count=element_count,
        nan_count=nan_count,
        inf_count=element_count - count - nan_count,
    )


def _common_scale(arrays: Sequence[Leaf]) -> float:
    """Return the power of two to divide by so that squares neither overflow nor vanish; mostly 1."""
    peak = _peak(array for array in arrays if _has_wide_range(array))
    if 0.0 < peak < _SAFE_TO_SQUARE[0]:
        peak = _peak(arrays)  # beside any number of a narrower dtype these are nothing
    if peak == 0.0 or _SAFE_TO_SQUARE[0] < peak < _SAFE_TO_SQUARE[1]:
        return 1.0
    return math.ldexp(1.0, math.frexp(peak)[1] - 1)


def _has_wide_range(leaf: Leaf) -> bool:
    """Tell whether the square of an element can leave the range of float64."""
    width = leaf.element_size() if is_tensor(leaf) else leaf.itemsize
    is_complex = leaf.is_complex() if is_tensor(leaf) else np.iscomplexobj(leaf)
    return width >= (16 if is_complex else 8)


def _peak(arrays: Iterable[Leaf]) -> float:
    magnitudes = (np.abs(block) for array in arrays for block in float64_blocks(array))
    return max((float(np.max(m, where=np.isfinite(m), initial=0.0)) for m in magnitudes), default=0.0)


Gradients = TypeVar("Gradients")


def clip_gradients(gradients: Gradients, max_norm: float) -> tuple[Gradients, float]:
    """Return the gradients clipped to a global norm of at most `max_norm`, and the norm they had.

    Above the limit every element is multiplied by the one factor `max_norm / norm`; otherwise all stay as
    they are. The result is always a copy in the same containers, dtypes and devices, detached from any graph;
    None stays None. Only integers become float64, as they hold no fractions, and an iterator becomes a list.

    A norm that is NaN or infinite has no factor that helps: then the copies are unchanged, and the returned
    norm says so. Test it with `math.isfinite` before the update.

    >>> clip_gradients({"weight": 3.0, "bias": 4.0}, max_norm=1.0)
    ({'weight': 0.6, 'bias': 0.8}, 5.0)
    """
    try:
        limit = float(max_norm)
    except (TypeError, ValueError) as error:
        message = f"max_norm={max_norm!r}: expected a number. Pass the largest norm to allow, such as 1.0."
        raise InputTypeError(message) from error
    if not limit >= 0.0:
        raise UsageError(f"max_norm={limit}: expected a number of at least 0. Pass the largest norm to allow.")
    source: object = list(gradients) if isinstance(gradients, Iterator) else gradients
    norm = compute_gradient_norm(source)
    too_long = math.isfinite(norm) and norm > limit

    def change(flat: Leaf) -> None:
        if too_long:
            _scale_in_place(flat, norm, limit)

    return cast("Gradients", rebuild(source, change)), norm


def _scale_in_place(flat: Leaf, norm: float, limit: float) -> None:
    """Multiply by `limit / norm` in float64, since a narrower dtype may not hold the factor."""
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        piece = flat[start : start + BLOCK_ELEMENTS]
        if is_tensor(piece):
            hosted = piece.cpu() if piece.device.type == "mps" else piece  # that device has no float64
            piece.copy_(hosted.double().div(norm).mul(limit))
        else:
            wide = np.complex128 if piece.dtype.kind == "c" else np.float64
            with np.errstate(under="ignore"):
                piece[...] = piece.astype(wide) / norm * limit
