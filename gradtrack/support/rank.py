"""The rank of this process among those that train together."""

from __future__ import annotations

import os
from typing import Final

import torch

_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def process_rank() -> int:
    """Return this process's rank, 0 where there is only one: the initialised group's, else the launcher's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    for name in _VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


def num_ranks() -> int:
    """Return how many processes train together, as far as their group is initialised."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1
