"""How the cost of a step grows with elements and with tensors: linearly, or something is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.shapes import Parameters, split
from benchmarks.timing import Row, interleaved
from gradtrack import GradientManager

ELEMENTS = (1_000_000, 10_000_000, 100_000_000, 500_000_000)
TENSORS = (10, 100, 1_000, 20_000)


def run(quick: bool = False) -> Iterator[Row]:
    """Time steps over sizes and counts, each relative to its neighbour and per unit."""
    sizes = ELEMENTS[:3] if quick else ELEMENTS
    yield from _grow("elements", [(size, split(size, 100)) for size in sizes])
    yield from _grow("tensors", [(count, split(10_000_000, count)) for count in TENSORS])


def _grow(what: str, cases: list[tuple[int, list[tuple[int, ...]]]]) -> Iterator[Row]:
    previous: tuple[int, float] | None = None
    for size, shapes in cases:
        seconds = _step_seconds(shapes)
        if previous is not None:
            ratio = (seconds / previous[1]) / (size / previous[0])
            yield Row(
                benchmark="growth",
                case=f"{previous[0]:,} to {size:,} {what}, not clipping",
                what="cost per unit / cost per unit before",
                ratio=ratio,
                bar=1.5,
            )
        previous = (size, seconds)


def _step_seconds(shapes: list[tuple[int, ...]]) -> float:
    model = Parameters(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager(backends=["memory"], max_grad_norm=1e12)
    return interleaved({"step": lambda: manager.step(model, optimizer, None, backward=False)}, rounds=7)["step"]
