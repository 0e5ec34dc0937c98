"""One look through a model: what its modules put out, what gradient comes back, and which module feeds which."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.measure.hooks import ModuleHook
from gradtrack.measure.samples import sample

_MAX_CALLS: Final = 256
_MAX_WALK: Final = 4000
_MAX_ROWS: Final = 32
_MAX_COLUMNS: Final = 256
_MAX_WIDE: Final = 1 << 20
TANH_LIMIT: Final = 2.0923  # |tanh| > 0.97
SIGMOID_LIMIT: Final = 3.4761  # outside 0.03 .. 0.97
RECTIFIERS: Final = {"ReLU", "ReLU6", "GELU", "SiLU", "Mish", "Hardswish", "ELU", "SELU", "CELU", "Softplus"}
SQUASHERS: Final = {"Tanh": TANH_LIMIT, "Sigmoid": SIGMOID_LIMIT}
_CHANNELS_FIRST: Final = re.compile(r"Conv|BatchNorm|GroupNorm|InstanceNorm")
_NORMS: Final = re.compile(r"Norm")


@dataclass(slots=True)
class Node:
    """One call of one module: its output, the gradient there, and the calls whose output it used.

    `ops` are the names of the functions between a parent's output and this call, the one nearest to the parent first.
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
    unit_max: NDArray[np.float64] | None = None
    unit_min: NDArray[np.float64] | None = None
    rows: int = 0
    varies: bool = True
    finite: bool = True
    finite_input: bool = True


