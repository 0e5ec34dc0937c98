"""A Trainer of Hugging Face under DDP, run by torchrun as `-m tests.distributed.trainer OUT.json SETTINGS`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtrack.integrations.transformers import GradtrackCallback
from tests.integrations.test_transformers import norms, own_norms, train


def main() -> None:
    """Train, and write what the Trainer and gradtrack have found on this rank."""
    warnings.simplefilter("ignore")
    out, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    callback = GradtrackCallback(**arguments.pop("settings", {}))
    trainer: Any = train(callback, out.parent, **arguments)
    rank = dist.get_rank()
    found = {
        "ours": norms(callback),
        "theirs": own_norms(trainer),
        "notes": [list(report.notes) for report in callback.reports],
        "names": [entry for report in callback.reports for entry in report.groups],
        "weights": [param.detach().double().sum().item() for param in trainer.model.parameters()],
        "wrapped": type(trainer.model_wrapped).__name__,
    }
    out.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
