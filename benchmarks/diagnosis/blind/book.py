"""Lists the functions that build runs under a name, until they are declared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.run import Expected, Run, add

Build = Callable[[], Run]
_RUNS: dict[str, tuple[Build, Expected | None]] = {}


def healthy(name: str, part: str = "blind") -> Callable[[Build], Build]:
    """List a run that has no fault."""

    def take(build: Build) -> Build:
        _RUNS[f"{part}_{name}"] = (build, None)
        return build

    return take


def faulty(name: str, kind: str, where: str, *others: str, part: str = "blind") -> Callable[[Build], Build]:
    """List a run with its fault, where it lies, and the other types that are right as well."""

    def take(build: Build) -> Build:
        _RUNS[f"{part}_{name}"] = (build, Expected(kind, where, others))
        return build

    return take


def declare() -> None:
    """Add what was listed to the scenarios."""
    for name, (build, expected) in _RUNS.items():
        add(name, build, expected)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def spirals(step: int, size: int = 64, arms: int = 3, full: bool = False) -> tuple[Tensor, Tensor]:
    """Return points on noisy spirals and the spiral of each."""
    source = generator(4242 if full else 50_000 + step)
    labels = torch.randint(0, arms, (size,), generator=source)
    radius = torch.rand(size, generator=source) + 0.1
    angle = 4 * radius + 2 * torch.pi * labels / arms + 0.15 * torch.randn(size, generator=source)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def bars(step: int, size: int = 16, side: int = 10) -> tuple[Tensor, Tensor]:
    """Return grey pictures of a horizontal or vertical bar under noise, and which and where."""
    source = generator(60_000 + step)
    labels = torch.randint(0, 6, (size,), generator=source)
    pictures = 0.4 * torch.randn(size, 1, side, side, generator=source)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        line = 1 + 3 * (label % 3)
        if label < 3:
            picture[0, line] += 2
        else:
            picture[0, :, line] += 2
    return pictures, labels


def waves(step: int, size: int = 16, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return noisy sine waves and their next values."""
    source = generator(70_000 + step)
    phase = 6 * torch.rand(size, 1, generator=source)
    speed = 0.2 + 0.5 * torch.rand(size, 1, generator=source)
    wave = torch.sin(phase + speed * torch.arange(length + 1)) + 0.05 * torch.randn(size, length + 1, generator=source)
    return wave[:, :-1, None], wave[:, 1:, None]


def tokens(step: int, size: int = 8, length: int = 18, vocabulary: int = 30) -> tuple[Tensor, Tensor]:
    """Return sequences that repeat themselves, and the next tokens."""
    half = torch.randint(0, vocabulary, (size, length // 2 + 1), generator=generator(80_000 + step))
    whole = torch.cat([half, half], 1)[:, : length + 1]
    return whole[:, :-1], whole[:, 1:]


def table(step: int, size: int = 48, width: int = 10, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return standardised features and a target with an interaction and a bend."""
    x = randn(90_000 + step, size, width)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs() - 0.5 * x[:, 3] + noise * randn(91_000 + step, size)
    return x, y[:, None]


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy over every position."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def learn(
    model: nn.Module,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = entropy,
    **options: object,
) -> Run:
    """Return a run on pairs of inputs and targets, with Adam where nothing else is given."""

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        return loss(model(x), y)

    chosen = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    return Run(model=model, forward=forward, optimizer=chosen, **options)


def sgd(model: nn.Module, rate: float, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, **options)


def adam(model: nn.Module, rate: float = 1e-3, **options: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate, **options)


def stack(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers as torch makes them, with a function between them."""
    parts: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(widths)):
        parts += [nn.Linear(before, after)] + ([act()] if index < len(widths) - 2 else [])
    return nn.Sequential(*parts)
