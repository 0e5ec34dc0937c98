"""The flat names under which a step goes to the trackers, what they mean, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from gradtrack.records import Metric, tail_of
from gradtrack.reports.base import LateReport, Report

CORE_METRICS: Final = (
    Metric("train/grad_norm", "L2 norm of all gradients, unscaled, before clipping; NaN or Inf where one is."),
    Metric("train/grad_norm_clipped", "The same norm as the optimizer gets it.", when="clipping, step not skipped"),
    Metric("train/grad_variance", "Unbiased variance over all finite elements.", when="log_gradient_stats"),
    Metric("train/grad_mean", "Mean over all finite elements.", when="log_gradient_stats"),
    Metric("train/grad_std", "Square root of the variance.", when="log_gradient_stats"),
    Metric("train/grad_max", "The largest finite element, with its sign.", when="log_gradient_stats"),
    Metric("train/grad_min", "The smallest finite element, with its sign.", when="log_gradient_stats"),
    Metric("train/grad_zero_fraction", "Elements that are exactly zero.", unit="share", when="log_gradient_stats"),
    Metric(
        "train/grad_nan_count",
        "Elements that are NaN, before any is replaced.",
        unit="elements",
        when="enable_nan_inf_check",
    ),
    Metric("train/grad_inf_count", "Elements that are +Inf or -Inf.", unit="elements", when="enable_nan_inf_check"),
    Metric(
        "train/grad_clip_coef",
        "Factor by which clipping scaled the gradients; 1 where it did not engage.",
        when="clipping",
    ),
    Metric("train/grad_clip_rate", "Recent steps on which clipping engaged.", unit="share", when="clipping"),
    Metric(
        "train/grad_clip_threshold", "The limit of this step: of a norm, a value, or a ratio with agc.", when="clipping"
    ),
    Metric(
        "train/grad_clip_group_norm/<group>",
        "Norm of what one key of max_grad_norm limits, of the order norm_type, before clipping.",
        when="limits by group, norm_type",
    ),
    Metric(
        "train/grad_clip_group_coef/<group>",
        "Factor by which clipping scaled these gradients; 1 where it did not engage.",
        when="limits by group, norm_type",
    ),
    Metric("train/grad_spikes", "Spikes so far, in the row of each.", unit="steps", when="spike_action"),
    Metric("train/grad_rank_norm_min", "The smallest norm that a rank has of its own part.", when="per_rank, shards"),
    Metric("train/grad_rank_norm_max", "The largest norm that a rank has of its own part.", when="per_rank, shards"),
    Metric("train/grad_rank_norm_std", "How far these norms differ between ranks.", when="per_rank, shards"),
    Metric("train/grad_loss_scale", "The loss scale of a GradScaler.", when="scaler="),
    Metric("train/grad_scaler_skips", "Steps that a GradScaler has left out so far.", unit="steps", when="scaler="),
    Metric("train/grad_skipped", "1 where the optimizer's step was made a no-op.", unit="0 or 1"),
    Metric("train/grad_healthy", "1 while no issue of MEDIUM or above is open.", unit="0 or 1"),
    Metric(
        "train/grad_issues/<type>",
        "Open issues of one type, as in train/grad_issues/dead.",
        unit="issues",
        when="one is open",
    ),
    Metric("train/grad_histogram", "Elements of all gradients by size.", when="log_histograms"),
    Metric("train/grad_histogram/<group>", "Elements of one group by size.", when="log_histograms"),
    Metric(
        "train/grad_norm/<group>", "Norm of one group, over its finite elements.", when="grad_track_per_weight_matrix"
    ),
    Metric("train/grad_variance/<group>", "Variance of one group.", when="grad_track_per_weight_matrix"),
    Metric("train/grad_mean/<group>", "Mean of one group.", when="grad_track_per_weight_matrix"),
    Metric(
        "train/grad_extreme/<parameter>",
        "Norm of a single parameter, of the three with the largest norms and the three with the smallest.",
        when="track_parameters",
    ),
)
"""A sentence on every name that a step can have, but for those of the analyzers."""

Fields = Mapping[str, Any] | Report
Spreads = Iterable[tuple[str, tuple[float, float, float]]]
_STATISTICS: Final = {f"train/grad_{name}": name for name in ("variance", "mean", "std", "max", "min", "zero_fraction")}
_EXTREMES: Final = 3
_NOT_CHECKED: Final = frozenset({"off", "unchecked"})


def flat_metrics(report: Fields, step: int, source: str, groups: Spreads | None = None) -> dict[str, float]:
    """Return the metrics of a step, `train/grad_*` first and then those of every analyzer.

    `report` is a StepReport, or its fields as plain data; what is missing has its default. Pass `groups` where their
    norm, variance and mean are known without the rest.
    """
    values: dict[str, float] = {}
    clipping, nan_inf, health = report.get("clipping", {}), report.get("nan_inf", {}), report["health"]
    before, after, clips = clipping.get("norm_before"), clipping.get("norm_after"), clipping.get("enabled", True)
    if before is not None:
        values["train/grad_norm"] = before
    if clips and after is not None:
        values["train/grad_norm_clipped"] = after
    statistics = report.get("statistics")
    if statistics is not None:
        for name, field in _STATISTICS.items():
            values[name] = statistics[field]
    if nan_inf.get("action", "none") not in _NOT_CHECKED:
        values["train/grad_nan_count"] = float(nan_inf.get("nan_count", 0))
        values["train/grad_inf_count"] = float(nan_inf.get("inf_count", 0))
    if clips:
        values["train/grad_clip_coef"] = clipping.get("coefficient", 1.0)
        values["train/grad_clip_rate"] = clipping.get("clip_rate", 0.0)
        threshold = clipping.get("threshold")
        if threshold is not None:
            values["train/grad_clip_threshold"] = threshold
    ranks, scaler, spike = report.get("ranks"), report.get("scaler"), report.get("spike")
    if spike is not None and spike["action"] != "listed":
        values["train/grad_spikes"] = float(spike["count"])
    if ranks is not None:
        values |= {f"train/grad_rank_{name}": ranks[name] for name in ("norm_min", "norm_max", "norm_std")}
    if scaler is not None:
        values["train/grad_scaler_skips"] = float(scaler["skips"])
        if scaler["scale"] is not None:
            values["train/grad_loss_scale"] = float(scaler["scale"])
    values["train/grad_skipped"] = 1.0 if report.get("skipped") else 0.0
    values["train/grad_healthy"] = 1.0 if health.healthy else 0.0
    for issue in health.issues:
        name = f"train/grad_issues/{issue.issue_type.value.lower()}"
        values[name] = values.get(name, 0.0) + 1.0
    tail = tail_of(source)
    if tail:
        values = {f"{name}{tail}": value for name, value in values.items()}
    for group, found in clipping.get("groups", {}).items():
        values[f"train/grad_clip_group_norm{tail}/{group}"] = found["norm_before"]
        values[f"train/grad_clip_group_coef{tail}/{group}"] = found["coefficient"]
    if groups is None:
        of_groups = report.get("groups", {}).items()
        groups = ((group, (found["norm"], found["variance"], found["mean"])) for group, found in of_groups)
    for group, (norm, variance, mean) in groups:
        names = _names_of_group(group, tail)
        values[names[0]], values[names[1]], values[names[2]] = norm, variance, mean
    if parameters := report.get("parameters"):
        by_norm = sorted(parameters, key=lambda name: parameters[name]["norm"])
        for name in dict.fromkeys((*by_norm[-_EXTREMES:], *by_norm[:_EXTREMES])):
            values[f"train/grad_extreme{tail}/{name}"] = parameters[name]["norm"]
    for found in report.get("analyzers", {}).values():
        if isinstance(found, Report) and not (isinstance(found, LateReport) and found.step != step):
            values |= {f"{name}{tail}": value for name, value in found.metrics().items()}
    return values


@lru_cache(4096)
def _names_of_group(group: str, tail: str) -> tuple[str, str, str]:
    return f"train/grad_norm{tail}/{group}", f"train/grad_variance{tail}/{group}", f"train/grad_mean{tail}/{group}"
