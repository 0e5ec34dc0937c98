"""Unusual gradients on two processes: `python -m torch.distributed.run ... -m tests.distributed.edges OUT.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from gradtrack import GradientManager
from gradtrack.errors import UsageError
from gradtrack.measure.measurer import Measurer
from gradtrack.measure.table import ParameterTable


class Holder(nn.Module):
    """A model whose parameters are given."""

    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def look(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Report the gradients that a model has."""
    manager = GradientManager(track_parameters=True, grad_log_every_n_steps=1, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = manager.step(model, optimizer, None, backward=False)
    return report.model_dump(mode="json", exclude={"time"})


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
    model.weight.grad = distribute_tensor(values * 1e200, mesh, [Shard(0)])
    found["huge"] = look(model, enable_gradient_clipping=False)

    try:
        look(model, clip_type="agc", nonfinite_action="report")
    except UsageError as error:
        found["agc"] = str(error)

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 3).double(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager()
    report = manager.step(model, optimizer, model(torch.ones(2, 4, dtype=torch.float64)).mul(1.0).sum())
    found["root_only"] = report.model_dump(mode="json", exclude={"time"})

    Path(sys.argv[1]).with_suffix(f".{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
