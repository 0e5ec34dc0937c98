"""The record of one call of a module: the range of its units, its saturation, and the gradient at its output."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import Reading, dot, places_of, sampled, small_array

_MAX_ROWS: Final = 32
_MAX_COLUMNS: Final = 256
_FEW_ROWS: Final = 8
_FLAT: Final = 40.0
_AT_ONCE: Final = 1 << 18
_TANH_CELLS: Final = "RNN_TANH"
TANH: Final = 0.97
TANH_LIMIT: Final = 2.0923  # |tanh| > 0.97
SIGMOID_LIMIT: Final = 3.4761  # outside 0.03 .. 0.97
_CHANNELS_FIRST: Final = re.compile(r"Conv|BatchNorm|GroupNorm|InstanceNorm|Pool|Upsample|Dropout[123]d")


@dataclass(slots=True)
class Node:
    """One call of one module: its output, the gradient there, and the calls whose output it used.

    `ops` are the names of the functions between a parent's output and this call, the one nearest to the parent first.
    The slopes are the root mean square of those of tanh or sigmoid, over the largest that they have; they are known
    where most values are beyond the limits. `made_in` is the module whose own code makes of its parts' finite values
    what comes in here and is not finite; `bad_input` says which input of the model, or else of this call, had such
    values.
    """

    name: str
    kind: str
    parametric: bool
    axis: int
    width: int
    parents: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    delta: float | None = None
    rank: float = float("nan")
    beyond_tanh: float = float("nan")
    beyond_sigmoid: float = float("nan")
    slope_tanh: float = float("nan")
    slope_sigmoid: float = float("nan")
    unit_max: NDArray[np.float64] | None = None
    unit_min: NDArray[np.float64] | None = None
    rows: int = 0
    varies: bool = True
    finite: bool = True
    finite_input: bool = True
    made_in: str = ""
    bad_input: str = ""
    gram: NDArray[np.float64] | None = None

    @property
    def effective_rank(self) -> float:
        """Return exp(entropy) of the normalised singular values of the gradient; it is worked out once."""
        if self.gram is not None:
            self.rank, self.gram = _effective_rank(self.gram), None
        return self.rank

    @property
    def least_rank(self) -> float:
        """Return a lower bound of the effective rank, from the squares alone, which costs far less."""
        if self.gram is None:
            return self.rank
        flat = self.gram.reshape(-1)
        return float(np.trace(self.gram) ** 2 / dot(flat, flat))


def axis_of(kind: str, parametric: bool, output: Tensor, parent: Node | None) -> int:
    """Return the dimension of the units: channels after a convolution and what keeps them, features elsewhere."""
    if _CHANNELS_FIRST.search(kind):
        return min(1, output.ndim - 1)
    if parent is None or (parametric and hasattr(nn, kind)):
        return output.ndim - 1
    if parent.axis == 1 and output.ndim >= 3 and output.shape[1] == parent.width:
        return 1
    return output.ndim - 1


def take_output(node: Node, output: Tensor, reading: Reading | None = None) -> None:
    """Record the output of a call; of one on an accelerator once `reading` is done."""
    squashes = node.kind == _TANH_CELLS  # what such a layer puts out has passed tanh
    saturates = (squashes or node.parametric) and not output.is_complex()
    if not output.is_cpu and reading is not None:
        _wait_for_output(node, output, reading, saturates=saturates, squashes=squashes)
        return
    _take_range(node, output)
    if node.finite and saturates:
        _take_saturation(node, output, squashes=squashes)


def _wait_for_output(node: Node, output: Tensor, reading: Reading, *, saturates: bool, squashes: bool) -> None:
    """Reduce an output where it is, as the functions for the CPU do, and note what follows from it when it is read."""
    ranged, count = output.ndim > 1 and not output.is_complex(), output.numel()
    num_rows = count // node.width if output.ndim > 1 else 0
    found = [_ends(output, _others(node, output)) if ranged else torch.isfinite(output).all()]
    if saturates:
        found.append(_saturation(sampled(output).abs().float(), squashes=squashes))

    def take(first: Tensor, shares: Tensor | None = None) -> None:
        if ranged:
            low, high = first.double().numpy()
            _note_range(node, low, high, count)
        else:
            node.rows, node.finite = num_rows, bool(first)
        if shares is not None and node.finite:
            _note_saturation(node, *shares.tolist(), squashes=squashes)

    reading.add(found, take)


def _saturation(sizes: Tensor, *, squashes: bool) -> Tensor:
    """Return the shares of sizes beyond both limits, and the mean slopes of both functions."""
    limits, flat = (TANH if squashes else TANH_LIMIT, SIGMOID_LIMIT), sizes.clamp(max=_FLAT)
    slopes = [1 - sizes.square() if squashes else flat.cosh() ** -2, (flat / 2).cosh() ** -2]
    shares = [(sizes > limit).double().mean() for limit in limits]
    return torch.stack([*shares, *(one.square().mean(dtype=torch.float64).sqrt() for one in slopes)])


def _note_saturation(
    node: Node, beyond_tanh: float, beyond_sigmoid: float, slope_tanh: float, slope_sigmoid: float, *, squashes: bool
) -> None:
    node.beyond_tanh = node.beyond_sigmoid = 0.0
    if _is_within(node, squashes=squashes):
        return
    node.beyond_tanh = beyond_tanh
    node.slope_tanh = slope_tanh if squashes or beyond_tanh > 0.5 else math.nan
    if not squashes:
        node.beyond_sigmoid = beyond_sigmoid
        node.slope_sigmoid = slope_sigmoid if beyond_sigmoid > 0.5 else math.nan


def _is_within(node: Node, *, squashes: bool) -> bool:
    """Whether no unit is known to come to where tanh is flat."""
    low, high, limit = node.unit_min, node.unit_max, TANH if squashes else TANH_LIMIT
    return low is not None and high is not None and bool(max(-low.min(), high.max()) <= limit)


def _take_saturation(node: Node, output: Tensor, *, squashes: bool) -> None:
    """Note how much of a layer is where tanh and sigmoid are flat."""
    node.beyond_tanh = node.beyond_sigmoid = 0.0
    if _is_within(node, squashes=squashes):
        return
    limit = TANH if squashes else TANH_LIMIT
    sizes = _sizes(output)
    node.beyond_tanh = float((sizes > limit).mean())
    if squashes:
        node.slope_tanh = _mean_size(1 - sizes**2)
        return
    node.beyond_sigmoid = float((sizes > SIGMOID_LIMIT).mean())
    if node.beyond_tanh > 0.5:
        node.slope_tanh = _mean_size(np.cosh(sizes.clip(max=_FLAT)) ** -2)
    if node.beyond_sigmoid > 0.5:
        node.slope_sigmoid = _mean_size(np.cosh(sizes.clip(max=_FLAT) / 2) ** -2)


def _sizes(output: Tensor) -> NDArray[Any]:
    small = small_array(output)
    return sampled(output).abs().float().cpu().numpy() if small is None else np.abs(small).reshape(-1)


def _mean_size(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(values**2, dtype=np.float64)))


def _take_range(node: Node, output: Tensor) -> None:
    """Note the range of every unit and whether anything depends on the batch, or that not all of it is finite."""
    if output.ndim < 2 or output.is_complex():
        node.rows = output.numel() // node.width if output.ndim > 1 else 0
        node.finite = bool(torch.isfinite(output).all())
        return
    _note_range(node, *_ranges(output, _others(node, output)), output.numel())


def _others(node: Node, output: Tensor) -> tuple[int, ...]:
    """Return all dimensions but that of the units."""
    return tuple(dim for dim in range(output.ndim) if dim != node.axis % output.ndim)


def _note_range(node: Node, low: NDArray[np.float64], high: NDArray[np.float64], count: int) -> None:
    node.finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
    if node.finite:
        node.unit_min, node.unit_max = low, high
        node.rows = count // len(high)
        node.varies = node.rows == 1 or bool((high - low > 1e-6 * np.maximum(high, -low)).any())


def _ranges(output: Tensor, over: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values = small_array(output)
    if values is None:
        low, high = _ends(output, over).double().cpu().numpy()
        return low, high
    with np.errstate(invalid="ignore"):
        return values.min(over).astype(np.float64), values.max(over).astype(np.float64)


def _ends(output: Tensor, over: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.amin(output, dim=over), torch.amax(output, dim=over)])


def take_gradient(node: Node, gradient: Tensor, reading: Reading | None = None) -> None:
    """Take in the gradient at a call's output; several arrive where a backward pass runs more than once."""
    units = gradient.movedim(node.axis, -1) if gradient.ndim > 1 else gradient
    rows = units.reshape(-1, units.shape[-1] if units.ndim else 1)
    ranked = gradient.ndim > 1 and not rows.is_complex() and node.kind not in ("Embedding", "EmbeddingBag")
    if not rows.is_cpu and reading is not None:
        _wait_for_gradient(node, rows, reading, ranked=ranked)
        return
    squares = row_squares(rows)
    _add_gradient(node, squares.sum())
    if ranked:
        node.rank, node.gram = math.nan, _gram(rows, squares)


