"""Unusual gradients on two processes: `python -m torch.distributed.run ... -m tests.distributed.edges OUT.json`."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradtrack import GradientManager, registry
from gradtrack.analyzers.base import always
from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.shards import add_up, local_gradient
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from tests.distributed.communication import Counted


class Holder(nn.Module):
    """A model whose parameters are given."""

    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def look(model: nn.Module, scaler: Any = None, **settings: Any) -> dict[str, Any]:
    """Report the gradients that a model has."""
    manager = GradientManager(track_parameters=True, grad_log_every_n_steps=1, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = manager.step(model, optimizer, None, backward=False, scaler=scaler)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    return report.model_dump(mode="json", exclude={"time"})


def plain_shards(values: Tensor) -> Holder:
    """Return a model whose plain parameter is four of the numbers on rank 0 and two on rank 1, with such a gradient."""
    own = values[:4] if dist.get_rank() == 0 else values[4:]
    model: Any = Holder(weight=torch.ones_like(own))
    model.weight.grad = own.clone()
    return model  # type: ignore[no-any-return]


def explicit_groups(values: Tensor) -> dict[str, Any]:
    """Return what is reported of plain tensors that share a group."""
    group = dist.group.WORLD
    found: dict[str, Any] = {"shards": look(plain_shards(values), process_group=group, max_grad_norm=1.0)}
    found["shards_refused"] = refusal(plain_shards(values), process_group=group, clip_type="agc")

    model: Any = plain_shards(values)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 1:
        model.weight.grad[1] = float("inf")
    before = model.weight.detach().clone()
    found["scaled"] = look(model, scaler, process_group=group)
    found["scale"], found["unmoved"] = scaler.get_scale(), torch.equal(model.weight, before)

    torch.manual_seed(0)
    replicas = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).double())
    replicas(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    found["replicas"] = look(replicas, process_group=group, per_rank=True)
    return found


def accumulated() -> dict[str, Any]:
    """Return the norm of four micro-batches under DDP, of which the last alone is reduced, and that of all of them."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    parts = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    manager, optimizer = GradientManager(), torch.optim.SGD(model.parameters(), lr=0.1)
    for index, part in enumerate(parts[dist.get_rank()]):
        with nullcontext() if index == 3 else model.no_sync():
            loss = model(part).square().mean() / 4
            report = manager.step(model, optimizer, loss, accumulate=index < 3)
    torch.autograd.backward(plain(parts.reshape(-1, 3)).square().mean())
    grads = [param.grad for param in plain.parameters() if param.grad is not None]
    return {"norm": report.clipping.norm_before, "expected": float(nn.utils.get_total_norm(grads))}


def refusal(model: nn.Module, **settings: Any) -> str:
    """Return the error that a look ends with."""
    try:
        look(model, **settings)
    except UsageError as error:
        return str(error)
    return ""


def analyzed(mesh: Any) -> dict[str, Any]:
    """Return what every analyzer makes of a sharded model when each step is its turn, and what is sent meanwhile."""
    torch.manual_seed(0)
    analyzers = [registry.analyzers.load(name)() for name in registry.analyzers.builtin()]
    for analyzer in analyzers:
        type(analyzer).schedule = staticmethod(always)
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    model: Any = fully_shard(nn.Sequential(*blocks, nn.Linear(8, 3)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = GradientManager(analyzers=analyzers)
    reports, calls = [], []
    for _ in range(5):
        (model(torch.randn(2, 5, 8)) * 1.0).square().mean().backward()
        with Counted() as counted:
            reports.append(manager.step(model, optimizer, None, backward=False))
        calls.append(len(counted.sizes))
        optimizer.step()
        optimizer.zero_grad()
    names = sorted({name for report in reports for name in report.analyzers})
    return {"names": names, "notes": [list(one.notes) for one in reports], "calls": calls}


def dead_units(mesh: Any, num_dead: int) -> dict[str, Any]:
    """Tell of the steps of a network of 64 hidden units of which the first are dead, and rank 0 has half of all."""
    torch.manual_seed(0)
    hidden = nn.Linear(8, 64)
    with torch.no_grad():
        hidden.bias[:num_dead] = -50.0
    plain = nn.Sequential(hidden, nn.ReLU(), nn.Linear(64, 1))
    model = parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = GradientManager(analyzers=["flow"])
    manager.attach(model, optimizer)
    opened: list[list[str]] = []
    manager.on_issue(lambda issue, report: opened.append([issue.issue_type.value, issue.message, str(report.step)]))
    healthy = []
    for _ in range(14):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.randn(16, 8)).square().mean())
        healthy.append(report.health.healthy)
        optimizer.step()
    return {"healthy": healthy, "opened": opened, "told": [issue.layer for issue in manager.diagnose()]}


