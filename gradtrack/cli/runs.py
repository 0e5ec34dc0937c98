"""The runs that commands are given, and the encoding of what they print."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import Final

from gradtrack.errors import UsageError
from gradtrack.support.regular_files import is_regular

_PLACES: Final = (".", "gradtrack_runs/*", "lightning_logs/*")
HERE: Final = "this directory, gradtrack_runs or lightning_logs"
"""Where runs are looked for, in words."""


def find_run(run: Path | None) -> Path:
    """Return the directory of a run: the newest one where none was named."""
    if run is not None:
        return run
    runs = [path for place in _PLACES for path in Path().glob(f"{place}/journal-*.jsonl") if is_regular(path)]
    if not runs:
        if any(path for place in _PLACES for path in Path().glob(f"{place}/run_end.json")):
            raise UsageError(
                f"no RUN: those in {HERE} have no row, expected one that was recorded. Lower grad_log_every_n_steps."
            )
        raise UsageError(f"no RUN: expected a run's directory, since there is none in {HERE}. Try: gradtrack demo")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


_INSTEAD: Final = dict(zip("▁▂▃▄▅▆▇█–—…→×∞°²·└├│─━", "__.-=+*#--.>x8o2.`||--", strict=True))


def survive_poor_encodings() -> None:
    """Let standard output and error write what their encoding lacks in letters that every one has, as wide."""
    codecs.register_error("gradtrack.letters", _spell)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="gradtrack.letters")


def _spell(fault: UnicodeError) -> tuple[str, int]:
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    lacking = fault.object[fault.start : fault.end]
    return "".join(_INSTEAD.get(letter, "?") for letter in lacking), fault.end
