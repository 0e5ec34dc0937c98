"""Train with Hugging Face Accelerate: torchrun --nproc-per-node 2 examples/accelerate_script.py.

Or accelerate launch --multi_gpu --num_processes 2 examples/accelerate_script.py, also on the CPU.

The loop is Accelerate's own; the one call of gradtrack stands between the backward pass and the optimizer's step.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrack import GradientManager


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", default="runs/accelerate")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches for each optimizer step")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    # Without an accelerator Accelerate knows of other processes only where it is told to use the CPU.
    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=arguments.accumulate)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())

    with GradientManager(run_dir=arguments.run_dir, max_grad_norm=1.0, grad_log_every_n_steps=5) as manager:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                report = manager.step(
                    model,
                    optimizer,
                    loss / accelerator.gradient_accumulation_steps,  # as accelerator.backward divides it
                    backward=False,
                    scaler=accelerator.scaler,  # None without mixed_precision="fp16"
                    accumulate=not accelerator.sync_gradients,
                )
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                norm = report.clipping.norm_before
                print(f"rank {accelerator.process_index} step {report.step} norm {norm!r}", flush=True)

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
