"""The table of results, with Wilson intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    name: str
    family: str
    faulty: bool
    right: bool
    naive_right: bool
    naive_alarm: bool
    issues: list[str]
    seconds: float
    alarm: bool


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson interval of a share."""
    if not total:
        return 0.0, 1.0
    share = hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def render(results: Sequence[Result], half: str) -> str:
    """Return the table as Markdown: recall by family of faults, then false alarms by family of healthy runs."""
    faulty = [result for result in results if result.faulty]
    healthy = [result for result in results if not result.faulty]
    lines = [f"{len(faulty)} faulty and {len(healthy)} healthy runs ({half} half).", ""]
    lines += ["| faulty runs | named right, type and layer | fixed thresholds |", "| --- | --- | --- |"]
    lines += _families(faulty, lambda part: sum(r.right for r in part), lambda part: sum(r.naive_right for r in part))
    lines += [_row("**all**", faulty, sum(r.right for r in faulty), sum(r.naive_right for r in faulty)), ""]
    lines += ["| healthy runs | false alarms | fixed thresholds |", "| --- | --- | --- |"]
    lines += _families(healthy, lambda part: sum(r.alarm for r in part), lambda part: sum(r.naive_alarm for r in part))
    lines += [_row("**all**", healthy, sum(r.alarm for r in healthy), sum(r.naive_alarm for r in healthy))]
    return "\n".join(lines)


def _families(results, ours, naive) -> list[str]:
    names = list(dict.fromkeys(result.family for result in results))
    parts = [[result for result in results if result.family == name] for name in names]
    return [
        f"| {name} | {ours(part)} of {len(part)} | {naive(part)} of {len(part)} |"
        for name, part in zip(names, parts, strict=True)
    ]


def _row(title: str, results: Sequence[Result], ours: int, naive: int) -> str:
    total = len(results)
    cells = [f"{hits} of {total} ({_percent(hits, total)})" for hits in (ours, naive)]
    return f"| {title} | {cells[0]} | {cells[1]} |"


def _percent(hits: int, total: int) -> str:
    low, high = wilson(hits, total)
    return f"{hits / max(1, total):.0%}, 95 % interval {low:.1%} to {high:.1%}"
