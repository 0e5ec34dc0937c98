"""The rows of a step: metrics, histograms, and a row of its own for a report on an earlier step."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradtrack import Analyzer, GradientManager, safe_backward, watch
from gradtrack.analyzers.base import Snapshot
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.reports import LateReport, Report, StepReport
from gradtrack.step.rows import contradictions
from tests.training import batch_loss, look, optimizer_of, small_model, train, with_gradients


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"track_parameters": True, "log_gradient_stats": False},
        {"track_parameters": True, "grad_track_per_weight_matrix": False},
        {"enable_gradient_clipping": False, "enable_nan_inf_check": False},
        {"enable_gradient_monitoring": False},
        {"clip_type": "value", "max_grad_norm": 1e-3},
        {"nonfinite_action": "replace"},
        {"analyzers": ["flow"]},
    ],
)
@pytest.mark.parametrize("name", ["", "second"])
def test_a_row_has_the_metrics_of_the_report(settings: dict[str, Any], name: str) -> None:
    """It is made without the report, and has the same names and numbers in the same order, NaN steps and issues too."""
    manager, model = GradientManager(backends=["memory"], grad_log_every_n_steps=1, **settings), small_model()
    optimizer = optimizer_of(model)
    manager.attach(model, optimizer, name=name)
    train(manager, 14, model=model, optimizer=optimizer, change=lambda step, loss: loss * _FACTORS.get(step, 1.0))
    rows = manager.backend("memory").records  # type: ignore[attr-defined]
    for row, report in zip(rows, manager.reports, strict=True):
        full = report if manager.config.log_gradient_stats else report.model_copy(update=_WITHOUT_STATISTICS)
        assert repr(list(row.metrics.items())) == repr(list(full.metrics().items()))
        assert repr((row.step, row.loss, row.source)) == repr((report.step, report.loss, name))


_FACTORS = {5: math.nan, 9: math.inf, 13: 1e6}
_WITHOUT_STATISTICS: dict[str, Any] = {"statistics": None, "groups": {}, "parameters": {}}


class WeightReport(LateReport):
    """The first weight after the step."""

    weight: float

    def metrics(self) -> dict[str, float]:
        """Return the weight."""
        return {"after/weight": self.weight}


@final
class AfterAnalyzer(Analyzer):
    """An analyzer that knows at step 3 what step 2 led to."""

    name = "after"
    report_type = WeightReport

    def due(self, step: int) -> bool:
        """Look at step 3 only."""
        return step == 3

    def inspect(self, snapshot: Snapshot) -> Report | None:
        """Read the weight that step 2 left."""
        return WeightReport(step=2, weight=first_weight(snapshot.model))


def first_weight(model: nn.Module) -> float:
    """Return the first weight."""
    return float(next(model.parameters()).detach().flatten()[0])


def test_a_report_on_an_earlier_step_is_recorded_under_its_own_step() -> None:
    """The numbers that came after the optimizer's step get a row of that step, and no place in the later one's."""
    model, before = small_model(), {}

    def keep(step: int, loss: Tensor) -> Tensor:
        before[step] = first_weight(model)
        return loss

    manager = GradientManager(backends=["memory"], analyzers=[AfterAnalyzer()], grad_log_every_n_steps=1)
    report = train(manager, 3, model=model, change=keep)[-1]
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    found = {record.step: record.metrics["after/weight"] for record in records if "after/weight" in record.metrics}
    assert found == {2: before[3]}
    assert [record.step for record in records] == [1, 2, 2, 3]
    assert report.analyzers["after"]["step"] == 2
    assert not any(name.startswith("after/") for name in report.metrics())


def test_a_late_report_alone_makes_no_row_of_its_step() -> None:
    """Between the rows that are due, a late report adds the row of its own step only."""
    manager = GradientManager(backends=["memory"], analyzers=[AfterAnalyzer()], grad_log_every_n_steps=100)
    train(manager, 3)
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    assert [record.step for record in records] == [1, 2, 2]


def test_rows_lie_on_the_axis_of_the_user() -> None:
    """With `step=` each row, also of a late report and of the last step, has that step; the report counts its own."""
    manager = GradientManager(backends=["memory"], analyzers=[AfterAnalyzer()])
    model = small_model()
    optimizer = optimizer_of(model)
    with manager:
        for step in range(1, 8):
            optimizer.zero_grad()
            loss = batch_loss(model, step) * (math.nan if step == 6 else 1.0)
            report = safe_backward(loss, model, optimizer, manager, step=np.int64(512 * step))  # type: ignore[arg-type]
            optimizer.step()
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    # The analyzer looks again after the NaN, at step 2, whose place is not known any more.
    assert [record.step // 512 for record in records] == [1, 2, 2, 4, 6, 4, 7]
    assert [issue["step"] for issue in records[4].issues] == [512 * 6]
    assert report.step == 7


def test_watch_asks_for_the_axis_before_each_step() -> None:
    """Its `step` is a function, since no call of the loop passes a number."""
    model, frames = small_model(), 0
    optimizer = optimizer_of(model)
    with watch(model, optimizer, backends=["memory"], step=lambda: frames) as manager:
        for step in range(1, 6):
            frames += 100
            optimizer.zero_grad()
            torch.autograd.backward(batch_loss(model, step))
            optimizer.step()
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    assert [record.step for record in records] == [100, 200, 400, 500]
    with pytest.raises(InputTypeError, match=r"Pass lambda: global_step\."):
        watch(model, optimizer, step=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1.5, -1, True, "3"])
def test_a_step_is_a_whole_number(wrong: Any) -> None:
    """Anything else is refused before the backward pass."""
    model = small_model()
    with pytest.raises(UsageError, match="expected a whole number from 0 on"):
        safe_backward(batch_loss(model), model, optimizer_of(model), GradientManager(backends=[]), step=wrong)
    assert all(param.grad is None for param in model.parameters())


def test_a_late_report_survives_json() -> None:
    """The step report that carries it keeps it, with its step."""
    manager = GradientManager(analyzers=[AfterAnalyzer()])
    report = train(manager, 3)[-1]
    again = StepReport.model_validate_json(report.model_dump_json())
    assert again.analyzers["after"]["step"] == 2


def test_contradictions_are_found() -> None:
    """In debug mode a report is checked against itself; a sound one passes, a bent one is named."""
    report = train(GradientManager(debug_mode=True, max_grad_norm=0.1), 1)[0]
    assert report.clipping.clipped
    assert contradictions(report) == []
    assert report.statistics is not None
    statistics = report.statistics.model_copy(update={"total_norm": 2 * report.statistics.total_norm})
    clipping = report.clipping.model_copy(update={"norm_after": 1.0})
    bent = contradictions(report.model_copy(update={"statistics": statistics, "clipping": clipping}))
    assert len(bent) == 2
    assert "above its limit" in bent[1]


def test_histograms_are_asked_for_and_of_the_gradients_before_clipping() -> None:
    """With `log_histograms` a due row counts every element of the whole and of each group, and no other row does."""
    gradient = torch.tensor([-3.0, 0.75, 1.0, 0.0, math.nan])
    with GradientManager(backends=["memory"], log_histograms=True) as manager:
        model = with_gradients([gradient.clone()])
        optimizer = optimizer_of(model)
        for step in range(1, 4):
            model.p0.grad = gradient.clone() if step > 1 else torch.ones(5)
            manager.step(model, optimizer, None, backward=False)
        backend: Any = manager.backend("memory")
    _, due, last = backend.records
    assert last.histograms == {}
    assert set(due.histograms) == {"train/grad_histogram", "train/grad_histogram/p0"}
    found = due.histograms["train/grad_histogram"]
    assert sum(found.counts) == 4
    assert (found.edges[0], found.edges[-1], found.counts[0], found.counts[-1]) == (-4.0, 2.0, 1.0, 1.0)


@pytest.mark.parametrize("settings", [{}, {"log_histograms": True, "log_gradient_stats": False}])
def test_histograms_are_off_unless_asked_for(settings: dict[str, Any]) -> None:
    """By default, and where statistics are not recorded, no row has one."""
    with GradientManager(backends=["memory"], grad_log_every_n_steps=1, **settings) as manager:
        look(with_gradients([torch.ones(3)]), manager)
        backend: Any = manager.backend("memory")
        assert [record.histograms for record in backend.records] == [{}]