def pending(mesh: Any) -> list[bool]:
    """Say of gradients that wait for a sum whether they are what torch makes of each by itself."""
    several, sums, whole = init_device_mesh("cpu", (2, 1)), Partial(), Replicate()
    cases: list[tuple[Any, Any, list[Any], list[Any], torch.dtype]] = [
        ((4, 6), mesh, [whole], [sums], torch.float32),
        ((4, 6), mesh, [whole], [sums], torch.bfloat16),
        ((3,), mesh, [whole], [sums], torch.complex64),
        ((), mesh, [whole], [sums], torch.float32),
        ((0,), mesh, [whole], [sums], torch.float32),
        ((4,), mesh, [whole], [Partial("avg")], torch.float32),
        ((4, 2), several, [whole, whole], [sums, sums], torch.float32),
        ((4, 2), several, [whole, Shard(0)], [sums, Shard(0)], torch.float32),
        ((2,), mesh, [whole], [whole], torch.float32),
    ]
    params, expected = [], []
    for shape, home, placements, given, dtype in cases:
        param: Any = nn.Parameter(distribute_tensor(torch.zeros(shape, dtype=dtype), home, placements))
        local = torch.full(shape, 1.0 + dist.get_rank()).to(dtype)
        param.grad = DTensor.from_local(local, home, given, run_check=False)
        expected.append(param.grad.redistribute(placements=placements).to_local())
        params.append(param)
    add_up(params)
    found = [local_gradient(param) for param in params]
    wanted = [torch.view_as_real(one) if one.is_complex() else one for one in expected]
    return [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]


def main() -> None:
    """Report each case, and write what this rank has found."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    values = torch.arange(1.0, 7.0, dtype=torch.float64)
    found: dict[str, Any] = {}

    model: Any = Holder(one=distribute_tensor(values[:1], mesh, [Shard(0)]), whole=values.clone())
    model.one.grad = distribute_tensor(values[:1], mesh, [Shard(0)])
    if rank == 1:
        model.whole.grad = values.clone()
    found["only_one_rank"] = look(model, enable_gradient_clipping=False)

    grads = ParameterTable(model).gradients({id(model.one)})
    moments = grads.measure(Measurer("torch"))
    found["some"] = [grads.layout.names, moments.rows.tolist(), len(grads.tensors)]

    model = Holder(weight=distribute_tensor(values, mesh, [Replicate()]))
    model.weight.grad = DTensor.from_local(values * (rank + 1), mesh, [Partial()])
    found["partial"] = look(model, enable_gradient_clipping=False)

    model = Holder(weight=distribute_tensor(values, mesh, [Shard(0)]))
    model.weight.grad = DTensor.from_local(values * (rank + 1), mesh, [Partial()])
    found["partial_of_shards"] = look(model, enable_gradient_clipping=False)

    found["pending"] = pending(mesh)

    model = Holder(weight=distribute_tensor(values, mesh, [Shard(0)]))
    model.weight.grad = distribute_tensor(values * 1e200, mesh, [Shard(0)])
    found["huge"] = look(model, enable_gradient_clipping=False)

    found["groups"] = explicit_groups(values)

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 3).double(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager()
    report = manager.step(model, optimizer, model(torch.ones(2, 4, dtype=torch.float64)).mul(1.0).sum())
    found["accumulated"] = accumulated()
    found["analyzed"] = analyzed(mesh)
    dead = {num_dead: dead_units(mesh, num_dead) for num_dead in (32, 64)}
    found["own"] = [one.pop("told") for one in dead.values()]
    found["dead"] = list(dead.values())
    found["root_only"] = report.model_dump(mode="json", exclude={"time"})

    Path(sys.argv[1]).with_suffix(f".{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
