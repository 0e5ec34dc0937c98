"""Follows a run in the terminal while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live

from gradtrack.delivery.journal.reading import open_run
from gradtrack.pages.run_data import RunData, Track, is_running, load_run
from gradtrack.pages.terminal.overview import show
from gradtrack.support.names import Printable, number, one_line

Pause = Callable[[float], object]
Clock = Callable[[], float]
_PAUSE_SECONDS: Final = 1.0
_REST: Final = 3.0


def follow(directory: Path, console: Console, *, pause: Pause = time.sleep, clock: Clock = time.monotonic) -> RunData:
    """Show a run until it ends: a view that refreshes on a terminal, a line for each row elsewhere.

    Reading a long run takes seconds; the pause between two reads is longer, so that a core is left to the training.
    """
    changes = _changes(directory, pause, clock)
    if not console.is_terminal:
        return _follow_lines(changes, console)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for run in changes:
            live.update(Printable(show(run, live=run.is_running)), refresh=True)
    return run


def _follow_lines(changes: Iterator[RunData], console: Console) -> RunData:
    told: dict[str, int] = {}
    for run in changes:
        for name, track in run.tracks.items():
            for line in islice(_lines(track), told.get(name, 0), None):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            told[name] = len(track.steps)
    return run


def _changes(directory: Path, pause: Pause, clock: Clock) -> Iterator[RunData]:
    """Yield the run whenever its journal has grown, and once more at its end."""
    size, rest = -1, _PAUSE_SECONDS
    while True:
        saved = open_run(directory)
        if (grown := saved.size()) != size:
            begin = clock()
            size, run = grown, load_run(directory)
            rest = max(_PAUSE_SECONDS, _REST * (clock() - begin))
            yield run
            if not run.is_running:
                return
        elif not is_running(saved):
            size = -1
            continue
        pause(rest)


def _lines(track: Track) -> Iterator[str]:
    name = f"{one_line(track.name)}: " if track.name else ""
    columns = (track.loss, track.column("train/grad_norm"), track.column("train/grad_healthy"))
    for step, loss, norm, healthy in zip(track.steps.tolist(), *columns, strict=True):
        health = "unhealthy" if healthy == 0.0 else "healthy"
        yield f"{name}step {step}  loss {number(loss)}  gradient norm {number(norm)}  {health}"
