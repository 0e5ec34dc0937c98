"""The usual fixed thresholds on the norms of parameter gradients, as a baseline."""

from __future__ import annotations

import math
import statistics

import torch

from benchmarks.diagnosis.driver import compensate
from benchmarks.diagnosis.run import Run, Scenario
from gradtrack.reports import Issue, IssueSeverity, IssueType

STEPS = 20


def alarms(scenario: Scenario, scale: float = 1.0) -> list[Issue]:
    """Return what norms below 1e-6 or above 10, zeros above 90 % and a variation above 3 say after 20 steps."""
    torch.manual_seed(scenario.seed)
    run = scenario.build()
    compensate(run, scale)
    norms: dict[str, list[float]] = {}
    zeros: dict[str, list[float]] = {}
    for step in range(STEPS):
        _step(run, step, scale, norms, zeros)
    return [issue for name in norms for issue in _judge(name, norms[name], zeros[name])]


def _step(run: Run, step: int, scale: float, norms: dict[str, list[float]], zeros: dict[str, list[float]]) -> None:
    for change in run.before:
        change(step)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    (run.forward(step) * scale).backward()  # type: ignore[no-untyped-call]
    for name, param in run.model.named_parameters():
        if param.grad is not None:
            grad = param.grad.to_dense()
            norms.setdefault(name, []).append(float(grad.norm()))
            zeros.setdefault(name, []).append(float((grad == 0).float().mean()))
    for optimizer in run.optimizers:
        optimizer.step()


def _judge(name: str, norms: list[float], zeros: list[float]) -> list[Issue]:
    finite = [norm for norm in norms if math.isfinite(norm)]
    found = []
    if len(finite) < len(norms):
        found.append(IssueType.NUMERICAL)
    if finite:
        mean = statistics.fmean(finite)
        if mean < 1e-6:
            found.append(IssueType.VANISHING)
        if max(finite) > 10:
            found.append(IssueType.EXPLODING)
        if statistics.fmean(zeros) > 0.9:
            found.append(IssueType.DEAD)
        if mean > 0 and statistics.pstdev(finite) / mean > 3:
            found.append(IssueType.UNSTABLE)
    return [
        Issue(issue_type=kind, severity=IssueSeverity.HIGH, layer=name, message="beyond a fixed threshold")
        for kind in found
    ]
