"""Replicas under DistributedDataParallel, of which one may change a bit by itself; started by torchrun.

The arguments are the run directory, the rank that changes a bit (-1 for none) and whether a batch breaks a step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from gradtrack import GradientManager, safe_backward
from tests.capture.planted import Net
from tests.fingerprints.test_fingerprints import flip

STEP = 37


def main(run_dir: str, bad_rank: int, *, breaks: bool) -> None:
    """Train, and write what was found on each rank."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    inner = Net()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    settings = {"fingerprints": 1, "capture": "nonfinite" if breaks else "off", "save_gradient_plots": False}
    with GradientManager(run_dir=run_dir, **settings) as manager:  # type: ignore[arg-type]
        manager.attach(model, optimizer)
        for step in range(1, 41):
            x, y = torch.randn(8, 4, generator=data), torch.randn(8, 3, generator=data)
            if rank == bad_rank and step == STEP:
                if breaks:
                    y[0] = torch.inf
                else:
                    flip(inner.head.last.weight, 5)
            optimizer.zero_grad()
            safe_backward((model(x) - y).square().mean(), model, optimizer, manager, batch=(x, y))
            optimizer.step()
        issues = [[one.issue_type.value, one.layer, one.step, one.message] for one in manager.diagnose()]
    Path(run_dir, f"found-{rank}.json").write_text(json.dumps(issues))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), breaks=sys.argv[3] == "True")
