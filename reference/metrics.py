"""The page of metrics: every name that a row can hold."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradtrack import registry
from gradtrack.records import Metric
from gradtrack.reports import StepReport
from reference.markdown import code, table

_HEAD = """# Metrics

Every name that a row in a tracker can hold, with its sentence, its unit and what it takes for it to be there. A name
without a unit is a number in the units of the gradient, or a ratio.

`<group>`, `<layer>` and the like stand for names of the model: groups are its modules, or those of `groups` in the
configuration. A second (model, optimizer) pair with a name adds it: `train/grad_norm/<pair>`,
`train/grad_norm/<pair>/<group>`, `gain/mean/<pair>`.

Rows are sent on every step that `grad_log_every_n_steps` divides, on steps 1, 2, 4, 8 ... before those, when an issue
opens, changes or closes, on the first step of a streak with NaN or Inf, on every step that an analyzer reports on, and
on the last step. On the trackers' own axis, `gradtrack/step` is the step of the row. How trackers change names that
they do not take is on their own pages: [TensorBoard](../trackers/tensorboard.md), [MLflow](../trackers/mlflow.md) and
[W&B](../trackers/wandb.md).
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD, "\n## Every training\n\n", _table(StepReport.described)]
    for name in registry.analyzers.builtin():
        described = registry.analyzers.load(name).report_type.described
        parts += [f"\n## {name}\n\n", f"From the [analyzer `{name}`](../analyzers/{name}.md).\n\n", _table(described)]
    return "".join(parts)


def _with_code(text: str) -> str:
    """Set names of settings, options and parameters as code."""
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b(?:=|\(\))?|\b[a-z]+(?:=|\(\))", lambda match: code(match[0]), text)


def _table(described: Iterable[Metric]) -> str:
    rows = [(code(one.name), one.meaning, one.unit, _with_code(one.when)) for one in described]
    return table(("metric", "meaning", "unit", "there with"), rows)
