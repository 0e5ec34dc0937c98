"""Loops that once went wrong: scalers, closures, faulty rules and analyzers, resumed and shared state."""

import copy
import gc
import json
import math
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradtrack
from gradtrack import Analyzer, GradientManager, GradientMonitor, safe_backward
from gradtrack.analyzers.base import Snapshot
from gradtrack.errors import UsageError
from gradtrack.health.rules.norm import SpikeRule
from gradtrack.reports import Report, StepReport
from tests.training import batch_loss, layer, look, optimizer_of, small_model, train, with_gradients


def plain_norm(model: nn.Module, step: int = 0) -> float:
    """Return the norm that a plain backward pass of a batch leaves."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    torch.autograd.backward(batch_loss(twin, step))
    return float(torch.nn.utils.get_total_norm([param.grad for param in twin.parameters() if param.grad is not None]))


class TestScalers:
    """Mixed precision in every way into a loop."""

    @pytest.mark.parametrize("fused", [False, True])
    def test_watch(self, fused: bool) -> None:
        """A watched optimizer is measured unscaled, also where it unscales within its own step."""
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        manager = gradtrack.watch(model, optimizer, max_grad_norm=1e9)
        expected, twin = plain_norm(model), copy.deepcopy(model)
        torch.autograd.backward(scaler.scale(batch_loss(model)))
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert manager.reports[0].clipping.norm_before == pytest.approx(expected, rel=1e-4)
        torch.autograd.backward(batch_loss(twin))
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-4)

    def test_parameters_that_nobody_steps_stay_out(self) -> None:
        """Gradients that the scaler never unscales are not measured beside those that it does."""
        model = small_model()
        optimizer = torch.optim.SGD(layer(model, 2).parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        report = safe_backward(batch_loss(model), model, optimizer, GradientManager(), scaler=scaler)
        assert set(report.groups) == {"2"}
        assert report.clipping.norm_before is not None
        assert report.clipping.norm_before < 10

    def test_needs_an_optimizer(self) -> None:
        """A scaler without what it steps cannot unscale."""
        model = small_model()
        with pytest.raises(UsageError, match="scaler without an optimizer"):
            GradientManager().step(model, None, batch_loss(model), scaler=torch.amp.GradScaler("cpu"))

    def test_a_second_backward_is_refused(self) -> None:
        """Scaled gradients are never added to unscaled ones in silence."""
        model, manager = small_model(), GradientManager()
        optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu")
        safe_backward(batch_loss(model), model, optimizer, manager, scaler=scaler)
        with pytest.raises(UsageError, match="accumulate=True"):
            safe_backward(batch_loss(model), model, optimizer, manager, scaler=scaler)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_watch_looks_after_the_closure(kind: Any) -> None:
    """An optimizer that is given a closure steps on what was measured and clipped, one report for each step."""
    model = small_model()
    optimizer = kind(model.parameters(), lr=0.1)
    manager = gradtrack.watch(model, optimizer, max_grad_norm=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = batch_loss(model, scale=1e3)
        torch.autograd.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert [report.step for report in manager.reports] == [1, 2]
    assert all(report.clipping.clipped and report.loss is not None for report in manager.reports)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(1e-3, rel=1e-2)


class TestLearnedLimits:
    """Strategies whose limit follows the norms."""

    @pytest.mark.parametrize("clip_type", ["adaptive", "zscore"])
    def test_zero_norms_do_not_become_the_limit(self, clip_type: Any) -> None:
        """After steps without any gradient the next one is neither zeroed nor an error."""
        manager, model = GradientManager(clip_type=clip_type), with_gradients([torch.zeros(3)])
        optimizer = optimizer_of(model)
        for _ in range(12):
            manager.step(model, optimizer, None, backward=False)
        next(model.parameters()).grad = torch.full((3,), 0.1)
        report = manager.step(model, optimizer, None, backward=False)
        assert report.clipping.norm_after == pytest.approx(0.1 * 3**0.5, rel=1e-5)

    @pytest.mark.parametrize("scale", [1e-7, 1.0])
    @pytest.mark.parametrize("clip_type", ["adaptive", "zscore"])
    def test_a_constant_norm_is_never_clipped(self, clip_type: Any, scale: float) -> None:
        """A norm that equals the limit is within it, whatever its size."""
        manager, model = GradientManager(clip_type=clip_type), with_gradients([torch.full((4,), scale)])
        optimizer = optimizer_of(model)
        reports = [manager.step(model, optimizer, None, backward=False) for _ in range(30)]
        assert not any(report.clipping.clipped for report in reports[12:])

    def test_closure_calls_count_once(self) -> None:
        """The several evaluations of one LBFGS step are one norm of the window."""
        model, manager = small_model(), GradientManager(adaptive_clipping=True, max_grad_norm=1e-6)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = batch_loss(model)
            safe_backward(loss, model, optimizer, manager)
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        assert len(manager.clipper.state_dict()["engaged"]) == 1


class Faulty(Analyzer):
    """An analyzer that fails in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, name: str) -> None:
        if self.where == name:
            raise RuntimeError(name)

    def due(self, step: int) -> bool:
        """Fail or be due."""
        self._fail("due")
        return True

    def inspect(self, snapshot: Snapshot) -> Report:
        """Return a report that may fail later."""
        where = self.where
        if where == "optimizer":
            assert snapshot.call_before_step is not None
            snapshot.call_before_step(lambda: self._fail("optimizer"))

        class Late(Report):
            def metrics(self) -> dict[str, float]:
                if where == "metrics":
                    raise ZeroDivisionError
                return {}

        return Late()

    def state_dict(self) -> dict[str, Any]:
        """Fail or remember nothing."""
        self._fail("state_dict")
        return {}


