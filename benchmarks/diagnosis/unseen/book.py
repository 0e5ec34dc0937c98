"""Lists the runs of this part, with the optimizers, schedules and data that they share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.blind import book
from benchmarks.diagnosis.blind.book import generator, randn
from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.run import Run

healthy = partial(book.healthy, part="unseen")
faulty = partial(book.faulty, part="unseen")


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of momentum and gradient, with decay of the weights beside it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["decay"])
                param.sub_(group["lr"] * torch.sign(first * mean + (1 - first) * param.grad))
                mean.lerp_(param.grad, 1 - second)


def lion(model: nn.Module, lr: float) -> Lion:
    return Lion([param for param in model.parameters() if param.requires_grad], lr)


def adamw(model: nn.Module, lr: float = 1e-3, decay: float = 0.01) -> torch.optim.AdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr, weight_decay=decay)


def cosine(run: Run, warm: int = 10) -> Run:
    """Warm a run's rate up, and take it down along a cosine until its last step."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, run.steps - warm)))

    return schedule(run, factor)


def shapes(step: int, size: int = 8, side: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of a bright disc and its mask."""
    source = generator(110_000 + step)
    place = torch.rand(size, 2, 1, 1, generator=source) * 0.6 + 0.2
    radius = torch.rand(size, 1, 1, generator=source) * 0.15 + 0.12
    grid = torch.linspace(0, 1, side)
    far = ((grid[None, :, None] - place[:, 0]) ** 2 + (grid[None, None] - place[:, 1]) ** 2).sqrt()
    mask = (far < radius).float()[:, None]
    return 1.5 * mask + 0.5 * torch.randn(size, 1, side, side, generator=source), mask


def textures(step: int, size: int = 24, side: int = 12, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Return coloured pictures of stripes in one of several directions, and which."""
    source = generator(120_000 + step)
    labels = torch.randint(0, classes, (size,), generator=source)
    angle = labels * math.pi / classes
    grid = torch.arange(side, dtype=torch.float32)
    across = grid[None, :, None] * angle.sin()[:, None, None] + grid[None, None] * angle.cos()[:, None, None]
    waves = torch.sin(1.4 * across + 6 * torch.rand(size, 1, 1, generator=source))
    colour = torch.rand(size, 3, 1, 1, generator=source) + 0.3
    return colour * waves[:, None] + 0.4 * torch.randn(size, 3, side, side, generator=source), labels


def signals(step: int, size: int = 16, length: int = 32) -> tuple[Tensor, Tensor]:
    """Return series of two channels whose next value depends on both, and the next values."""
    source = generator(130_000 + step)
    time = torch.arange(length + 1)
    speed = 0.3 + 0.4 * torch.rand(size, 2, 1, generator=source)
    wave = torch.sin(speed * time + 6 * torch.rand(size, 2, 1, generator=source))
    wave = wave + 0.5 * wave[:, :1] * wave[:, 1:] + 0.05 * torch.randn(size, 2, length + 1, generator=source)
    return wave[..., :-1].mT, wave[..., 1:].mT


def digits(step: int, size: int = 16, length: int = 6, base: int = 12) -> tuple[Tensor, Tensor]:
    """Return sequences of digits, and the same backwards."""
    found = torch.randint(2, base, (size, length), generator=generator(140_000 + step))
    return found, found.flip(1)


def graph(step: int, nodes: int = 60, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of nodes in two communities, their edges, and the community of each."""
    source = generator(150_000 + step)
    labels = torch.randint(0, 2, (nodes,), generator=source)
    same = labels[:, None] == labels[None]
    chance = torch.where(same, 0.15, 0.02)
    edges = (torch.rand(nodes, nodes, generator=source) < chance).nonzero().T
    loops = torch.arange(nodes).repeat(2, 1)
    x = torch.randn(nodes, width, generator=source)
    x[:, 0] += labels - 0.5
    return x, torch.cat([edges, loops], 1), labels


def curve(step: int, size: int = 64, width: int = 6) -> tuple[Tensor, Tensor]:
    """Return points and a smooth function of them."""
    x = randn(160_000 + step, size, width)
    return x, (torch.sin(x[:, :1] + x[:, 1:2]) + 0.3 * x[:, 2:3] * x[:, 3:4]) + 0.1 * randn(170_000 + step, size, 1)
