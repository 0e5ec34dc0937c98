"""The runs that commands are given, what `show --check` refuses in one, and how commands print and write."""

from __future__ import annotations

import codecs
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from gradtrack.errors import JournalError, UsageError
from gradtrack.support.names import Printable, names_run, one_line
from gradtrack.support.regular_files import is_regular

_PLACES: Final = (".", "gradtrack_runs/*", "lightning_logs/*")
HERE: Final = "this directory, gradtrack_runs or lightning_logs"
"""Where runs are looked for, in words."""
AsJson = Annotated[bool, typer.Option("--json", help="Print data for scripts instead of text.")]


def epilog(*examples: str, code_1: str = "") -> str:
    """Return what follows the help of a command: examples, and when it ends with 1; an empty line is a line break."""
    lines = ["Examples:", *(f"[bold]{example}[/bold]" for example in examples)]
    if code_1:
        lines.append(f"Exit codes: 0 done; 1 {code_1}; 2 wrong usage or input.")
    return "\n\n".join(lines)


def find_run(run: Path | None, *, every: bool = False) -> Path:
    """Return a run of those that a command is given: the newest one where none was named.

    Of a directory with several it is the newest as well, and the others are listed on stderr, unless the command takes
    `every` run of a directory.
    """
    from gradtrack.delivery.journal.reading import find_runs, open_run

    if run is not None and not run.exists() and "@" not in str(run):
        return _by_id(str(run)) or run
    run = run or _newest_here()
    runs = [] if every or not run.is_dir() else find_runs(run)
    if len(runs) < 2:
        return run
    newest = open_run(run)
    typer.echo(
        f"{one_line(str(run))} holds {len(runs)} runs. This is {one_line(newest.name)}; there are also", err=True
    )
    for other in (other for other in runs if other.run_id != newest.run_id):
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.journals[0].run.created))
        typer.echo(one_line(f"  {other.name}  {started}  {other.run_id}"), err=True)
    return Path(newest.name)


def find_several(runs: Sequence[Path]) -> list[Path]:
    """Return the runs of those that a command is given that compares them, or all that one directory has."""
    from gradtrack.delivery.journal.reading import find_runs

    if len(runs) == 1 and runs[0].is_dir():
        runs = [Path(found.name) for found in find_runs(runs[0])]
    if len(runs) < 2:
        raise UsageError("one run: expected two or more, or a directory that has as many. Name another one.")
    return [find_run(run) for run in runs]


def _newest_here() -> Path:
    """Return the directory of the run that recorded last."""
    runs = _here("journal-*.jsonl")
    if not runs:
        if _here("run_end.json"):
            raise UsageError(
                f"no RUN: those in {HERE} have no row, expected one that was recorded. Lower grad_log_every_n_steps."
            )
        raise UsageError(f"no RUN: expected a run's directory, since there is none in {HERE}. Try: gradtrack demo")
    return max(runs, key=lambda path: path.stat().st_mtime).parent


def _here(name: str) -> list[Path]:
    """Return the files of this name in the directories of runs, also in those that lie in the directory of another."""
    found = [path for place in _PLACES for path in Path().glob(f"{place}/{name}")]
    found += [path for place in _PLACES for path in Path().glob(f"{place}/*/{name}") if names_run(path.parent.name)]
    return list(filter(is_regular, found))


def _by_id(run_id: str) -> Path | None:
    """Return the run of this identity among those in this directory."""
    from gradtrack.delivery.journal.reading import find_runs

    for directory in {path.parent for path in _here("journal-*.jsonl")}:
        with suppress(JournalError):
            for found in find_runs(directory):
                if any(journal.run.run_id == run_id for journal in found.journals):
                    return Path(f"{directory}@{run_id}")
    return None


def tell_where_they_part(runs: Sequence[Path], *, as_json: bool) -> bool:
    """Print the first step and parameter in which two runs, or the ranks of one, part; return whether they do."""
    from gradtrack.delivery.journal.reading import open_run
    from gradtrack.fingerprints import first_difference

    if len(runs) > 2:
        raise UsageError(f"--first with {len(runs)} runs: expected one or two. Compare them in pairs.")
    opened = [open_run(find_run(run)) for run in runs]
    run_ids = [{journal.run.run_id for journal in one.journals} for one in opened]
    found, count = first_difference(*(one.directory for one in opened), run_ids=run_ids)
    text = "No fingerprint differs." if found is None else found.text
    where = f" (rank {found.rank})" if found is not None and found.rank else ""
    plain = {"parts": found is not None, "compared_steps": count, **({} if found is None else asdict(found))}
    print_found(lambda: plain, lambda: Text(f"{text}{where}\n{count:,} steps were compared."), as_json=as_json)
    return found is not None


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


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Say on one line why a file that an option names could not be written."""
    try:
        yield
    except OSError as fault:
        raise UsageError(
            f"{str(path)!r}: expected a file that can be written ({fault.strerror or fault}). "
            f"Choose another with {option}."
        ) from fault


def folded(text: str) -> str:
    """Break long lines between words for a person's terminal, below where they began; a pipe gets them whole."""
    if not sys.stdout.isatty():
        return text
    lines = []
    width = shutil.get_terminal_size().columns
    fold = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    for line in text.splitlines():
        fold.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += fold.wrap(line) or [""]
    return "\n".join(lines)


def print_found(plain: Callable[[], Any], shown: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print data for scripts, or what a person reads."""
    if as_json:
        typer.echo(json.dumps(plain(), indent=1, default=str))
    else:
        Console(highlight=False).print(Printable(shown()), crop=False)
