"""The files that a run leaves in its directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Self, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from gradtrack.config import GradientConfig
from gradtrack.errors import JournalError, RunDirectoryError
from gradtrack.records import RunInfo
from gradtrack.reports import StepReport, TrainingSummary
from gradtrack.support.names import names_run
from gradtrack.support.regular_files import MEBIBYTE, check_json, is_regular, read_inside, read_regular

_logger = logging.getLogger("gradtrack")


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file by a new one in one move, so that no reader and no crash ever meets half of it.

    Unless `durable`, the new content may not be there yet after a loss of power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            # A name that is not Unicode may come from any file of a run directory.
            stream.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, values: Any) -> None:
    """Write JSON as Python's own `json` reads it: NaN and Infinity as these words."""
    write_atomically(path, json.dumps(values, indent=1))


def new_run_id(directory: Path | None = None) -> str:
    """Name a run by the time in UTC, the process and four random bytes; or like its new directory that is named so."""
    if directory is not None and names_run(directory.name) and not directory.exists():
        return directory.name
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}"


def ensure_writable(directory: Path) -> None:
    """Make a directory that the user named, or say why its files could not be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as fault:
        raise RunDirectoryError(
            f"run_dir {str(directory)!r}: expected a directory that can be written ({fault.strerror or fault}). "
            "Choose another run_dir."
        ) from fault


RUN_END: Final = "run_end.json"
_FORMAT: Final = 1
_BATCH_CHARACTERS: Final = 200
_MOST_OF_END: Final = 256 * MEBIBYTE
_REPORTS: Final = ("last", "flight_recorder")
_MOST_REPORTS: Final = 1000
"""Of an end. It has a report for each pair and the eight up to the first fault; of 1,000 tensors, that is 3 MB."""


class RunEnd(BaseModel, frozen=True):
    """How a run ended: the last step of each pair and the steps up to the first fault, with every parameter."""

    run_id: str
    summary: TrainingSummary
    failed: bool = False
    interrupted: bool = False
    last: Sequence[StepReport] = ()
    flight_recorder: Sequence[StepReport] = ()

    def save(self, path: Path) -> Path:
        """Write it as JSON that Python's own `json` reads, and return where it is."""
        values = {
            "format": _FORMAT,
            "run_id": self.run_id,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "summary": self.summary.model_dump(),
            "last": [_plain(report) for report in self.last],
            "flight_recorder": [_plain(report) for report in self.flight_recorder],
        }
        write_json(path, values)
        return path

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read it back; None where the run has not ended or left no such file."""
        try:
            values = json.loads(check_json(read_regular(path, most_bytes=_MOST_OF_END)))
            if not isinstance(values, dict) or values.get("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            if any(len(values.get(name, ())) > _MOST_REPORTS for name in _REPORTS):
                raise ValueError(f"it holds more than {_MOST_REPORTS} reports")
            reports = {name: _in_parts(list[StepReport], values[name]) for name in _REPORTS if name in values}
            return cls.model_validate({**values, **reports})
        except FileNotFoundError:
            return None
        except (OSError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as fault:
            if isinstance(fault, ValidationError):  # whose text has lines for every fault
                reason = f"{fault.error_count()} validation errors"
            else:
                reason = getattr(fault, "strerror", None) or (str(fault).splitlines() or [type(fault).__name__])[0]
            raise JournalError(
                f"{str(path)!r} cannot be read ({reason}): expected what a run leaves at its end. "
                "Move it out of the directory."
            ) from None


def _in_parts(kind: Any, value: Any, *checks: Any) -> Any:
    """Validate what may have many entries one by one: pydantic collects all faults, and a million fill the memory."""
    kind = next((one for one in get_args(kind) if one is not NoneType), kind) if NoneType in get_args(kind) else kind
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {name: field for name, field in kind.model_fields.items() if isinstance(value.get(name), (dict, list))}
        parts = {name: _in_parts(field.annotation, value[name], *field.metadata) for name, field in fields.items()}
        return kind.model_validate({**value, **parts})
    if isinstance(value, dict) and get_origin(kind) is dict:
        if not checks:
            return {name: _in_parts(get_args(kind)[1], entry) for name, entry in value.items()}
        found = (_adapter(kind, checks).validate_python({name: entry}) for name, entry in value.items())
        return {name: entry for one in found for name, entry in one.items()}
    if isinstance(value, list) and get_origin(kind) is list:
        return [_in_parts(get_args(kind)[0], entry) for entry in value]
    return _adapter(kind, checks).validate_python(value)


@cache
def _adapter(kind: Any, checks: tuple[Any, ...]) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[(kind, *checks)] if checks else kind)


def holds_run(directory: Path) -> bool:
    """Say whether a run has left its journal or its end in a directory."""
    return any(directory.glob("journal-[0-9]*.jsonl")) or (directory / RUN_END).exists()


def runs_in(directory: Path) -> set[str]:
    """Return the identities of the runs that have left their journal or their end in a directory."""
    found = set[str]()
    with contextlib.suppress(JournalError):
        from gradtrack.delivery.journal.reading import find_journals  # which loads torch; a backend does not

        found |= {journal.run.run_id for journal in find_journals(directory)}
    with contextlib.suppress(JournalError):
        end = RunEnd.load(directory / RUN_END)
        found |= set() if end is None else {end.run_id}
    return found


def _plain(report: StepReport) -> dict[str, Any]:
    """Return a report as JSON; a batch that is not plain data is kept as a short text."""
    values = report.model_dump(mode="json", exclude={"batch"})
    try:
        values["batch"] = json.loads(json.dumps(report.batch))
    except (TypeError, ValueError, RecursionError):
        values["batch"] = repr(report.batch)[:_BATCH_CHARACTERS]
    return values


def save_training_log(
    path: Path, config: GradientConfig, summary: TrainingSummary, reports: Iterable[StepReport]
) -> Path:
    """Write what a training was set to, how it went, and its kept reports, as Python's own `json` reads it."""
    values = {
        "format": 1,
        "config": config.model_dump(mode="json", exclude={"backends", "analyzers", "alerts"}),
        "summary": _as_json(summary.model_dump()),
        "steps": [_as_json(report.model_dump(exclude={"batch"})) for report in reports],
    }
    write_json(path, values)
    return path


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(getattr(value, "value", value))


