"""The parts of reports: statistics, clipping, non-finite values, and the summary of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from gradtrack.reports import html
from gradtrack.reports.base import Report
from gradtrack.support.names import plural


class GroupClipping(Report):
    """The clipping of one group: its norm of the order `norm_type` before and after, its limit and the factor."""

    clipped: bool = False
    threshold: float
    coefficient: float = 1.0
    norm_before: float
    norm_after: float


class ClippingReport(Report):
    """The clipping of a step: the true norm before it, the norm after it, and how often clipping engages.

    Both are L2 norms of all gradients. With limits by group `threshold` is None, `coefficient` is the norm after over
    the norm before, and `groups` has the numbers of each group or pattern, or of `all` where `norm_type` is not 2.
    """

    enabled: bool = True
    clip_type: str = "norm"
    clipped: bool = False
    threshold: float | None = None
    coefficient: float = 1.0
    norm_before: float | None = None
    norm_after: float | None = None
    clip_rate: float = 0.0
    clipped_fraction: float | None = None
    norm_type: float = 2.0
    groups: dict[str, GroupClipping] = Field(default_factory=dict)


class NonFiniteParameter(Report):
    """The non-finite elements of one named tensor."""

    name: str
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.nan_count} NaN, {self.positive_inf_count} +Inf, {self.negative_inf_count} -Inf)"


NonFiniteAction = Literal["none", "skip", "replace", "raise", "report", "scaler", "off", "unchecked"]


class NanInfReport(Report):
    """The non-finite elements as they were before anything was changed, and what was done about them.

    `action` is `none` when everything was finite, `scaler` when a GradScaler decides, `off` when the check is switched
    off, and `unchecked` when the step was not measured.
    """

    nan_count: int = 0
    inf_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    parameters: list[NonFiniteParameter] = Field(default_factory=list)
    action: NonFiniteAction = "none"
    replaced_count: int = 0


class RankStatistics(Report):
    """The spread of the norms of the ranks' own parts of the gradients, before clipping.

    `nonfinite_ranks` says how many ranks hold a NaN or an infinity, and `first_nonfinite_rank` which is the first.
    """

    num_ranks: int
    norm_min: float
    norm_min_rank: int
    norm_max: float
    norm_max_rank: int
    norm_mean: float
    norm_std: float
    nonfinite_ranks: int = 0
    first_nonfinite_rank: int | None = None


class ScalerReport(Report):
    """The loss scale of a `GradScaler` at this step, where it is known, and how many steps it has left out so far.

    A scaler finds its scale by overflowing now and then; `skips_in_a_row` tells such a step from a training that is
    stuck.
    """

    scale: float | None = None
    skips: int = 0
    skips_in_a_row: int = 0


SpikeOutcome = Literal["skip", "clip", "rollback", "accepted", "listed"]


class SpikeReport(Report):
    """A spike, and what was done about it: how many deviations above its window a step is, and what is no spike.

    `action` is `accepted` after as many in a row as are allowed, and `listed` for a step that `skip_steps` leaves out.
    `in_a_row` and `count` are the spikes so far, in a row and in all.
    """

    action: SpikeOutcome
    norm_deviations: float | None = None
    norm_limit: float | None = None
    loss_deviations: float | None = None
    loss_limit: float | None = None
    in_a_row: int = 0
    count: int = 0


class GroupStatistics(Report):
    """The gradients of one group of parameters, over their finite elements; `total_norm` is the norm as well."""

    aliases_of_fields: ClassVar[Mapping[str, str]] = {"total_norm": "norm"}

    norm: float
    mean: float
    variance: float
    min: float
    max: float
    zero_fraction: float
    element_count: int
    nan_count: int = 0
    inf_count: int = 0
    weight_norm: float | None = None

    @property
    def total_norm(self) -> float:
        """Return the norm, under the name that it has for all gradients."""
        return self.norm


class ParameterStatistics(GroupStatistics):
    """The gradient of one parameter, over its finite elements; `aliases` are the other names of a tied parameter."""

    group: str = ""
    aliases: list[str] = Field(default_factory=list)
    touched_rows: int | None = None


class GradientStatistics(Report):
    """All gradients as one vector, before clipping and unscaled, over its finite elements.

    `variance` is the unbiased sample variance, and 0 for fewer than two elements. `norm` is the total norm as well.
    """

    aliases_of_fields: ClassVar[Mapping[str, str]] = {"norm": "total_norm"}

    total_norm: float
    mean: float
    variance: float
    std: float
    min: float
    max: float
    zero_fraction: float
    element_count: int
    nan_count: int
    inf_count: int
    missing: list[str] = Field(default_factory=list)

    @property
    def norm(self) -> float:
        """Return the total norm, under the name that it has for a group."""
        return self.total_norm


def has_finite(found: GroupStatistics | GradientStatistics) -> bool:
    """Whether any gradient element was finite, so that the statistics are about something."""
    return found.element_count > found.nan_count + found.inf_count


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

    def _rows(self) -> list[tuple[str, str]]:
        norms, bad = self.gradient_statistics.gradient_norms, self.nan_inf_summary
        return [
            ("gradient norm", f"{norms.mean:.4g} on average, {norms.min:.4g} to {norms.max:.4g}"),
            (
                "clipped",
                f"{plural(self.clipping_summary.clipped_steps, 'step')} ({self.clipping_summary.clip_rate:.1%})",
            ),
            ("non-finite", f"{plural(bad.nonfinite_steps, 'step')}, {bad.skipped_steps} skipped"),
            ("unhealthy", plural(self.health_issues.unhealthy_steps, "step")),
            *((kind, f"open on {plural(count, 'step')}") for kind, count in self.health_issues.issues.items()),
        ]

    def __str__(self) -> str:
        return "\n".join([plural(self.total_steps, "step"), *(f"  {name}: {value}" for name, value in self._rows())])

    def _repr_html_(self) -> str:
        return html.card(plural(self.total_steps, "step"), self._rows())
