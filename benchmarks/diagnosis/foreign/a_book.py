"""Lists the runs of the first author, with the data and helpers that they share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind import book
from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.run import Run

healthy = partial(book.healthy, part="foreign")
faulty = partial(book.faulty, part="foreign")

_FONT = (
    "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001 "
    "111100111001111 111100111101111 111001010010010 111101111101111 111101111001111"
)


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(7_700_000 + seed)


def glyphs(step: int, size: int = 32, side: int = 14, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return pictures of digits at changing places, and the digits."""
    font = torch.tensor([[float(bit) for bit in glyph] for glyph in _FONT.split()]).reshape(10, 1, 5, 3)
    font = F.interpolate(font, scale_factor=2)
    dice = source(step)
    labels = torch.randint(0, 10, (size,), generator=dice)
    places = torch.randint(1, 4, (size, 2), generator=dice).tolist()
    pictures = torch.zeros(size, 1, side, side)
    for row, (label, (down, right)) in enumerate(zip(labels.tolist(), places, strict=True)):
        pictures[row, :, down : down + 10, right : right + 6] = font[label]
    strength = 0.7 + 0.6 * torch.rand(size, 1, 1, 1, generator=dice)
    pictures = pictures * strength + noise * torch.randn(pictures.shape, generator=dice)
    return (pictures - 0.25) / 0.45, labels


def coloured(step: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Return digits in changing colours on changing grounds, and the digits."""
    grey, labels = glyphs(step, size)
    dice = source(step + 500_000)
    ink = torch.rand(size, 3, 1, 1, generator=dice) * 1.2 + 0.4
    return grey * ink + 0.3 * torch.randn(size, 3, 1, 1, generator=dice), labels


def rings(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Return points of two spirals in the plane, and which spiral each is of."""
    dice = source(step)
    labels = torch.randint(0, 2, (size,), generator=dice)
    turn = 0.5 + 4.0 * torch.rand(size, generator=dice)
    angle = turn + math.pi * labels
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 2.5
    return points + 0.05 * torch.randn(size, 2, generator=dice), labels


def friedman(step: int, size: int = 64, width: int = 10) -> tuple[Tensor, Tensor]:
    """Return ten features and the standardised target of Friedman's first problem."""
    dice = source(step)
    x = torch.rand(size, width, generator=dice)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(size, generator=dice)
    return (x - 0.5) / 0.29, ((y - 14.4) / 5.0)[:, None]


def swirl(step: int, size: int = 128) -> Tensor:
    """Return points of a noisy spiral in the plane."""
    dice = source(step)
    angle = 1.5 * math.pi * (1 + 2 * torch.rand(size, generator=dice))
    points = torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 7
    return points + 0.03 * torch.randn(size, 2, generator=dice)


def curved(step: int, size: int = 64, width: int = 20, latent: int = 2) -> Tensor:
    """Return points of a smooth surface of few dimensions in a space of many."""
    fixed = source(1)
    one, two = torch.randn(latent, 16, generator=fixed), torch.randn(16, width, generator=fixed) / 4
    code = torch.rand(size, latent, generator=source(step)) * 2 - 1
    return torch.tanh(code @ one) @ two + 0.02 * torch.randn(size, width, generator=source(step + 600_000))


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, norm: Callable[[int], nn.Module] | None = None) -> Any:
    """Return linear layers with an activation, and a norm before it where one is given, between each two."""
    parts: list[nn.Module] = []
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(before, after))
        if index < len(widths) - 2:
            parts += ([norm(after)] if norm else []) + [act()]
    return nn.Sequential(*parts)


def fit(
    model: nn.Module,
    optimizer: Any,
    batches: Callable[[int], tuple[Tensor, Tensor]] = glyphs,
    loss: Callable[..., Tensor] = F.cross_entropy,
    **options: Any,
) -> Run:
    """Return a run on pairs of inputs and targets."""

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        return loss(model(x), y)

    return Run(model=model, forward=forward, optimizer=optimizer, **options)


def sgd(model: nn.Module, lr: float, momentum: float = 0.9, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(trained(model), lr, momentum=momentum, **options)


def adam(model: nn.Module, lr: float = 1e-3, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(trained(model), lr, **options)


def adamw(model: nn.Module, lr: float = 1e-3, decay: float = 0.05) -> torch.optim.AdamW:
    return torch.optim.AdamW(trained(model), lr, weight_decay=decay)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def warm_cosine(run: Run, warm: int = 15) -> Run:
    """Warm a run's rate up, then take it down to nothing along a cosine."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, run.steps - warm)))

    return schedule(run, factor)


def one_cycle(run: Run, low: float = 0.04) -> Run:
    """Take a run's rate from low up to the full rate at three tenths of it, and down to nothing."""

    def factor(step: int) -> float:
        at = step / run.steps
        if at < 0.3:
            return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * at / 0.3))
        return 0.5 * (1 + math.cos(math.pi * (at - 0.3) / 0.7)) + 1e-4

    return schedule(run, factor)


def beforehand(run: Run, steps: int, lr: float = 2e-3) -> Run:
    """Train all of a run's model well before it is looked at, with Adam and a falling rate."""
    optimizer = torch.optim.Adam(trained(run.model), lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - 0.95 * step / steps)
        optimizer.zero_grad()
        run.forward(300_000 + step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
    return run


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)
