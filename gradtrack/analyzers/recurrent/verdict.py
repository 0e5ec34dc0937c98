"""The verdict on recurrent dynamics: against the horizon of the task, and not by a radius alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from gradtrack.analyzers.recurrent.report import CellDynamics, Criticality
from gradtrack.reports import Issue, IssueSeverity, IssueType

EXPLAINED_BY: Final[Mapping[IssueType, tuple[IssueType, ...]]] = {
    IssueType.SHORT_MEMORY: (IssueType.EXPLODING, IssueType.LR_TOO_HIGH),
    IssueType.LOW_EFFECTIVE_RANK: (
        IssueType.SUPERCRITICAL,
        IssueType.SHORT_MEMORY,
        IssueType.DEAD,
        IssueType.SATURATION,
    ),
}
_GROWTH: Final = 1e3
_LEFT: Final = 1e-3
_RANK_SHARE: Final = 0.05
_JUDGED_RANK: Final = 8.0


def judge(
    cells: Mapping[str, CellDynamics], horizon: int | None, *, broken: Iterable[str] = (), step: int = 0
) -> list[Issue]:
    """Return the issues of a model's recurrent cells, of which the `broken` ones had states that were not finite.

    Forgetting is judged only where a horizon was declared.
    """
    found = [_nonfinite(name) for name in broken]
    for name, cell in cells.items():
        found += [*_supercritical(name, cell, horizon), *_low_rank(name, cell)]
    found += [] if horizon is None else _short_memories(cells, horizon)
    return [issue.model_copy(update={"step": step}) for issue in found]


def criticality(growth: float | None, issues: Sequence[Issue], optimal: float, band: float) -> Criticality | None:
    """Name the growth per step: as the issues say, else as it lies below, within or above the band of the optimum."""
    types = {issue.issue_type for issue in issues}
    if growth is None:
        return None
    if IssueType.SUPERCRITICAL in types:
        return "SUPERCRITICAL"
    if IssueType.SHORT_MEMORY in types or growth < optimal - band:
        return "SUBCRITICAL"
    return "SUPERCRITICAL" if growth > optimal + band else "CRITICAL"


def _nonfinite(name: str) -> Issue:
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.CRITICAL,
        layer=name,
        message="Hidden states are NaN or infinite.",
        statistic="nonfinite_states",
        recommendation="Clip the gradient norm, lower the learning rate, or bound the activation.",
    )


def retained(cell: CellDynamics, horizon: int) -> tuple[float, bool] | None:
    """Return m(horizon) / m(1), and whether it had to be extrapolated beyond the window."""
    profile = cell.decay_profile
    if len(profile) < 2 or horizon < 1:
        return None
    if profile[1] == 0:
        return 0.0, False
    if horizon < len(profile):
        return profile[horizon] / profile[1], False
    rate = cell.temporal_decay_rate
    if rate is None:
        return None
    log_share = math.log(rate) * (horizon - len(profile) + 1) if rate > 0 else -math.inf
    return profile[-1] / profile[1] * math.exp(min(log_share, 700.0)), True


def _supercritical(name: str, cell: CellDynamics, horizon: int | None) -> Iterator[Issue]:
    if not cell.decay_profile or not cell.lyapunov_exponents:
        return
    steps = horizon or cell.window
    peak = max(cell.decay_profile)
    certain = cell.lyapunov_exponents[0] - 2 * (cell.lyapunov_error or 0.0)
    if peak > _GROWTH:
        message = f"A gradient grows {peak:.3g} times on its way back through {cell.window} steps."
        statistic, value, threshold = "largest_gradient_growth", peak, _GROWTH
    elif certain * steps > math.log(_GROWTH):
        growth = math.exp(cell.lyapunov_exponents[0])
        message = f"Differences between states grow {growth:.3g} times per step, over {steps} steps."
        statistic, value, threshold = "lyapunov_exponent_times_steps", certain * steps, math.log(_GROWTH)
    else:
        return
    yield Issue.found(
        IssueType.SUPERCRITICAL,
        name,
        (statistic, value, threshold),
        message,
        "Clip the gradient norm, start from an orthogonal recurrent matrix, or shorten the sequences.",
        window=cell.window,
    )


def _short_memories(cells: Mapping[str, CellDynamics], horizon: int) -> Iterator[Issue]:
    """Find the modules in which no layer and direction keeps a gradient up to the horizon."""
    for module in dict.fromkeys(cell.module for cell in cells.values()):
        parts = [cell for cell in cells.values() if cell.module == module]
        shares = [found for cell in parts if (found := retained(cell, horizon)) is not None]
        if not shares or max(shares)[0] >= _LEFT:
            continue
        share, extrapolated = max(shares)
        memory = max((cell.effective_memory_length or 0.0 for cell in parts), default=0.0)
        yield Issue.found(
            IssueType.SHORT_MEMORY,
            module,
            ("gradient_left_at_horizon", share, _LEFT),
            (
                f"Of a gradient {share:.2g} is left after the {horizon} steps of the declared horizon; "
                f"it falls to 1/e within {memory:.3g}."
            ),
            _remedy(parts),
            severity=IssueSeverity.MEDIUM,
            window=max(cell.window for cell in parts),
            confidence=0.7 if extrapolated else 1.0,
        )


def _remedy(parts: list[CellDynamics]) -> str:
    if any(cell.kind == "lstm" for cell in parts):
        return "Raise the forget gate's bias towards ln(horizon - 1), or read earlier steps by attention."
    if any(cell.kind == "gru" for cell in parts):
        return "Raise the update gate's bias, or read earlier steps by attention."
    return "Start from an orthogonal recurrent matrix, or use an LSTM or a GRU."


def _low_rank(name: str, cell: CellDynamics) -> Iterator[Issue]:
    rank, bound = cell.effective_rank, cell.rank_bound
    if rank is None or bound is None or bound < _JUDGED_RANK:
        return
    limit = 1 + _RANK_SHARE * (bound - 1)
    if rank < limit:
        yield Issue.found(
            IssueType.LOW_EFFECTIVE_RANK,
            name,
            ("effective_rank", rank, limit),
            f"The hidden states fill {rank:.2g} dimensions of the {bound:.3g} that size, input and data allow.",
            "Look for saturated gates or units; a smaller hidden size may do as well.",
            severity=IssueSeverity.LOW,
            window=cell.window,
            confidence=0.5,
        )
