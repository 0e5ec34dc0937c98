"""Parameters with a gradient that the optimizer leaves as they are."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.rules.disconnected import _by_module, _common
from gradtrack.diagnose.sample import Case, Sample, median, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SAMPLES: Final = 2
_RESOLVED: Final = 1e-5
_NEGLIGIBLE: Final = 1e-4


def judge(case: Case) -> list[Issue]:
    """Open where parameters with a gradient never changed: not in the optimizer, or put back after each step.

    Silent where the update would be too small to see, which is a matter of the learning rate.
    """
    moved = case.moved
    if len(moved) < _SAMPLES:
        return []
    moved = moved[-max(_SAMPLES, len(moved) // 2) :]
    still = set.intersection(*(_still(sample) for sample in moved))
    last = moved[-1]
    outside = [name for name in still if last.params[name].owned is False]
    inside = [name for name in still if last.params[name].owned and not (_invisible(moved) or _negligible(last, name))]
    return [
        _issue(case, sorted(names), len(moved), owned=owned)
        for names, owned in ((outside, False), (inside, True))
        if names
    ]


def _still(sample: Sample) -> set[str]:
    return {
        name
        for name, change in (sample.changes or {}).items()
        if change.unchanged == 1.0
        and _has_gradient(sample, name)
        and (change.ratio == 0.0 or not sample.params[name].weight)
    }


def _has_gradient(sample: Sample, name: str) -> bool:
    return name in sample.params and sample.params[name].norm > 0


def _invisible(moved: list[Sample]) -> bool:
    """Whether the other weights move so little that a still one may only be rounded."""
    return any(not median(ratio for ratio in sample.ratios.values() if ratio > 0) > _RESOLVED for sample in moved)


def _negligible(sample: Sample, name: str) -> bool:
    """Whether a gradient is zero but for rounding, as before a normalisation, or 16 bits may hide its update."""
    if sample.params[name].coarse:
        return True
    typical = median(param.relative for param in sample.params.values() if param.norm > 0)
    return not sample.params[name].relative > _NEGLIGIBLE * typical


def _issue(case: Case, names: list[str], window: int, *, owned: bool) -> Issue:
    groups = _by_module(names)
    modules = list(dict.fromkeys(module_of(name) for name in names))
    layer = _common(modules) if len(groups) == 1 else modules[0]
    why = "though the optimizer has them" if owned else "and no optimizer has them"
    return Issue(
        issue_type=IssueType.UNCHANGED,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"{len(names)} parameters, of {', '.join(groups)}, get gradients but never change, {why}.",
        statistic="update_ratio",
        value=0.0,
        threshold=0.0,
        window=window,
        step=case.step,
        confidence=1.0,
        recommendation=(
            "Look for code that puts the weights back, or a learning rate of 0 in their group."
            if owned
            else f"Pass {layer}.parameters() to the optimizer, or freeze them with requires_grad_(False)."
        ),
    )
