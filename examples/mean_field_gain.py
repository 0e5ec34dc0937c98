"""Draw the measured gain per layer of random tanh networks next to the curve of mean-field theory.

Schoenholz et al. 2017 (arXiv 1611.01232): a gradient grows by √χ₁ per layer on its way back, which is one at σ_w = 1,
the edge of chaos.

    python examples/mean_field_gain.py mean_field_gain.png
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from mean_field import squared_gain
from torch import nn

from gradtrack import GradientGainMonitor

mpl.use("Agg")
from matplotlib import pyplot as plt


def random_network(
    weight_std: float, *, width: int, depth: int, activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0
) -> nn.ModuleList:
    """Return layers W φ(h) with independent weights of variance σ_w²/n."""
    generator = torch.Generator().manual_seed(seed)
    blocks = nn.ModuleList()
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(linear.weight, std=weight_std / math.sqrt(width), generator=generator)
        blocks.append(nn.Sequential(activation(), linear))
    return blocks


def watch(blocks: nn.ModuleList, *, width: int, batch: int = 8, seed: int = 1) -> GradientGainMonitor:
    """Send a random batch through the blocks and a random gradient back."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(batch, width, generator=generator).requires_grad_()
    with GradientGainMonitor(blocks) as monitor:
        for block in blocks:
            h = block(h)
        torch.autograd.backward((h * torch.randn(batch, width, generator=generator)).sum())
    return monitor


def mean_gain(weight_std: float, *, width: int = 400, depth: int = 25) -> float:
    """Return the measured mean gain of a tanh network."""
    monitor = watch(random_network(weight_std, width=width, depth=depth), width=width)
    return float(monitor.summary_stats()["mean_gain"])


def main(path: Path, width: int = 400) -> None:
    stds = [0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0]
    measured = [mean_gain(std, width=width) for std in stds]
    theory = [math.sqrt(squared_gain(std)) for std in stds]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(stds, theory, label="mean field: √χ₁")
    axes.plot(stds, measured, "o", label=f"measured, width {width}")
    axes.axhline(1.0, linewidth=0.5, color="black")
    axes.set(xlabel="σ_w", ylabel="backward gain per layer", title="Random tanh networks")
    axes.legend()
    figure.savefig(path, dpi=120)
    for std, found, expected in zip(stds, measured, theory, strict=True):
        print(f"sigma_w {std:.2f}: measured {found:.4f}, theory {expected:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "mean_field_gain.png"))
