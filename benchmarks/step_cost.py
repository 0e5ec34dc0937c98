"""A full report at every step, over torch's own clip_grad_norm_ on the same gradients."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.shapes import SHAPES, Parameters
from benchmarks.timing import Row, all_times, usual_mean
from gradtrack import GradientManager

BARS = {
    "gpt2_124m": (0.90, 0.60),
    "tiny_2000": (0.40, 0.35),
    "mlp_1m": (0.60, 0.50),
    "policy_25k": (1.00, 1.00),
}
ROUNDS = {"gpt2_124m": 15, "tiny_2000": 60, "mlp_1m": 200, "policy_25k": 600}
TORCH_BAR = 1.6


def run(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Compare for every shape, type and engine, with clipping engaged and not."""
    if device != "cpu":
        yield from _on_accelerator(device, quick=quick)
        return
    for name, shapes in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for engaged in (True, False):
                bar: float | None = BARS[name][not engaged]
                yield _compare(name, shapes, dtype, engaged=engaged, engine="native", bar=bar, quick=quick)
    for name, shapes in SHAPES.items():
        bar = TORCH_BAR if name == "gpt2_124m" else None
        yield _compare(name, shapes, torch.float32, engaged=False, engine="torch", bar=bar, quick=quick)


def _on_accelerator(device: str, *, quick: bool) -> Iterator[Row]:
    """Compare both engines of accelerators, after each call waiting for the device."""
    for engine in ("triton", "torch"):
        for name, shapes in SHAPES.items():
            for dtype in (torch.float32, torch.bfloat16):
                for engaged in (True, False):
                    yield _compare(
                        name, shapes, dtype, engaged=engaged, engine=engine, bar=None, quick=quick, device=device
                    )


def _compare(
    name: str,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    *,
    engaged: bool,
    engine: Any,
    bar: float | None,
    quick: bool,
    device: str = "cpu",
) -> Row:
    model = Parameters(shapes, dtype).to(device)
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    original = [grad.clone() for grad in grads]
    norm = float(torch.nn.utils.get_total_norm([grad.double() for grad in grads]))
    limit = norm * (0.999 if engaged else 1e6)
    elsewhere = device != "cpu"
    # A fused optimizer skips by a flag of the device, so that no step waits; a row would.
    optimizer = torch.optim.SGD(params, lr=0.1, fused=elsewhere)
    wait = torch.get_device_module(device).synchronize if elsewhere else lambda: None
    manager = GradientManager(backends=["memory"], max_grad_norm=limit, engine=engine)

    def train() -> None:
        """Update the weights, as a training does, and take the last clipping back."""
        optimizer.step()
        if engaged:
            torch._foreach_copy_(grads, original)
        wait()

    times = all_times(
        {
            "clip": lambda: (torch.nn.utils.clip_grad_norm_(params, limit), wait()),
            "gradtrack": lambda: (manager.step(model, optimizer, None, backward=False), wait()),
        },
        rounds=ROUNDS[name] // (4 if quick else 1),
        before=train,
    )
    found = {name: statistics.median(taken) for name, taken in times.items()}
    means = {name: usual_mean(taken) for name, taken in times.items()}
    kind = str(dtype).removeprefix("torch.")
    case = f"{name}, {kind}, {'clipping' if engaged else 'not clipping'}"
    return Row(
        benchmark=f"step ({engine}, {device})" if elsewhere else f"step ({engine})",
        case=case,
        what="report / clip_grad_norm_",
        ratio=found["gradtrack"] / found["clip"],
        bar=bar,
        note=f"{means['gradtrack'] / means['clip']:.2f} of the means",
    )
