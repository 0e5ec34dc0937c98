"""The flat names under which a step goes to the trackers, from the plain values of its report's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gradtrack.records import tail_of
from gradtrack.reports.base import LateReport, Report
from gradtrack.reports.issues import HealthReport

Values = Mapping[str, Any]
_EXTREMES: Final = 3
_NOT_CHECKED: Final = frozenset({"off", "unchecked"})


def flat_metrics(
    *,
    step: int,
    source: str,
    skipped: bool,
    health: HealthReport,
    clipping: Values,
    nan_inf: Values,
    statistics: Values | None,
    groups: Mapping[str, Values],
    parameters: Mapping[str, Values],
    ranks: Values | None,
    scaler: Values | None,
    analyzers: Mapping[str, object],
) -> dict[str, float]:
    """Return the metrics of a step, `train/grad_*` first and then those of every analyzer.

    A part is what its report holds; what is missing of it has its default.
    """
    values: dict[str, float] = {}
    before, after, clips = clipping.get("norm_before"), clipping.get("norm_after"), clipping.get("enabled", True)
    if before is not None:
        values["train/grad_norm"] = before
    if clips and after is not None:
        values["train/grad_norm_clipped"] = after
    if statistics is not None:
        values["train/grad_variance"] = statistics["variance"]
        values["train/grad_mean"] = statistics["mean"]
        values["train/grad_std"] = statistics["std"]
        values["train/grad_max"] = statistics["max"]
        values["train/grad_min"] = statistics["min"]
        values["train/grad_zero_fraction"] = statistics["zero_fraction"]
    if nan_inf.get("action", "none") not in _NOT_CHECKED:
        values["train/grad_nan_count"] = float(nan_inf.get("nan_count", 0))
        values["train/grad_inf_count"] = float(nan_inf.get("inf_count", 0))
    if clips:
        values["train/grad_clip_coef"] = clipping.get("coefficient", 1.0)
        values["train/grad_clip_rate"] = clipping.get("clip_rate", 0.0)
        threshold = clipping.get("threshold")
        if threshold is not None:
            values["train/grad_clip_threshold"] = threshold
    if ranks is not None:
        values["train/grad_rank_norm_min"] = ranks["norm_min"]
        values["train/grad_rank_norm_max"] = ranks["norm_max"]
        values["train/grad_rank_norm_std"] = ranks["norm_std"]
    if scaler is not None:
        values["train/grad_scaler_skips"] = float(scaler["skips"])
        if scaler["scale"] is not None:
            values["train/grad_loss_scale"] = float(scaler["scale"])
    values["train/grad_skipped"] = 1.0 if skipped else 0.0
    values["train/grad_healthy"] = 1.0 if health.healthy else 0.0
    for issue in health.issues:
        name = f"train/grad_issues/{issue.issue_type.value.lower()}"
        values[name] = values.get(name, 0.0) + 1.0
    tail = tail_of(source)
    if tail:
        values = {f"{name}{tail}": value for name, value in values.items()}
    if groups or parameters:
        _add_parts(values, tail, groups, parameters)
    for report in analyzers.values():
        if isinstance(report, Report) and not (isinstance(report, LateReport) and report.step != step):
            values.update((f"{name}{tail}", value) for name, value in report.metrics().items())
    return values


def _add_parts(
    values: dict[str, float], tail: str, groups: Mapping[str, Values], parameters: Mapping[str, Values]
) -> None:
    """Add the metrics of each group, and the norms of the parameters with the largest and the smallest."""
    for group, found in groups.items():
        values[f"train/grad_norm{tail}/{group}"] = found["norm"]
        values[f"train/grad_variance{tail}/{group}"] = found["variance"]
        values[f"train/grad_mean{tail}/{group}"] = found["mean"]
    by_norm = sorted(parameters, key=lambda name: parameters[name]["norm"])
    for name in dict.fromkeys((*by_norm[-_EXTREMES:], *by_norm[:_EXTREMES])):
        values[f"train/grad_extreme{tail}/{name}"] = parameters[name]["norm"]
