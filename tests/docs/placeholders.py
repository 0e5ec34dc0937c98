"""What a reader has before the first line of a page: a model, data and an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Blocks(nn.Module):
    """A chain of blocks under the name `blocks`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks in order."""
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


class Reader(nn.Module):
    """A recurrent network that reads its sequence to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per sequence."""
        found: Tensor = self.head(self.cell(x)[0][:, -1])
        return found


def placeholders(page: str) -> dict[str, Any]:
    """Return the names that the blocks of a page begin with."""
    recurrent = page.endswith("recurrent.md")
    shape = (8, 12, 4) if recurrent else (8, 4)
    model: nn.Module = Reader() if recurrent else Blocks()
    x, y = torch.randn(shape), torch.randn(8, 1)
    return {
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "criterion": nn.functional.mse_loss,
        "loader": [(torch.randn(shape), torch.randn(8, 1)) for _ in range(3)],
        "x": x,
        "y": y,
        "batch": x,
        "input_fn": lambda: torch.randn(shape),
        "loss_fn": lambda output: output.square().mean(),
    }
