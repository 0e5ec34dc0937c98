"""Train sharded over processes: torchrun --nproc-per-node 2 examples/distributed_fsdp.py --run-dir runs/fsdp.

Every rank calls gradtrack in the same way and gets the same report; rank 0 alone writes to the trackers.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradtrack import GradientManager


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(32, 8)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/fsdp")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, model = dist.get_rank(), make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)  # each rank has its own share of the data

    with GradientManager(run_dir=arguments.run_dir, max_grad_norm=1.0, grad_log_every_n_steps=5) as manager:
        for _ in range(arguments.steps):
            inputs = torch.randn(8, 10, 32, generator=generator).to(device)
            loss = (model(inputs) - inputs[..., :8]).square().mean()
            loss.backward()
            report = manager.step(model, optimizer, loss, backward=False)
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {rank} step {report.step} norm {report.clipping.norm_before!r}", flush=True)

    dist.barrier()
    os._exit(0)  # some torch versions abort in the destructors of the groups


if __name__ == "__main__":
    main()
