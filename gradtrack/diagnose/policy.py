"""What is wrong with a policy, from its report and its past."""

from __future__ import annotations

from gradtrack.analyzers.base import Suggested
from gradtrack.diagnose.policy_trend import FLOOR, PolicyHistory
from gradtrack.measure.policy_report import Adequacy, PolicyReport
from gradtrack.reports import Issue, IssueSeverity, IssueType


class PolicyVerdict:
    """The judgement of a policy by level, trend and returns; thresholds that were chosen weigh more than usual ones."""

    def __init__(self, min_entropy: float, min_std: float, max_std: float) -> None:
        self.min_entropy, self.min_std, self.max_std = min_entropy, min_std, max_std

    def judge(self, report: PolicyReport, history: PolicyHistory, step: int) -> PolicyReport:
        """Return the report with its issues and the adequacy of its exploration."""
        issues = [*self._collapse(report, history), *self._exploration(report, history), *self._spread(report, history)]
        found = [issue.model_copy(update={"step": step, "window": max(len(history.levels), 1)}) for issue in issues]
        return report.model_copy(update={"issues": found, "exploration_adequacy": self._adequacy(report, history)})

    def _adequacy(self, report: PolicyReport, history: PolicyHistory) -> Adequacy | None:
        if self._wide(report) and not history.pays:
            return "TOO_HIGH"
        chosen = not isinstance(self.min_entropy, Suggested)
        stagnant = history.pays is False
        least = float(self.min_entropy) if chosen or stagnant else FLOOR
        return history.adequacy(report.entropy_level, least)

    def _collapse(self, report: PolicyReport, history: PolicyHistory) -> list[Issue]:
        level, risk = report.entropy_level, report.entropy_collapse_risk
        if level is None or risk in (None, "LOW"):
            return []
        informed = risk == "MEDIUM" and level < FLOOR
        severity = IssueSeverity.LOW if informed else IssueSeverity[str(risk)]
        trend = "" if report.entropy_slope is None else f" and changes by {report.entropy_slope:.2g} per observation"
        reason = (
            " Its actions depend on the state, so it may simply be sure; pass episode_return to tell."
            if informed
            else " Returns do not rise."
            if history.pays is False
            else ""
        )
        return [
            Issue(
                issue_type=IssueType.ENTROPY_COLLAPSE,
                severity=severity,
                message=f"The policy's entropy is {level:.3g} of its largest{trend}.{reason}",
                statistic="entropy_level",
                value=level,
                threshold=FLOOR,
                confidence=_confidence(report),
                recommendation="Raise the entropy bonus, lower the learning rate or the number of epochs per batch.",
            )
        ]

    def _exploration(self, report: PolicyReport, history: PolicyHistory) -> list[Issue]:
        adequacy, level = self._adequacy(report, history), report.entropy_level
        if adequacy not in ("TOO_LOW", "TOO_HIGH"):
            return []
        collapsing = [issue for issue in self._collapse(report, history) if issue.severity > IssueSeverity.LOW]
        if adequacy == "TOO_HIGH":
            return [self._over(report, history)]
        if not collapsing and report.entropy_collapse_risk == "MEDIUM":
            return []
        return [
            Issue(
                issue_type=IssueType.INSUFFICIENT_EXPLORATION,
                severity=IssueSeverity.MEDIUM,
                message=f"The policy explores little: its entropy is {level:.3g} of its largest.",
                statistic="entropy_level",
                value=level,
                threshold=float(self.min_entropy),
                explained_by=collapsing[0].key if collapsing else None,
                confidence=_confidence(report),
                recommendation="Raise the entropy bonus or the temperature of the policy.",
            )
        ]

    def _over(self, report: PolicyReport, history: PolicyHistory) -> Issue:
        wide = self._wide(report)
        value = report.continuous_std_mean if wide else report.entropy_level
        return Issue(
            issue_type=IssueType.OVER_EXPLORATION,
            severity=self._by_returns(self.max_std, history) if wide else IssueSeverity.MEDIUM,
            message=f"The policy acts almost at random: its {'std' if wide else 'entropy level'} is {value:.3g}.",
            statistic="continuous_std_mean" if wide else "entropy_level",
            value=value,
            threshold=float(self.max_std) if wide else 0.95,
            confidence=_confidence(report),
            recommendation="Lower the entropy bonus or the standard deviation; check that rewards reach the policy.",
        )

    def _spread(self, report: PolicyReport, history: PolicyHistory) -> list[Issue]:
        """Judge a small standard deviation, relative to half of the action range where that is known."""
        std = report.continuous_relative_std_mean or report.continuous_std_mean
        if std is None or not std < self.min_std or history.pays:
            return []
        return [
            Issue(
                issue_type=IssueType.LOW_ACTION_STD,
                severity=self._by_returns(self.min_std, history),
                message=f"Actions hardly vary: their standard deviation is {std:.3g}.",
                statistic="continuous_std_mean",
                value=std,
                threshold=float(self.min_std),
                confidence=_confidence(report),
                recommendation="Raise the entropy bonus, or bound log_std from below.",
            )
        ]

    def _wide(self, report: PolicyReport) -> bool:
        std = report.continuous_relative_std_mean or report.continuous_std_mean
        return std is not None and not report.squashed and std > self.max_std

    def _by_returns(self, threshold: float, history: PolicyHistory) -> IssueSeverity:
        """Let a threshold that nobody chose weigh little, unless returns say that something is wrong."""
        sure = not isinstance(threshold, Suggested) or history.pays is False
        return IssueSeverity.MEDIUM if sure else IssueSeverity.LOW


def _confidence(report: PolicyReport) -> float:
    return 0.9 if report.confidence == "high" else 0.5