@pytest.mark.parametrize("where", ["due", "metrics", "state_dict", "optimizer"])
def test_a_faulty_analyzer_never_stops_the_training(where: str) -> None:
    """Whatever method of it fails, steps, records and checkpoints go on."""
    manager = GradientManager(analyzers=[Faulty(where)], backends=["memory"], grad_log_every_n_steps=1)
    assert len(train(manager, 6)) == 6
    manager.state_dict()
    assert len(manager.backend("memory").records) >= 6  # type: ignore[attr-defined]


def test_a_faulty_rule_never_stops_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fails is left out."""

    def fail(*_: object) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(SpikeRule, "judge", fail)
    assert len(train(GradientManager(), 3)) == 3


def test_jumps_beyond_the_range_of_a_float() -> None:
    """A norm that grows from 1e-200 to 1e200 is a spike like any other."""
    manager, model = (
        GradientManager(max_grad_norm=1e300),
        with_gradients([torch.full((4,), 1e-200, dtype=torch.float64)]),
    )
    optimizer, param = optimizer_of(model), None
    for _ in range(12):
        manager.step(model, optimizer, None, backward=False)
    param = next(model.parameters())
    param.grad = torch.full((4,), 1e200, dtype=torch.float64)
    report = manager.step(model, optimizer, None, backward=False)
    assert report.health.issues[0].issue_type.value == "EXPLODING"


class TestNumbers:
    """Numbers that are what they say."""

    def test_rates_are_those_of_the_step(self) -> None:
        """A rate that is a tensor is taken down before a schedule changes it, and two of one name stay two."""
        model = small_model()
        groups = [
            {"params": [param], "name": "a", "lr": torch.tensor(0.1 * index)}
            for index, param in enumerate(model.parameters(), 1)
        ]
        optimizer = torch.optim.Adam(groups, capturable=False)
        report = GradientManager().step(model, optimizer, batch_loss(model))
        for group in optimizer.param_groups:
            group["lr"].fill_(7.0)
        assert list(report.lr.values()) == pytest.approx([0.1, 0.2, 0.3, 0.4])

    def test_low_precision_losses_add_up(self) -> None:
        """The sum over micro-batches is not held in bfloat16."""
        model, manager = small_model(), GradientManager()
        optimizer = optimizer_of(model)
        for _ in range(299):
            manager.step(model, optimizer, torch.ones((), dtype=torch.bfloat16), False, accumulate=True)
        report = manager.step(model, optimizer, torch.ones((), dtype=torch.bfloat16), False)
        assert report.loss == 300.0

    def test_numpy_losses(self) -> None:
        """Any real number is a loss to record."""
        model = small_model()
        assert GradientManager().step(model, optimizer_of(model), np.float32(0.5), backward=False).loss == 0.5  # type: ignore[arg-type]

    def test_replacements_stay_within_the_type(self) -> None:
        """A replacement for NaN that float16 cannot hold becomes its largest number."""
        model = with_gradients([torch.tensor([math.nan, 1.0], dtype=torch.float16)])
        look(model, replace_nan_with=1e6, enable_gradient_clipping=False)
        grad = next(model.parameters()).grad
        assert grad is not None
        assert grad[0].item() == 65504.0

    def test_monitor_takes_any_gradient(self) -> None:
        """Sparse and complex gradients, from any iterable."""
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
        found = GradientMonitor().update_statistics(grad for grad in (sparse, torch.tensor([4j])))  # type: ignore[arg-type]
        assert found.total_norm == 5.0


class TestState:
    """What is saved, shared and let go."""

    def test_loading_shares_nothing(self) -> None:
        """Training on does not change the state that was loaded."""
        first, second = GradientManager(), GradientManager()
        train(first, 4)
        state = first.state_dict()
        before = json.dumps(state)
        second.load_state_dict(state)
        train(second, 4)
        assert json.dumps(state) == before

    def test_broken_state_is_refused_whole(self) -> None:
        """A state without its parts is an error and changes nothing."""
        manager = GradientManager()
        train(manager, 2)
        with pytest.raises(UsageError, match="without pairs"):
            manager.load_state_dict({"version": 1, "history": {}})
        assert manager.get_training_summary().total_steps == 2

    def test_open_issues_are_restored(self) -> None:
        """What was open when the state was saved is open after it was loaded."""
        first, second, model = GradientManager(), GradientManager(), small_model()
        train(first, 3, model=model, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
        second.attach(model, optimizer_of(model))
        second.load_state_dict(first.state_dict())
        assert second.diagnose() == first.diagnose() != []

    def test_an_unread_report_keeps_no_model_alive(self) -> None:
        """A report can be kept for long; what it was made from cannot."""

        def trained() -> tuple[StepReport, weakref.ref[nn.Module]]:
            model = small_model()
            with GradientManager() as manager:
                report = manager.step(model, optimizer_of(model), batch_loss(model))
            return report, weakref.ref(model)

        report, model = trained()
        gc.collect()
        assert model() is None
        assert report.loss is not None

    def test_a_default_manager_follows_a_new_optimizer(self) -> None:
        """Without a manager of one's own, a new optimizer needs no ceremony."""
        model = small_model()
        safe_backward(batch_loss(model), model, optimizer_of(model))
        assert safe_backward(batch_loss(model), model, optimizer_of(model)).step == 2

    def test_log_can_be_written_from_another_thread(self, tmp_path: Any) -> None:
        """Writing the log while training goes on reads a copy of the history."""
        manager, faults = GradientManager(max_gradient_history=50), []

        def write() -> None:
            try:
                for _ in range(5):
                    manager.save_training_log(tmp_path / "log.json")
            except RuntimeError as fault:
                faults.append(fault)

        train(manager, 1)
        thread = threading.Thread(target=write)
        thread.start()
        model = small_model(1)
        manager.attach(model, optimizer := optimizer_of(model), name="second")
        train(manager, 150, model=model, optimizer=optimizer)
        thread.join()
        assert faults == []


