"""The runs that commands are given, what `show --check` refuses in one, and the encoding of what commands print."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import typer

from gradtrack.errors import UsageError
from gradtrack.support.names import one_line
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


FailOn = StrEnum("FailOn", ["failed", "critical", "open", "any"])
"""What `show --check` refuses, the worst first; each includes those before it."""
FAIL_ON: Final = (
    "failed: the training raised an error, was killed or never ended; critical: that, or a critical issue at any time; "
    "open: that, or an issue of MEDIUM or above that was open at the end; any: that, or any issue at any time."
)


def exit_code(faults: Mapping[str, str], level: FailOn) -> int:
    """Return the exit code of a run with these faults, and say on stderr why it is not 0."""
    for one in FailOn:
        if one.value in faults:
            typer.echo(one_line(f"gradtrack: {faults[one.value]}."), err=True)
            return 3 if one is FailOn.failed else 1
        if one is level:
            break
    return 0


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
