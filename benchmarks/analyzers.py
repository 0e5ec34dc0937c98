"""What all automatically chosen analyzers add to 2,000 steps of training, at their default cadences.

One model trains, in turns of a few steps with a manager without analyzers and with one that has them: two copies of a
model differ by more than the bar, by where they lie in memory. Between the looks nothing of the analyzers is on the
model, and no turn ends before a step that is looked at; two hooks on the optimizer stay, some microseconds of each step
on both sides. The times are processor time of the training's thread: those
that help it spin for milliseconds after their work, which the clock of the process adds at random; what they do while
it waits for them counts once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import SmallGPT
from benchmarks.timing import Row
from gradtrack import GradientManager
from gradtrack.analyzers.base import Schedule, often, rarely

STEPS = 2000
TURN = 8
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
class Turns:
    """The steps of one manager, with the seconds that each has taken."""

    manager: GradientManager
    seconds: list[float] = field(default_factory=list)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
        """Train for the steps of a turn."""
        for _ in range(TURN):
            start = time.thread_time()
            optimizer.zero_grad()
            self.manager.step(model, optimizer, loss())
            optimizer.step()
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
    torch.manual_seed(0)
    model, loss = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        GradientManager(backends=["memory"]) as alone,
        GradientManager(backends=["memory"], analyzers="auto") as watching,
    ):
        watching.attach(model, optimizer)
        plain, watched = Turns(alone), Turns(watching)
        for number in range(steps // TURN):
            for one in (watched, plain) if number % 2 else (plain, watched):  # the first step warms torch up
                one.take(model, optimizer, loss)
        chosen = sorted({name for report in watching.reports for name in report.analyzers or {}})
    usual = statistics.median(plain.seconds)
    return Row(
        benchmark="analyzers",
        case=name,
        what=f"auto / without analyzers, {steps:,} steps",
        ratio=1 + _added(watched.seconds, usual) / (usual * steps),
        bar=bar,
        note=f"{', '.join(chosen)}; a step without takes {1e3 * usual:.1f} ms",
    )


def _added(seconds: Sequence[float], usual: float) -> float:
    """Return what analyzers add to all steps.

    Steps at which nothing looks are of one kind, of which the median is taken. Looks, and the steps after them at which
    they are completed, are added up; of the frequent ones the slowest tenth counts as the others, since there the
    machine did something else.
    """
    rare, frequent, others = list[float](), list[float](), list[float]()
    for step, time_taken in enumerate(seconds, start=1):
        kind = rare if _is_at(rarely, step) else frequent if _is_at(often, step) else others
        kind.append(time_taken - usual)
    kept = sorted(frequent)[: len(frequent) - len(frequent) // 10]
    return sum(rare) + sum(kept) / len(kept) * len(frequent) + statistics.median(others) * len(others)


def _is_at(schedule: Schedule, step: int) -> bool:
    return schedule(step) or schedule(step - 1)
