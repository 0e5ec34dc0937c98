"""Operations of torch followed through a forward and a backward pass: where values that are not finite come from.

With the settings and the random numbers on which their results depend.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import linecache
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradtrack.support.names import number

_NOT_THEIRS: Final = tuple(os.path.dirname(inspect.getfile(one)) + os.sep for one in (torch, sys.modules["gradtrack"]))
"""Where code lies that is not the user's."""
_NUMPY_KEYS: Final = 624
_NUMPY_STATE: Final = 4 * _NUMPY_KEYS + 4
_MEMORY: Final = ("empty", "new_empty", "resize")
"""What the names of operations begin with whose results hold whatever was in memory."""


class Range(NamedTuple):
    """The range of the finite elements of a tensor, and how many others it has."""

    shape: tuple[int, ...]
    dtype: str
    low: float = math.nan
    high: float = math.nan
    num_nan: int = 0
    num_inf: int = 0

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.num_nan or self.num_inf)

    def __str__(self) -> str:
        where = f"{self.dtype} {list(self.shape)}"
        inside = "no finite element" if math.isnan(self.low) else f"{number(self.low)} to {number(self.high)}"
        others = "".join(f", {count} {what}" for count, what in ((self.num_nan, "NaN"), (self.num_inf, "Inf")) if count)
        return f"{where} {inside}{others}"


