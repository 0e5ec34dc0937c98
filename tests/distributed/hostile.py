"""Trainings that make it hard to agree, on two processes: `python -m torch.distributed.run ... -m ... OUT.json`."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import gradtrack
from gradtrack import GradientManager
from gradtrack.gradients.distributed.shards import local_part
from tests.distributed.communication import Counted
from tests.distributed.edges import Holder, look

Twins = list[dict[str, Any]]
VALUES = torch.tensor([4.0, -3.0, 0.5, 0.0, 2.0], dtype=torch.float64)
"""Five numbers, of which rank 0 holds three."""


def make_model() -> nn.Module:
    """Return a small model with a layer that is frozen and a width that two ranks do not share evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[2].requires_grad_(False)
    return model


def batches(count: int) -> Tensor:
    """Return global batches of eight."""
    return torch.randn(count, 8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def shards_of(model: nn.Module, mesh: Any) -> Any:
    """Return a sharded copy of a model."""
    copied = copy.deepcopy(model)
    for layer in copied:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(copied, mesh=mesh)


class Trainee:
    """A model that trains with a manager, whole or in shards of which each has its part of the batch."""

    def __init__(self, model: Any, *, part: tuple[int, int] = (0, 1), **settings: Any) -> None:
        self.model, self.part, self.manager = model, part, GradientManager(track_parameters=True, **settings)
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.set_to_none = True

    def step(self, batch: Tensor, *, micro_batches: int = 1) -> dict[str, Any]:
        """Train on one global batch, with as many backward passes as wanted, and return the report."""
        index, count = self.part
        pieces = batch.chunk(count)[index].chunk(micro_batches)
        for place, piece in enumerate(pieces, start=1):
            last = place == len(pieces)
            if hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(last)
            loss = self.model(piece).square().mean() / len(pieces)
            report = self.manager.step(self.model, self.optimizer, loss, accumulate=not last)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return report.model_dump(mode="json", exclude={"time"})


def twins(mesh: Any, **settings: Any) -> tuple[Trainee, Trainee]:
    """Return the same training in shards and in this process alone."""
    model = make_model()
    return Trainee(shards_of(model, mesh), part=(dist.get_rank(), 2), **settings), Trainee(model, **settings)


class Checkpointed(nn.Sequential):
    """Layers whose middle is computed again in the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layers make of the inputs."""

        def middle(values: Tensor) -> Tensor:
            found: Tensor = self[2](self[1](values))
            return found

        found: Tensor = self[4](self[3](checkpoint(middle, self[0](inputs), use_reentrant=False)))
        return found


def ways(mesh: Any) -> dict[str, list[Twins]]:
    """Return the reports of both where the shards are compiled, checkpointed or stepped in other ways."""
    part, inputs, found = (dist.get_rank(), 2), batches(4), {}
    model = make_model().requires_grad_(True)
    again = copy.deepcopy(model)
    again.__class__ = Checkpointed
    compiled: Any = torch.compile(shards_of(model, mesh), backend="eager")
    for name, spread in (("compiled", compiled), ("checkpointed", shards_of(again, mesh))):
        pair = Trainee(spread, part=part, max_grad_norm=0.05), Trainee(copy.deepcopy(model), max_grad_norm=0.05)
        found[name] = [[one.step(batch) for one in pair] for batch in inputs]
    for name, options in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
        pair = Trainee(shards_of(model, mesh), part=part), Trainee(copy.deepcopy(model))
        for one in pair:
            one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=0.05, **options)  # type: ignore[arg-type]
            one.set_to_none = False
        found[name] = [[one.step(batch) for one in pair] for batch in inputs]
    found["watched"] = watched(shards_of(model, mesh), copy.deepcopy(model), inputs)
    return found


