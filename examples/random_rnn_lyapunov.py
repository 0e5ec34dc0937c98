"""Draw the first Lyapunov exponent of random tanh networks next to the curve of mean-field theory.

A network h' = tanh(W h) with W ~ N(0, g²/N) forgets below g = 1 and is chaotic above it. With infinitely many units the
exponent is ½ ln χ₁(g), which is ln g where the network falls silent (Sompolinsky, Crisanti and Sommers 1988).

    python examples/random_rnn_lyapunov.py random_rnn_lyapunov.png
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from mean_field import squared_gain

from gradtrack import RecurrentAnalyzer

mpl.use("Agg")
from matplotlib import pyplot as plt


def exponent(gain: float, *, size: int = 500, steps: int = 250, warm_up: int = 150, seed: int = 0) -> float:
    """Return the exponent of one network over its last steps."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, size, dtype=torch.float64, generator=generator) * gain / math.sqrt(size)
    start = torch.randn(1, size, dtype=torch.float64, generator=generator)
    no_inputs = torch.zeros(warm_up + steps, 1, 0, dtype=torch.float64)
    analyzer = RecurrentAnalyzer(max_steps=steps, track_hidden_states=False)
    _, dynamics = analyzer.analyze_step(lambda h, _: torch.tanh(h @ weight.T), start, no_inputs)
    assert dynamics.lyapunov_exponent is not None
    return dynamics.lyapunov_exponent


def main(path: Path, size: int = 500) -> None:
    gains = [0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0]
    measured = [exponent(gain, size=size) for gain in gains]
    fine = np.linspace(gains[0], gains[-1], 80)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.axhline(0.0, linewidth=0.5, color="black")
    axes.plot(fine, [0.5 * math.log(squared_gain(gain)) for gain in fine], label="mean field: ½ ln χ₁")
    axes.plot(gains, measured, "o", label=f"measured, {size} units")
    axes.set(xlabel="gain g", ylabel="first Lyapunov exponent per step", title="Random tanh networks")
    axes.legend()
    figure.savefig(path, dpi=120)
    for gain, found in zip(gains, measured, strict=True):
        print(f"g {gain:.2f}: measured {found:+.3f}, theory {0.5 * math.log(squared_gain(gain)):+.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "random_rnn_lyapunov.png"))
