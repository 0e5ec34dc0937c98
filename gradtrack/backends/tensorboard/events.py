"""TensorBoard's protocol buffers: scalars, custom scalars and images, made from records, panels and pictures."""

from __future__ import annotations

import html
import itertools
import math
import re
import struct
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from gradtrack.errors import MissingExtraError
from gradtrack.records import Histogram, Panel, Record, tail_of
from gradtrack.support.names import digest_of

STEP: Final = "gradtrack/step"
EXACT: Final = "gradtrack/exact/"
_SMALLEST_FLOAT: Final = float.fromhex("0x1p-126")
_LARGEST_FLOAT: Final = float.fromhex("0x1.fffffep+127")


@lru_cache(maxsize=4096)
def tag_of(name: str) -> str:
    """Return the tag of a metric: its name, or where that is no Unicode or our own axis, its spelling and a hash."""
    spelling = name.encode("utf-8", "backslashreplace").decode()
    reserved = name == STEP or name.startswith(f"{STEP}/")
    return f"{spelling}-gt{digest_of(name)}" if reserved or spelling != name else name


def axis_of(source: str) -> str:
    """Return the tag of the axis of a (model, optimizer) pair."""
    return f"{STEP}{tail_of(tag_of(source))}"


def description_of(run_id: str) -> str:
    """Return the text by which the rows of a run are found again."""
    return f"gradtrack run {run_id}"


class Events:
    """TensorBoard's protocol buffers, made from records."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.plugins.custom_scalar import layout_pb2
        except ImportError as fault:
            raise MissingExtraError("tensorboard backend", "tensorboard", "tensorboard") from fault
        self.event, self.origin, self.value, self.histogram_type = Event, SourceMetadata, Summary.Value, HistogramProto
        self.summary, self.metadata, self.tensor, self.shapes = Summary, SummaryMetadata, TensorProto, layout_pb2

    def first(self) -> Any:
        """Return the event that every event file begins with."""
        return self.event(
            wall_time=time.time(), file_version="brain.Event:2", source_metadata=self.origin(writer="gradtrack")
        )

    def of(self, record: Record, run_id: str, issues: Sequence[str]) -> Any:
        """Return one event that holds everything of a record."""
        values = [self.scalar(name, value) for name, value in record.metrics.items()]
        for name, value in record.metrics.items():
            if _needs_double(value):
                proto = self.tensor(dtype="DT_DOUBLE", double_val=[value])
                values.append(
                    self.value(tag=f"{EXACT}{tag_of(name)}", tensor=proto, metadata=self._metadata_of("scalars"))
                )
        values += [self.histogram(name, found) for name, found in record.histograms.items() if found.drawable]
        if issues:
            values.append(self.text(f"gradtrack/issues{tail_of(record.source)}", issues))
        step = self.value(tag=axis_of(record.source), simple_value=record.step, metadata=self._metadata_of("scalars"))
        step.metadata.summary_description = description_of(run_id)
        return self.event(step=record.step, wall_time=record.time, summary=self.summary(value=[*values, step]))

    def scalar(self, tag: str, value: float) -> Any:
        """Return a scalar that TensorBoard draws: its fast reader, the default, leaves out doubles."""
        if math.isfinite(value) and not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT:
            value = math.copysign(_LARGEST_FLOAT, value)
        return self.value(tag=tag_of(tag), simple_value=value)

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
        return self.value(tag=tag_of(tag), histo=proto)

    def text(self, tag: str, lines: Sequence[str]) -> Any:
        """Return a list in Markdown; names in it come from modules and are escaped."""
        text = "\n".join(f"- {html.escape(line, quote=False)}" for line in lines)
        return self.opaque(tag_of(tag), text.encode("utf-8", "backslashreplace"), "text")

    def opaque(self, tag: str, content: bytes, plugin: str) -> Any:
        """Return a value that a plugin of TensorBoard reads by itself."""
        tensor = self.tensor(dtype="DT_STRING", string_val=[content])
        return self.value(tag=tag, tensor=tensor, metadata=self._metadata_of(plugin))

    def _metadata_of(self, name: str) -> Any:
        return self.metadata(plugin_data=self.metadata.PluginData(plugin_name=name))


def _needs_double(value: float) -> bool:
    """Say whether a float would overflow or lose digits at its lower end."""
    return value != 0 and math.isfinite(value) and not _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT


def layout_event(events: Events, panels: Iterable[Panel], now: float) -> Any:
    """Return the event that arranges all panels; the newest one of a run counts."""
    shapes = events.shapes
    categories: dict[str, list[Any]] = {}
    for panel in panels:
        chart = _chart(shapes, panel)
        if chart is not None:
            categories.setdefault(panel.section, []).append(chart)
    found = [shapes.Category(title=name, chart=charts) for name, charts in categories.items()]
    content = shapes.Layout(category=found).SerializeToString()
    value = events.opaque("custom_scalars__config__", content, "custom_scalars")
    return events.event(wall_time=now, summary=events.summary(value=[value]))


def _chart(shapes: Any, panel: Panel) -> Any:
    if panel.kind == "band" and len(panel.metrics) == 3:
        value, lower, upper = panel.metrics
        series = shapes.MarginChartContent.Series(value=value, lower=lower, upper=upper)
        return shapes.Chart(title=panel.title, margin=shapes.MarginChartContent(series=[series]))
    if panel.kind in ("line", "multi-line", "band"):
        tags = [_pattern(metric) for metric in panel.metrics]
        return shapes.Chart(title=panel.title, multiline=shapes.MultilineChartContent(tag=tags))
    return None


def _pattern(metric: str) -> str:
    """Return the regular expression of a metric, which may end in a star; TensorBoard matches from the start only."""
    return f"^{re.escape(metric[:-1])}.+$" if metric.endswith("/*") else f"^{re.escape(metric)}$"


def image_tag(path: Path) -> str:
    """Return the tag of a picture."""
    return f"gradtrack/{path.stem}"


def image_event(events: Events, pictures: Iterable[tuple[Path, bytes]], *, run_id: str, step: int, now: float) -> Any:
    """Return one event that holds PNG files; what is none is left out."""
    values = []
    for path, content in pictures:
        if content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 24:
            width, height = struct.unpack(">II", content[16:24])
            image = events.summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
            values.append(events.value(tag=image_tag(path), image=image))
            values[-1].metadata.summary_description = description_of(run_id)
    return events.event(step=step, wall_time=now, summary=events.summary(value=values))
