"""What all automatically chosen analyzers add to 2,000 steps of training, at their default cadences.

Their cost lies on few steps, so it is sums that are compared, not medians; and sums of processor time, since the other
processes of a shared machine would drown a difference of one percent. The time is that of the training's thread: those
that help it spin for milliseconds after their work, which the clock of the process adds at random. What they do while
it waits for them counts once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import SmallGPT
from benchmarks.timing import Row
from gradtrack import GradientManager

STEPS = 2000
CHUNK = 8
BAR = 1.03


class SequenceModel(nn.Module):
    """A stacked LSTM that names a class for each sequence."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


def lstm(*, inputs: int, hidden: int, layers: int, batch: int, length: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return an LSTM and a function that gives the loss of a batch of it."""
    model = SequenceModel(inputs, hidden, layers)
    x, classes = torch.randn(batch, length, inputs), torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), classes)


def gpt(*, batch: int, **sizes: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a GPT and a function that gives the loss of a batch of it."""
    model, vocabulary, length = SmallGPT(**sizes), sizes["vocabulary"], sizes["length"]
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Tensor]]], float | None]] = {
    "LSTM 2 x 128, 64 steps, batch 32": (lambda: lstm(inputs=32, hidden=128, layers=2, batch=32, length=64), BAR),
    "GPT of 1.1 M, 64 tokens, batch 16": (
        lambda: gpt(vocabulary=1024, width=128, depth=4, length=64, batch=16),
        BAR,
    ),
    "tiny LSTM 1 x 32, 20 steps, batch 8": (lambda: lstm(inputs=8, hidden=32, layers=1, batch=8, length=20), None),
}


@dataclass(slots=True)
class Run:
    """One training beside a manager, with the seconds of its thread's processor time for each step."""

    train: Callable[[], object]
    seconds: list[float]

    @classmethod
    def of(cls, build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], manager: GradientManager) -> Run:
        """Build a model and let a manager look at its steps."""
        torch.manual_seed(0)
        model, loss = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        manager.attach(model, optimizer)

        def train() -> None:
            optimizer.zero_grad()
            manager.step(model, optimizer, loss())
            optimizer.step()

        return cls(train, [])

    def chunk(self, count: int) -> None:
        """Train for some steps."""
        for _ in range(count):
            start = time.thread_time()
            self.train()
            self.seconds.append(time.thread_time() - start)


def run(quick: bool = False) -> Iterator[Row]:
    """Train each model with and without analyzers, in turns of a few steps each."""
    for name, (build, bar) in CASES.items():
        if quick:  # most looks are among the first steps, so the bar is one of the whole run
            yield compare(name, build, None, steps=STEPS // 10)
        else:
            yield compare(name, build, bar)


def compare(
    name: str, build: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], bar: float | None, *, steps: int = STEPS
) -> Row:
    """Return the time of a training with analyzers over the time of the same without."""
    with (
        GradientManager(backends=["memory"]) as alone,
        GradientManager(backends=["memory"], analyzers="auto") as watching,
    ):
        plain, watched = Run.of(build, alone), Run.of(build, watching)
        for turn in range(steps // CHUNK):
            for one in (plain, watched) if turn % 2 else (watched, plain):
                one.chunk(CHUNK)
        chosen = sorted({name for report in watching.reports for name in report.analyzers or {}})
    usual = statistics.median(plain.seconds)
    return Row(
        benchmark="analyzers",
        case=name,
        what=f"auto / without analyzers, {steps:,} steps",
        ratio=sum(watched.seconds) / sum(plain.seconds),
        bar=bar,
        note=f"{', '.join(chosen)}; a step without takes {1e3 * usual:.1f} ms",
    )
