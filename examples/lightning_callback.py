"""Lightning: one callback, which writes to the trainer's own logger and leaves files and a picture in its directory.

python examples/lightning_callback.py && tensorboard --logdir lightning_logs
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrack.integrations.lightning import GradientStatisticsCallback


class Tagger(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 32, batch_first=True)
        self.readout = nn.Linear(32, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.readout(self.rnn(x)[0]), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(steps: int = 100) -> GradientStatisticsCallback:
    pl.seed_everything(0)
    x = torch.randn(256, 12, 4)
    loader = DataLoader(TensorDataset(x, x.cumsum(1).mean(2, keepdim=True)), batch_size=16)
    callback = GradientStatisticsCallback(grad_log_every_n_steps=10)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=TensorBoardLogger("."),
        callbacks=[callback],
        gradient_clip_val=1.0,
        enable_progress_bar=False,
    )
    trainer.fit(Tagger(), loader)
    print(f"{len(callback.reports)} reports; files in {callback.manager.run_dir}")
    return callback


if __name__ == "__main__":
    main()
