"""Rows and issues as lines of text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TextIO, final

from gradtrack.backends.base import Backend
from gradtrack.errors import ClosedError
from gradtrack.records import Record, tail_of
from gradtrack.support.names import one_line


@final
class ConsoleBackend(Backend):
    """A backend that prints one line per step, and one for every issue when it opens, changes or closes.

    What an optimizer did to a step, which is known later, makes no line. It prints to `stream`, or to what `sys.stdout`
    is at that moment.
    """

    inline: ClassVar[bool] = True

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._open: dict[str, dict[str, str]] = {}
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("console backend: it is closed. Make a new one for another run.")
        lines = [line for record in records for line in self._lines(record)]
        if lines:
            print("\n".join(lines), file=self._stream or sys.stdout, flush=True)

    def close(self, *, failed: bool = False) -> None:
        self._closed = True

    @classmethod
    def probe(cls, **options: Any) -> str:
        return "standard output" if options.get("stream") is None else "a stream"

    def _lines(self, record: Record) -> Iterator[str]:
        if record.tells_health or f"train/grad_norm{tail_of(record.source)}" in record.metrics:
            name = f" {one_line(record.source)}" if record.source else ""
            yield f"step {record.step}{name}: {_summary(record)}"
        if not record.tells_health:
            return
        known, now = self._open.get(record.source, {}), {}
        for issue in record.issues:
            key = f"{issue.get('issue_type')}:{issue.get('layer', '')}"
            now[key] = str(issue.get("severity"))
            if known.get(key) != now[key]:
                yield f"  {_issue(issue)}"
        for key in known.keys() - now.keys():
            yield f"  closed: {one_line(key.removesuffix(':'))}"
        self._open[record.source] = now


def _summary(record: Record) -> str:
    suffix = tail_of(record.source)
    values = {name: record.metrics.get(f"train/grad_{name}{suffix}") for name in ("norm", "norm_clipped", "variance")}
    norm, after = values["norm"], values["norm_clipped"]
    parts = [f"gradient norm {_number(norm)}"]
    if after is not None and after != norm:
        parts[0] += f" -> {_number(after)}"
    if values["variance"] is not None:
        parts.append(f"variance {_number(values['variance'])}")
    if record.metrics.get(f"train/grad_skipped{suffix}"):
        parts.append("skipped")
    if record.epoch is not None:
        parts.append(f"epoch {record.epoch}")
    return ", ".join(parts)


def _issue(issue: Mapping[str, Any]) -> str:
    where = f" at {issue['layer']}" if issue.get("layer") else ""
    where += f" of {issue['source']}" if issue.get("source") else ""
    text = f"[{issue.get('severity')}] {issue.get('issue_type')}{where}: {issue.get('message', '')}"
    return one_line(f"{text} {issue.get('recommendation', '')}".strip())


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
