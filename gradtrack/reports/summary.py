"""The summary of a training."""

from __future__ import annotations

from pydantic import Field

from gradtrack import markup
from gradtrack.reports.base import Report


class NormSummary(Report):
    """The finite pre-clip norms of a training."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    max: float = 0.0
    last: float = 0.0


class GradientSummary(Report):
    """The statistics of all gradients of a training."""

    gradient_norms: NormSummary = NormSummary()


class HealthSummary(Report):
    """How many steps were unhealthy, and how often each type of issue was open."""

    unhealthy_steps: int = 0
    issues: dict[str, int] = Field(default_factory=dict)


class NanInfSummary(Report):
    """Non-finite elements seen, elements replaced and steps skipped in a training."""

    nan_count: int = 0
    inf_count: int = 0
    nonfinite_steps: int = 0
    total_replacements: int = 0
    skipped_steps: int = 0


class ClippingSummary(Report):
    """How often clipping engaged in a training."""

    clipped_steps: int = 0
    clip_rate: float = 0.0


class TrainingSummary(Report):
    """A training so far, in the layout of its keys: steps, norms, health, non-finite values and clipping."""

    total_steps: int = 0
    gradient_statistics: GradientSummary = GradientSummary()
    health_issues: HealthSummary = HealthSummary()
    nan_inf_summary: NanInfSummary = NanInfSummary()
    clipping_summary: ClippingSummary = ClippingSummary()

    def _repr_html_(self) -> str:
        norms, bad = self.gradient_statistics.gradient_norms, self.nan_inf_summary
        rows = [
            ("gradient norm", f"{norms.mean:.4g} on average, {norms.min:.4g} to {norms.max:.4g}"),
            ("clipped", f"{_steps(self.clipping_summary.clipped_steps)} ({self.clipping_summary.clip_rate:.1%})"),
            ("non-finite", f"{_steps(bad.nonfinite_steps)}, {bad.skipped_steps} skipped"),
            ("unhealthy", _steps(self.health_issues.unhealthy_steps)),
            *((kind, f"open on {_steps(count)}") for kind, count in self.health_issues.issues.items()),
        ]
        return markup.card(_steps(self.total_steps), rows)


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
