"""A training loop of one's own: one call in place of `loss.backward()`, and TensorBoard files to look at.

python examples/plain_loop.py && tensorboard --logdir runs/plain_loop
"""

from __future__ import annotations

import torch
from torch import nn

from gradtrack import GradientManager, safe_backward


def main(steps: int = 200) -> GradientManager:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backends = [{"name": "tensorboard", "log_dir": "runs/plain_loop"}]
    with GradientManager(backends=backends, grad_log_every_n_steps=10, max_grad_norm=1.0) as manager:
        for _ in range(steps):
            x = torch.randn(64, 8)
            y = x.square().sum(1, keepdim=True)
            optimizer.zero_grad()
            report = safe_backward(nn.functional.mse_loss(model(x), y), model, optimizer, manager)
            optimizer.step()
            if not report.health.healthy:
                print(report.step, report.health)
        print(f"loss {report.loss:.3f}, gradient norm {report.clipping.norm_before:.3f}")
    return manager


if __name__ == "__main__":
    main()
