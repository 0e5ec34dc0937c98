"""What a user receives: the typed, frozen reports of a step and of a whole training."""

from gradtrack.reports.base import LateReport, Report
from gradtrack.reports.issues import HEALTHY, HealthReport, Issue, IssueSeverity, IssueType
from gradtrack.reports.parts import (
    ClippingReport,
    GradientStatistics,
    GroupStatistics,
    NanInfReport,
    NonFiniteParameter,
    ParameterStatistics,
    RankStatistics,
    ScalerReport,
)
from gradtrack.reports.step import StepReport
from gradtrack.reports.summary import (
    ClippingSummary,
    GradientSummary,
    HealthSummary,
    NanInfSummary,
    NormSummary,
    TrainingSummary,
)

__all__ = [
    "HEALTHY",
    "ClippingReport",
    "ClippingSummary",
    "GradientStatistics",
    "GradientSummary",
    "GroupStatistics",
    "HealthReport",
    "HealthSummary",
    "Issue",
    "IssueSeverity",
    "IssueType",
    "LateReport",
    "NanInfReport",
    "NanInfSummary",
    "NonFiniteParameter",
    "NormSummary",
    "ParameterStatistics",
    "RankStatistics",
    "Report",
    "ScalerReport",
    "StepReport",
    "TrainingSummary",
]
