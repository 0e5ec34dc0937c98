"""Skips a step of every optimizer of other packages: `python -m tests.faults.foreign_optimizers OUT.json`.

An optimizer counts where it can be made from parameters and a rate, and moves a small network in three steps.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

PACKAGES = ("pytorch_optimizer", "torch_optimizer", "schedulefree", "prodigyopt", "dadaptation")
SECONDS = 20


class TooSlow(Exception):
    """An optimizer takes longer than it is waited for."""


def optimizers() -> Iterator[tuple[str, Any]]:
    """Yield every class of optimizers that the packages have."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name, found in sorted(vars(module).items()):
            is_one = inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
            if is_one and found is not torch.optim.Optimizer and not inspect.isabstract(found):
                yield f"{package}.{name}", found


def plain(value: Any) -> Any:
    """Return a copy of a state that can be compared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items() if not callable(part)}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else None


def same(one: Any, other: Any) -> bool:
    """Say whether two states are bitwise the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(one.equal(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return weights, groups and the state of each parameter."""
    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = {index: optimizer.state.get(param, {}) for index, param in enumerate(model.parameters())}
    return [plain(list(model.parameters())), groups, plain(state)]


def made(kind: Any, model: nn.Module) -> Any:
    """Return an optimizer that has moved the model, or raise whatever keeps it from that."""
    try:
        optimizer = kind(model.parameters(), lr=1e-3)
    except TypeError:
        optimizer = kind(model.parameters())
    before = copy.deepcopy(list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        optimizer.step()
    if all(map(torch.equal, before, model.parameters())):
        raise ValueError("it does not move in three steps")
    return optimizer


def loss_of(model: nn.Module) -> Tensor:
    """Return the loss of a batch."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    loss: Tensor = (model(inputs) - 1).square().mean()
    return loss


def skips_well(model: nn.Module, optimizer: Any) -> bool:
    """Say whether a skipped step changes neither weights nor state, and the next one does."""
    manager = GradientManager()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    report = safe_backward(loss_of(model) * math.inf, model, optimizer, manager)
    optimizer.step()
    rested = report.skipped and same(before, everything(model, optimizer))
    optimizer.zero_grad()
    safe_backward(loss_of(model), model, optimizer, manager)
    optimizer.step()
    return rested and not same(before, everything(model, optimizer))


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def main(path: Path) -> None:
    """Try them all and write down what came of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_slow)
    found: dict[str, list[str]] = {"rested": [], "moved": [], "left_out": []}
    for name, kind in optimizers():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        signal.alarm(SECONDS)
        try:
            optimizer = made(kind, model)
        except Exception as fault:
            found["left_out"].append(f"{name}: {type(fault).__name__}: {fault!s:.80}")
            continue
        finally:
            signal.alarm(0)
        found["rested" if skips_well(model, optimizer) else "moved"].append(name)
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
