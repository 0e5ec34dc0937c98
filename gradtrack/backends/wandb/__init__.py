"""Records as history rows of Weights & Biases, in the user's run or in a run of their own."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, final

from gradtrack.backends.base import Backend, package_of
from gradtrack.backends.wandb.charts import Show
from gradtrack.backends.wandb.columns import Columns
from gradtrack.backends.wandb.history import Index, check_attached, check_own, files_of
from gradtrack.backends.wandb.own_run import RunEnding, open_run, place_of, project_of
from gradtrack.backends.wandb.rows import Rows, StepMode, rows_of
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError, UsageError
from gradtrack.records import Identity, Record, RunInfo
from gradtrack.support.redact import redact
from gradtrack.support.regular_files import is_inside

_logger = logging.getLogger("gradtrack")

_ALERT_SECONDS: Final = 300


@final
class WandbBackend(Backend):
    """A backend for Weights & Biases that costs the user's run none of its rows.

    It writes to `run`, else to the run that is open by the first record, else to a run of its own, which it opens then
    and ends. A run has one step counter for everybody, and rows behind it are dropped. `step_mode` says
    what happens to it in a run of the user's: `polite` never moves it, so that our rows join the user's and what finds
    none of them is written when the run ends; `row` commits every row by itself; `step` logs at the record's own step.
    The metrics in `withhold` are left out, and `train/grad_norm` is where another callback writes it to the same run.
    `alerts=True` alerts on critical issues, on each at most every five minutes.
    `run_name` is `name` for a configuration, in which `name` is that of the backend.
    """

    own_links: ClassVar[frozenset[str]] = frozenset({"debug-core.log"})

    def __init__(
        self,
        *,
        run: Any = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        directory: str | None = None,
        step_mode: StepMode = "polite",
        withhold: Collection[str] = (),
        alerts: bool = False,
    ) -> None:
        if step_mode not in ("polite", "row", "step"):
            raise UsageError(f"wandb: step_mode {step_mode!r}: expected 'polite', 'row' or 'step'.")
        if run is not None and not callable(getattr(run, "log", None)):
            raise UsageError(f"wandb: run {run!r}: expected a run. Pass what wandb.init() returned.")
        self._wandb = package_of("wandb")
        self._own = {"project": project, "entity": entity, "name": run_name or name, "id": run_id, "dir": directory}
        self._joins = run is None and run_id is None and project is None
        """Whether any run that is open will do."""
        self._run: Any = run
        self._owned = run is None
        self._mode = step_mode
        self._alerts = alerts
        self._alerted: dict[str, float] = {}
        self._partial: set[Identity] = set()
        self._told: set[str] = set()
        self._closed = False
        self._written = 0
        self._columns = Columns(self._wandb, withhold, owned=self._owned, tell=self._tell)
        self._show = Show(self._wandb, self._tell)
        self._info: RunInfo | None = None
        self._rows: Rows | None = None
        self._ending: RunEnding | None = None
        self._index = Index()
        if run is not None:
            self._attach(run)
        self._join()

    @property
    def run(self) -> Any:
        """Return the W&B run, or None before a run of our own is opened."""
        return self._run

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("wandb backend: it is closed. Make a new one for another run.")
        if not records:
            return
        try:
            self._join()
            if self._run is None:
                self._learn(records)
                self._run = open_run(self._wandb, self._own, self._info, self._tell)
                self._attach(self._run)
            if self._rows is None:
                raise PermanentBackendError(
                    "wandb: W&B is disabled and keeps nothing: expected the mode online, offline or shared. The "
                    "journal has the rows; `gradtrack replay` delivers them where W&B is not disabled."
                )
            for record in records:
                if record.identity not in self._partial:
                    self._rows.write(self._columns.row(self._run, record), record.step)
                    self._partial.add(record.identity)
                    self._written += 1
                    self._show.take([record], written=True)
                    if self._alerts:
                        self._alert(record)
        except Exception as fault:
            raise _error_of(fault) from None
        self._partial.clear()

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        if self._run is None or self._rows is None:
            return
        self._show.gather()
        try:
            self._rows.close()
            if self._owned:
                self._put_show()
                self._run.finish(exit_code=1 if failed else 0)
                check_own(self._run, self._written)
            elif self._written:
                check_attached(self._run)
        except Exception as fault:
            raise _error_of(fault) from None

    def address(self) -> dict[str, Any]:
        self._join()
        found: dict[str, Any] = {"run_id": self._own["id"], "directory": self._own["dir"]}
        found |= {"project": project_of(self._own) if self._owned else None}
        found |= {"entity": self._own["entity"] or os.environ.get("WANDB_ENTITY")}
        if self._run is not None and not self._run.disabled:
            found = {"run_id": self._run.id, "directory": str(Path(self._run.dir).absolute().parents[2])}
            found |= {"project": self._run.project, "entity": self._run.entity}
        found["withhold"] = sorted(self._columns.withheld)
        return {key: value for key, value in found.items() if value}

    def before_end(self, deliver: Callable[[], object]) -> None:
        self._join()
        if self._ending is not None:
            self._ending.before(deliver, first=True)

    def confine(self, directory: Path) -> None:
        """Keep away from settings of W&B, which name its server, that lie in the run's directory."""
        root = Path(os.environ.get("WANDB_DIR") or os.getcwd())
        for settings in (root / "wandb" / "settings", root / ".wandb" / "settings"):
            if os.path.lexists(settings) and is_inside(settings.parent, directory):
                raise BackendError(
                    f"wandb: {str(settings)!r} lies in the run's directory and may name a server: expected settings of "
                    "your own. Replay from another working directory."
                )

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        server = os.environ.get("WANDB_BASE_URL") or "that of W&B's own settings"
        return {"server": server, "directory": os.path.abspath(os.environ.get("WANDB_DIR") or os.getcwd())}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._run is None:
            return f"a new run in project {project_of(backend._own)} ({os.environ.get('WANDB_MODE', 'online')})"
        return f"run {backend._run.id} of project {backend._run.project}, which is open"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._learn(records)
        address = self.address()
        run_id, directory = address.get("run_id"), address.get("directory", ".")
        found = {(record.source, record.step) for record in records if record.identity in self._partial}
        if run_id is None:
            return found
        wanted = {(record.source, record.step): self._columns.named(record) for record in records}
        self._show.take(records, written=False)
        return found | self._index.find(files_of(run_id, directory), wanted)

    def _join(self) -> None:
        """Write to the user's run from now on, if it is open and no run was chosen yet."""
        if self._run is None and self._joins and not self._closed and self._wandb.run is not None:
            self._run, self._owned = self._wandb.run, False
            self._columns.owned = False
            self._attach(self._run)

    def _attach(self, run: Any) -> None:
        if getattr(run, "disabled", False):  # it keeps nothing
            return
        self._ending = None if self._owned else RunEnding(run)
        self._rows = rows_of(run, self._mode, self._ending, self._tell)
        if self._ending is not None:
            self._ending.before(self._put_show)

    def _learn(self, records: Sequence[Record]) -> None:
        """Know the training, which a run of our own is named after."""
        info = next((record.run for record in records if record.run is not None), None)
        if info is not None and self._run is None:
            self._info = info
            self._own |= place_of(self._own, info)

    def _alert(self, record: Record) -> None:
        for issue in record.issues:
            title = f"gradtrack: {issue.get('issue_type')} {issue.get('layer', '')}".strip()
            # A clock may be set back.
            recent = 0 <= record.time - self._alerted.get(title, -math.inf) < _ALERT_SECONDS
            if issue.get("severity") == "CRITICAL" and not recent:
                self._alerted[title] = record.time
                text = f"step {record.step}: {issue.get('message')}"
                self._run.alert(title=title, text=text, level="ERROR", wait_duration=_ALERT_SECONDS)

    def _put_show(self) -> None:
        if self._closed and not getattr(self._run, "_is_finished", False):
            self._show.put(self._run, self.address()["directory"])

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _logger.warning("wandb: %s", text)


def _error_of(fault: Exception) -> Exception:
    if isinstance(fault, BackendError):
        return fault
    text = redact(str(fault)) or type(fault).__name__
    if "is finished" in text:
        return PermanentBackendError(
            f"wandb: {text}: expected an open run. Close the manager before the run; "
            "`gradtrack replay` delivers the rows that came after."
        )
    return BackendError(f"wandb: {type(fault).__name__}: {text}")
