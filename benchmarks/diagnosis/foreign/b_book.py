"""Lists the runs of the second of these authors, with the data and recipes that they share."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.blind import book
from benchmarks.diagnosis.blind.book import generator, randn
from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.run import Run

healthy = partial(book.healthy, part="foreign")
faulty = partial(book.faulty, part="foreign")

TEXT = "the cat sat on a mat and then ran to see an old red hen who had ten fat eggs in her nest"
WORDS = TEXT.split()
LETTERS = " " + "".join(sorted(set("".join(WORDS))))


def clipped(run: Run, limit: float = 1.0) -> Run:
    """Clip a run's gradients by their norm, as most recipes do."""
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit))
    run.scalable = False
    return run


def warmed(run: Run, warm: int = 20) -> Run:
    """Raise a run's rate along a line, then let it fall with the root of the step."""
    return schedule(run, lambda step: min((step + 1) / warm, math.sqrt(warm / (step + 1))))


def falling(run: Run, warm: int = 0, floor: float = 0.1) -> Run:
    """Let a run's rate rise along a line and fall along a cosine to a share of itself."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        share = (step - warm) / max(1, run.steps - warm)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return schedule(run, factor)


def decayed(model: nn.Module, rate: float, decay: float = 0.1) -> torch.optim.AdamW:
    """Return AdamW as language models are trained with it: matrices decay, the rest does not."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], rate, betas=(0.9, 0.95))


def adding(step: int, size: int = 48, length: int = 20) -> tuple[Tensor, Tensor]:
    """Return numbers of which two are marked, and the sum of those two."""
    source = generator(510_000 + step)
    values = torch.rand(size, length, generator=source)
    marks = torch.zeros(size, length)
    half = length // 2
    marks[torch.arange(size), torch.randint(0, half, (size,), generator=source)] = 1
    marks[torch.arange(size), torch.randint(half, length, (size,), generator=source)] = 1
    return torch.stack([values, marks], -1), (values * marks).sum(1, keepdim=True)


def recall(step: int, size: int = 32, length: int = 40, width: int = 3) -> tuple[Tensor, Tensor]:
    """Return noise, and the sign of what one channel said at the first time step."""
    x = 0.3 * randn(520_000 + step, size, length, width)
    labels = torch.randint(0, 2, (size,), generator=generator(530_000 + step))
    x[:, 0, 0] = 2.0 * labels - 1
    return x, labels


def letters(step: int, size: int = 16, length: int = 32) -> tuple[Tensor, Tensor]:
    """Return letters of random words, and the letters that follow."""
    source = generator(540_000 + step)
    rows = []
    for _ in range(size):
        chosen = torch.randint(0, len(WORDS), (length // 2,), generator=source).tolist()
        rows.append([LETTERS.index(letter) for letter in " ".join(WORDS[word] for word in chosen)[: length + 1]])
    text = torch.tensor(rows)
    return text[:, :-1], text[:, 1:]


def chain(step: int, size: int = 16, length: int = 24, base: int = 24) -> tuple[Tensor, Tensor]:
    """Return tokens of which each is one of three that may follow its predecessor, and the next tokens."""
    source = generator(550_000 + step)
    follow = torch.randint(0, base, (base, 3), generator=generator(551_000))
    tokens = [torch.randint(0, base, (size,), generator=source)]
    chance = torch.tensor([0.8, 0.15, 0.05])
    for _ in range(length):
        pick = torch.multinomial(chance, size, replacement=True, generator=source)
        tokens.append(follow[tokens[-1], pick])
    text = torch.stack(tokens, 1)
    return text[:, :-1], text[:, 1:]


def marked(step: int, size: int = 32, length: int = 16, base: int = 20) -> tuple[Tensor, Tensor]:
    """Return tokens, and which of four rare tokens stands somewhere among them."""
    source = generator(560_000 + step)
    found = torch.randint(4, base, (size, length), generator=source)
    labels = torch.randint(0, 4, (size,), generator=source)
    found[torch.arange(size), torch.randint(0, length, (size,), generator=source)] = labels
    return found, labels


def sorting(step: int, size: int = 32, length: int = 6, base: int = 10) -> tuple[Tensor, Tensor]:
    """Return digits, and the same digits in order."""
    found = torch.randint(1, base, (size, length), generator=generator(570_000 + step))
    return found, found.sort(1).values


def ratings(step: int, size: int = 256, users: int = 60, items: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, popular and unpopular items, and how each user liked each."""
    taste, kind = randn(580_000, users, 3), randn(581_000, items, 3)
    source = generator(582_000 + step)
    user = torch.randint(0, users, (size,), generator=source)
    item = (items * torch.rand(size, generator=source) ** 2).long()
    noise = 0.3 * torch.randn(size, generator=source)
    return user, item, 3 + (taste[user] * kind[item]).sum(-1) / 3**0.5 + noise


def moons(step: int, size: int = 128) -> tuple[Tensor, Tensor]:
    """Return points on two noisy crescents, and the crescent of each."""
    source = generator(590_000 + step)
    labels = torch.randint(0, 2, (size,), generator=source)
    angle = math.pi * torch.rand(size, generator=source) + math.pi * labels
    x = torch.stack([angle.cos() + labels - 0.5, angle.sin() + 0.5 * labels - 0.25], 1)
    return x + 0.07 * torch.randn(size, 2, generator=source), labels


def blobs(step: int, size: int = 48, classes: int = 6, width: int = 12) -> tuple[Tensor, Tensor]:
    """Return points of a few clouds bent by a fixed map, and the cloud of each."""
    centres, bend = randn(600_000, classes, width), randn(600_001, width, width) / width**0.5
    source = generator(601_000 + step)
    labels = torch.randint(0, classes, (size,), generator=source)
    x = centres[labels] + 0.6 * torch.randn(size, width, generator=source)
    return x + torch.sin(x @ bend), labels
