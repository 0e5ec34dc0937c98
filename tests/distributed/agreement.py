"""Ranks that were not set up alike, four of them: `python -m torch.distributed.run ... -m ... OUT.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradtrack import GradientManager
from gradtrack.errors import UsageError
from gradtrack.gradients.distributed import agreement
from tests.distributed.edges import Holder


def sharded(mesh: Any, num_layers: int = 2) -> Any:
    """Return a sharded model."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(nn.Sequential(*layers), mesh=mesh)


def train(
    model: Any, manager: GradientManager, steps: int = 2, scale: float = 1.0, optimizer: Any = None
) -> list[float | None]:
    """Train for some steps and return the norms."""
    norms, optimizer = [], optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).square().mean() * scale
        norms.append(manager.step(model, optimizer, loss).clipping.norm_before)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def refused(model: Any, manager: GradientManager) -> str:
    """Return the error that a training ends with."""
    try:
        train(model, manager)
    except UsageError as error:
        return str(error)
    return ""


def unlike(mesh: Any) -> dict[str, str]:
    """Return what the ranks are told where one of them has another setting, or has loaded a state alone."""
    odd, found = dist.get_rank() == 2, {}
    settings: dict[str, tuple[Any, Any]] = {
        "check_frequency": (1, 5),
        "grad_log_every_n_steps": (100, 7),
        "log_histograms": (False, True),
        "per_rank": (False, True),
        "clip_type": ("norm", "value"),
        "enable_gradient_monitoring": (True, False),
        "max_grad_norm": (1.0, 2.0),
    }
    for name, values in settings.items():
        found[name] = refused(sharded(mesh), GradientManager({name: values[odd]}))
    manager = GradientManager()
    if odd:
        other = GradientManager()
        other.load_state_dict(manager.state_dict() | {"pairs": {"": saved(mesh)}})
        manager = other
    else:
        saved(mesh)
    found["step"] = refused(sharded(mesh), manager)
    return found


def saved(mesh: Any) -> dict[str, Any]:
    """Return what a pair remembers of a training."""
    manager = GradientManager()
    train(sharded(mesh), manager, 3)
    found: dict[str, Any] = manager.state_dict()["pairs"][""]
    return found


def changed(mesh: Any) -> dict[str, Any]:
    """Return the norms where all ranks change a setting in between, and what one is told that does so alone."""
    model, manager = sharded(mesh), GradientManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = train(model, manager, optimizer=optimizer)
    manager.config.check_frequency = 3
    norms += train(model, manager, optimizer=optimizer)
    manager.config.per_rank = True
    model(torch.ones(2, 4)).square().mean().backward()
    if dist.get_rank() != 1:
        return {"norms": norms}
    try:
        manager.step(model, optimizer, None, backward=False)
    except UsageError as error:
        return {"norms": norms, "refused": str(error)}
    return {"norms": norms}


def updates(mesh: Any, *, everywhere: bool) -> dict[str, Any]:
    """Return the steps with a report on updates where one rank has no such analyzer, or one that fails."""
    model, odd = sharded(mesh), dist.get_rank() == 3
    manager = GradientManager(analyzers=["updates"] if everywhere or not odd else [])
    if everywhere and odd:
        failing: Any = manager.analyzer("updates")
        failing.sums = lambda *_: 1 / 0
    train(model, manager, 21)
    reports = manager.reports
    notes = [note for report in reports for note in report.notes]
    return {"steps": [report.step for report in reports if "updates" in report.analyzers], "notes": notes}


def fewer_parameters() -> str:
    """Return what ranks are told that share plain tensors of which one has more."""
    params = {f"weight{index}": torch.ones(2) for index in range(3 if dist.get_rank() == 3 else 2)}
    model = Holder(**params)
    for param in model.parameters():
        param.grad = torch.ones(2)
    manager, optimizer = GradientManager(process_group=dist.group.WORLD), torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        manager.step(model, optimizer, None, backward=False)
    except UsageError as error:
        return str(error)
    return ""


def groups_of_two() -> float | None:
    """Return the norm of ones over a group of two ranks, each with two of them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model: Any = Holder(weight=torch.ones(2))
    model.weight.grad = torch.full((2,), 1.0 + dist.get_rank() // 2)
    manager = GradientManager(process_group=groups[dist.get_rank() // 2])
    return manager.step(model, torch.optim.SGD(model.parameters(), lr=0.1), None, backward=False).clipping.norm_before


def uneven_batches() -> list[list[float | None]]:
    """Return the norms of two trainings under DDP of which ranks have batches of different numbers."""
    torch.manual_seed(0)
    found = []
    for has_manager in (True, False):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
        manager, optimizer, norms = GradientManager(), torch.optim.SGD(model.parameters(), lr=0.1), []
        with model.join():
            for step in range(2 + dist.get_rank()):
                loss = model(torch.full((2, 4), 1.0 + step)).square().mean()
                if has_manager:
                    norms.append(manager.step(model, optimizer, loss).clipping.norm_before)
                else:
                    loss.backward()
                    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
        found.append(norms)
        torch.manual_seed(0)
    return found


def main() -> None:
    """Run each case, and write what this rank has found; in the last one the first of two ranks is alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    found: dict[str, Any] = {
        "unlike": unlike(mesh),
        "fewer": fewer_parameters(),
        "stages": train(sharded(stages["shard"], 2 + rank // 2), GradientManager(), scale=1.0 + rank // 2),
        "groups": groups_of_two(),
        "uneven": uneven_batches(),
        "updates": [updates(mesh, everywhere=everywhere) for everywhere in (False, True)],
    }
    agreement.PATIENCE_SECONDS = 2.0
    found["changed"] = changed(mesh)
    dist.barrier()
    group = dist.new_group([0, 3])
    if rank == 0:
        lonely: Any = Holder(weight=torch.ones(2))
        lonely.weight.grad = torch.ones(2)
        manager = GradientManager(process_group=group)
        try:
            manager.step(lonely, torch.optim.SGD(lonely.parameters(), lr=0.1), None, backward=False)
        except UsageError as error:
            found["alone"] = str(error)
    Path(sys.argv[1]).with_suffix(f".{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
