"""Parameters that no gradient has ever reached, or none any more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, Sample, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_STEPS: Final = 4
_CUT: Final = 10
_FLAT: Final = frozenset(f"{name}Backward0" for name in ("Round", "Sign", "Sgn", "Floor", "Ceil", "Trunc", "Heaviside"))


def judge(case: Case) -> list[Issue]:
    """Open where trainable parameters had no gradient on any step, or on none of the last ten after they always had.

    Silent on what no optimizer owns and what only ran without gradients, as target networks do; and on the bias of a
    layer whose weight has one: where the loss is about the derivative of the output, a constant does not count.
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
    return [_issue(case, names) for names in _by_module(wanted).values()][:2]


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


def _behind_steps(case: Case) -> list[str]:
    """Return the weights behind a function whose derivative is zero everywhere, as rounding is."""
    seen = [sample for sample in case.samples if sample.nodes]
    if len(seen) < _STEPS or any(not any(_is_stepped(sample.graph)) for sample in seen):
        return []
    reached = {node.name for sample in seen for node in sample.nodes if node.delta}
    return [
        name
        for name, param in case.samples[-1].params.items()
        if param.owned is not False and param.has_grad and not param.norm and module_of(name) not in reached
    ]


def _is_stepped(graph: FlowGraph) -> Iterator[bool]:
    """Tell for each edge that a gradient comes to whether a step function lets none of it through."""
    for node in graph.nodes:
        for parent, ops in node.parents if node.delta else ():
            yield graph.nodes[parent].delta == 0 and not _FLAT.isdisjoint(ops)


def _by_module(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".")[0], []).append(name)
    return found


def _issue(case: Case, names: list[str]) -> Issue:
    modules = list(dict.fromkeys(module_of(name) for name in names))
    layer = modules[0] if len(modules) == 1 else _common(modules)
    all_steps = case.series.num_steps
    steps = all_steps - max(case.series.missing_since.get(name, 1) for name in names) + 1
    span = f"{steps} steps" if steps == all_steps else f"the last {steps} of {all_steps} steps"
    return Issue(
        issue_type=IssueType.DISCONNECTED,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"{len(names)} trainable parameters of {layer} had no gradient in {span}.",
        statistic="steps_without_gradient",
        value=float(steps),
        threshold=float(_STEPS),
        window=all_steps,
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
