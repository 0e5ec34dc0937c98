"""Rules about what reaches parameters: a gradient, an update, a fresh one at every step, and batches of a training."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import listed, module_of

_STEPS: Final = 4
_CUT: Final = 10
_FLAT: Final = frozenset(f"{name}Backward0" for name in ("Round", "Sign", "Sgn", "Floor", "Ceil", "Trunc", "Heaviside"))


def judge_disconnected(case: Case) -> Iterator[Issue]:
    """Open where trainable parameters had no gradient on any step, or on none of the last ten after they always had.

    Silent on what no optimizer owns and what only ran without gradients, as target networks do; and on the bias of a
    layer whose weight has one: where the loss is about the derivative of the output, a constant does not count.
    """
    if case.series.num_steps < _STEPS or not case.samples:
        return
    last = case.samples[-1]
    never = [
        name
        for name, steps in case.series.missing.items()
        if steps >= case.series.num_steps - case.series.nonfinite_steps
        and name in last.params
        and not last.params[name].has_grad
        and not _is_constant(last, name)
    ]
    ran = {node.name for node in last.nodes}
    wanted = [
        name
        for name in never
        if last.params[name].owned
        or (last.params[name].owned is None and module_of(name) not in last.without_grad)
        or (module_of(name) in ran and last.params[name].owned is False)
    ]
    wanted += _starved(case) + _behind_steps(case)
    moved = {name for sample in case.moved for name, change in (sample.changes or {}).items() if change.ratio > 0}
    wanted = [name for name in wanted if name not in moved] + _cut_off(case, ran)
    all_steps = case.series.num_steps
    for names in list(_by_module(wanted).values())[:2]:
        layer = _place_of(names, last.params)
        steps = all_steps - max(case.series.missing_since.get(name, 1) for name in names) + 1
        span = f"{steps} steps" if steps == all_steps else f"the last {steps} of {all_steps} steps"
        yield case.issue(
            IssueType.DISCONNECTED,
            layer,
            ("steps_without_gradient", steps, _STEPS),
            f"{len(names)} trainable parameters of {layer} had no gradient in {span}: {listed(names)}.",
            f"Look for a detach(), a no_grad() or an unused branch behind {layer}, or freeze it.",
            window=all_steps,
        )


def _is_constant(sample: Sample, name: str) -> bool:
    """Whether a vector belongs to a module whose matrix has a gradient."""
    return sample.params[name].ndim < 2 and any(
        other.ndim > 1 and other.norm > 0
        for other_name, other in sample.params.items()
        if module_of(other_name) == module_of(name)
    )


def _cut_off(case: Case, ran: set[str]) -> list[str]:
    """Return the weights that had a gradient on every step until one, and none since, of modules that still run.

    Players that train in turn have none now and then, and a head that is not used any more does not run.
    """
    last, series = case.samples[-1], case.series
    return [
        name
        for name, since in series.missing_since.items()
        if (count := series.num_steps - since + 1) >= _CUT
        and count == series.missing[name] < series.num_steps
        and name in last.params
        and not last.params[name].has_grad  # or the module may not have run since
        and last.params[name].owned
        and not _is_constant(last, name)
        and module_of(name) in ran | last.without_grad
    ]


def _starved(case: Case) -> list[str]:
    """Return the weights of modules that the gradient never came through, though zeros were filled in for it."""
    suspects = [name for name, param in case.samples[-1].params.items() if param.owned and not param.norm]
    if not suspects or len(case.samples) < _STEPS:
        return []
    if any(not any(param.norm for param in sample.params.values()) for sample in case.samples):
        return []
    reached = {node.name for sample in case.samples for node in sample.nodes if node.delta is not None}
    return [
        name
        for name in suspects
        if module_of(name) not in reached
        and all(
            name in sample.params and sample.params[name].has_grad and not sample.params[name].norm
            for sample in case.samples
        )
    ]


def _behind_steps(case: Case) -> list[str]:
    """Return the weights behind a function whose derivative is zero everywhere, as rounding is."""
    seen = [sample for sample in case.samples if sample.nodes]
    if len(seen) < _STEPS or not all(sample.remembered("stepped", _is_stepped) for sample in seen):
        return []
    reached = {node.name for sample in seen for node in sample.nodes if node.delta}
    return [
        name
        for name, param in case.samples[-1].params.items()
        if param.owned is not False and param.has_grad and not param.norm and module_of(name) not in reached
    ]


def _is_stepped(sample: Sample) -> bool:
    """Say whether a step function lets nothing through of a gradient that comes to it."""
    parents = (found for node in sample.nodes if node.delta for found in node.parents)
    return any(sample.nodes[parent].delta == 0 and not _FLAT.isdisjoint(ops) for parent, ops in parents)


def _by_module(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".")[0], []).append(name)
    return found


def _place_of(names: Sequence[str], params: Iterable[str]) -> str:
    """Return the module that parameters have in common, or the first of theirs where it has others as well."""
    layer = _layer_of(names)
    whole = {name for name in params if name.startswith(f"{layer}.")} <= set(names)
    return layer if whole else module_of(names[0])


def _layer_of(names: Iterable[str]) -> str:
    """Return the module that parameters have in common, the first of theirs where it is the whole model."""
    modules = [module_of(name).split(".") for name in names]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*modules, strict=False))
    return ".".join(level[0] for level in shared) or ".".join(modules[0])


_UNCHANGED_SAMPLES: Final = 2
_MOVED_BEFORE: Final = 3
_RESOLVED: Final = 1e-5
_NEGLIGIBLE: Final = 1e-4


def judge_unchanged(case: Case) -> Iterator[Issue]:
    """Open where parameters with a gradient never changed: not in the optimizer, or put back after each step.

    Silent where the update would be too small to see, which is a matter of the learning rate.
    """
    if len(case.moved) < _UNCHANGED_SAMPLES:
        return
    moved = case.moved[-max(_UNCHANGED_SAMPLES, len(case.moved) // 2) :]
    still = set.intersection(*(sample.remembered("still", _still) for sample in moved))
    how = "never change"
    if not still:
        moved, still = _stopped(case.moved)
        how = f"have not changed since step {moved[0].step}"
    last = moved[-1]
    outside = [name for name in still if last.params[name].owned is False]
    inside = [name for name in still if last.params[name].owned and not (_invisible(moved) or _negligible(last, name))]
    for names, owned in ((sorted(outside), False), (sorted(inside), True)):
        if not names:
            continue
        groups = _by_module(names)
        layer = _layer_of(names) if len(groups) == 1 else module_of(names[0])
        why = "though the optimizer has them" if owned else "and no optimizer has them"
        yield case.issue(
            IssueType.UNCHANGED,
            layer,
            ("update_ratio", 0.0, 0.0),
            f"{len(names)} parameters, of {', '.join(groups)}, get gradients but {how}, {why}.",
            (
                "Look for code that puts the weights back, or a learning rate of 0 in their group."
                if owned
                else f"Pass {layer}.parameters() to the optimizer, or freeze them with requires_grad_(False)."
            ),
            window=len(moved),
        )


def _stopped(moved: list[Sample]) -> tuple[list[Sample], set[str]]:
    """Return the samples since some parameters stand still, and those of them that moved before.

    Players that train in turn stand still and move again, and one moves while another does not: so nothing may have
    stood still before.
    """
    stills = [sample.remembered("still", _still) for sample in moved]
    still, start = stills[-1], len(moved) - 1
    while start and still & stills[start - 1]:
        start -= 1
        still = still & stills[start]
    before, after = moved[:start], moved[start:]
    if len(after) < _UNCHANGED_SAMPLES or len(before) < _MOVED_BEFORE or any(stills[:start]):
        return after, set()
    return after, {name for name in still if all(_moved(sample, name) for sample in before[-_MOVED_BEFORE:])}


def _moved(sample: Sample, name: str) -> bool:
    """Whether a parameter moved by far more than its rounding."""
    change = (sample.changes or {}).get(name)
    return change is not None and change.ratio > _RESOLVED


def _still(sample: Sample) -> set[str]:
    return {
        name
        for name, change in (sample.changes or {}).items()
        if change.unchanged == 1.0
        and name in sample.params
        and sample.params[name].norm > 0
        and (change.ratio == 0.0 or not sample.params[name].weight)
    }


def _invisible(moved: list[Sample]) -> bool:
    """Whether the other weights move so little that a still one may only be rounded."""
    return any(not median(ratio for ratio in sample.ratios.values() if ratio > 0) > _RESOLVED for sample in moved)


def _negligible(sample: Sample, name: str) -> bool:
    """Whether a gradient is zero but for rounding, as before a normalisation, or 16 bits may hide its update."""
    if sample.params[name].coarse:
        return True
    typical = median(param.relative for param in sample.params.values() if param.norm > 0)
    return not sample.params[name].relative > _NEGLIGIBLE * typical


_STALE_GRAD_SAMPLES: Final = 2


def judge_stale_grad(case: Case) -> Iterator[Issue]:
    """Open where gradients were not zero before the backward pass though the optimizer had stepped in between."""
    counts = Counter(name for sample in case.samples for name in sample.stale)
    names = [name for name, count in counts.items() if count >= _STALE_GRAD_SAMPLES]
    if not names:
        return
    everything = len(names) >= 0.9 * len(case.samples[-1].params)
    layer = "" if everything else _layer_of(names)
    whose = "All parameters" if everything else f"{len(names)} parameters, of {', '.join(_by_module(names))},"
    yield case.issue(
        IssueType.STALE_GRAD,
        layer,
        ("samples_with_stale_gradients", max(counts.values()), _STALE_GRAD_SAMPLES),
        f"{whose} still held the gradients of the last step when the next backward pass began.",
        "Call optimizer.zero_grad() after every optimizer.step(); gradients add up until then.",
        window=len(case.samples),
    )


def judge_mode(case: Case) -> Iterator[Issue]:
    """Open where a model trains in evaluation mode as it did not at first, or its norms have never seen a batch.

    Silent on normalisations that are frozen while the rest trains, and on a model that was never in training mode
    whose statistics come from elsewhere: both are usual in fine-tuning.
    """
    seen = case.samples[-_UNCHANGED_SAMPLES:]
    if len(seen) < _UNCHANGED_SAMPLES or math.isnan(seen[-1].lr) or any(sample.training for sample in seen):
        return
    last = seen[-1]
    untrained = [name for name in last.untrained if all(name in sample.untrained for sample in seen)]
    if untrained:
        yield case.issue(
            IssueType.EVAL_MODE,
            untrained[0],
            ("batches_seen", 0.0, 1.0),
            f"{listed(untrained)} normalise in evaluation mode and have never seen a batch: their statistics are "
            "those of the start, so that they do not normalise.",
            "Call model.train() before the loop, and after every model.eval().",
            window=len(seen),
        )
    else:
        trained = next((sample for sample in case.samples if sample.training and sample.in_training), None)
        left = [] if trained is None else [name for name in trained.in_training if name not in last.in_training]
        if trained is not None and left:
            since = next(sample.step for sample in case.samples if sample.step > trained.step and not sample.training)
            yield case.issue(
                IssueType.EVAL_MODE,
                left[0],
                ("modules_in_training", 0.0, 1.0),
                f"The model trains in evaluation mode, as it did not at first: {listed(left)} are switched off.",
                "Call model.train() after every evaluation.",
                severity=IssueSeverity.MEDIUM,
                window=len(seen),
                step=since,
            )
