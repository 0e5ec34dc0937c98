"""Train with Lightning Fabric: torchrun --nproc-per-node 2 examples/fabric_script.py --run-dir runs/fabric.

The loop is Fabric's own; the one call of gradtrack stands between the backward pass and the optimizer's step.
"""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrack import GradientManager


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/fabric")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches for each optimizer step")
    arguments = parser.parse_args()

    fabric = Fabric(accelerator="auto", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(make_loader())

    with GradientManager(run_dir=arguments.run_dir, max_grad_norm=1.0, grad_log_every_n_steps=5) as manager:
        for index, (inputs, targets) in enumerate(loader, start=1):
            accumulate = index % arguments.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulate):
                loss = nn.functional.mse_loss(model(inputs), targets) / arguments.accumulate
                fabric.backward(loss)
            report = manager.step(model, optimizer, loss, backward=False, accumulate=accumulate)
            if accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            norm = report.clipping.norm_before
            print(f"rank {fabric.global_rank} step {report.step} norm {norm!r}", flush=True)

    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
