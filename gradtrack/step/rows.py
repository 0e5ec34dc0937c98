"""Stage 6: the record and the log lines of a step, and the dashboard that goes with the first of a pair."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from gradtrack.config import GradientConfig
from gradtrack.delivery.run import Sink
from gradtrack.records import Histogram, Panel, Record, tail_of
from gradtrack.reports import StepReport
from gradtrack.reports.panels import Dashboard
from gradtrack.step.data import Outcome

_logger = logging.getLogger("gradtrack")


class Rows:
    """Sends the rows of steps to a sink."""

    def __init__(self, config: GradientConfig, sink: Sink) -> None:
        self._config, self._sink = config, sink
        self._dashboard = Dashboard()

    @property
    def go_somewhere(self) -> bool:
        """Whether anything takes rows."""
        return bool(self._sink.backends) or self._sink.keeps_files

    def is_new(self, source: str) -> bool:
        """Whether a pair has had no row yet."""
        return source not in self._dashboard.shown

    def send(self, outcome: Outcome, panels: Sequence[Panel] = ()) -> None:
        """Send what a step leaves; with the first row of a pair the panels of its analyzers."""
        if not self.go_somewhere:
            return
        for record in late_records(outcome) if outcome.late else ():
            self._sink.write(record)
        if outcome.event:
            source = outcome.report.source
            shown = self._dashboard.take(source, panels) if self.is_new(source) else ()
            self._sink.write(to_record(outcome, self._config, shown))

    def talk(self, outcome: Outcome) -> None:
        """Log lines for a recorded step, as far as the configuration asks for it."""
        if outcome.event and (self._config.verbose_logging or self._config.debug_mode):
            talk(outcome, self._config)


def to_record(outcome: Outcome, config: GradientConfig, panels: tuple[Panel, ...] = ()) -> Record:
    """Return the row that goes to the backends; without `log_gradient_stats` it has health and clipping only."""
    report, facts = outcome.report, outcome.facts
    step, source, with_statistics = report.step, report.source, config.log_gradient_stats
    histograms: Mapping[str, Histogram] = {}
    if facts.histograms and with_statistics:
        name = f"train/grad_histogram{tail_of(source)}"
        histograms = {f"{name}/{group}" if group else name: found for group, found in facts.histograms.items()}
    return Record(
        step=step,
        time=report.time,
        metrics=facts.metrics(step, source, with_statistics=with_statistics),
        epoch=report.epoch,
        loss=facts.loss,
        source=source,
        panels=panels,
        issues=tuple(issue.model_dump(mode="json") for issue in outcome.issues) if outcome.issues else (),
        histograms=histograms,
    )


def late_records(outcome: Outcome) -> list[Record]:
    """Return the rows of earlier steps that became known with this one."""
    report = outcome.report
    tail = tail_of(report.source)
    return [
        Record(
            step=late.step,
            time=report.time,
            metrics={f"{name}{tail}": value for name, value in late.metrics().items()},
            source=report.source,
        )
        for late in outcome.late
    ]


def talk(outcome: Outcome, config: GradientConfig) -> None:
    """Log a line for a recorded step, and every parameter, as far as the configuration asks for it."""
    report = outcome.report
    if config.verbose_logging:
        clipping = report.clipping
        _logger.info(
            "step %d: loss %s, gradient norm %s -> %s%s, %s",
            report.step,
            _number(report.loss),
            _number(clipping.norm_before),
            _number(clipping.norm_after),
            " (clipped)" if clipping.clipped else "",
            report.health,
        )
    if config.debug_mode:
        for broken in contradictions(report):
            _logger.error("step %d: %s. This is a fault of gradtrack: please report it.", report.step, broken)
    if config.debug_mode and outcome.facts.rows is not None:
        for name, found in outcome.facts.parameters().items():
            _logger.debug(
                "step %d: %s norm %s mean %s",
                report.step,
                name,
                _number(found["norm"]),
                _number(found["mean"]),
            )


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
