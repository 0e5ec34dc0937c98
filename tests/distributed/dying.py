"""A training of which one rank dies: `python -m torch.distributed.run ... -m tests.distributed.dying RUN_DIR HOW`."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradtrack import GradientManager

DIES_AT = 5


def end(how: str) -> None:
    """End this rank."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a fault of the loop's own")


def main() -> None:
    """Train until rank 1 is killed, or raises, between its backward pass and its look at the gradients."""
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 3), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = {"name": "tensorboard", "log_dir": str(directory / "board")}
    manager = GradientManager(run_dir=directory, backends=[tracker], grad_log_every_n_steps=1)
    try:
        for step in range(1, 20):
            loss = model(torch.ones(2, 4)).mul(1.0).sum()
            loss.backward()
            if rank == 1 and step == DIES_AT:
                end(sys.argv[2])
            manager.step(model, optimizer, loss, backward=False)
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:
        (directory / f"error-{rank}.txt").write_text(f"{type(error).__module__} {type(error).__name__}: {error}")
        manager.close(failed=True)
        os._exit(3)


if __name__ == "__main__":
    main()
