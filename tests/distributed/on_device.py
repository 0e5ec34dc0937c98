"""Trainings on several processes whose tensors are shown as those of an accelerator, and what float64 says of them.

`on_device.py MODE SETTINGS OUT.json` in each process: the numbers of every step stay on the device until the end of the
training, and then in a second one the host reads them at once, by the same engine.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack import StepReport
from gradtrack.gradients import torch_cpu
from gradtrack.gradients.moments import Rows
from gradtrack.gradients.torch_device import TorchPlan, halves_of
from gradtrack.step import data, on_device, pair
from tests.distributed import training

Found = dict[str, Any]


@contextmanager
def accelerator(*, late: bool) -> Iterator[list[int]]:
    """Show tensors as those of a device, and no step as a row; yield the steps whose numbers stay there."""
    left, protect = list[int](), on_device.DeviceStep.protect

    def counted(step: Any, *args: Any, **others: Any) -> None:
        left.append(1)
        protect(step, *args, **others)

    def measure(grads: list[Tensor], exponent: int = 0) -> Rows:
        return TorchPlan(grads).rows(grads, halves_of(exponent))

    with (
        patch.object(pair, "on_device", lambda grads: late and bool(grads)),
        patch.object(data, "next_row", lambda step, every: every),
        patch.object(on_device.DeviceStep, "protect", counted),
        patch.object(torch_cpu, "measure", measure),
    ):
        yield left


def whole(tensor: Any) -> Tensor:
    """Return all elements of a gradient, wherever they are."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def numbers(values: NDArray[np.float64]) -> dict[str, float]:
    """Return what a report has of a gradient, from all of its elements in float64."""
    finite = values[np.isfinite(values)]
    return {
        "norm": float(np.sqrt(np.square(finite).sum())),
        "mean": float(finite.mean()) if len(finite) else math.nan,
        "variance": float(finite.var(ddof=1)) if len(finite) > 1 else 0.0,
        "min": float(finite.min()) if len(finite) else math.nan,
        "max": float(finite.max()) if len(finite) else math.nan,
        "zero_fraction": float((values == 0).mean()),
        "element_count": len(values),
        "nan_count": int(np.isnan(values).sum()),
        "inf_count": int(np.isinf(values).sum()),
    }


def oracle(model: nn.Module, mode: str) -> dict[str, dict[str, float]]:
    """Return the numbers of every whole gradient, and under an empty name those of all."""
    if mode in ("fsdp1", "ddp+group"):  # which has no whole ones, and the same on every rank
        return {}
    grads = {training.plain(name): param.grad for name, param in model.named_parameters() if param.grad is not None}
    parts = {name: whole(grad).double().flatten().numpy() for name, grad in grads.items()}
    parts[""] = np.concatenate(list(parts.values()))
    return {name: numbers(part) for name, part in parts.items()}


def shown(report: StepReport) -> Found:
    """Return a report without its clock, and without the norms of weights, which only a row on a device has."""
    found = report.model_dump(mode="json", exclude={"time"})
    for group in found["groups"].values():
        group.pop("weight_norm")
    return found


def run(mode: str, settings: Found, *, late: bool) -> Found:
    """Train, with the numbers read at the end or at once; `first_rank` has settings of the first rank alone."""
    expected: list[Found] = []
    own = settings.pop("first_rank", {}) if dist.get_rank() == 0 else {}
    settings = {name: value for name, value in settings.items() if name != "first_rank"}
    with accelerator(late=late) as left:
        found = training.run(
            mode,
            {"dtype": "float32", "grad_log_every_n_steps": 1000, **settings, **own},
            look=lambda model: expected.append(oracle(model, mode)),
            show=shown,
            at_end=late,
        )
    return {**found, "oracle": expected, "late": len(left)}


def main() -> None:
    """Run both trainings, and write what this rank has found."""
    mode, settings, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"late": run(mode, dict(settings), late=True), "at_once": run(mode, dict(settings), late=False)}
    out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
