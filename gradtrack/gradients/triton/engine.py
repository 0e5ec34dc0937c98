"""The Triton engine: measures and protects the gradients of an accelerator with at most five launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from struct import Struct
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import JITFunction

from gradtrack.gradients.moments import MAX, MIN, NAN, SQUARES, WIDTH, ZEROS, Rows
from gradtrack.gradients.torch_cpu import PLAIN_TYPES, is_plain
from gradtrack.gradients.torch_device import Orders, Plans, Sums, halves_of
from gradtrack.gradients.triton import changes, kernels

CODES: Final = {
    torch.float32: kernels.FLOAT32.value,
    torch.float64: kernels.FLOAT64.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
}
INTERPRETED: Final = not isinstance(kernels.measure, JITFunction)
"""Whether Triton's interpreter runs the kernels (`TRITON_INTERPRET=1`), which it does on the memory of the CPU."""
DEVICES: Final = frozenset({"cpu"} if INTERPRETED else {"cuda", "xpu"})
"""The types of the devices whose gradients the engine measures; ROCm's are `cuda` to torch."""
_SHORT, _LONG = 1 << 14, 1 << 16
"""The elements of a chunk, for models below `_LARGE` elements and for larger ones."""
_LARGE: Final = 1 << 28
_LONGEST_UNIT: Final = 1 << 20
"""The elements of a unit that one program limits in bearable time."""
_FACTORS: Final = (1.0, 1.0)
_NUM_NUMBERS: Final = int(changes.NUM_NUMBERS.value)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the current device, with as many programs, unless there are none."""
    if programs:
        with np.errstate(all="ignore") if INTERPRETED else nullcontext():
            kernel[(programs,)](*arguments, num_warps=4, enable_fp_fusion=True, **constants)


@final
class Plan:
    """The tables of gradients of the same types and sizes on one device, with the memory of their sums.

    The addresses are sent again only where they have changed. The memory is used by one step after the other, in the
    order of the device's stream.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.device = grads[0].device
        self._dtypes, self._sizes = [grad.dtype for grad in grads], list(map(Tensor.numel, grads))
        self.num_tensors = len(grads)
        codes = [CODES[dtype] for dtype in self._dtypes]
        self.types = sum(1 << code for code in set(codes))
        self.is_wide = torch.float64 in self._dtypes
        self.columns: int = (kernels.WIDE_COLUMNS if self.is_wide else kernels.COLUMNS).value
        self.chunk = _SHORT if sum(self._sizes) < _LARGE else _LONG
        num_chunks = -(-np.array(self._sizes, np.int64) // self.chunk)
        firsts = np.concatenate([[0], np.cumsum(num_chunks)])
        self.num_chunks = int(firsts[-1])
        self.sizes = self._put(np.array(self._sizes, np.int64))
        self.codes = self._put(np.array(codes, np.int32))
        self.firsts = self._put(firsts.astype(np.int32))
        self.tensor_of = self._put(np.repeat(np.arange(self.num_tensors, dtype=np.int32), num_chunks))
        self.partial = self._empty(self.columns * self.num_chunks)
        self.results = self._empty(self.num_tensors * self.columns + 4)
        size = self.num_tensors * self.columns
        self.rows, self._outcome = self.results.narrow(0, 0, size), self.results.narrow(0, size, 4)
        self.found_inf: Tensor
        """The flag that the optimizers of a step skip it by; each step has its own."""
        self._sent: Any = None
        self._pack: Any = Struct(f"{self.num_tensors}q{_NUM_NUMBERS}d{self.num_tensors}q").pack_into
        self.inputs = torch.zeros(2 * self.num_tensors + _NUM_NUMBERS, dtype=torch.int64, device=self.device)
        """The addresses of the gradients, what a step decides by, as bits of float64 numbers, and the weights'."""
        self._units: tuple[Sequence[int], Tensor, Tensor] | None = None
        self._after: Tensor | None = None

    def fits(self, grads: Sequence[Tensor]) -> bool:
        """Tell whether gradients have the types, the sizes and the device that the plan was made for."""
        return (
            len(grads) == self.num_tensors
            and grads[0].device == self.device
            and [grad.dtype for grad in grads] == self._dtypes
            and list(map(Tensor.numel, grads)) == self._sizes
        )

    def measure(self, grads: Sequence[Tensor], factors: tuple[float, float] = _FACTORS) -> None:
        """Write the row of each gradient, multiplied by both factors, into `rows`; the host does not wait."""
        self._send(grads, (*factors, *[0.0] * (_NUM_NUMBERS - 2)))
        self._measure(factors)

    def start(self, grads: Sequence[Tensor], orders: Orders, weights: Sequence[Tensor] = ()) -> Tensor:
        """Measure, decide and change gradients by at most five launches; return the numbers that `read` takes."""
        self._send(grads, self._numbers(orders), weights)
        self._measure(_FACTORS)
        self.found_inf = torch.empty((), dtype=torch.float32, device=self.device)
        with _on(self.device):
            launch(
                changes.decide,
                1,
                self.inputs,
                self.codes,
                self.rows,
                self._outcome,
                self.found_inf,
                self.num_tensors,
                COLUMNS=self.columns,
                CLIPS=orders.limit is not None and orders.clip_type == "norm",
                REPLACES=orders.replacements is not None,
            )
        self._change(grads, orders)
        return self.results.clone() if self.device.type == "cpu" else self.results

    def norm(self, numbers: Tensor) -> Tensor:
        """Return the norm before clipping on the device, from what `start` has returned."""
        rows = numbers.narrow(0, 0, self.num_tensors * self.columns).view(-1, self.columns)
        return rows.select(1, SQUARES).sum().sqrt()

    def local_sums(self, grads: Sequence[Tensor], orders: Orders) -> tuple[Tensor, Tensor]:
        """Measure gradients; return sums and ends of each, as the plan of torch does."""
        self._send(grads, self._numbers(orders))
        self._measure(_FACTORS)
        rows = self.rows.view(self.num_tensors, self.columns)
        ends = torch.stack([-rows[:, MIN], rows[:, MAX]], dim=1)
        return torch.cat([rows[:, :MIN], rows[:, ZEROS:WIDTH]], dim=1), ends

    def foresee(self, orders: Orders) -> Tensor:
        """Return how many elements clamping would limit in each gradient that was measured last, and the squares then.

        No gradient changes, so that ranks can add up both before they decide.
        """
        self._outcome.zero_()
        limited = self._empty(2 * self.num_tensors)
        after = self._change_chunks(orders, stores=False)
        with _on(self.device):
            launch(changes.merge_limited_chunks, self.num_tensors, after, self.firsts, limited, self.num_chunks)
        return limited.view(-1, 2)

    def change(self, grads: Sequence[Tensor], orders: Orders, coefficient: Tensor | None, bad: Tensor) -> None:
        """Clip gradients that were measured last by a coefficient on their device, and replace what is not finite."""
        one, flag = self._outcome.new_ones(1), bad.reshape(1).to(torch.float64)
        self._outcome[:2] = torch.cat([one if coefficient is None else coefficient.reshape(1), flag])
        self._change(grads, orders)

    def _change(self, grads: Sequence[Tensor], orders: Orders) -> None:
        """Change gradients by what was decided on the device."""
        clips, replaces = orders.limit is not None, orders.replacements is not None
        if not (clips or replaces):
            return
        by_unit = clips and orders.clip_type == "agc"
        after = self._limit_units(grads, replaces) if by_unit else self._change_chunks(orders, stores=True)
        if clips and orders.clip_type != "norm":
            with _on(self.device):
                launch(changes.merge_limited, 1, after, self._outcome, after.numel() // 2)

    def _limit_units(self, grads: Sequence[Tensor], replaces: bool) -> Tensor:
        """Limit each unit; return how many were limited, and their squares afterwards."""
        firsts, tensor_of = self._units_of(grads)
        after = self._after = self._memory(tensor_of.numel())
        with _on(self.device):
            launch(
                changes.limit_units,
                tensor_of.numel(),
                *(self.inputs, self.sizes, self.codes, firsts, tensor_of, self.rows, self._outcome, after),
                *(self.num_tensors, tensor_of.numel()),
                TYPES=self.types,
                COLUMNS=self.columns,
                REPLACES=replaces,
            )
        return after

    def _change_chunks(self, orders: Orders, *, stores: bool) -> Tensor:
        """Scale or clamp each chunk; return how much was limited where it clamps, and the squares afterwards."""
        clamps = orders.limit is not None and orders.clip_type != "norm"
        after = self._after = self._memory(self.num_chunks) if clamps else self.partial
        with _on(self.device):
            launch(
                changes.change,
                self.num_chunks,
                *(self.inputs, self.sizes, self.codes, self.firsts, self.tensor_of, self.partial, self.rows),
                *(self._outcome, after, self.num_tensors, self.num_chunks),
                TYPES=self.types,
                CHUNK=self.chunk,
                COLUMNS=self.columns,
                CLAMPS=clamps,
                REPLACES=orders.replacements is not None,
                STORES=stores,
            )
        return after

    def read(self, values: NDArray[np.float64], orders: Orders) -> Sums:
        """Return the sums of a step from the numbers that `start` has returned, on the host now."""
        rows = values[:-4].reshape(self.num_tensors, self.columns)
        limited = (float(values[-2]), float(values[-1])) if orders.clip_type != "norm" else (0.0, 0.0)
        plain = rows[:, :WIDTH].copy()
        if not (orders.variances and self.is_wide):
            return Sums(plain, None, *limited)
        wide = np.array([place for place, dtype in enumerate(self._dtypes) if dtype == torch.float64])
        counts = np.array(self._sizes, np.float64)[wide] - rows[wide, NAN:WIDTH].sum(axis=1)
        return Sums(plain, (rows[wide, 10], rows[wide, 8], rows[wide, 9], counts, wide), *limited)

    def clips(self, clip_type: str, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
        """Say whether a strategy needs no decision of the host; AGC does where units do not lie in one piece."""
        if clip_type != "agc":
            return True
        return len(weights) == len(grads) and all(
            grad.shape == weight.shape
            and grad.dtype == weight.dtype
            and weight.device == grad.device
            and type(weight) in PLAIN_TYPES
            and grad.is_contiguous()
            and weight.is_contiguous()
            and grad.numel() <= _LONGEST_UNIT * (len(grad) if grad.ndim > 1 else 1)
            for grad, weight in zip(grads, weights, strict=True)
        )

    def _numbers(self, orders: Orders) -> list[float]:
        """Return what a step decides by, in the places that the kernels read."""
        numbers = [*_FACTORS, *[0.0] * (_NUM_NUMBERS - 2)]
        numbers[changes.LIMIT.value] = math.inf if orders.limit is None else orders.limit
        numbers[changes.EPSILON.value] = orders.epsilon
        for dtype, code in CODES.items():
            nan, infinity = (orders.replacements or {}).get(dtype, (0.0, 0.0))
            numbers[changes.NAN_VALUES.value + code] = nan
            numbers[changes.INFINITY_VALUES.value + code] = infinity
            numbers[changes.LIMITS.value + code] = (orders.limits or {}).get(dtype, math.inf)
        return numbers

    def _units_of(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the first unit of each tensor and the tensor of each unit: a row, or a whole vector."""
        numbers = [(len(grad) if grad.ndim > 1 else 1) if grad.numel() else 0 for grad in grads]
        if self._units is None or self._units[0] != numbers:
            firsts = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int32)
            tensor_of = np.repeat(np.arange(self.num_tensors, dtype=np.int32), numbers)
            self._units = numbers, self._put(firsts), self._put(tensor_of)
        return self._units[1:]

    def _memory(self, number: int) -> Tensor:
        """Return memory for two numbers of each chunk or unit."""
        kept = self._after
        return kept if kept is not None and kept.numel() == 2 * number else self._empty(2 * number)

    def _measure(self, factors: tuple[float, float]) -> None:
        scaled = factors != _FACTORS
        facts = self.inputs, self.sizes, self.codes, self.firsts
        counts = self.num_tensors, self.num_chunks
        with _on(self.device):
            launch(
                kernels.measure,
                self.num_chunks,
                *facts,
                self.tensor_of,
                self.partial,
                *counts,
                TYPES=self.types,
                CHUNK=self.chunk,
                FACTORS=scaled,
            )
            launch(
                kernels.merge_chunks,
                self.num_tensors,
                *facts,
                self.partial,
                self.rows,
                *counts,
                WIDE=self.is_wide,
                FACTORS=scaled,
            )

    def _send(self, grads: Sequence[Tensor], numbers: Sequence[float], weights: Sequence[Tensor] = ()) -> None:
        """Copy the addresses of gradients and weights and some numbers to the device, unless it has them."""
        of_weights = list(map(Tensor.data_ptr, weights)) or [0] * self.num_tensors
        new = list(map(Tensor.data_ptr, grads)), list(numbers), of_weights
        if new == self._sent:
            return
        host = torch.empty_like(self.inputs, device="cpu", pin_memory=self.device.type != "cpu")
        self._pack(host.numpy(), 0, *new[0], *numbers, *of_weights)
        self.inputs.copy_(host, non_blocking=True)
        self._sent = new

    def _put(self, facts: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(facts).to(self.device)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float64, device=self.device)


@final
class TritonEngine:
    """A measurement of gradients in the memory of an accelerator: one read of each element, and sums in float64."""

    def __init__(self) -> None:
        self.plans = Plans(Plan)

    @staticmethod
    def covers(grad: Tensor) -> bool:
        """Tell whether the engine can measure a gradient: plain, real, floating, without gaps, on an accelerator."""
        return grad.device.type in DEVICES and is_plain(grad, CODES)

    def works_on(self, device: torch.device) -> bool:
        """Tell whether the kernels run on a device, by running them; it must have float64 numbers."""
        if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
            return False
        grads = [torch.full((4,), 2.0, device=device)]
        row = Plan(grads).start(grads, Orders(limit=2.0))[:WIDTH].tolist()
        return row == [8, 16, 2, 2, 0, 0, 0, 0] and grads[0].tolist() == [1.0] * 4

    def measure(self, grads: Sequence[Tensor], exponent: int = 0) -> Rows:
        """Return the row of each gradient that the engine covers, all on one device, divided by 2**exponent."""
        plan = self.plans.of(grads)
        plan.measure(grads, halves_of(exponent))
        rows: Rows = plan.rows.cpu().numpy().reshape(plan.num_tensors, plan.columns)
        return rows[:, :WIDTH].copy()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    found: AbstractContextManager[Any] = nullcontext()
    return found if device.type == "cpu" else torch.get_device_module(device).device(device)
