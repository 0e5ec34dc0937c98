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

from gradtrack.analyzers.flow.squares import loops_over, row_squares
from gradtrack.analyzers.tools.samples import dot, sampled, small_array

_MAX_ROWS: Final = 32
_MAX_COLUMNS: Final = 256
_FEW_ROWS: Final = 8
_FLAT: Final = 40.0
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
    what comes in here and is not finite.
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


def take_output(node: Node, output: Tensor) -> None:
    """Record the output of a call."""
    squashes = node.kind == _TANH_CELLS  # what such a layer puts out has passed tanh
    limit = TANH if squashes else TANH_LIMIT
    counts = _survey(node, output, limit)
    if counts is None:
        _take_range(node, output)
    if node.finite and (squashes or node.parametric) and not output.is_complex():
        _take_saturation(node, output, limit, counts, squashes=squashes)


def _survey(node: Node, output: Tensor, limit: float) -> NDArray[np.int64] | None:
    """Take the range in one pass, and count what is beyond the limits of tanh and sigmoid, where that is compiled."""
    compiled = loops_over(output) if output.ndim > 1 else None
    if compiled is None:
        return None
    loops, values = compiled
    num_units = output.shape[node.axis]
    values = values.reshape((len(values), num_units, -1) if node.axis % output.ndim == 1 else (-1, num_units, 1))
    low, high = np.full(num_units, np.inf, np.float32), np.full(num_units, -np.inf, np.float32)
    counts = np.zeros(2, np.int64)
    if loops.survey(values, low, high, limit, SIGMOID_LIMIT, counts):
        _note_range(node, low.astype(np.float64), high.astype(np.float64), output.numel())
    else:
        node.finite = False
    return counts


def _take_saturation(
    node: Node, output: Tensor, limit: float, counts: NDArray[np.int64] | None, *, squashes: bool
) -> None:
    """Note how much of a layer is where tanh and sigmoid are flat."""
    low, high = node.unit_min, node.unit_max
    node.beyond_tanh = node.beyond_sigmoid = 0.0
    if low is not None and high is not None and max(-low.min(), high.max()) <= limit:
        return
    shares = _beyond(output, limit) if counts is None else counts / output.numel()
    node.beyond_tanh = float(shares[0])
    node.beyond_sigmoid = 0.0 if squashes else float(shares[1])
    if not squashes and node.beyond_tanh <= 0.5:
        return
    sizes = _sizes(output)
    node.slope_tanh = _size(1 - sizes**2 if squashes else np.cosh(sizes.clip(max=_FLAT)) ** -2)
    if node.beyond_sigmoid > 0.5:
        node.slope_sigmoid = _size(np.cosh(sizes.clip(max=_FLAT) / 2) ** -2)


def _sizes(output: Tensor) -> NDArray[Any]:
    small = small_array(output)
    return sampled(output).abs().float().cpu().numpy() if small is None else np.abs(small).reshape(-1)


def _beyond(output: Tensor, limit: float) -> NDArray[np.float64]:
    sizes = _sizes(output)
    return np.array([np.count_nonzero(sizes > one) for one in (limit, SIGMOID_LIMIT)]) / len(sizes)


def _size(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(values**2, dtype=np.float64)))


def _take_range(node: Node, output: Tensor) -> None:
    """Note the range of every unit, or that not all of it is finite."""
    if output.ndim < 2 or output.is_complex():
        node.rows = output.numel() // node.width if output.ndim > 1 else 0
        node.finite = bool(torch.isfinite(output).all())
        return
    low, high = _ranges(output, tuple(dim for dim in range(output.ndim) if dim != node.axis % output.ndim))
    if np.isfinite(low).all() and np.isfinite(high).all():
        _note_range(node, low, high, output.numel())
    else:
        node.finite = False


def _note_range(node: Node, low: NDArray[np.float64], high: NDArray[np.float64], count: int) -> None:
    """Note the range of every unit, and whether anything depends on the batch."""
    node.unit_min, node.unit_max = low, high
    node.rows = count // len(high)
    node.varies = count == len(high) or bool((high - low > 1e-6 * np.maximum(high, -low)).any())


def _ranges(output: Tensor, over: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values = small_array(output)
    if values is None:
        low, high = torch.stack([torch.amin(output, dim=over), torch.amax(output, dim=over)]).double().cpu().numpy()
        return low, high
    with np.errstate(invalid="ignore"):
        return values.min(over).astype(np.float64), values.max(over).astype(np.float64)


def take_gradient(node: Node, gradient: Tensor) -> None:
    """Take in the gradient at a call's output; several arrive where a backward pass runs more than once."""
    units = gradient.movedim(node.axis, -1) if gradient.ndim > 1 else gradient
    rows = units.reshape(-1, units.shape[-1] if units.ndim else 1)
    squares = row_squares(rows)
    size = math.sqrt(squares.sum())
    node.delta = size if node.delta is None else math.hypot(node.delta, size)
    if gradient.ndim > 1 and not rows.is_complex() and node.kind not in ("Embedding", "EmbeddingBag"):
        node.rank, node.gram = math.nan, _gram(rows, squares)


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
