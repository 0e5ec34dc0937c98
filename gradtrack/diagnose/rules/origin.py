"""The first module whose output is not finite."""

from __future__ import annotations

from gradtrack.diagnose.sample import Case
from gradtrack.reports import Issue, IssueSeverity, IssueType


def judge(case: Case) -> list[Issue]:
    """Open where a sampled forward pass made values that are not finite out of values that were."""
    for sample in case.samples:
        for node in sample.nodes:
            if not node.finite:
                return [_issue(case, sample.step, node.name, made=node.finite_input)]
    return []


def _issue(case: Case, step: int, layer: str, *, made: bool) -> Issue:
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.CRITICAL,
        layer=layer,
        message=f"{layer} is the first module whose output is NaN or infinite"
        + (", from finite inputs." if made else "."),
        statistic="nonfinite_output",
        value=1.0,
        threshold=0.0,
        window=len(case.samples),
        step=step,
        confidence=1.0,
        recommendation=f"Look at the weights and inputs of {layer} at step {step}: overflow, division by zero, log(0).",
    )
