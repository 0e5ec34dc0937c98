"""What a run is shown with when it ends: charts of the panels, its pictures and its report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.wandb.charts import Charts
from gradtrack.backends.wandb.history import files_of, read_keys
from gradtrack.record.leavings import files_to_show
from gradtrack.records import Record, RunInfo
from gradtrack.redact import redact

_PICTURES: Final = (".png", ".jpg", ".jpeg", ".gif")


class Show:
    """The last row of a W&B run: whatever there is to look at, once."""

    def __init__(self, package: Any, tell: Callable[[str], object]) -> None:
        self._wandb, self._tell = package, tell
        self._charts = Charts()
        self._info: RunInfo | None = None
        self._named: dict[str, None] = {}
        self._wrote = False
        self._media: dict[str, Any] = {}

    def take(self, records: Iterable[Record], *, written: bool) -> None:
        """Learn of records, which this process has written, or which the run has from another one."""
        records = list(records)
        self._wrote = self._wrote or (written and bool(records))
        self._charts.take(records)
        for record in records:
            self._info = record.run or self._info
            self._named.update(dict.fromkeys(record.files))

    def gather(self) -> None:
        """Read the files of the run now, as they may be gone when the W&B run ends."""
        for path in files_to_show(self._info, self._named):
            with self._contained(path.name):
                if path.suffix == ".html":
                    page = path.read_text(encoding="utf-8")
                    self._media[f"gradtrack/{path.stem}"] = self._wandb.Html(page, inject=False)
                elif path.suffix in _PICTURES:
                    self._media[f"gradtrack/{path.stem}"] = self._wandb.Image(str(path))

    def put(self, run: Any, directory: str) -> None:
        """Log everything as one row, but for what the run was shown with before; nothing where we wrote no record."""
        if self._wrote:
            with self._contained("the last row"):
                self._put(run, directory)

    def _put(self, run: Any, directory: str) -> None:
        row = {**self._charts.draw(self._wandb), **self._media}
        earlier = [path for path in files_of(run.id, directory) if path.parent != Path(run.dir).parent]
        there = read_keys(earlier) if row else set()
        row = {name: value for name, value in row.items() if not {name, f"Custom Chart Tables/{name}_table"} & there}
        if row:
            _log_alone(run, row)

    @contextlib.contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as fault:
            self._tell(f"{what} could not be shown ({type(fault).__name__}: {redact(str(fault))})")


def _log_alone(run: Any, row: dict[str, Any]) -> None:
    """Log a row that joins no other one, which may be open and the user's."""
    try:
        following = run.step + 1
    except Exception:  # a shared run has no steps
        run.log(row)
    else:
        run.log(row, step=following, commit=True)