def _add_gradient(node: Node, squares: float) -> None:
    size = math.sqrt(squares)
    node.delta = size if node.delta is None else math.hypot(node.delta, size)


def _wait_for_gradient(node: Node, rows: Tensor, reading: Reading, *, ranked: bool) -> None:
    """Reduce a gradient where it is; the rows for its products are those that `_gram` would choose on the CPU."""
    squares = _row_squares(torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows)
    found = [squares.sum(), squares.count_nonzero()]
    if ranked:
        places = places_of(squares != 0, _MAX_ROWS, lambda count: (count + _MAX_ROWS - 1) // _MAX_ROWS)
        part = rows[places, :: -(-rows.shape[1] // _MAX_COLUMNS)].to(squares.dtype)
        part = part / squares.max().sqrt()
        found.append(part @ part.T)

    def take(total: Tensor, alive: Tensor, product: Tensor | None = None) -> None:
        _add_gradient(node, float(total))
        if product is not None:
            node.rank, node.gram, count = math.nan, None, int(alive)
            if count >= _FEW_ROWS and math.isfinite(float(total)):
                taken = len(range(0, count, -(-count // _MAX_ROWS)))
                node.gram = product[:taken, :taken].double().numpy().copy()

    reading.add(found, take)


def row_squares(rows: Tensor) -> NDArray[np.float64]:
    """Return the sum of squares of each row in float64; of a large tensor on the CPU, little is converted at a time."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    small = small_array(rows)
    if small is not None:
        wide = small.astype(np.float64)
        return np.asarray(np.einsum("ij,ij->i", wide, wide))
    found: NDArray[np.float64] = _row_squares(rows).cpu().numpy()
    return found


def _row_squares(rows: Tensor) -> Tensor:
    parts = torch.split(rows, max(1, _AT_ONCE // max(1, rows.shape[1]))) if rows.is_cpu else [rows]
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts]).square_()


def _gram(rows: Tensor, squares: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the products of some rows of a gradient with each other, or nothing where too few are there."""
    alive = np.flatnonzero(squares)
    if len(alive) < _FEW_ROWS or not math.isfinite(squares.sum()):
        return None
    alive, every = alive[:: -(-len(alive) // _MAX_ROWS)], -(-rows.shape[1] // _MAX_COLUMNS)
    there = small_array(rows, rows.numel())
    if there is None:
        part = rows[torch.from_numpy(alive).to(rows.device), ::every].double().cpu().numpy()
    else:
        part = there[alive, ::every].astype(np.float64)
    part = part / math.sqrt(squares.max())
    wide = torch.from_numpy(np.ascontiguousarray(part))  # the threads of numpy's BLAS would spin beside torch's
    product: NDArray[np.float64] = (wide @ wide.T).numpy()
    return product


def _effective_rank(gram: NDArray[np.float64]) -> float:
    """Return exp(entropy) of the normalised singular values, of which the matrix has the squares."""
    values = np.sqrt(torch.linalg.eigvalsh(torch.from_numpy(gram)).numpy().clip(min=0))
    shares = values[values > 0] / values.sum()
    return float(np.exp(-dot(shares, np.log(shares))))
