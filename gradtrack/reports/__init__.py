"""The typed, frozen reports of a step and of a whole training."""

from gradtrack.reports.base import LateReport, Report
from gradtrack.reports.issues import HEALTHY, HealthReport, Issue, IssueSeverity, IssueType
from gradtrack.reports.step import StepReport
from gradtrack.reports.summary import (
    ClippingReport,
    ClippingSummary,
    GradientStatistics,
    GradientSummary,
    GroupStatistics,
    HealthSummary,
    NanInfReport,
    NanInfSummary,
    NonFiniteParameter,
    NormSummary,
    ParameterStatistics,
    RankStatistics,
    ScalerReport,
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
