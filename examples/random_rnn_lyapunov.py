"""The first Lyapunov exponent of random tanh networks against mean-field theory: `python random_rnn_lyapunov.py`.

A network h' = tanh(W h) with W ~ N(0, g^2 / N) forgets below g = 1 and is chaotic above it. For infinitely many units
the exponent is ln g below the transition and 0.5 ln chi above it, with chi = g^2 E[tanh'(h)^2] at the fixed point of
the variance q = g^2 E[tanh(h)^2], h ~ N(0, q) (Sompolinsky, Crisanti and Sommers 1988; Schoenholz et al. 2017).
"""

import argparse
import math
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gradtrack import RecurrentAnalyzer


def theory(gain: float) -> float:
    """Return 0.5 ln chi at the fixed point of the variance."""
    points, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()
    variance = 1.0
    for _ in range(20_000):
        variance = gain**2 * float(weights @ np.tanh(math.sqrt(variance) * points) ** 2)
    slopes = 1 - np.tanh(math.sqrt(variance) * points) ** 2
    return 0.5 * math.log(gain**2 * float(weights @ slopes**2))


def measured(gain: float, size: int, seed: int) -> tuple[float, float]:
    """Return the exponent of one network and its standard error, over 250 steps after 150."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, dtype=torch.float64, generator=generator) * gain / math.sqrt(size)
    start = torch.randn(1, size, dtype=torch.float64, generator=generator)
    analyzer = RecurrentAnalyzer(max_steps=250, track_hidden_states=False)
    nothing = torch.zeros(400, 1, 0, dtype=torch.float64)
    _, dynamics = analyzer.analyze_step(lambda h, _: torch.tanh(h @ matrix.T), start, nothing)
    cell = dynamics.cells["step"]
    return cell.lyapunov_exponents[0], cell.lyapunov_error or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--gains", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0])
    parser.add_argument("--output", type=Path, default=Path("random_rnn_lyapunov.png"))
    options = parser.parse_args()
    found = [measured(gain, options.size, seed=index) for index, gain in enumerate(options.gains)]
    for gain, (exponent, error) in zip(options.gains, found, strict=True):
        print(f"g = {gain:4.2f}   theory {theory(gain):+.3f}   measured {exponent:+.3f} +- {error:.3f}")
    fine = np.linspace(min(options.gains), max(options.gains), 60)
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.axhline(0.0, color="0.8", linewidth=1)
    axes.plot(fine, [theory(gain) for gain in fine], label="mean-field theory")
    values, errors = zip(*found, strict=True)
    axes.errorbar(options.gains, values, yerr=errors, fmt="o", label=f"measured, {options.size} units")
    axes.set(xlabel="gain g", ylabel="first Lyapunov exponent", title="Order and chaos in random networks")
    axes.legend()
    figure.savefig(options.output, dpi=150, bbox_inches="tight")
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
