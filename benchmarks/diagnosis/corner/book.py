"""Lists the runs of this part, with the data and recipes that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind import book
from benchmarks.diagnosis.run import Run

healthy = partial(book.healthy, part="corner")
faulty = partial(book.faulty, part="corner")
Batch = tuple[Tensor, Tensor]


def dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(31_000_000 + seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=dice(seed))


def groups(step: int, size: int = 64, width: int = 20, kinds: int = 4, apart: float = 1.5) -> Batch:
    """Return points around a few centres, and the centre of each."""
    centres = normal(1, kinds, width) * apart / math.sqrt(2)
    labels = torch.randint(0, kinds, (size,), generator=dice(10 + step))
    return centres[labels] + normal(100_000 + step, size, width), labels


def house(step: int, size: int = 64, scale: float = 1.0) -> Batch:
    """Return features, and a price with a bend and an interaction in them."""
    x = normal(200_000 + step, size, 8)
    y = 2 * x[:, 0] + x[:, 1] * x[:, 2] + torch.relu(x[:, 3]) + 0.1 * normal(300_000 + step, size)
    return x, scale * y[:, None]


def discs(step: int, size: int = 16, side: int = 12, channels: int = 1) -> Batch:
    """Return pictures of a bright disc in one of four corners, and which."""
    labels = torch.randint(0, 4, (size,), generator=dice(400_000 + step))
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    down, right = (labels // 2).float(), (labels % 2).float()
    near = torch.tensor(side / 4)
    far = side / 2
    distance = (rows - (near + far * down)[:, None, None]) ** 2 + (columns - (near + far * right)[:, None, None]) ** 2
    disc = (distance < (side / 5) ** 2).float()
    return 2 * disc[:, None].repeat(1, channels, 1, 1) + 0.5 * normal(
        500_000 + step, size, channels, side, side
    ), labels


def counting(step: int, size: int = 12, length: int = 16, base: int = 24) -> Batch:
    """Return sequences that go on by a stride of their own, and the next tokens."""
    source = dice(600_000 + step)
    start, stride = (
        torch.randint(0, base, (size, 1), generator=source),
        torch.randint(1, 4, (size, 1), generator=source),
    )
    whole = (start + stride * torch.arange(length + 1)) % base
    return whole[:, :-1], whole[:, 1:]


def echo(step: int, size: int = 24, length: int = 15, lag: int = 4) -> Batch:
    """Return noise, and the sign of one channel some steps before the end."""
    x = normal(700_000 + step, size, length, 3)
    return x, (x[:, -1 - lag, 0] > 0).long()


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def fit(
    model: nn.Module,
    optimizer: Any,
    batches: Callable[[int], Batch] = groups,
    loss: Callable[[Tensor, Tensor], Tensor] = entropy,
    **options: Any,
) -> Run:
    """Return a run on pairs of inputs and targets."""

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        return loss(model(x), y)

    return Run(model=model, forward=forward, optimizer=optimizer, **options)


def dense(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, norm: Callable[[int], nn.Module] | None = None) -> Any:
    """Return linear layers `fc0`, `fc1`, ... with a function, and a norm before it where one is given, between them."""
    model = nn.Sequential()
    for index, (before, after) in enumerate(pairwise(widths)):
        model.add_module(f"fc{index}", nn.Linear(before, after))
        if index < len(widths) - 2:
            if norm is not None:
                model.add_module(f"norm{index}", norm(after))
            model.add_module(f"act{index}", act())
    return model


def sgd(model: nn.Module, rate: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], rate, **options)


def adam(model: nn.Module, rate: float = 1e-3, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([param for param in model.parameters() if param.requires_grad], rate, **options)


def gain(model: nn.Module, factor: float) -> nn.Module:
    """Draw every matrix anew, with the given gain, and take the biases to zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=factor / math.sqrt(module.weight[0].numel()))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def from_step(run: Run, step: int, change: Callable[[], object]) -> Run:
    """Change something once, right before a step."""
    run.before.append(lambda now: change() if now == step else None)
    return run
