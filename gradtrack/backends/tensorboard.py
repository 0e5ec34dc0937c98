"""Records as TensorBoard event files, in a directory of their own or through the user's SummaryWriter."""

from __future__ import annotations

import dataclasses
import html
import itertools
import logging
import math
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

from gradtrack.backends.base import Backend
from gradtrack.errors import BackendError, ClosedError, MissingExtraError, PermanentBackendError, UsageError
from gradtrack.records import Histogram, Panel, Record, RunInfo

STEP: Final = "gradtrack/step"
EXACT: Final = "gradtrack/exact/"
_SUB_RUN: Final = "gradtrack"
_LATE_RUN: Final = "gradtrack-late"
_SMALLEST_FLOAT: Final = float.fromhex("0x1p-126")
_LARGEST_FLOAT: Final = float.fromhex("0x1.fffffep+127")
_logger = logging.getLogger("gradtrack")
_file_numbers = itertools.count()


@final
class TensorBoardBackend(Backend):
    """A backend for TensorBoard that has every record in the file when `write` returns.

    With `writer`, the scalars join the user's own run; the writer is flushed and never closed. Otherwise they go to
    event files in `log_dir`, which is `tensorboard` in the run directory unless it is given. The layout of the panels
    goes to the sub-run `gradtrack` in both cases. A value is stored as a float, or as a double where a float would
    overflow, underflow or miscount; `precision="double"` stores every value as a double. The metrics in `withhold` are
    left out, for those that somebody else writes to the same run.
    """

    def __init__(
        self, *, log_dir: str | Path | None = None, writer: Any = None, withhold: Collection[str] = ()
    ) -> None:
        if log_dir is not None and writer is not None:
            raise UsageError("tensorboard: log_dir and writer were given: expected one of them. Leave log_dir out.")
        self._events = _Events()
        self._withheld = frozenset(withhold)
        self._writer = None if writer is None else _UserRun(writer)
        directory = log_dir if self._writer is None else self._writer.directory
        self._directory = None if directory is None else Path(directory).absolute()
        self._run: _UserRun | _EventFile | None = self._writer
        self._late: _EventFile | None = None
        self._layout: _EventFile | None = None
        self._panels: list[Panel] = []
        self._run_id = ""
        self._reached: dict[str, int] = {}
        self._issues: dict[str, tuple[str, ...]] = {}
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("tensorboard backend: it is closed. Make a new one for another run.")
        for record in records:
            if record.run is not None:
                self._open(record.run)
        panels = [panel for record in records for panel in record.panels if panel not in self._panels]
        late = [record for record in records if record.step <= self._reached.get(record.source, -1)]
        on_time = [record for record in records if record not in late] if late else records
        run, late_run, layout = self._opened()
        run.append([(_key(record), self._event(record)) for record in on_time])
        late_run.append([(_key(record), self._event(record)) for record in late])
        if panels:
            layout.append([(("", 0, 0.0), self._events.layout([*self._panels, *panels], time.time()))])
            self._panels += panels

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        if not self._closed:
            self._closed = True
            if self._writer is not None and not self._writer.closed:
                self._writer.flush()

    def address(self) -> dict[str, Any]:
        withheld = {"withhold": sorted(self._withheld)} if self._withheld else {}
        return withheld if self._directory is None else {"log_dir": str(self._directory), **withheld}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._writer is not None:
            return f"the SummaryWriter of {backend._directory}"
        return f"event files in {backend._directory or 'tensorboard in the run directory'}"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        for record in records:
            if record.run is not None:
                self._open(record.run)
        if self._directory is None or (self._writer is not None and not self._writer.keeps_identity):
            return None
        there: dict[tuple[str, int, float], set[str]] = {}
        for directory in (self._directory, self._directory / _LATE_RUN):
            for source, step, when, tags in self._events.read_rows(directory, self._run_id):
                self._reached[source] = max(step, self._reached.get(source, -1))
                there.setdefault((source, step, when), set()).update(tags)
        return {
            (record.source, record.step)
            for record in records
            if there.get((record.source, record.step, record.time), set()) > set(record.metrics)
        }

    def _open(self, run: RunInfo) -> None:
        self._run_id = run.run_id
        if self._directory is None:
            parent = Path(run.run_dir) if run.run_dir else Path("gradtrack_runs") / run.run_id
            self._directory = (parent / "tensorboard").absolute()

    def _opened(self) -> tuple[_UserRun | _EventFile, _EventFile, _EventFile]:
        if self._directory is None:
            self._directory = Path("gradtrack_runs", "tensorboard").absolute()
        if self._run is None:
            self._run = _EventFile(self._directory, self._events)
        if self._late is None:
            self._late = _EventFile(self._directory / _LATE_RUN, self._events)
        if self._layout is None:
            self._layout = _EventFile(self._directory / _SUB_RUN, self._events)
        return self._run, self._late, self._layout

    def _event(self, record: Record) -> Any:
        if not self._withheld.isdisjoint(record.metrics):
            metrics = {name: value for name, value in record.metrics.items() if name not in self._withheld}
            record = dataclasses.replace(record, metrics=metrics)
        return self._events.of(record, self._run_id, self._new_issues(record))

    def _new_issues(self, record: Record) -> tuple[str, ...]:
        """Return the open issues as text, where they are not those of the record before."""
        lines = tuple(f"**{issue.get('severity')}** {issue.get('message')}" for issue in record.issues)
        if lines == self._issues.get(record.source, ()):
            return ()
        self._issues[record.source] = lines
        return lines or ("no open issue",)