def watched(parts: Any, whole: Any, inputs: Tensor) -> list[Twins]:
    """Return the reports of both where only the optimizer is watched."""
    reports = []
    for model, share in ((parts, (dist.get_rank(), 2)), (whole, (0, 1))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        manager = gradtrack.watch(model, optimizer, max_grad_norm=0.05, track_parameters=True)
        for batch in inputs:
            model(batch.chunk(share[1])[share[0]]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reports.append([report.model_dump(mode="json", exclude={"time"}) for report in manager.reports])
    return [list(pair) for pair in zip(*reports, strict=True)]


def frozen(mesh: Any) -> list[Twins]:
    """Return the reports of both while a layer is frozen, and after it was set free."""
    pair, found = twins(mesh, max_grad_norm=0.05, grad_log_every_n_steps=1), []
    for step, batch in enumerate(batches(6)):
        if step == 3:
            for one in pair:
                one.model[2].requires_grad_(True)
        found.append([one.step(batch) for one in pair])
    return found


def accumulated(mesh: Any) -> list[Twins]:
    """Return the reports of both over micro-batches, of which FSDP2 reduces the last alone."""
    pair = twins(mesh, max_grad_norm=0.05)
    return [[one.step(batch, micro_batches=4) for one in pair] for batch in batches(3)]


def continued(mesh: Any) -> list[Twins]:
    """Return the reports of both after each was continued from what the manager of the other remembers."""
    pair, found = twins(mesh, adaptive_clipping=True, max_grad_norm=0.1), []
    inputs = batches(30)
    for step, batch in enumerate(inputs):
        if step == 15:
            states = [one.manager.state_dict() for one in pair]
            for one, state in zip(pair, reversed(states), strict=True):
                one.manager = GradientManager(adaptive_clipping=True, max_grad_norm=0.1, track_parameters=True)
                one.manager.load_state_dict(json.loads(json.dumps(state)))
        found.append([one.step(batch) for one in pair])
    return found[15:]


def one_bad_shard(mesh: Any, kind: Any, **settings: Any) -> tuple[Twins, list[list[float]], list[int]]:
    """Return both reports, what is left of both gradients and what was sent, where rank 1 alone holds a NaN and Inf."""
    values = VALUES.clone()
    values[3:] = torch.tensor([math.nan, -math.inf])
    whole: Any = Holder(weight=torch.ones_like(values), other=torch.ones(2, 2, dtype=torch.float64))
    parts: Any = Holder(
        weight=distribute_tensor(whole.weight.detach(), mesh, [kind]),
        other=distribute_tensor(whole.other.detach(), mesh, [kind]),
    )
    for model in (whole, parts):
        for name, grad in (("weight", values), ("other", torch.full((2, 2), 3.0, dtype=torch.float64))):
            given = grad.clone() if model is whole else distribute_tensor(grad, mesh, [kind])
            model.get_parameter(name).grad = given
    with Counted() as counted:
        found = [look(parts, **settings)]
    found.append(look(whole, **settings))
    left = [one.grad for model in (parts, whole) for one in (model.weight, model.other)]
    lists = [
        [] if one is None else (one.full_tensor() if hasattr(one, "full_tensor") else one).flatten().tolist()
        for one in left
    ]
    return found, [lists[0] + lists[1], lists[2] + lists[3]], counted.sizes


def one_bad_replica(mesh: Any) -> tuple[dict[str, Any], list[int], bool]:
    """Return what is told, sent and left where a plain tensor beside shards holds a NaN on rank 1 alone."""
    model: Any = Holder(weight=distribute_tensor(VALUES, mesh, [Shard(0)]), whole=VALUES.clone())
    model.weight.grad = distribute_tensor(VALUES, mesh, [Shard(0)])
    model.whole.grad = VALUES.clone()
    if dist.get_rank() == 1:
        model.whole.grad[2] = math.nan
    with Counted() as counted:
        found = look(model)
    return found, counted.sizes, any(bool(local_part(param.grad).any()) for param in model.parameters())


def far_from_zero(mesh: Any) -> dict[str, Twins]:
    """Return both reports of gradients whose mean is a billion times what they differ by, in several sizes."""
    found = {}
    noise = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, values in (("near", 1e9 + noise), ("large", 1e160 * (1.0 + 1e-9 * noise)), ("one", 1e9 + noise[:1])):
        whole: Any = Holder(weight=torch.ones_like(values), other=torch.ones(3, dtype=torch.float64))
        parts: Any = Holder(
            weight=distribute_tensor(whole.weight.detach(), mesh, [Shard(0)]),
            other=distribute_tensor(whole.other.detach(), mesh, [Replicate()]),
        )
        others = values[0] * torch.ones(3, dtype=torch.float64)
        whole.weight.grad, whole.other.grad = values.clone(), others.clone()
        parts.weight.grad = distribute_tensor(values, mesh, [Shard(0)])
        parts.other.grad = distribute_tensor(others, mesh, [Replicate()])
        found[name] = [look(one, enable_gradient_clipping=False) for one in (parts, whole)]
    return found


def scaled(mesh: Any) -> dict[str, Any]:
    """Return what a scaler of DTensors does where rank 1 alone holds an element that is not finite, and then not."""
    whole = torch.ones(5, dtype=torch.float64)
    model: Any = Holder(weight=distribute_tensor(whole, mesh, [Shard(0)]))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    reports, weights, scales = [], [], []
    for bad in (math.inf, 1.0):
        values = 4.0 * VALUES
        values[4] *= bad
        model.weight.grad = distribute_tensor(values, mesh, [Shard(0)])
        reports.append(look(model, scaler, enable_gradient_clipping=False))
        weights.append(model.weight.full_tensor().tolist())
        scales.append(scaler.get_scale())
    return {"reports": reports, "weights": weights, "scales": scales}


def stepped_inside(mesh: Any, **settings: Any) -> dict[str, Any]:
    """Return what is told where optimizers step shards inside the backward pass, beside an ordinary loop's reports."""
    whole = make_model()
    model, found, notes, sizes = shards_of(whole, mesh), [], [], []
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters() if param.requires_grad}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    options = {"track_parameters": True, "enable_gradient_clipping": False}
    manager, plain = GradientManager({**options, **settings}), GradientManager(options)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for batch in batches(4):
        loss = model(batch).square().mean()
        loss.backward()
        with Counted() as counted:
            report = manager.step(model, list(optimizers.values()), loss, backward=False)
        other = plain.step(whole, optimizer, whole(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            [one.model_dump(mode="json", include={"statistics", "groups", "parameters"}) for one in (report, other)]
        )
        notes.append(list(report.notes))
        sizes.append(counted.sizes)
    return {"notes": notes, "reports": found, "sizes": sizes}


def subnormal(mesh: Any, scale: float) -> float:
    """Return the share of float16 gradients that the flow analyzer finds too small, in shards."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half(), mesh=mesh)
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.01), GradientManager(analyzers=["flow"])
    for _ in range(9):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4, dtype=torch.float16)) * 1.0).sum() * scale
        manager.step(model, optimizer, loss)
        optimizer.step()
    found: Any = manager.reports[7].analyzers["flow"]
    return float(found.subnormal)


def main() -> None:
    """Run each case, and write what this rank has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    replacing = {"replace_nan_with": 0.5, "replace_inf_with": 7.0}
    found = {
        "ways": ways(mesh),
        "frozen": frozen(mesh),
        "accumulated": accumulated(mesh),
        "continued": continued(mesh),
        "skip": one_bad_shard(mesh, Shard(0)),
        "report": one_bad_shard(mesh, Shard(0), nonfinite_action="report"),
        "replace": one_bad_shard(mesh, Shard(0), **replacing, max_grad_norm=1.0),
        "replace-value": one_bad_shard(mesh, Shard(0), **replacing, max_grad_norm=2.5, clip_type="value"),
        "replace-agc": one_bad_shard(mesh, Replicate(), **replacing, clip_type="agc"),
        "replica": one_bad_replica(mesh),
        "far": far_from_zero(mesh),
        "scaled": scaled(mesh),
        "stepped_inside": stepped_inside(mesh),
        "stepped_inside_value": stepped_inside(mesh, enable_gradient_clipping=True, clip_type="value"),
        "subnormal": [subnormal(mesh, scale) for scale in (1.0, 1e-5)],
    }
    Path(sys.argv[1]).with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
