"""The thresholds that a user may pass in absolute terms; unset, they do not act."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from gradtrack.diagnose.sample import Case
from gradtrack.reports import Issue, IssueSeverity, IssueType


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on the gradient norm of a parameter, its share of zeros, and its coefficient of variation."""

    vanishing: float | None = None
    exploding: float | None = None
    dead: float | None = None
    unstable_cv: float | None = None


def judge_absolutely(case: Case, thresholds: Thresholds) -> list[Issue]:
    """Return the parameters beyond the thresholds that were passed."""
    return [issue for name, norms in _norms(case).items() for issue in _judge(case, name, norms, thresholds)]


def _norms(case: Case) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in case.samples:
        for name, param in sample.params.items():
            if param.has_grad:
                found.setdefault(name, []).append(param.norm)
    return found


def _judge(case: Case, name: str, norms: list[float], limits: Thresholds) -> Iterator[Issue]:
    mean = statistics.fmean(norms)
    spread = statistics.pstdev(norms) / mean if mean > 0 else 0.0
    zeros = _zeros(case, name)
    for kind, value, limit, beyond, statistic in (
        (
            IssueType.VANISHING,
            mean,
            limits.vanishing,
            limits.vanishing is not None and mean < limits.vanishing,
            "mean_norm",
        ),
        (
            IssueType.EXPLODING,
            max(norms),
            limits.exploding,
            limits.exploding is not None and max(norms) > limits.exploding,
            "max_norm",
        ),
        (IssueType.DEAD, zeros, limits.dead, limits.dead is not None and zeros > limits.dead, "zero_share"),
        (
            IssueType.UNSTABLE,
            spread,
            limits.unstable_cv,
            limits.unstable_cv is not None and spread > limits.unstable_cv,
            "variation",
        ),
    ):
        if beyond and limit is not None and not math.isnan(value):
            yield Issue(
                issue_type=kind,
                severity=IssueSeverity.HIGH,
                layer=name,
                message=f"The {statistic} of the gradient of {name} is {value:.3g}, beyond the limit {limit:g} set.",
                statistic=statistic,
                value=value,
                threshold=limit,
                window=len(norms),
                step=case.step,
                confidence=0.5,
                recommendation="An absolute limit moves with the scale of the loss: leave it out to be judged without.",
            )


def _zeros(case: Case, name: str) -> float:
    found = [sample.params[name].zeros for sample in case.samples if name in sample.params]
    return statistics.fmean(found) if found else 0.0