class Probe:
    """Hooks on a model for one forward and backward pass, until `close`.

    A fault in a hook never reaches the training: it ends the look and is kept in `fault`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.without_grad: set[str] = set()
        self.fault: Exception | None = None
        self._calls: dict[str, int] = {}
        self._functions: dict[Any, int] = {}
        self._closed = False
        self._handles = [
            module.register_forward_hook(ModuleHook(module, self._seeing(name, module)))
            for name, module in _observed(model)
            if name
        ]

    def close(self) -> None:
        """Remove the hooks and let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._closed = True
        self._handles = []
        self._functions = {}

    def _seeing(self, name: str, module: nn.Module) -> Callable[..., None]:
        kind = type(module).__name__
        parametric = any(True for _ in module.parameters(recurse=False))

        def see(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._closed:
                return
            if not torch.is_grad_enabled():
                self.without_grad.add(name)
                return
            found = next(_tensors(output), None)
            calls = self._calls[name] = self._calls.get(name, 0) + 1
            if found is not None and calls <= _MAX_CALLS and not torch.compiler.is_compiling():
                self._guard(lambda: self._record(name, kind, parametric, inputs, found))

        return see

    def _guard(self, call: Callable[[], None]) -> None:
        if self.fault is None:
            try:
                call()
            except Exception as fault:
                self.fault = fault

    def _record(self, name: str, kind: str, parametric: bool, inputs: Any, output: Tensor) -> None:
        function = output.grad_fn
        if function is None or function in self._functions or not output.numel():
            return
        parents = list(self._walk(function))
        first = self.nodes[parents[0][0]] if parents else None
        axis = _axis(kind, parametric, output, first)
        width = output.shape[axis] if output.ndim > 1 else 1
        node = Node(name, kind, parametric, axis, width, parents)
        _look(node, output.detach(), inputs)
        self._functions[function] = len(self.nodes)
        self.nodes.append(node)
        output.register_hook(lambda gradient: self._guard(lambda: _take(node, gradient)))  # type: ignore[no-untyped-call]

    def _walk(self, start: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Find the recorded calls that a function's value was computed from, with the functions on the way."""
        stack: list[tuple[Any, tuple[str, ...]]] = [(start, ())]
        seen = {start}
        found: set[int] = set()
        while stack and len(seen) < _MAX_WALK:
            function, ops = stack.pop()
            ops = (function.name(), *ops[:7])
            for previous, _ in function.next_functions:
                if previous is None or previous in seen:
                    continue
                seen.add(previous)
                index = self._functions.get(previous)
                if index is None:
                    stack.append((previous, ops))
                elif index not in found:
                    found.add(index)
                    yield index, ops


def _observed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules without children and those that own parameters."""
    for name, module in model.named_modules():
        leaf = next(module.children(), None) is None
        if not isinstance(module, (torch.jit.ScriptModule,)) and (
            leaf or next(module.parameters(False), None) is not None
        ):
            yield name or ("model" if leaf else ""), module


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "data") and isinstance(value.data, Tensor):  # a PackedSequence
        yield from _tensors(value.data)


def _axis(kind: str, parametric: bool, output: Tensor, parent: Node | None) -> int:
    """Return the dimension of the units: channels after a convolution, features elsewhere."""
    if _CHANNELS_FIRST.search(kind):
        return min(1, output.ndim - 1)
    if parametric or parent is None:
        return output.ndim - 1
    if parent.axis == 1 and output.ndim >= 3 and output.shape[1] == parent.width:
        return 1
    return output.ndim - 1


def _look(node: Node, output: Tensor, inputs: Any) -> None:
    if not _take_range(node, output):
        node.finite = False
        node.finite_input = all(bool(torch.isfinite(value).all()) for value in _tensors(inputs))
    elif output.is_complex():
        return  # what is dead or saturated is defined for real numbers
    elif node.kind in SQUASHERS:
        limit = 0.97 if node.kind == "Tanh" else 0.47
        (node.beyond_tanh,) = _shares(node, output - (0.0 if node.kind == "Tanh" else 0.5), limit)
    elif node.kind == "RNN":
        (node.beyond_tanh,) = _shares(node, output, 0.97)
    elif node.parametric:
        node.beyond_tanh, node.beyond_sigmoid = _shares(node, output, TANH_LIMIT, SIGMOID_LIMIT)


def _shares(node: Node, output: Tensor, *limits: float) -> list[float]:
    """Return the share of the elements, of many an even sample, that are beyond each limit on either side."""
    low, high = node.unit_min, node.unit_max
    if node.kind not in SQUASHERS and low is not None and high is not None and max(-low.min(), high.max()) <= limits[0]:
        return [0.0] * len(limits)
    sizes = sample(output).abs_().float().cpu().numpy()
    return [int(np.count_nonzero(sizes > limit)) / len(sizes) for limit in limits]


def _take_range(node: Node, output: Tensor) -> bool:
    """Note the range of every unit, and whether anything depends on the batch; return whether all of it is finite."""
    if output.ndim < 2 or output.is_complex():
        node.rows = output.numel() // node.width if output.ndim > 1 else 0
        return bool(torch.isfinite(output).all())
    others = [dim for dim in range(output.ndim) if dim != node.axis % output.ndim]
    found = torch.stack([torch.amin(output, dim=others), torch.amax(output, dim=others)])
    low, high = found.double().cpu().numpy()
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return False
    node.unit_min, node.unit_max = low, high
    node.rows = output.numel() // len(high)
    node.varies = output.numel() == len(high) or bool((high - low > 1e-6 * np.maximum(high, -low)).any())
    return True


def _take(node: Node, gradient: Tensor) -> None:
    """Take in the gradient at a call's output; several arrive where a backward pass runs more than once."""
    gradient = gradient.detach()
    units = gradient.movedim(node.axis, -1) if gradient.ndim > 1 else gradient
    rows = units.reshape(-1, units.shape[-1] if units.ndim else 1)
    squares = _row_squares(torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows)
    size = math.sqrt(squares.sum())
    node.delta = size if node.delta is None else math.hypot(node.delta, size)
    if gradient.ndim > 1 and not rows.is_complex() and node.kind not in ("Embedding", "EmbeddingBag"):
        node.rank = _effective_rank(rows, np.sqrt(squares))


def _row_squares(rows: Tensor) -> NDArray[np.float64]:
    """Return the sum of squares of each row in float64, several times faster than torch takes norms of rows."""
    parts = torch.split(rows, max(1, _MAX_WIDE // max(rows.shape[1], 1)))
    found: NDArray[np.float64] = (
        torch.cat([part.to(torch.float64, copy=True).square_().sum(1) for part in parts]).cpu().numpy()
    )
    return found


def _effective_rank(rows: Tensor, sizes: NDArray[np.float64]) -> float:
    """Return exp(entropy) of the normalised singular values of a gradient, rows by units."""
    alive = np.flatnonzero(sizes)
    if len(alive) < 8 or not np.isfinite(sizes).all():
        return float("nan")
    chosen = torch.from_numpy(alive[:: -(-len(alive) // _MAX_ROWS)]).to(rows.device)
    part = rows[chosen, :: -(-rows.shape[1] // _MAX_COLUMNS)].double().cpu().numpy() / sizes.max()
    values = np.sqrt(np.linalg.eigvalsh(part @ part.T).clip(min=0))
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
