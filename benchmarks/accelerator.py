"""A model of a step on an accelerator, and no measurement: counted launches, and the bytes that each kernel moves.

The launches are those of the code that runs, counted without a device; the time follows from them at 5 us a launch and
2 TB/s, as if nothing overlapped and no cache helped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import looks
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import Row
from gradtrack.gradients.torch_device import Orders, TorchPlan

SECONDS_OF_A_LAUNCH = 5e-6
BYTES_PER_SECOND = 2e12
ORDERS = Orders(limit=1.0, epsilon=1e-6)
_START_NOTHING = ("view", "select", "detach", "split", "narrow", "slice", "alias", "empty", "prim.", "unbind")


class Candidate(NamedTuple):
    """What a step does with the gradients: its launches, and the bytes that it reads and writes for each element."""

    name: str
    launches: int
    read: float
    written: float

    def seconds(self, elements: int) -> float:
        return self.launches * SECONDS_OF_A_LAUNCH + (self.read + self.written) * elements / BYTES_PER_SECOND


def run(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Compare steps, and count what the looks of analyzers cost."""
    yield from steps()
    yield from looks.run()


def steps() -> Iterator[Row]:
    """Compare for float32 gradients of two models, where clipping engages and where it does not."""
    for name in ("gpt2_124m", "tiny_2000"):
        shapes = SHAPES[name]
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        clip = Candidate("clip_grad_norm_", _operations(shapes, _clip), 8, 4)
        for one in (clip, *_candidates(shapes), Candidate("one read", 1, 4, 0)):
            seconds = one.seconds(elements)
            yield Row(
                benchmark="On an accelerator: a model",
                case=f"{name}, float32, {one.name}",
                what="modelled time / clip_grad_norm_",
                ratio=seconds / clip.seconds(elements),
                note=f"{one.launches} launches; reads {one.read:g} B and writes {one.written:g} B an element: "
                f"{1e3 * seconds:.2f} ms",
            )


def _candidates(shapes: list[Shape]) -> Iterator[Candidate]:
    try:
        launches = _launches(shapes)
    except ImportError:
        pass
    else:
        yield Candidate("Triton, not clipping", launches, 4, 0)
        yield Candidate("Triton, clipping", launches, 8, 4)
    # A window is in float64: it is filled and copied to, read and cleaned three times, and five sums are taken of it.
    yield Candidate("torch alone", _operations(shapes, _windows), 108, 68)


def _launches(shapes: list[Shape]) -> int:
    """Count the kernels that the Triton engine launches, and its two copies."""
    from gradtrack.gradients.triton import engine

    launched: list[Any] = []
    with patch.object(engine, "launch", lambda kernel, programs, *_, **__: launched.append(kernel)):
        grads = [torch.empty(shape) for shape in shapes]
        engine.Plan(grads).start(grads, ORDERS)
    return len(launched) + 2


def _clip(grads: list[Tensor]) -> object:
    params = [nn.Parameter(grad) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)


def _windows(grads: list[Tensor]) -> object:
    plan = TorchPlan(grads)
    return lambda: plan.start(grads, ORDERS).to("cpu", non_blocking=True)


def _operations(shapes: list[Shape], make: Callable[[list[Tensor]], Any]) -> int:
    """Count the operations that start a kernel or a copy on tensors of a device that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        action = make([torch.empty(shape, device="cuda") for shape in shapes])
        with _Counter() as counter:  # type: ignore[no-untyped-call]
            action()
    return int(counter.number)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not any(word in str(func) for word in _START_NOTHING)
        return func(*args, **(kwargs or {}))
