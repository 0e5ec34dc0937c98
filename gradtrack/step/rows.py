"""Stage 6: rows: the record and the log lines of a step, with the dashboard on the first record of a pair."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gradtrack.config import GradientConfig
from gradtrack.delivery.run import Sink
from gradtrack.records import Histogram, Panel, Record, tail_of
from gradtrack.reports import StepReport
from gradtrack.reports.panels import CORE_PANELS, panels_of
from gradtrack.step.data import StepData

_logger = logging.getLogger("gradtrack")
_PLACES: Final = 4
_NOWHERE: Final[Mapping[int, int]] = MappingProxyType({})


class Rows:
    """Sends the records of steps to a sink, and logs lines for them."""

    def __init__(self, config: GradientConfig, sink: Sink) -> None:
        self._config, self._sink = config, sink
        self._with_panels: set[str] = set()
        self._axes: dict[str, dict[int, int]] = {}
        """The places of the last steps of each pair on the user's own axis, if that was given."""
        self._caveats: dict[str, list[str]] = {}

    def place(self, source: str, step: int, axis: int) -> None:
        """Put the rows of a coming step at a place of the user's own axis."""
        known = self._axes.setdefault(source, {})
        known[step] = axis
        if len(known) > _PLACES:
            del known[next(iter(known))]

    def add_caveats(self, source: str, texts: Iterable[str]) -> None:
        """Log what the numbers of a pair do not show, and put it into its next row."""
        for text in texts:
            _logger.warning("%s%s", f"{source}: " if source else "", text)
            self._caveats.setdefault(source, []).append(text)

    def record(self, report: StepReport, data: StepData, panels: Callable[[], Sequence[Panel]]) -> None:
        """Send the records of a step to the sink, and log lines for it as far as the configuration asks for that.

        The first row of a pair has the panels of its analyzers.
        """
        if self._sink.backends or self._sink.keeps_files:
            self._send(data, panels)
        if data.event and self._config.verbose_logging:
            _logger.info("%s", report)
        if data.event and self._config.debug_mode:
            _log_details(report, data)

    def _send(self, data: StepData, panels: Callable[[], Sequence[Panel]]) -> None:
        tail, places = tail_of(data.source), self._axes.get(data.source, {})
        for late in data.late:  # reports of earlier steps, which analyzers completed on this one
            metrics = {f"{name}{tail}": value for name, value in late.metrics().items()}
            step = _placed(late.step, places)
            self._sink.write(Record(step=step, time=data.time, metrics=metrics, source=data.source))
        if data.event:
            shown: tuple[Panel, ...] = ()
            if data.source not in self._with_panels:
                self._with_panels.add(data.source)
                shown = panels_of((*CORE_PANELS, *panels()), data.source)
            caveats = tuple(self._caveats.pop(data.source, ()))
            self._sink.write(to_record(data, self._config, shown, places, caveats))


def _placed(step: int, places: Mapping[int, int]) -> int:
    """Return where a step lies on the user's axis; one that is long ago lies before those that are known."""
    return places.get(step, min(places.values())) if places else step


def to_record(
    data: StepData,
    config: GradientConfig,
    panels: tuple[Panel, ...] = (),
    places: Mapping[int, int] = _NOWHERE,
    caveats: tuple[str, ...] = (),
) -> Record:
    """Return the record of a step for the backends; without `log_gradient_stats` it has health and clipping only."""
    with_statistics = config.log_gradient_stats
    histograms: Mapping[str, Histogram] = {}
    if data.histograms and with_statistics:
        name = f"train/grad_histogram{tail_of(data.source)}"
        histograms = {f"{name}/{group}" if group else name: found for group, found in data.histograms.items()}
    issues = [issue.model_dump(mode="json") for issue in data.issues]
    return Record(
        step=_placed(data.step, places),
        time=data.time,
        metrics=data.metrics(with_statistics=with_statistics),
        epoch=data.epoch,
        loss=data.loss,
        source=data.source,
        panels=panels,
        issues=tuple({**issue, "step": _placed(issue["step"], places)} for issue in issues),
        histograms=histograms,
        caveats=caveats,
    )


def _log_details(report: StepReport, data: StepData) -> None:
    """Log what contradicts itself in a report, and a line for every parameter."""
    for broken in contradictions(report):
        _logger.error("step %d: %s. This is a fault of gradtrack: please report it.", report.step, broken)
    for name, found in data.parameters().items() if data.rows is not None else ():
        norm, mean = _number(found["norm"]), _number(found["mean"])
        _logger.debug("step %d: %s norm %s mean %s", report.step, name, norm, mean)


def contradictions(report: StepReport) -> list[str]:
    """Return where the numbers of a report contradict one another."""
    found, clipping, whole = [], report.clipping, report.statistics
    if whole is not None and report.groups:
        together = math.hypot(*(group.norm for group in report.groups.values()))
        if not math.isclose(together, whole.total_norm, rel_tol=1e-6):
            found.append(f"the groups have a norm of {together:.9g} together, the whole has {whole.total_norm:.9g}")
        count = sum(group.element_count for group in report.groups.values())
        if count != whole.element_count:
            found.append(f"the groups have {count} elements together, the whole has {whole.element_count}")
    after, limit = clipping.norm_after, clipping.threshold
    scaled = clipping.clipped and clipping.clip_type in ("norm", "adaptive", "zscore")
    if scaled and after is not None and limit is not None and after > limit * (1 + 1e-6):
        found.append(f"the norm after clipping {after:.9g} is above its limit {limit:.9g}")
    return found


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"
