"""Alerts on critical issues, rarely."""

from __future__ import annotations

import math
from typing import Any, Final

from gradtrack.records import Record

_SECONDS: Final = 300


class Alerts:
    """Alerts on critical issues, on each at most every five minutes."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def send(self, run: Any, record: Record) -> None:
        """Send what a record gives reason for."""
        for issue in record.issues:
            title = f"gradtrack: {issue.get('issue_type')} {issue.get('layer', '')}".strip()
            recent = 0 <= record.time - self._times.get(title, -math.inf) < _SECONDS  # a clock may be set back
            if issue.get("severity") == "CRITICAL" and not recent:
                self._times[title] = record.time
                text = f"step {record.step}: {issue.get('message')}"
                run.alert(title=title, text=text, level="ERROR", wait_duration=_SECONDS)