LISTED_FILES: Final = "leavings.json"
_MOST_LISTED_FILES: Final = 1000
_SHOWN_BYTES: Final = 128 * MEBIBYTE
"""The size of a file, and of all files together, that trackers are shown."""


def note_files(directory: Path, run_id: str, paths: Iterable[Path]) -> Path:
    """Write down which files of a run's directory are its own: other people's files may lie beside them."""
    path = directory / LISTED_FILES
    write_json(path, {"run_id": run_id, "files": [found.name for found in paths if found.parent == directory]})
    return path


def files_to_show(run: RunInfo | None, named: Iterable[str] = ()) -> list[tuple[Path, bytes]]:
    """Return the files that records have named, then those that the run has left in its directory, each once.

    Their content is what a tracker gets: it is read here, and no tracker opens the path, since a run directory that was
    made by another person may hold a link to any file of the user. A file below the run directory is opened without
    following a link on the way to it, and one elsewhere was named by the training itself; one that is refused is named
    in a warning.
    """
    found = {Path(path): None for path in named}
    run_dir = None if run is None else run.run_dir
    if run is not None and run_dir is not None:
        found.update((path, None) for path in noted_files(Path(run_dir), run.run_id))
    read: list[tuple[Path, bytes]] = []
    left = _SHOWN_BYTES
    for path in found:
        try:
            if run_dir is not None and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(run_dir)):
                content = read_inside(run_dir, path, most_bytes=left)
            else:
                content = read_regular(os.path.realpath(path), most_bytes=left)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            _logger.warning("%a is not shown to a tracker: %s", path.name, reason)
            continue
        left -= len(content)
        read.append((path, content))
    return read


def noted_files(directory: Path, run_id: str) -> list[Path]:
    """Return the files of a directory that a run has written down as its own; only regular files that lie there."""
    try:
        values = json.loads(check_json(read_regular(directory / LISTED_FILES, most_bytes=4 * MEBIBYTE)))
        if values["run_id"] != run_id:
            return []
        names = [Path(name).name for name in values["files"][:_MOST_LISTED_FILES] if isinstance(name, str)]
        return [directory / name for name in names if is_regular(directory / name)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