def _key(record: Record) -> tuple[str, int, float, frozenset[str]]:
    """Tell a record from others of its step: what an optimizer did to a step is a record of its own."""
    return record.source, record.step, record.time, frozenset(record.metrics)


def _description(run_id: str) -> str:
    return f"gradtrack run {run_id}"


def _series(name: str, source: str) -> str:
    return f"{name}/{source}" if source else name


class _Events:
    """TensorBoard's protocol buffers, made from records and read back."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.plugins.custom_scalar import layout_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as fault:
            raise MissingExtraError('pip install "gradtrack[tensorboard]"') from fault
        self.event, self.origin, self.value, self.histogram_type = Event, SourceMetadata, Summary.Value, HistogramProto
        self.summary, self.metadata, self.tensor, self.shapes = Summary, SummaryMetadata, TensorProto, layout_pb2
        self.record_writer = RecordWriter

    def first(self) -> Any:
        """Return the event that every event file begins with."""
        return self.event(
            wall_time=time.time(), file_version="brain.Event:2", source_metadata=self.origin(writer="gradtrack")
        )

    def of(self, record: Record, run_id: str, issues: Sequence[str]) -> Any:
        """Return one event that holds everything of a record."""
        values = [self.scalar(name, value) for name, value in record.metrics.items()]
        values += [self.exact(name, value) for name, value in record.metrics.items() if _needs_double(value)]
        values += [self.histogram(name, found) for name, found in record.histograms.items() if _drawable(found)]
        if issues:
            values.append(self.text(_series("gradtrack/issues", record.source), issues))
        step = self.scalar(_series(STEP, record.source), record.step)
        step.metadata.summary_description = _description(run_id)
        return self.event(step=record.step, wall_time=record.time, summary=self.summary(value=[*values, step]))

    def scalar(self, tag: str, value: float) -> Any:
        """Return a scalar that TensorBoard draws: its fast reader, the default, leaves out doubles."""
        shown = value if not math.isfinite(value) else max(-_LARGEST_FLOAT, min(value, _LARGEST_FLOAT))
        return self.value(tag=tag, simple_value=shown)

    def exact(self, tag: str, value: float) -> Any:
        """Return a double beside a scalar."""
        proto = self.tensor(dtype="DT_DOUBLE", double_val=[value])
        return self.value(tag=f"{EXACT}{tag}", tensor=proto, metadata=self._of_plugin("scalars"))

    def histogram(self, tag: str, found: Histogram) -> Any:
        """Return a histogram with the counts that were taken; its sums are those of the middles of the buckets."""
        middles = [(low + high) / 2 for low, high in itertools.pairwise(found.edges)]
        weighted = [middle * count for middle, count in zip(middles, found.counts, strict=True)]
        proto = self.histogram_type(
            min=found.edges[0],
            max=found.edges[-1],
            num=sum(found.counts),
            sum=sum(weighted),
            sum_squares=sum(middle * part for middle, part in zip(middles, weighted, strict=True)),
            bucket_limit=found.edges[1:],
            bucket=found.counts,
        )
        return self.value(tag=tag, histo=proto)

    def text(self, tag: str, lines: Sequence[str]) -> Any:
        """Return a list in Markdown; names in it come from modules and are escaped."""
        text = "\n".join(f"- {html.escape(line, quote=False)}" for line in lines)
        return self.value(tag=tag, tensor=self._string(text.encode()), metadata=self._of_plugin("text"))

    def layout(self, panels: Sequence[Panel], now: float) -> Any:
        """Return the event that arranges all panels; the newest one of a run counts."""
        categories: dict[str, list[Any]] = {}
        for panel in panels:
            chart = self._chart(panel)
            if chart is not None:
                categories.setdefault(panel.section, []).append(chart)
        layout = self.shapes.Layout(
            category=[self.shapes.Category(title=name, chart=charts) for name, charts in categories.items()]
        )
        value = self.value(
            tag="custom_scalars__config__",
            tensor=self._string(layout.SerializeToString()),
            metadata=self._of_plugin("custom_scalars"),
        )
        return self.event(wall_time=now, summary=self.summary(value=[value]))

    def read_rows(self, directory: Path, run_id: str) -> Iterator[tuple[str, int, float, set[str]]]:
        """Find source, step, time and tags of every record of a run in the event files of a directory."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for path in sorted(directory.glob("*tfevents*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if value.tag.startswith(STEP) and value.metadata.summary_description == _description(run_id):
                        tags = {value.tag for value in event.summary.value}
                        yield value.tag.removeprefix(STEP).removeprefix("/"), event.step, event.wall_time, tags

    def _chart(self, panel: Panel) -> Any:
        shapes = self.shapes
        if panel.kind == "band" and len(panel.metrics) == 3:
            value, lower, upper = panel.metrics
            series = shapes.MarginChartContent.Series(value=value, lower=lower, upper=upper)
            return shapes.Chart(title=panel.title, margin=shapes.MarginChartContent(series=[series]))
        if panel.kind in ("line", "multi-line", "band"):
            tags = [_pattern(metric) for metric in panel.metrics]
            return shapes.Chart(title=panel.title, multiline=shapes.MultilineChartContent(tag=tags))
        return None

    def _string(self, text: bytes) -> Any:
        return self.tensor(dtype="DT_STRING", string_val=[text])

    def _of_plugin(self, name: str) -> Any:
        return self.metadata(plugin_data=self.metadata.PluginData(plugin_name=name))


