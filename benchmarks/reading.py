"""What a report costs in a real training loop, with default settings: unread, its health read, its metrics read.

One model trains in turns: plain, with clip_grad_norm_, and in three ways with gradtrack. A turn has as many steps as
lie between two rows, so what happens only on some of them counts with its share: of each step in a turn the processor
time at the lower quartile of all rounds is taken, since on a shared machine the slower ones show other processes, and
of these times the mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Action, Row
from gradtrack import GradientConfig, GradientManager, StepReport, safe_backward

LAYERS = {"mlp_9k": [64, 64, 64, 10], "policy_25k": [64] * 7, "mlp_1m": [512] * 5}
ROUNDS = {"mlp_9k": 40, "policy_25k": 30, "mlp_1m": 20}
TURN = GradientConfig().grad_log_every_n_steps
LIMIT = GradientConfig().max_grad_norm
READS: dict[str, tuple[Callable[[StepReport], object], float]] = {
    "unread": (lambda report: None, 0.35),
    "health.healthy read": (lambda report: report.health.healthy, 0.40),
    "metrics() read": (lambda report: report.metrics(), 0.60),
}


def run(quick: bool = False) -> Iterator[Row]:
    """Compare what each way adds to the plain step of each model with what clip_grad_norm_ adds."""
    for name, widths in LAYERS.items():
        with ExitStack() as stack:
            ways = _ways(widths, stack)
            taken = _times(ways, rounds=ROUNDS[name] // (5 if quick else 1))
        found = {way: statistics.fmean(map(_lower_quartile, zip(*turns, strict=True))) for way, turns in taken.items()}
        added = {way: seconds - found["plain"] for way, seconds in found.items()}
        for way, (_, bar) in READS.items():
            yield Row(
                benchmark="reading",
                case=f"{name}, {way}",
                what="added to a step / by clip_grad_norm_",
                ratio=added[way] / added["clip_grad_norm_"],
                bar=bar,
                note=f"{added[way] * 1e6:.0f} us / {added['clip_grad_norm_'] * 1e6:.0f} us; "
                f"a plain step takes {found['plain'] * 1e6:.0f} us, {torch.get_num_threads()} of torch's threads",
            )


def _times(ways: Mapping[str, Action], *, rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each step of all turns; the first turn of each way warms it up."""
    names, taken = list(ways), {name: list[list[float]]() for name in ways}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append([_once(ways[name]) for _ in range(TURN)])
    return {name: turns[1:] for name, turns in taken.items()}


def _once(action: Action) -> float:
    """Return the seconds of the training's thread; the clock would count what other processes take."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def _lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def _ways(widths: list[int], stack: ExitStack) -> dict[str, Action]:
    """Return a step of each way; all train one model, since copies differ by where they lie in memory."""
    torch.manual_seed(0)
    layers = (layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU()))
    model = nn.Sequential(*list(layers)[:-1])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-7
    )  # so that norms, and with them what is clipped, stay alike
    x, classes = torch.randn(256, 32, widths[0]), torch.randint(widths[-1], (256, 32))
    batches = cycle(list(zip(x, classes, strict=True)))

    def step(backward: Callable[[Tensor], object]) -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()

    def clipped(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    def ours(read: Callable[[StepReport], object]) -> Callable[[Tensor], object]:
        manager = stack.enter_context(GradientManager())
        return lambda loss: read(safe_backward(loss, model, optimizer, manager))

    ways = {"plain": lambda loss: loss.backward(), "clip_grad_norm_": clipped}
    ways |= {name: ours(read) for name, (read, _) in READS.items()}
    return {name: partial(step, backward) for name, backward in ways.items()}
