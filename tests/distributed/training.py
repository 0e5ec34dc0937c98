"""One training, by itself or spread over processes: `training.py MODE SETTINGS OUT.json` in each of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradtrack import GradientManager, StepReport
from tests.distributed.communication import Counted

BATCH, WIDTH = 12, 6
"""A batch that two, three and four processes share evenly, and a width that three and four do not divide."""


class Block(nn.Module):
    """A transformer block with one head, whose feed-forward layers can be split.

    The attention has no bias, since the gradient of that of the keys is nothing but rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Attend and feed forward."""
        query, key, value = self.qkv(self.norm(inputs)).chunk(3, dim=-1)
        inputs = inputs + nn.functional.scaled_dot_product_attention(query, key, value)
        found: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return found


class Model(nn.Module):
    """Two blocks, a head with fewer rows than four ranks, one element alone, and a parameter that no layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return three numbers for each place."""
        for block in self.blocks:
            inputs = block(inputs)
        found: Tensor = self.head(inputs) * self.gain
        return found


def spread(model: nn.Module, mode: str) -> tuple[Any, int, int]:
    """Spread a model over all processes; return it with the place of this process among the shares of the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode in ("ddp", "ddp+group"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), rank, world
    if mode == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")), rank, world
    if mode == "fsdp":
        return shard(model, init_device_mesh("cpu", (world,))), rank, world
    if mode == "tp":
        return split(model, init_device_mesh("cpu", (world,))), 0, 1
    if mode == "sp":
        mesh = init_device_mesh("cpu", (world,))
        return norm_places_apart(split(model, mesh), mesh), 0, 1
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    if mode == "hsdp":
        return shard(model, mesh), rank, world
    return shard(split(model, mesh["tp"]), mesh["dp"]), mesh["dp"].get_local_rank(), world // 2


def split(model: Any, mesh: Any) -> Any:
    """Split the feed-forward layers: parameters of other layers stay plain tensors."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def norm_places_apart(model: Any, mesh: Any) -> Any:
    """Let each process norm some of the places, so that gradients of the norms are sums that no rank has made yet."""

    def part(module: nn.Module, args: tuple[Tensor]) -> DTensor:
        return DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(placements=[Shard(1)])

    def whole(module: nn.Module, args: tuple[Tensor], out: DTensor) -> Tensor:
        return out.full_tensor()

    for block in model.blocks:
        for name, param in list(block.norm.named_parameters()):
            block.norm.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
        block.norm.register_forward_pre_hook(part)
        block.norm.register_forward_hook(whole)
    return model


def shard(model: Any, mesh: Any) -> Any:
    """Shard every block, and the rest together."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model: Any, mode: str) -> dict[str, list[float]]:
    """Return all elements of all weights, wherever they are, by the names that the model has in one process."""
    whole = FullyShardedDataParallel.summon_full_params(model) if mode == "fsdp1" else nullcontext()
    found: dict[str, list[float]] = {}
    with whole, torch.no_grad():
        for name, param in model.named_parameters():
            tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
            found[plain(name)] = tensor.flatten().tolist()
    return found


def plain(text: str) -> str:
    """Take the names of wrappers out of the names of parameters."""
    return text.replace("_fsdp_wrapped_module.", "").replace("module.", "")


def show(report: StepReport) -> dict[str, Any]:
    """Return a report without its clock."""
    return report.model_dump(mode="json", exclude={"time"})


def nothing(model: nn.Module) -> None:
    """Look at nothing."""


def run(
    mode: str,
    settings: dict[str, Any],
    *,
    look: Callable[[nn.Module], None] = nothing,
    show: Callable[[StepReport], dict[str, Any]] = show,
    at_end: bool = False,
) -> dict[str, Any]:
    """Train 20 steps with a gradtrack manager; a process can make its own loss NaN or huge at one step.

    `look` is called before each step, and `show` returns what a report says, after its step or after the last one.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, settings.pop("dtype", "float64"))
    model: Any = Model().to(dtype)
    share, shares = 0, 1
    if mode != "single":
        model, share, shares = spread(model, mode)
    kind = getattr(torch.optim, settings.pop("optimizer", "AdamW"))
    optimizer = kind(model.parameters(), lr=settings.pop("lr", 0.01), fused=settings.pop("fused", None))
    steps, nan_step, by_hand = settings.pop("steps", 20), settings.pop("nan_step", 0), settings.pop("by_hand", True)
    spike_step, save_step, calls = settings.pop("spike_step", 0), settings.pop("save_step", 0), list[int]()
    scale = settings.pop("scale", 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=bool(scale))
    group = dist.group.WORLD if mode == "ddp+group" else None
    manager = GradientManager(
        process_group=group,
        **{"backends": ["memory"], "track_parameters": True, "grad_log_every_n_steps": 1, **settings},
    )
    manager.on_rollback(lambda step, report: calls.append(step))
    generator = torch.Generator().manual_seed(1)
    reports, sizes = list[Any](), []
    for step in range(1, steps + 1):
        inputs = torch.randn(BATCH, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        loss = model(inputs.chunk(shares)[share]).square().mean()
        if step == nan_step and share == shares - 1:
            loss = loss * float("nan")
        if step == spike_step and share == shares - 1:
            loss = loss * 1e4
        if step == save_step and (mode == "single" or dist.get_rank() == 0):  # where one rank alone saves
            manager.state_dict()
        if by_hand:
            scaler.scale(loss).backward()
            look(model)
        with Counted() if by_hand else nullcontext(Counted()) as counted:
            report = manager.step(model, optimizer, loss, backward=not by_hand, scaler=scaler if scale else None)
        sizes.append(counted.sizes)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reports.append(report if at_end else show(report))
    memory: Any = manager.backend("memory")
    histograms = [{name: list(found.counts) for name, found in one.histograms.items()} for one in memory.records]
    return {
        "reports": [show(report) for report in reports] if at_end else reports,
        "weights": full(model, mode),
        "sizes": sizes,
        "scale": scaler.get_scale(),
        "histograms": histograms,
        "rollbacks": calls,
    }


def main() -> None:
    """Run what the command line says, and write what this rank has found."""
    mode, settings, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = run(mode, settings)
    out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # some torch versions abort in the destructors of the groups


if __name__ == "__main__":
    main()
