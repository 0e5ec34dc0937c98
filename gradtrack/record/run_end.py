"""What a run leaves beside its rows when it ends: its summary, its last step and the flight recorder, in full."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError

from gradtrack.errors import JournalError
from gradtrack.record.files import write_json
from gradtrack.reports import StepReport, TrainingSummary

RUN_END: Final = "run_end.json"
_FORMAT: Final = 1
_BATCH_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended: `last` has the last step of each pair, `flight_recorder` the steps up to the first fault.

    Both have the statistics of every parameter.
    """

    run_id: str
    summary: TrainingSummary
    failed: bool = False
    last: Sequence[StepReport] = ()
    flight_recorder: Sequence[StepReport] = ()

    def save(self, path: Path) -> Path:
        """Write it as JSON that Python's own `json` reads, and return where it is."""
        values = {
            "format": _FORMAT,
            "run_id": self.run_id,
            "failed": self.failed,
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
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as fault:
            raise _unreadable(path, str(fault)) from None
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise _unreadable(path, f"its format is not {_FORMAT}")
        try:
            return cls(
                run_id=str(values["run_id"]),
                summary=TrainingSummary.model_validate(values["summary"]),
                failed=bool(values["failed"]),
                last=[StepReport.model_validate(report) for report in values["last"]],
                flight_recorder=[StepReport.model_validate(report) for report in values["flight_recorder"]],
            )
        except (KeyError, TypeError, ValidationError) as fault:
            raise _unreadable(path, str(fault).splitlines()[0]) from None


def _unreadable(path: Path, reason: str) -> JournalError:
    return JournalError(
        f"{str(path)!r} cannot be read ({reason}): expected what a run leaves at its end. Move it out of the directory."
    )


def _plain(report: StepReport) -> dict[str, Any]:
    values = report.model_dump(mode="json", exclude={"batch", "analyzers"})
    values["analyzers"] = {name: _json_or_nothing(found) for name, found in report.analyzers.items()}
    values["batch"] = None if report.batch is None else _batch(report.batch)
    return values


def _json_or_nothing(found: Any) -> Any:
    return found.model_dump(mode="json") if hasattr(found, "model_dump") else found


def _batch(batch: object) -> Any:
    """Keep what identifies a batch: plain values as they are, anything else by a short text."""
    try:
        text = json.dumps(batch)
    except (TypeError, ValueError, RecursionError):
        return repr(batch)[:_BATCH_CHARACTERS]
    return json.loads(text)
