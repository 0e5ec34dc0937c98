"""The profile of gains from block to block, its summary and its text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

AMPLIFYING: Final = 2.0
DAMPING: Final = 0.5
SILENT_SHARE: Final = 1e-3

Maybe = float | None


class GainFit(NamedTuple):
    """The gain per block from a least-squares line through the logarithms of the norms over depth.

    `slope` is the change of the logarithm per block on the way back; `gain_per_block` is its exponential.
    """

    gain_per_block: float
    slope: float
    standard_error: float
    num_blocks: int


class Discontinuity(NamedTuple):
    """The transition whose logarithmic gain is furthest from the median of all of them."""

    transition: int
    gain: float
    deviation: float


class SampleSpread(NamedTuple):
    """The gradient norms of the single samples of a batch at one block's output.

    `silent_fraction` is the share of samples whose norm is at most a thousandth of the largest, all of them where every
    norm is zero: a mean over the batch hides that a part of it no longer learns. What is not finite is left out of all
    of them, which are NaN where nothing is left.
    """

    min: float
    median: float
    max: float
    silent_fraction: float
    num_samples: int


class GainProfile:
    """The norms at the outputs of a chain of blocks, and which of the neighbours are connected.

    The gain of a transition is the earlier norm divided by the later one; it is None where a norm is missing or where
    the later block does not consume the earlier one's output. A norm that is at most `eps` times the largest one counts
    as zero, at every scale of the loss, and makes the gain of the transition before it infinite.
    """

    def __init__(self, norms: Sequence[Maybe], edges: Sequence[bool] | None = None, eps: float = 1e-30) -> None:
        self.norms = list(norms)
        self.edges = [True] * max(len(self.norms) - 1, 0) if edges is None else list(edges)
        finite = [norm for norm in self.norms if norm is not None and math.isfinite(norm)]
        self._zero = eps * max(finite, default=0.0)

    def gains(self) -> list[Maybe]:
        """Return the gain of each transition."""
        return [self._gain(index, lambda early, late: early / late) for index in range(len(self.edges))]

    def log_gains(self) -> list[Maybe]:
        """Return the natural logarithm of each gain, from a difference of logarithms."""
        return [self._gain(index, _log_ratio) for index in range(len(self.edges))]

    def cumulative_gains(self) -> list[Maybe]:
        """Return the norm of each block over that of the last block it is connected to without a gap."""
        logs = self.log_gains()
        found: list[Maybe] = []
        total: Maybe = 0.0 if self.norms and self.norms[-1] is not None else None
        for index in reversed(range(len(self.norms))):
            step = logs[index] if index < len(logs) else 0.0
            total = None if total is None or step is None else total + step
            found.append(None if total is None else _exp(total))
        return found[::-1]

    def fit(self) -> GainFit | None:
        """Fit a line to the logarithms of the norms over the longest connected run; None for under three blocks."""
        run = max(self._runs(), key=len, default=[])
        count = len(run)
        if count < 3:
            return None
        slope, begin = statistics.linear_regression(range(count), run)
        left = sum((log - begin - slope * depth) ** 2 for depth, log in enumerate(run))
        squares = count * (count**2 - 1) / 12
        return GainFit(_exp(-slope), -slope, math.sqrt(left / (count - 2) / squares), count)

    def discontinuity(self) -> Discontinuity | None:
        """Find the transition that stands out the most; None for under three transitions."""
        known = {index: log for index, log in enumerate(self.log_gains()) if log is not None and math.isfinite(log)}
        if len(known) < 3:
            return None
        middle = statistics.median(known.values())
        index = max(known, key=lambda index: abs(known[index] - middle))
        return Discontinuity(index, _exp(known[index]), known[index] - middle)

    def _gain(self, index: int, combine: Callable[[float, float], float]) -> Maybe:
        early, late = self.norms[index], self.norms[index + 1]
        if early is None or late is None or not self.edges[index]:
            return None
        if not (math.isfinite(early) and math.isfinite(late)):
            return math.nan
        if late <= self._zero:
            return math.inf
        return combine(early, late)

    def _runs(self) -> Iterator[list[float]]:
        run: list[float] = []
        for index, norm in enumerate(self.norms):
            usable = norm is not None and math.isfinite(norm) and norm > self._zero
            if run and not (usable and self.edges[index - 1]):
                yield run
                run = []
            if usable and norm is not None:
                run.append(math.log(norm))
        yield run


def summarise(gains: Sequence[Maybe], log_gains: Sequence[Maybe]) -> dict[str, float | int]:
    """Return the summary of a chain; mean, minimum and maximum are over the finite gains, NaN where there are none."""
    known = [gain for gain in gains if gain is not None and math.isfinite(gain)]
    logs = [log for log in log_gains if log is not None and math.isfinite(log)]
    return {
        "mean_gain": sum(known) / len(known) if known else math.nan,
        "min_gain": min(known, default=math.nan),
        "max_gain": max(known, default=math.nan),
        "mean_log_gain": sum(logs) / len(logs) if logs else math.nan,
        "num_amplifying": sum(gain > AMPLIFYING for gain in known),
        "num_damping": sum(gain < DAMPING for gain in known),
        "num_healthy": sum(DAMPING <= gain <= AMPLIFYING for gain in known),
        "num_vanishing": sum(gain == math.inf for gain in gains),
        "num_missing": sum(gain is None or math.isnan(gain) for gain in gains),
    }


def spread(norms: Sequence[float]) -> SampleSpread:
    """Describe the norms of the samples of a batch."""
    ordered = sorted(norm for norm in norms if math.isfinite(norm))
    if not ordered:
        return SampleSpread(math.nan, math.nan, math.nan, math.nan, len(norms))
    limit = SILENT_SHARE * ordered[-1]
    silent = sum(norm <= limit for norm in ordered) / len(ordered)
    return SampleSpread(ordered[0], statistics.median(ordered), ordered[-1], silent, len(norms))


def label(gain: Maybe) -> str:
    """Name what a gain means, by limits that are a rule of thumb."""
    if gain is None:
        return "no gradient"
    if math.isnan(gain):
        return "NOT FINITE"
    if math.isinf(gain):
        return "VANISHING"
    return "AMPLIFYING" if gain > AMPLIFYING else "DAMPING" if gain < DAMPING else "Healthy"


def _log_ratio(early: float, late: float) -> float:
    return math.log(early) - math.log(late) if early > 0 else -math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


_NO_FORWARD: Final = """\
GradientGainMonitor saw no forward pass, so there is no gradient to report.
Make the monitor before the forward pass: with GradientGainMonitor(blocks) as monitor: loss = ...; loss.backward().
Where the whole model is compiled, run this pass under torch.compiler.set_stance("force_eager")."""
_NO_BACKWARD: Final = """\
GradientGainMonitor saw {count} forward passes of blocks, but no gradient arrived at any of them.
Call loss.backward() before the report, and look for frozen blocks, no_grad() or detach() on the way to the loss."""


def write_report(
    profile: GainProfile, norm_type: str, spreads: Sequence[SampleSpread | None], *, num_forwards: int
) -> str:
    """Write norms, gains and summary, or why there are none."""
    if all(norm is None for norm in profile.norms):
        return _NO_BACKWARD.format(count=num_forwards) if num_forwards else _NO_FORWARD
    return "\n".join([*_norm_lines(profile, norm_type, spreads), "", *_gain_lines(profile), "", *_summary(profile)])


def _norm_lines(profile: GainProfile, norm_type: str, spreads: Sequence[SampleSpread | None]) -> Iterator[str]:
    yield f"Gradient Norms (at the output of each block, {norm_type}):"
    for index, (norm, found) in enumerate(zip(profile.norms, spreads, strict=True)):
        if norm is None or found is None:
            yield f"  Block {index:2d}: no gradient"
            continue
        silent = f" ({found.silent_fraction:.0%} of the samples are silent)" if found.silent_fraction > 0 else ""
        yield f"  Block {index:2d}: {norm:.4e}{silent}"


def _gain_lines(profile: GainProfile) -> Iterator[str]:
    yield "Gradient Gains (ratio of consecutive norms):"
    for index, (gain, log) in enumerate(zip(profile.gains(), profile.log_gains(), strict=True)):
        where = f"  Transition {index:2d} to {index + 1:2d}:"
        if gain is None or log is None:
            yield f"{where} {'no gradient' if profile.edges[index] else 'not connected'}"
        else:
            yield f"{where} gamma={gain:.4f}, log_gamma={log:.4f} [{label(gain)}]"


def _summary(profile: GainProfile) -> Iterator[str]:
    found = summarise(profile.gains(), profile.log_gains())
    yield "Summary Statistics:"
    yield f"  Mean gain: {found['mean_gain']:.4f}"
    yield f"  Min gain: {found['min_gain']:.4f}"
    yield f"  Max gain: {found['max_gain']:.4f}"
    yield f"  Mean log gain: {found['mean_log_gain']:.4f}"
    yield f"  Healthy (0.5 <= gamma <= 2.0): {found['num_healthy']}"
    yield f"  Damping (gamma < 0.5): {found['num_damping']}"
    yield f"  Amplifying (gamma > 2.0): {found['num_amplifying']}"
    yield f"  Vanishing (gamma = inf): {found['num_vanishing']}"
    yield f"  Missing: {found['num_missing']}"
    first = next((gain for gain in profile.cumulative_gains() if gain is not None), math.nan)
    yield f"  Cumulative gain from the last block to the first: {first:.4g}"
    fit, jump = profile.fit(), profile.discontinuity()
    if fit is not None:
        yield f"  Gain per block: {fit.gain_per_block:.4f} (slope {fit.slope:+.4f} ± {fit.standard_error:.4f})"
    if jump is not None and abs(jump.deviation) > math.log(2):
        here, there = jump.transition, jump.transition + 1
        yield f"  Largest discontinuity: transition {here} to {there}, gamma={jump.gain:.4f}"
    yield "  The limits 0.5 and 2.0 are heuristic: gains inside them can still multiply to nothing over many blocks."
