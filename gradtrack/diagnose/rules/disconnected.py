"""Parameters that no gradient has ever reached."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_STEPS: Final = 4


def judge(case: Case) -> list[Issue]:
    """Open where trainable parameters had no gradient on any step.

    Silent on what no optimizer owns and what only ran without gradients, as target networks do.
    """
    if case.series.num_steps < _STEPS or not case.samples:
        return []
    last = case.samples[-1]
    never = [
        name
        for name, steps in case.series.missing.items()
        if steps >= case.series.num_steps - case.series.nonfinite_steps
        and name in last.params
        and not last.params[name].has_grad
    ]
    ran = {node.name for node in last.nodes}
    wanted = [
        name
        for name in never
        if last.params[name].owned
        or (last.params[name].owned is None and module_of(name) not in last.without_grad)
        or (module_of(name) in ran and last.params[name].owned is False)
    ]
    wanted += _starved(case)
    moved = {name for sample in case.moved for name, change in (sample.changes or {}).items() if change.ratio > 0}
    wanted = [name for name in wanted if name not in moved]
    return [_issue(case, names) for names in _by_module(wanted).values()][:2]


def _starved(case: Case) -> list[str]:
    """Return the weights of modules that the gradient never came through, though zeros were filled in for it."""
    if len(case.samples) < _STEPS or any(
        not any(param.norm for param in sample.params.values()) for sample in case.samples
    ):
        return []
    reached = {node.name for sample in case.samples for node in sample.nodes if node.delta is not None}
    return [
        name
        for name, param in case.samples[-1].params.items()
        if param.owned
        and module_of(name) not in reached
        and all(
            name in sample.params and sample.params[name].has_grad and not sample.params[name].norm
            for sample in case.samples
        )
    ]


def _by_module(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".")[0], []).append(name)
    return found


def _issue(case: Case, names: list[str]) -> Issue:
    modules = list(dict.fromkeys(module_of(name) for name in names))
    layer = modules[0] if len(modules) == 1 else _common(modules)
    return Issue(
        issue_type=IssueType.DISCONNECTED,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"{len(names)} trainable parameters of {layer} had no gradient in {case.series.num_steps} steps.",
        statistic="steps_without_gradient",
        value=float(case.series.num_steps),
        threshold=float(_STEPS),
        window=case.series.num_steps,
        step=case.step,
        confidence=1.0,
        recommendation=f"Look for a detach(), a no_grad() or an unused branch behind {layer}, or freeze it.",
    )


def _common(modules: list[str]) -> str:
    parts = [module.split(".") for module in modules]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or modules[0]
