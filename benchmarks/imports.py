"""What importing gradtrack adds to importing torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.timing import Row

BAR_MILLISECONDS = 60.0
SCRIPT = """
import sys, time
import torch
start = time.perf_counter()
exec(sys.argv[1])
print((time.perf_counter() - start) * 1e3)
"""


def run(quick: bool = False) -> Iterator[Row]:
    """Import in fresh processes, bare and with the first names that a loop uses."""
    for what, bar in (("import gradtrack", BAR_MILLISECONDS), ("from gradtrack import GradientManager", None)):
        found = [_milliseconds(what) for _ in range(3 if quick else 7)]
        yield Row(
            benchmark="import", case="after torch", what=what, ratio=statistics.median(found), bar=bar, unit=" ms"
        )


def _milliseconds(statement: str) -> float:
    done = subprocess.run([sys.executable, "-c", SCRIPT, statement], check=True, capture_output=True, text=True)
    return float(done.stdout)
