"""The typed, frozen reports of a step and of a whole training."""

from gradtrack.reports.base import LateReport as LateReport
from gradtrack.reports.base import Report as Report
from gradtrack.reports.issues import HEALTHY as HEALTHY
from gradtrack.reports.issues import HealthReport as HealthReport
from gradtrack.reports.issues import Issue as Issue
from gradtrack.reports.issues import Issues as Issues
from gradtrack.reports.issues import IssueSeverity as IssueSeverity
from gradtrack.reports.issues import IssueType as IssueType
from gradtrack.reports.issues import usual_confidence as usual_confidence
from gradtrack.reports.step import StepReport as StepReport
from gradtrack.reports.summary import ClippingReport as ClippingReport
from gradtrack.reports.summary import ClippingSummary as ClippingSummary
from gradtrack.reports.summary import GradientStatistics as GradientStatistics
from gradtrack.reports.summary import GradientSummary as GradientSummary
from gradtrack.reports.summary import GroupStatistics as GroupStatistics
from gradtrack.reports.summary import HealthSummary as HealthSummary
from gradtrack.reports.summary import NanInfReport as NanInfReport
from gradtrack.reports.summary import NanInfSummary as NanInfSummary
from gradtrack.reports.summary import NonFiniteParameter as NonFiniteParameter
from gradtrack.reports.summary import NormSummary as NormSummary
from gradtrack.reports.summary import ParameterStatistics as ParameterStatistics
from gradtrack.reports.summary import RankStatistics as RankStatistics
from gradtrack.reports.summary import ScalerReport as ScalerReport
from gradtrack.reports.summary import SpikeReport as SpikeReport
from gradtrack.reports.summary import TrainingSummary as TrainingSummary
