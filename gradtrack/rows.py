"""The rows that steps leave where rows go."""

from __future__ import annotations

from collections.abc import Sequence

from gradtrack.config import GradientConfig
from gradtrack.outcome import Outcome, late_records, talk, to_record
from gradtrack.record.panels import Dashboard
from gradtrack.record.sink import Sink
from gradtrack.records import Panel


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
