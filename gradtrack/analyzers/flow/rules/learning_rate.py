"""Rules about the learning rate, by how far a step moves the weights."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of

_HIGH: Final = 0.075
_RISEN: Final = 0.03
_UNKNOWN: Final = 0.25
_HEALTHY: Final = 1e-3
_THROWN: Final = 0.6
_HARM: Final = 2.0
_APART: Final = 10.0
_RATE_HIGH_SAMPLES: Final = 3
_EARLY: Final = 8
_TOLD: Final = 24
_FEWEST: Final = 2
_FIRST: Final = 4


def may_be_high(case: Case) -> bool:
    """Whether any step could be too large for the rule below, which costs more than this look at all of them."""
    return case.trend.risen or any(sample.largest > _RISEN for sample in case.moved)


def judge_rate_high(case: Case) -> list[Issue]:
    """Open where the median weight moves by over 7.5 % a step, sample after sample, and the loss has not come down.

    Three per cent are enough where the loss is worse than before the training; a quarter is needed where the loss goes
    through zero, as that of a policy or of a game does, and so need not come down for the training to go well. One step
    is enough that, as the very first, leaves little of most of the weights, unless the loss has halved since, or there
    is a single matrix only, of which nothing need be left: after it even large steps are small beside what they have
    become. A loss that had come down and is three times its best again has not come down either. And where the loss has
    risen, the middle of the first samples is enough: a rate that is far too high soon leaves units that are dead, and
    weights without a gradient do not move. Of fewer than 24 steps only a loss that rises by more than its noise tells.
    """
    if case.moved and _is_thrown(case.moved[0], case.series.blew_up) and (case.series.blew_up or not _is_fine(case)):
        ratios = case.moved[0].ratios
        return [_rate_high_issue(case, case.moved[:1], ratios, median(ratios.values()), _THROWN)]
    moved = [sample for sample in case.moved if sample.step > 1][-_RATE_HIGH_SAMPLES:]
    if (part := _thrown_part(case)) is not None:
        return [part]
    if case.series.num_steps < _TOLD and not case.trend.rising:
        return []
    grown = [_of_grown(case, sample) for sample in moved]
    if len(moved) == _RATE_HIGH_SAMPLES and all(grown):
        typical = min(median(found.values()) for found in grown)
        limit = _RISEN if case.trend.risen else _HIGH if case.trend.tells else _UNKNOWN
        if typical > limit and (not case.trend.learned or case.series.has_risen_after(moved[0].step)):
            return [_rate_high_issue(case, moved, grown[-1], typical, limit)]
        if (part := _rate_high_of_a_part(case, moved, grown)) is not None:
            return [part]
    return _early(case)


def _thrown_part(case: Case) -> Issue | None:
    """Judge a weight that the very first step moved far, unlike the others, and with harm.

    That is units of its layer that are off or at the ends of their range from then on, or little that is left of the
    weight and a loss that was worse at once.
    """
    ratios = _of_grown(case, case.moved[0]) if case.moved and case.moved[0].step == 1 else {}
    name = max(ratios, key=lambda name: ratios[name], default="")
    if not name or not ratios[name] > max(_HIGH, _APART * median(ratios.values())):
        return None
    known = [issue for issue in case.standing if issue.issue_type in (IssueType.DEAD, IssueType.SATURATION)]
    ruined = {issue.layer for issue in known if issue.key in case.from_start}
    losses = case.series.first_losses[:_FIRST]
    worse = len(losses) == _FIRST and 0 < _HARM * losses[0] < median(losses[1:])
    if module_of(name) not in ruined and not (worse and ratios[name] > _THROWN):
        return None
    return _part(case, case.moved[:1], name, ratios[name], _HIGH if module_of(name) in ruined else _THROWN)


def _rate_high_of_a_part(case: Case, moved: list[Sample], ratios: list[dict[str, float]]) -> Issue | None:
    """Judge a weight that moves too fast by itself while the loss is twice what it was before the training."""
    begin = case.series.first_losses[0] if case.series.first_losses else 0.0
    if not begin > 0 or not all(sample.loss > _HARM * begin for sample in moved):
        return None
    names = set.intersection(*({name for name, ratio in found.items() if ratio > _HIGH} for found in ratios))
    if not names:
        return None
    name = max(names, key=lambda name: ratios[-1][name])
    return _part(case, moved, name, min(found[name] for found in ratios), _HIGH)


def _early(case: Case) -> list[Issue]:
    """Judge the first samples on which weights still moved, of a run that has got worse."""
    if not case.trend.risen:
        return []
    moved = [sample for sample in case.moved if _of_grown(case, sample)][:_EARLY]
    typical = median(median(_of_grown(case, sample).values()) for sample in moved)
    limit = _RISEN if len(moved) == _EARLY else _HIGH
    if len(moved) < _FEWEST or not typical > limit:
        return []
    return [_rate_high_issue(case, moved, _of_grown(case, moved[-1]), typical, limit)]


def _of_grown(case: Case, sample: Sample) -> dict[str, float]:
    """Return the update ratios of the weights that are not growing from zero, as those of an adapter do."""
    began = {name for name, param in case.samples[0].params.items() if param.weight == 0}
    return {name: ratio for name, ratio in sample.ratios.items() if name not in began}


def _is_thrown(sample: Sample, blew_up: bool) -> bool:
    """Whether the very first step left little of most weights, or blew up what had begun at zero, as of adapters."""
    ratios = [ratio for name, ratio in sample.ratios.items() if sample.params[name].weight > 0]
    return sample.step == 1 and (median(ratios) > _THROWN if ratios else blew_up and bool(sample.ratios))


def _is_fine(case: Case) -> bool:
    """Whether what was thrown away was not needed: the loss has halved, or no weight rests on another."""
    return case.series.has_halved or sum(param.ndim > 1 for param in case.moved[0].params.values()) == 1


def _rate_high_issue(case: Case, moved: list[Sample], ratios: dict[str, float], typical: float, limit: float) -> Issue:
    """Report a rate from the first of the samples on, since what it has done by the last is its consequence."""
    sample, name = moved[-1], max(ratios, key=lambda key: ratios[key])
    became = ""  # of a loss that was not seen
    if case.trend.losses:
        became = f", while the loss {'has risen' if case.trend.risen else 'does not fall'}"
    return case.issue(
        IssueType.LR_TOO_HIGH,
        "",
        ("median_update_ratio", typical, limit),
        (
            f"lr {sample.lr:.3g} moved {name} by {ratios[name]:.0%} per step and the median weight by {typical:.0%}"
            f"{became}."
        ),
        f"Try lr {sample.lr * _HEALTHY / typical:.1g}, which would move the median weight by 0.1 % per step.",
        window=len(moved),
        step=moved[0].step,
    )


def _part(case: Case, moved: list[Sample], name: str, ratio: float, limit: float) -> Issue:
    """Report the rate of one weight, whose group may have one of its own."""
    return _rate_high_issue(case, moved, {name: ratio}, ratio, limit).model_copy(
        update={
            "layer": module_of(name),
            "statistic": "update_ratio",
            "message": f"A step has moved {name} by {ratio:.0%}, unlike the other weights, and done harm.",
            "recommendation": f"Multiply the rate of its group by {_HEALTHY / ratio:.1g}: 0.1 % per step is usual.",
        }
    )


def judge_negative_rate(case: Case) -> list[Issue]:
    """Open where a group's learning rate is below zero, so that each step makes the loss worse.

    Schedules make it so: a cosine or a line that goes on past its end.
    """
    found = [sample for sample in case.samples if sample.lowest_lr < 0]
    if not found or found[-1] is not case.samples[-1]:
        return []
    lowest = found[-1].lowest_lr
    return [
        case.issue(
            IssueType.LR_NEGATIVE,
            "",
            ("learning_rate", lowest, 0.0),
            f"The learning rate is {lowest:.3g}: every step goes up the slope of the loss.",
            "Look at the schedule: its number of steps is smaller than that of the training. Clamp the rate at zero.",
            severity=IssueSeverity.CRITICAL,
            window=len(found),
            step=found[0].step,
        )
    ]


_LOW: Final = 3e-6
_QUITE_LOW: Final = 2e-5
_NOTHING: Final = 1e-4
_COME_DOWN: Final = 1e-2
_PART: Final = 1e-4
_STILL: Final = 1e-5
_MOVING: Final = 1e-4
_FELT: Final = 1e-2
_RATE_LOW_SAMPLES: Final = 3
_LEARNED: Final = 0.5
_FLAT: Final = 1e-3
_QUICK: Final = 1e-3
_ALTOGETHER: Final = 0.06


def judge_rate_low(case: Case) -> list[Issue]:
    """Open where no weight moves by a millionth of its size per step, or all steps together promise nothing.

    They do so where a hundred of them and more could not have lowered the loss by 6 %, by its slope.

    Silent on a rate that is rising (warm-up), unless that goes on for so long, and where the loss is down already: it
    has fallen, or there is next to no slope left, or steps this small are as much as the slope asks for. A rate that
    has come down is judged by the last half of the samples: what a schedule has left undone by then is not done any
    more. Where even the slope promises nothing of the loss, some more than a millionth is too small as well.
    """
    moved = case.moved
    if len(moved) < _RATE_LOW_SAMPLES:
        return []
    if 0 < (promised := _promised_by_all(case)) < _ALTOGETHER:
        return [_rate_low_by_slope(case, moved[-1], promised)]
    if moved[-1].lr > moved[0].lr:
        return []
    came_down = moved[-1].lr < _COME_DOWN * moved[0].lr and len(moved) >= 2 * _RATE_LOW_SAMPLES
    judged = moved[-(len(moved) // 2) :] if came_down else moved
    largest = max(max(sample.ratios.values(), default=1.0) for sample in judged)
    limit = _LOW if came_down or median(sample.promised for sample in judged) > _NOTHING else _QUITE_LOW
    still_falling = case.trend.falling and not (came_down and largest < _LOW)  # the last half did not move
    if not largest < limit or case.trend.remaining < _LEARNED or still_falling or _is_down(judged):
        return _rate_low_of_a_part(case)
    return [_rate_low_issue(case, judged[-1], largest, len(judged))]


def _promised_by_all(case: Case) -> float:
    """Return which share of the loss all steps so far could have taken away; 1 where that tells nothing.

    A step between two samples promises no more than the one of them that promises more.
    """
    known = [(sample.step, sample.promised) for sample in case.moved if not math.isnan(sample.promised)]
    if not known or not case.is_stuck or _is_down(case.moved):
        return 1.0
    ends = [(0, known[0][1]), *known, (max(case.series.num_steps, known[-1][0]), known[-1][1])]
    return sum((after[0] - before[0]) * max(before[1], after[1]) for before, after in pairwise(ends))


def _rate_low_by_slope(case: Case, sample: Sample, promised: float) -> Issue:
    rising = ", in a warm-up that is still rising," * (sample.lr > case.moved[0].lr)
    what = f"The {case.series.num_steps} steps{rising} could have lowered the loss by {promised:.2g} of it at most"
    typical = median(sample.ratios.values())
    better = f"lr {sample.lr * _HEALTHY / typical:.1g}" if typical > 0 else "a learning rate of 1e-3"
    return case.issue(
        IssueType.LR_TOO_LOW,
        "",
        ("promised_fall", promised, _ALTOGETHER),
        f"{what}, by its slope: lr {sample.lr:.3g} moved the median weight by {typical:.1e} of its size per step.",
        f"Try {better}, or a shorter warm-up: healthy updates are near 1e-3 of the weight.",
        severity=IssueSeverity.MEDIUM,
        window=len(case.moved),
        confidence=0.7,
    )


def _rate_low_of_a_part(case: Case) -> list[Issue]:
    """Judge the weights that hardly move by themselves though their gradient is as large as that of the others.

    Where the loss comes down without them, the lower layers of a trained model may be meant to move far less, but not
    a hundred thousand times.
    """
    still: set[str] | None = None
    part = _PART if case.trend.remaining >= _LEARNED else _STILL
    for sample in case.moved:
        usual, slope = sample.remembered("usual", _usual)
        if not usual > _MOVING:
            return []
        found = {
            name
            for name, ratio in sample.ratios.items()
            if 0 < ratio < part * usual and sample.params[name].relative > _FELT * slope
        }
        still = found if still is None else still & found
    if not still:
        return []
    last, name = case.moved[-1], min(still)
    largest, usual = max(last.ratios[one] for one in still), median(last.ratios.values())
    issue = _rate_low_issue(case, last, largest, len(case.moved))
    what = f"{len(still)} weights, of {name}, move by {largest:.1e} of their size per step, unlike all others."
    how = f"Multiply the rate of their group by {usual / largest:.1g}, which would move them like the median weight."
    return [issue.model_copy(update={"layer": module_of(name), "message": what, "recommendation": how})]


def _usual(sample: Sample) -> tuple[float, float]:
    """Return by how much the median weight moved, and ‖g‖/‖w‖ of the median parameter."""
    return median(sample.ratios.values()), median(param.relative for param in sample.params.values())


def _is_down(moved: list[Sample]) -> bool:
    """Whether a change of the weights by their own size, or the steps that are made, say that the loss is converged."""
    slope = median(sample.sensitivity for sample in moved)
    gain = median(sample.promised for sample in moved)
    return slope < _FLAT or gain > _QUICK


def _rate_low_issue(case: Case, sample: Sample, largest: float, window: int) -> Issue:
    if largest > 0:
        what = f"moved no weight by more than {largest:.1e} of its size per step"
        advice = f"Try lr {sample.lr * _HEALTHY / largest:.1g}: healthy updates are near 1e-3 of the weight."
    elif sample.lr > 0:
        what = "has changed no weight at all: it is rounded away, or no step is made with these gradients"
        advice = "Look whether optimizer.step() is called, and whether the weights are in float32."
    else:
        what = "changes no weight"
        advice = "Look at the schedule, or try a learning rate of 1e-3."
    return case.issue(
        IssueType.LR_TOO_LOW,
        "",
        ("max_update_ratio", largest, _LOW),
        f"lr {sample.lr:.3g} {what}.",
        advice,
        severity=IssueSeverity.MEDIUM,
        window=window,
    )
