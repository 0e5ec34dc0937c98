"""An LSTM: groups by the role of each weight, and the recurrent analyzer beside the training.

python examples/lstm.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

TIME_STEPS = 20


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 24, batch_first=True)
        self.readout = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.readout(self.lstm(x)[0][:, -1])
        return found


def main(steps: int = 40) -> GradientManager:
    torch.manual_seed(0)
    model = Memory()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with GradientManager(backends=["memory"], analyzers=["recurrent"], grad_log_every_n_steps=8) as manager:
        manager.attach(model, optimizer, horizon=TIME_STEPS)
        for _ in range(steps):
            x = torch.randn(32, TIME_STEPS, 2)
            optimizer.zero_grad()
            # The answer is in the first input: the gradient has to cross the whole sequence.
            report = safe_backward(nn.functional.mse_loss(model(x), x[:, 0, :1]), model, optimizer, manager)
            optimizer.step()
        for name, group in report.groups.items():
            print(f"{name}: gradient norm {group.norm:.5f}, variance {group.variance:.2e}")
        for issue in manager.diagnose():
            print(issue)
    return manager


if __name__ == "__main__":
    main()
