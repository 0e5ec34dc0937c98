"""The verdict on a policy, and the report on its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gradtrack.analyzers.base import DefaultThreshold
from gradtrack.analyzers.rl_policy.history import FLOOR, PolicyHistory
from gradtrack.analyzers.rl_policy.observation import remarks
from gradtrack.analyzers.rl_policy.report import Adequacy, PolicyReport
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.statistics import mean

EXPLAINED_BY: Final[Mapping[IssueType, tuple[IssueType, ...]]] = {
    IssueType.ENTROPY_COLLAPSE: (IssueType.LR_TOO_HIGH, IssueType.STALE_GRAD),
    IssueType.INSUFFICIENT_EXPLORATION: (IssueType.ENTROPY_COLLAPSE,),
    IssueType.LOW_ACTION_STD: (IssueType.ENTROPY_COLLAPSE,),
}


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """The judgement of a policy by level, trend and returns; thresholds that were chosen weigh more than usual ones."""

    min_entropy: float
    min_std: float
    max_std: float

    def judge(self, report: PolicyReport, history: PolicyHistory, step: int) -> PolicyReport:
        """Return the report with its issues and the adequacy of its exploration."""
        adequacy = self._adequacy(report, history)
        issues = [*_collapse(report, history), *self._exploration(report, history, adequacy)]
        issues += self._spread(report, history)
        confidence = 0.9 if report.confidence == "high" else 0.5
        update = {"step": step, "window": max(len(history.levels), 1), "confidence": confidence}
        found = [issue.model_copy(update=update) for issue in issues]
        return report.model_copy(update={"issues": found, "exploration_adequacy": adequacy})

    def _adequacy(self, report: PolicyReport, history: PolicyHistory) -> Adequacy | None:
        if self._is_wide(report) and not history.pays:
            return "TOO_HIGH"
        chosen = not isinstance(self.min_entropy, DefaultThreshold) or history.pays is False
        return history.adequacy(report.entropy_level, float(self.min_entropy) if chosen else FLOOR)

    def _exploration(self, report: PolicyReport, history: PolicyHistory, adequacy: Adequacy | None) -> Iterator[Issue]:
        level, risk = report.entropy_level, report.entropy_collapse_risk
        if adequacy == "TOO_LOW":
            collapsing = [one.key for one in _collapse(report, history) if one.severity > IssueSeverity.LOW]
            if collapsing or risk != "MEDIUM":
                yield Issue.found(
                    IssueType.INSUFFICIENT_EXPLORATION,
                    "",
                    ("entropy_level", level, float(self.min_entropy)),
                    f"The policy explores little: its entropy is {level:.3g} of its largest.",
                    "Raise the entropy bonus or the temperature of the policy.",
                    severity=IssueSeverity.MEDIUM,
                    explained_by=collapsing[0] if collapsing else None,
                )
        elif adequacy == "TOO_HIGH":
            wide, std = self._is_wide(report), report.continuous_std_mean
            what = f"std is {std:.3g}" if wide else f"entropy level is {level:.3g}"
            yield Issue.found(
                IssueType.OVER_EXPLORATION,
                "",
                (
                    "continuous_std_mean" if wide else "entropy_level",
                    std if wide else level,
                    float(self.max_std) if wide else 0.95,
                ),
                f"The policy acts almost at random: its {what}.",
                "Lower the entropy bonus or the standard deviation; check that rewards reach the policy.",
                severity=_by_returns(self.max_std, history) if wide else IssueSeverity.MEDIUM,
            )

    def _spread(self, report: PolicyReport, history: PolicyHistory) -> Iterator[Issue]:
        std = _relative_std(report)
        if std is not None and std < self.min_std and not history.pays:
            yield Issue.found(
                IssueType.LOW_ACTION_STD,
                "",
                ("continuous_std_mean", std, float(self.min_std)),
                f"Actions hardly vary: their standard deviation is {std:.3g}.",
                "Raise the entropy bonus, or bound log_std from below.",
                severity=_by_returns(self.min_std, history),
            )

    def _is_wide(self, report: PolicyReport) -> bool:
        std = _relative_std(report)
        return std is not None and not report.squashed and std > self.max_std


def _collapse(report: PolicyReport, history: PolicyHistory) -> Iterator[Issue]:
    level, risk = report.entropy_level, report.entropy_collapse_risk
    if level is None or risk in (None, "LOW"):
        return
    informed = risk == "MEDIUM" and level < FLOOR
    trend = "" if report.entropy_slope is None else f" and changes by {report.entropy_slope:.2g} per observation"
    reason = " Returns do not rise." if history.pays is False else ""
    if informed:
        reason = " Its actions depend on the state, so it may simply be sure; pass episode_return to tell."
    yield Issue.found(
        IssueType.ENTROPY_COLLAPSE,
        "",
        ("entropy_level", level, FLOOR),
        f"The policy's entropy is {level:.3g} of its largest{trend}.{reason}",
        "Raise the entropy bonus, lower the learning rate or the number of epochs per batch.",
        severity=IssueSeverity.LOW if informed else IssueSeverity[str(risk)],
    )


def _relative_std(report: PolicyReport) -> float | None:
    """Return the standard deviation, relative to half of the action range where that is known."""
    return report.continuous_relative_std_mean or report.continuous_std_mean


def _by_returns(threshold: float, history: PolicyHistory) -> IssueSeverity:
    """Return LOW for a threshold that the user did not choose, unless returns say that something is wrong."""
    sure = not isinstance(threshold, DefaultThreshold) or history.pays is False
    return IssueSeverity.MEDIUM if sure else IssueSeverity.LOW


_INFORMED: Final = 0.5
_TOLD: Final = 0.1
_AVERAGED: Final = frozenset(PolicyReport.__pydantic_fields__) - {"num_states", "squashed"}


def sum_up(
    samples: Sequence[dict[str, Tensor]], history: PolicyHistory, returns: Sequence[float | None]
) -> PolicyReport:
    """Average samples by their states, and take each of them into the history."""
    rows = [_floats(sample) for sample in samples]
    levels = [_level(row) for row in rows]
    for level, episode_return in zip(levels, returns, strict=True):
        history.add(level, episode_return)
    values = {name: _weighted(rows, name) for name in dict.fromkeys(name for row in rows for name in row)}
    level = mean([level for level in levels[-max(len(levels) // 4, 1) :] if level is not None])
    conditional = values.get("discrete_entropy_mean", values.get("continuous_entropy_mean"))
    total = values.setdefault("marginal_entropy", values.get("continuous_marginal_entropy"))
    information = None if total is None or conditional is None else max(total - conditional, 0.0)
    spread = values.get("marginal_entropy_normalized")
    alone = "continuous_entropy_mean" not in values  # beside a continuous part, the level may be that of the other
    informed = alone and spread is not None and level is not None and spread - level > _INFORMED * (1 - level)
    history.blind = information is not None and (information < _TOLD if spread is None else spread < 2 * FLOOR)
    known = [found for found in returns if found is not None]
    return PolicyReport(
        **{name: value for name, value in values.items() if name in _AVERAGED},
        squashed=bool(values.get("squashed")),
        continuous_entropy_normalized=values.get("continuous_range_mean"),
        conditional_entropy=conditional,
        state_information=information,
        entropy_level=level,
        entropy_slope=history.slope,
        entropy_collapse_risk=history.risk(level, informed=informed),
        confidence="low" if history.pays is None else "high",
        episode_return=known[-1] if known else None,
        notes=remarks(rows),
        num_observations=len(rows),
        num_states=int(sum(row["num_states"] for row in rows)),
    )


def _level(row: Mapping[str, float]) -> float | None:
    """Return the lowest normalised entropy of a sample's parts; for a Gaussian of unknown range its std, at most 1."""
    parts = [row[name] for name in ("discrete_entropy_normalized", "continuous_range_mean") if name in row]
    if "continuous_range_mean" not in row and "continuous_std_mean" in row:
        parts.append(min(row["continuous_std_mean"], 1.0))
    finite = [part for part in parts if math.isfinite(part)]
    return min(finite) if finite else None


def _floats(sample: Mapping[str, Tensor]) -> dict[str, float]:
    stacked = torch.stack([value.detach().double().reshape(()).cpu() for value in sample.values()])
    return dict(zip(sample, stacked.tolist(), strict=True))


def _weighted(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    known = [(row[name], row["num_states"]) for row in rows if name in row and math.isfinite(row[name])]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else None