class TestSettings:
    """Settings and calls that were taken wrongly."""

    def test_groups_change_during_training(self) -> None:
        """New regexes group the next step."""
        manager, model = GradientManager(), small_model()
        train(manager, 1, model=model, optimizer=(optimizer := optimizer_of(model)))
        manager.config.groups = {"weights": "weight", "rest": "."}
        manager.config.engine = "torch"
        assert set(train(manager, 1, model=model, optimizer=optimizer)[0].groups) == {"weights", "rest"}

    def test_a_pair_is_not_named_like_a_group(self) -> None:
        """Two series never write one name."""
        manager = GradientManager()
        train(manager, 1)
        with pytest.raises(UsageError, match="also a group"):
            manager.attach(small_model(1), name="2")

    def test_first_bad_step_is_recorded_without_monitoring(self) -> None:
        """The row of a non-finite step is there whatever is switched off."""
        manager = GradientManager(enable_gradient_monitoring=False, backends=["memory"])
        train(manager, 7, change=lambda step, loss: loss * (math.nan if step == 6 else 1.0))
        assert [record.step for record in manager.backend("memory").records] == [1, 2, 4, 6]  # type: ignore[attr-defined]

    def test_leaving_on_purpose_is_no_failure(self) -> None:
        """`sys.exit(0)` ends a run well."""
        with pytest.raises(SystemExit), GradientManager(backends=["memory"]) as manager:
            raise SystemExit(0)
        assert not manager.backend("memory").failed  # type: ignore[attr-defined]

    def test_any_batch_identity_goes_through_json(self) -> None:
        """What JSON cannot hold is kept as its text."""
        text = StepReport(step=1, batch=torch.ones(2)).model_dump_json()
        assert StepReport.model_validate_json(text).batch == "tensor([1., 1.])"

    def test_an_empty_section_is_the_default(self) -> None:
        """A section without settings is a section all the same."""
        assert gradtrack.GradientConfig.load({"model": 3, "gradtrack": None}) == gradtrack.GradientConfig()
