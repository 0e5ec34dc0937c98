"""What a live diagnosis adds to training: 2,000 steps of a tiny MLP and of a small GPT, at its usual cadence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.models import Training
from benchmarks.timing import Action, Row
from gradtrack import GradientManager
from gradtrack.analyzers.base import often

STEPS = 2000
MEASURED = {"mlp": 2000, "gpt": 160}
BARS = {"mlp": 1.10, "gpt": 1.03}


def run(quick: bool = False) -> Iterator[Row]:
    """Time steps without and with diagnosis in turn; what the kinds of steps cost is added up for 2,000 of them."""
    for name, bar in BARS.items():
        with GradientManager() as plain, GradientManager(analyzers=["flow"]) as diagnosed:
            actions = [_alone(Training(name)), _managed(Training(name), plain), _managed(Training(name), diagnosed)]
            alone, reported, looked = _times(actions, MEASURED[name] // (4 if quick else 1))
        added = _added(reported, looked)
        base = statistics.median(reported)
        note = f"{added * 1e6:.0f} us a step"
        yield Row(
            benchmark="diagnosis",
            case=name,
            what="with / without diagnosis",
            ratio=1 + added / base,
            bar=bar,
            note=note,
        )
        whole = (base + added) / statistics.median(alone)
        yield Row(benchmark="diagnosis", case=name, what="with diagnosis / without gradtrack", ratio=whole)


def _alone(training: Training) -> Action:
    def step() -> None:
        training.optimizer.zero_grad()
        training.forward().backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()

    return step


def _managed(training: Training, manager: GradientManager) -> Action:
    manager.attach(training.model, training.optimizer)

    def step() -> None:
        training.optimizer.zero_grad()
        manager.step(training.model, training.optimizer, training.forward())
        training.optimizer.step()

    return step


def _times(actions: Sequence[Action], steps: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in actions]
    for step in range(steps):
        for place in range(len(actions)):
            index = (step + place) % len(actions)
            start = time.thread_time()  # other processes and threads that spin would drown a few percent
            actions[index]()
            times[index].append(time.thread_time() - start)
    return times


def _added(without: Sequence[float], with_it: Sequence[float]) -> float:
    """Return what diagnosis adds to the mean of 2,000 steps.

    Most steps are of one kind, of which the median is taken; the sampled ones, with all that a judgement takes, are
    averaged, leaving out the slowest tenth, where the machine did something else. The step after a sampled one looks
    at what the optimizer did.
    """
    usual, sampled = [], []
    for step, times in enumerate(zip(without, with_it, strict=True), start=1):
        (sampled if often(step) or often(step - 1) else usual).append(times[1] - times[0])
    count = sum(often(step) or often(step - 1) for step in range(1, STEPS + 1))
    kept = sorted(sampled)[: max(1, len(sampled) - len(sampled) // 10)]
    return (statistics.median(usual) * (STEPS - count) + statistics.fmean(kept) * count) / STEPS