class _EventFile:
    """One event file in a directory of its own; a batch is in it as a whole or not at all."""

    def __init__(self, directory: Path, events: _Events) -> None:
        # TensorBoard reads the files of a directory in the order of their names.
        order = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}"
        self._path = directory / f"events.out.tfevents.{order}"
        self._events = events
        self._started = False

    def append(self, keyed: Iterable[tuple[object, Any]]) -> None:
        """Add events and hand them to the operating system."""
        found = [event.SerializeToString() for _, event in keyed]
        if not found:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as stream:
                self._append(stream, found)
        except OSError as fault:
            raise BackendError(
                f"tensorboard: {self._path.parent} cannot be written ({fault.strerror or fault}). "
                "The journal keeps the records; make room or give the directory back."
            ) from fault

    def _append(self, stream: Any, found: list[bytes]) -> None:
        end = stream.seek(0, os.SEEK_END)
        if end == 0:
            found = [self._events.first().SerializeToString(), *found]
            if self._started:
                _logger.warning("tensorboard: %s was removed; `gradtrack replay` brings back what it held", self._path)
        buffer = _Buffer()
        writer = self._events.record_writer(buffer)
        for event in found:
            writer.write(event)
        try:
            view = memoryview(buffer.content)
            while view:
                view = view[stream.write(view) :]
        except OSError:
            stream.truncate(end)
            raise
        self._started = True


class _Buffer:
    """What TensorBoard's record writer writes to."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> None:
        """Keep what was framed."""
        self.content += data


class _UserRun:
    """The user's own SummaryWriter: written to and flushed, never closed."""

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise UsageError(
                f"tensorboard: writer {type(writer).__name__}: expected a SummaryWriter. Pass the writer itself."
            )
        self._writer = writer
        self._taken: set[object] = set()
        found = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
        self.directory = None if found is None else str(found)
        # Another package's writer has protocol buffers of its own and takes single values only.
        self.keeps_identity = type(writer).__module__.startswith("torch.")

    @property
    def closed(self) -> bool:
        """Whether the user has closed the writer: torch's would open a second file without a word."""
        return getattr(self._writer, "all_writers", self) is None

    def append(self, keyed: Sequence[tuple[object, Any]]) -> None:
        """Add events to the user's run; after a fault, those that are in it already are left out."""
        if not keyed:
            return
        if self.closed:
            raise PermanentBackendError(
                "tensorboard: the SummaryWriter was closed before gradtrack. "
                "Close the manager first; `gradtrack replay` delivers the records that came after."
            )
        try:
            for key, event in keyed:
                if key not in self._taken:
                    self._add(event)
                    self._taken.add(key)
            self._writer.flush()
        except Exception as fault:
            raise BackendError(f"tensorboard: the SummaryWriter failed ({fault!r}).") from fault
        self._taken.clear()

    def flush(self) -> None:
        """Flush the writer."""
        if not self.closed:
            self._writer.flush()

    def _add(self, event: Any) -> None:
        if self.keeps_identity:
            self._writer.file_writer.add_event(event, event.step, event.wall_time)
            return
        for value in event.summary.value:
            if value.HasField("histo"):
                self._add_histogram(value, event)
            elif value.metadata.plugin_data.plugin_name == "text":
                self._writer.add_text(value.tag, value.tensor.string_val[0].decode(), event.step, event.wall_time)
            elif value.HasField("simple_value"):
                self._writer.add_scalar(value.tag, value.simple_value, event.step, event.wall_time)

    def _add_histogram(self, value: Any, event: Any) -> None:
        found = value.histo
        self._writer.add_histogram_raw(
            value.tag,
            found.min,
            found.max,
            found.num,
            found.sum,
            found.sum_squares,
            list(found.bucket_limit),
            list(found.bucket),
            event.step,
            walltime=event.wall_time,
        )


def _needs_double(value: float) -> bool:
    """Say whether a float would overflow or lose digits at its lower end."""
    return value != 0 and math.isfinite(value) and not _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT


def _drawable(found: Histogram) -> bool:
    return len(found.edges) == len(found.counts) + 1 > 1 and all(math.isfinite(edge) for edge in found.edges)


def _pattern(metric: str) -> str:
    """Return the regular expression of a metric, which may end in a star; TensorBoard matches from the start only."""
    return f"^{re.escape(metric[:-1])}.+$" if metric.endswith("/*") else f"^{re.escape(metric)}$"
