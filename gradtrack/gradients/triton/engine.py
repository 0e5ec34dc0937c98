"""The Triton engine: measures the gradients of an accelerator with two launches, whatever their number and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from struct import Struct
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from triton.runtime import JITFunction

from gradtrack.gradients.moments import WIDTH, Rows
from gradtrack.gradients.torch_device import Plans, halves_of
from gradtrack.gradients.triton import kernels

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
_PLAIN_TYPES: Final = frozenset({Tensor, Parameter})
_SHORT, _LONG = 1 << 14, 1 << 16
"""The elements of a chunk, for models below `_LARGE` elements and for larger ones."""
_LARGE: Final = 1 << 28
_FACTORS: Final = (1.0, 1.0)


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
        self.rows = self._empty(self.num_tensors * self.columns)
        self._sent: tuple[Sequence[int], Sequence[float]] = (), ()
        self._pack: Any = Struct(f"{self.num_tensors}q{len(_FACTORS)}d").pack_into
        self.inputs = torch.zeros(self.num_tensors + len(_FACTORS), dtype=torch.int64, device=self.device)
        """The addresses of the gradients and, after them, what a step decides by, as bits of float64 numbers."""

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
        self._send(grads, factors)
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

    def _send(self, grads: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Copy the addresses of gradients and some numbers to the device, unless it has them."""
        new = list(map(Tensor.data_ptr, grads)), numbers
        if new == self._sent:
            return
        host = torch.empty_like(self.inputs, device="cpu", pin_memory=self.device.type != "cpu")
        self._pack(host.numpy(), 0, *new[0], *numbers)
        self.inputs.copy_(host, non_blocking=True)
        self._sent = new

    def _put(self, facts: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(facts).to(self.device)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float64, device=self.device)


@final
class TritonEngine:
    """A measurement of gradients in the memory of an accelerator: one read of each element, and sums in float64."""

    name = "triton"

    def __init__(self) -> None:
        self.plans = Plans(Plan)

    @staticmethod
    def covers(grad: Tensor) -> bool:
        """Tell whether the engine can measure a gradient: plain, real, floating, without gaps, on an accelerator."""
        return (
            grad.device.type in DEVICES
            and type(grad) in _PLAIN_TYPES
            and grad.layout is torch.strided
            and grad.dtype in CODES
            and not grad.is_neg()
            and not grad._is_zerotensor()
            and (grad.is_contiguous() or is_dense(grad))
        )

    def works_on(self, device: torch.device) -> bool:
        """Tell whether the kernels run on a device, by running them; it must have float64 numbers."""
        if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
            return False
        row: list[float] = self.measure([torch.full((3,), 2.0, device=device)])[0].tolist()
        return row == [6, 12, 2, 2, 0, 0, 0, 0]

    def measure(self, grads: Sequence[Tensor], exponent: int = 0) -> Rows:
        """Return the row of each gradient that the engine covers, all on one device, divided by 2**exponent."""
        plan = self.plans.of(grads)
        plan.measure(grads, halves_of(exponent))
        rows: Rows = plan.rows.cpu().numpy().reshape(plan.num_tensors, plan.columns)
        return rows[:, :WIDTH].copy()


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make a device the current one, on which Triton launches."""
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        yield
        return
    with module.device(device):
        yield


def is_dense(grad: Tensor) -> bool:
    """Tell whether the elements fill a stretch of memory once each, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(pair for pair in zip(grad.stride(), grad.shape, strict=True) if pair[1] != 1):
        if stride != step:
            return False
        step *= size
    return True
