"""The gains of a chain of blocks as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from gradtrack.measure.gains import GainProfile, SampleSpread, label, summarise

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
    yield from _over_depth(profile)
    yield "  The limits 0.5 and 2.0 are heuristic: gains inside them can still multiply to nothing over many blocks."


def _over_depth(profile: GainProfile) -> Iterator[str]:
    first = next((gain for gain in profile.cumulative_gains() if gain is not None), math.nan)
    yield f"  Cumulative gain from the last block to the first: {first:.4g}"
    fit, jump = profile.fit(), profile.discontinuity()
    if fit is not None:
        yield f"  Gain per block: {fit.gain_per_block:.4f} (slope {fit.slope:+.4f} ± {fit.standard_error:.4f})"
    if jump is not None and abs(jump.deviation) > math.log(2):
        here, there = jump.transition, jump.transition + 1
        yield f"  Largest discontinuity: transition {here} to {there}, gamma={jump.gain:.4f}"