def range_of(tensor: Tensor) -> Range | None:
    """Return the range of the elements of a tensor; None for one that is empty or holds no such numbers."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.new_empty(0)
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return None
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    parts = parts.float() if parts.element_size() == 1 else parts
    low, high = (float(one) for one in torch.aminmax(parts))
    if math.isfinite(low) and math.isfinite(high):
        return Range(shape, dtype, low, high)
    num_nan, num_inf = int(parts.isnan().sum()), int(parts.isinf().sum())
    finite = parts[parts.isfinite()]
    low, high = (float(one) for one in torch.aminmax(finite)) if finite.numel() else (math.nan, math.nan)
    return Range(shape, dtype, low, high, num_nan, num_inf)


@dataclass(slots=True, kw_only=True)
class Operation:
    """An operation of torch: where it was called, in which module, and the ranges of what it was given."""

    name: str
    module: str
    place: str
    line: str
    inputs: list[Range]
    forward_inputs: list[Range] = field(default_factory=list)
    """In a backward pass, what the operation was given in the forward pass."""
    result: Range | None = None
    is_backward: bool = False
    kernel: str = ""
    """In a backward pass, the operation by which the gradient was computed."""
    given: str = ""
    """What held values that are not finite before the step already, a parameter or an input, how many and where."""
    on_purpose: bool = False
    """Whether the infinity was asked for, as by a mask."""
    order: int = 0
    """How many operations there were before."""

    def __str__(self) -> str:
        what = f"the gradient of {self.name} (by {self.kernel})" if self.is_backward else self.name
        where = f"in {self.module}" if self.module else "outside of the model's forward pass"
        lines = [f"{what} {where}", f"  at {self.place}: {self.line}" if self.line else f"  at {self.place}"]
        lines += [f"  input {one}" for one in self.inputs]
        lines += [f"  input of the forward pass {one}" for one in self.forward_inputs]
        lines.append(f"  result {self.result}")
        if self.given:
            lines.append(f"  {self.given}")
        return "\n".join(lines)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation of a forward and a backward pass, and where values that are not finite came from.

    Each tensor that holds one leads to the operation that made the first on the way to it. An infinity that the code
    asks for, as masks of attention have them, is no fault: only a NaN that comes of it is.
    """

    def __init__(self, given: Mapping[int, str], modules: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given, self._modules = given, modules
        self._origins: dict[int, Operation] = {}
        self._kept: list[object] = []
        """The memory of these tensors, as far as the forward pass made them: it is not used again for others."""
        self._forward: dict[int, Operation] = {}
        """The operation of the forward pass that belongs to each node of the graph, by the number of the node."""
        self.first: Operation | None = None
        """The first of all from which a value came that is not finite, whether it did harm or not."""
        self.count = 0

    def origin(self, tensor: Tensor) -> Operation | None:
        """Return the operation from which the values of a tensor came that are not finite."""
        return self._origins.get(memory_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it was given and what it returned."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        ranges, places = list(map(range_of, tensors)), list(map(memory_of, tensors))
        operation = self._operation(func, [one for one in ranges if one is not None])
        found = func(*args, **kwargs)
        results = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        if func.overloadpacket.__name__.startswith(_MEMORY):
            for result in results:
                self._origins.pop(memory_of(result), None)
            return found
        bad = [(place, one) for place, one in zip(places, ranges, strict=True) if one is not None and not one.finite]
        asked = any(isinstance(one, float) and math.isinf(one) for one in leaves)
        for result in results:
            if memory_of(result) not in places:  # else a view, of which other parts may not be finite
                self._origins.pop(memory_of(result), None)
            self._follow(result, operation, bad, asked=asked)
        return found

    def _follow(self, result: Tensor, operation: Operation, bad: list[tuple[int, Range]], *, asked: bool) -> None:
        """Note where the values of a result that are not finite come from."""
        here, place = range_of(result), memory_of(result)
        if here is None or here.finite:
            return
        operation.result = operation.result or here
        causes = [self._cause(known, one, operation) for known, one in bad]
        faults = [one for one in causes if not one.on_purpose]
        if faults:
            origin = min(faults, key=lambda one: one.order)
        elif (causes or asked) and not here.num_nan:
            origin = causes[0] if causes else replace(operation, on_purpose=True)
        else:
            origin = operation
        if not (origin.on_purpose or self.first):
            self.first = origin
        self._origins[place] = origin
        if not operation.is_backward:
            self._kept.append(result.untyped_storage() if result.layout is torch.strided else result)

    def _cause(self, place: int, found: Range, operation: Operation) -> Operation:
        """Return where an input came from; one that no operation made was there before, or is a constant."""
        known = self._origins.get(place)
        if known is None:
            given = self._given.get(place, "a constant was not finite before this step" if found.num_nan else "")
            known = self._origins[place] = replace(operation, given=given, on_purpose=not given)
        return known

    def _operation(self, func: Any, ranges: list[Range]) -> Operation:
        self.count += 1
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        node: Any = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            forward = self._forward.get(node._sequence_nr())
            if forward is None:
                title = node.name().rpartition("::")[2]
                forward = Operation(name=title, module="", place="the backward pass", line="", inputs=[])
            return replace(
                forward,
                inputs=ranges,
                forward_inputs=forward.inputs,
                result=None,
                given="",
                is_backward=True,
                kernel=name,
                order=self.count,
            )
        place, line = _place_in_code()
        module = self._modules[-1] if self._modules else ""
        operation = Operation(name=name, module=module, place=place, line=line, inputs=ranges, order=self.count)
        if torch.is_grad_enabled():  # the node of an operation is made before the operation itself runs
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, operation)  # type: ignore[attr-defined]
        return operation


def memory_of(tensor: Any) -> int:
    """Return what identifies the memory of a tensor, which its views share."""
    try:
        return int((tensor._values() if tensor.is_sparse else tensor).untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return id(tensor)


def _place_in_code() -> tuple[str, str]:
    """Return the file and line of the caller's own code, and that line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_NOT_THEIRS, "<")) or path.startswith("<ipython"):
            line = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}", line
        frame = frame.f_back
    return "code outside of Python files", ""


def switches() -> dict[str, bool | int | str]:
    """Return the settings of torch by which two computations of the same numbers may differ."""
    found: dict[str, bool | int | str] = {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "cudnn": bool(torch.backends.cudnn.enabled),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
    }
    with contextlib.suppress(RuntimeError):  # where old and new ways of setting it were mixed
        found["cudnn_tf32"] = bool(torch.backends.cudnn.allow_tf32)
    return found


def set_switches(wanted: Mapping[str, bool | int | str]) -> None:
    """Set what `switches` returned."""
    torch.set_num_threads(max(1, min(int(wanted.get("threads", 1)), os.cpu_count() or 1)))
    torch.use_deterministic_algorithms(
        bool(wanted.get("deterministic")), warn_only=wanted.get("warn_only") is not False
    )
    torch.set_float32_matmul_precision(str(wanted.get("matmul", "highest")))
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        recorded = {"enabled": "cudnn", "allow_tf32": "cudnn_tf32"}.get(name, f"cudnn_{name}")
        if recorded in wanted:
            setattr(torch.backends.cudnn, name, bool(wanted[recorded]))
    if "mkldnn" in wanted:
        torch.backends.mkldnn.enabled = bool(wanted["mkldnn"])  # type: ignore[assignment, unused-ignore]


class NumpyState:
    """The state of NumPy's global generator, which is copied only where it has changed: that takes 80 microseconds."""

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = np.random.get_state()

    def read(self) -> Any:
        """Return the state as it is now."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return np.random.get_state()
        memory = ctypes.string_at(generator.ctypes.state_address, _NUMPY_STATE)
        if memory != self._memory or self._state[3]:  # a normal number is in store, which may go without a trace there
            self._memory, self._state = memory, np.random.get_state()
        return self._state


numpy_state = NumpyState()


def checked_numpy_state(state: Any) -> Any:
    """Return a state of NumPy's generator, whose position NumPy itself does not check."""
    name, keys, position = state[:3]
    if name == "MT19937" and not (len(keys) == _NUMPY_KEYS and 0 <= position <= _NUMPY_KEYS):
        raise ValueError("the state of NumPy's random numbers is none")
    return state
