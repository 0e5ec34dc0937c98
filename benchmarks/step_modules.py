"""Counts the modules of gradtrack that one training step passes, without and with a row, on the training thread.

A step is traced with `sys.setprofile`: a module counts when one of its functions is called between `safe_backward` and
the end of the optimizer's step. Settings are the defaults with one backend; the worker's thread does not count.

    python -m benchmarks.step_modules
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

WARM_UP = 140
ROW = 200
QUIET, SETTLING, WITH_ROW = "without a row", "without a row, and the ring is full", "with a row"


def passed_modules() -> dict[str, list[str]]:
    """Return the modules that steps pass, in the order in which they are entered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: dict[str, list[str]] = {}
    gc.disable()  # what is collected by chance is no part of a step
    with tempfile.TemporaryDirectory() as directory, GradientManager(backends=["json"], run_dir=directory) as manager:
        for step in range(1, ROW + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            take = partial(_take, loss, model, optimizer, manager)
            if step <= WARM_UP:
                take()
                continue
            names = _traced(take)
            if step == ROW:
                found[WITH_ROW] = names
                continue
            found[QUIET] = min(found.get(QUIET, names), names, key=len)
            found[SETTLING] = max(found.get(SETTLING, names), names, key=len)
    gc.enable()
    return found


def _take(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, manager: GradientManager) -> None:
    safe_backward(loss, model, optimizer, manager)
    optimizer.step()


def _traced(take: Callable[[], None]) -> list[str]:
    entered: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.partition(".")[0] == "gradtrack":
            entered[name] = None

    sys.setprofile(enter)
    try:
        take()
    finally:
        sys.setprofile(None)
    return list(entered)


def main() -> None:
    """Print the number of modules and their names."""
    for kind, names in passed_modules().items():
        print(f"{kind}: {len(names)} modules")
        for name in names:
            print(f"  {name}")


if __name__ == "__main__":
    main()
