"""Rules about successive steps: to and fro, round and round, too large at first, or clipped by the loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of

_COSINE: Final = -0.3
_EXACT: Final = -0.8
_SHARE: Final = 0.8
_OSCILLATION_SAMPLES: Final = 4
_PARTS: Final = 4


def judge_oscillation(case: Case) -> Iterator[Issue]:
    """Open where the gradient turns round from step to step while its norm and the loss go up.

    Full-batch training at the edge of stability turns round as well, but its norm goes up and down again; small batches
    of two classes turn round by chance, but their loss does not rise.
    """
    cosines = [sample.cosine for sample in case.moved if not math.isnan(sample.cosine)]
    cosines = cosines[-max(_OSCILLATION_SAMPLES, len(cosines) // 2) :]
    if len(cosines) < _OSCILLATION_SAMPLES or sum(cosine < _COSINE for cosine in cosines) < _SHARE * len(cosines):
        return
    norms = [norm for norm in case.series.log_norms if math.isfinite(norm)]
    if not _grows(norms) or not (case.trend.turning or max(cosines) < _EXACT):
        return
    lr = case.moved[-1].lr
    yield case.issue(
        IssueType.UNSTABLE,
        "",
        ("gradient_cosine", median(cosines), _COSINE),
        (
            f"Successive gradients point against each other (median cosine {median(cosines):.2f}) and grow: "
            "every step jumps across the minimum."
        ),
        f"Halve the learning rate {lr:.3g} to {lr / 2:.2g}, or more: it is past 2/curvature.",
        window=len(cosines),
    )


def _grows(norms: list[float]) -> bool:
    """Whether the norm grows all through the last half of the run, and not up and down."""
    half = norms[len(norms) // 2 :]
    width = len(half) // _PARTS
    middles = [median(half[width * part : width * (part + 1)]) for part in range(_PARTS)] if width >= 2 else []
    return len(middles) == _PARTS and all(after > before for before, after in pairwise([*middles, norms[-1]]))


_BACK: Final = -0.7
_SMOOTH: Final = 0.5
_ROTATION_SAMPLES: Final = 4


def judge_rotation(case: Case) -> Iterator[Issue]:
    """Open where the gradient turns right round, a little at each step, and is as long as ever while it does.

    A ball that rolls to and fro in a valley turns round as well, but its gradient is short at the bottom, or shorter
    each time; and where a loss falls, no gradient comes back the way it went.
    """
    seen = [sample for sample in case.moved if not math.isnan(sample.cosine)]
    if len(seen) < _ROTATION_SAMPLES or min(sample.cosine for sample in seen) < _SMOOTH or case.trend.learned:
        return
    turned = [sample for sample in seen if sample.turned < _BACK]
    if not turned or not _is_lasting(seen):
        return
    found = turned[-1]
    yield case.issue(
        IssueType.ROTATION,
        "",
        ("cosine_with_earlier_gradient", found.turned, _BACK),
        (
            f"The gradient has turned right round (cosine {found.turned:.2f}) by small turns (cosine "
            f"{found.cosine:.2f} from step to step) without getting shorter: the weights go in circles."
        ),
        "Let the players step in turn, use extragradient or averaging, or add a penalty on both.",
        window=len(seen),
        step=case.samples[0].step,
        confidence=0.8,
    )


def _is_lasting(seen: list[Sample]) -> bool:
    """Whether the gradient never gets short, from the first sample to the last."""
    norms = [math.hypot(*(param.norm for param in sample.params.values())) for sample in seen]
    return min(norms) > 0.5 * median(norms) and norms[-1] > 0.7 * norms[0]


_LARGE: Final = 1e3
_FIRST: Final = 4
_REST: Final = 8


def judge_first_steps(case: Case) -> Iterator[Issue]:
    """Open where the norm of a first step was a thousand times that of the steps after, and the loss has not halved.

    What such a step leaves behind, dead or saturated units, is then only its consequence. Where targets are large, the
    norm falls because the loss does.
    """
    norms = case.series.first_log_norms
    rest = [norm for norm in norms[_FIRST:] if math.isfinite(norm)]
    begun = [norm for norm in norms[:_FIRST] if math.isfinite(norm)]
    if not begun or len(rest) < _REST or _has_halved(case):
        return
    jump = math.exp(min(max(begun) - median(rest), 700.0))
    if not jump > _LARGE:
        return
    layer = _largest(case) if norms[0] == max(begun) else ""
    yield case.issue(
        IssueType.EXPLODING,
        layer,
        ("first_norm_over_next", jump, _LARGE),
        f"The gradient of the first steps was {jump:.2g} times the next, and the loss has not fallen.",
        "Initialise for a gain near 1, clip the gradient norm, or begin with a small learning rate.",
        window=len(norms),
        step=norms.index(max(begun)) + 1,
    )


def _has_halved(case: Case) -> bool:
    first, last = case.series.first_losses[:1], median(list(case.series.losses)[-_REST:])
    return last < 0.5 * first[0] if first and first[0] > 0 else case.trend.learned


def _largest(case: Case) -> str:
    """Return the module whose gradient was the largest on the first step, beside its weight."""
    params = case.samples[0].params if case.samples and case.samples[0].step == 1 else {}
    relative = {name: param.relative for name, param in params.items() if param.ndim > 1 and param.weight > 0}
    return module_of(max(relative, key=lambda name: relative[name])) if relative else ""


_COEFFICIENT: Final = 0.01
_FOREIGN_CLIP_SAMPLES: Final = 4


def judge_foreign_clip(case: Case) -> Iterator[Issue]:
    """Open where the gradients at the optimizer's step are always under a hundredth of those that were measured."""
    found = [sample.clip for sample in case.samples if not math.isnan(sample.clip)]
    if len(found) < _FOREIGN_CLIP_SAMPLES or max(found[-max(_FOREIGN_CLIP_SAMPLES, len(found) // 2) :]) > _COEFFICIENT:
        return
    typical = median(found)
    if not typical > 0:  # there was nothing left to step by, which is no clipping
        return
    yield case.issue(
        IssueType.CLIP_SATURATED,
        "",
        ("gradient_left_by_clipping", typical, _COEFFICIENT),
        f"Every sampled gradient was scaled down to {typical:.2g} of itself before the optimizer took it.",
        f"Raise the limit of the clipping about {1 / typical:.1g} times, or scale the loss down.",
        severity=IssueSeverity.MEDIUM,
        window=len(found),
    )
