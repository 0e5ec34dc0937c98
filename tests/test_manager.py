"""The manager: what a loop gets from it, and what it refuses."""

import logging
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st
from torch import Tensor, nn

import gradtrack
from gradtrack import GradientConfig, GradientManager, Issue, StepReport, create_gradient_manager, safe_backward
from gradtrack.errors import ClosedError, InputTypeError, RunDirectoryError, UsageError
from gradtrack.step import rows as rows_module
from gradtrack.step.rows import to_record
from tests.training import batch_loss, layer, look, optimizer_of, small_model, train, with_gradients


def rows(manager: GradientManager) -> list[Any]:
    """Return what the memory backend was given."""
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    return records


def shrink(model: nn.Module, factor: float, *_: object) -> None:
    """Clip as other code in the loop would, when an optimizer begins its step."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(factor)


class TestStep:
    """One step of a loop."""

    def test_backward_and_report(self) -> None:
        """`safe_backward` leaves the gradients of the loss and a complete report."""
        model = small_model()
        optimizer = optimizer_of(model, lr=0.25)
        loss = batch_loss(model)
        report = safe_backward(loss=loss, model=model, optimizer=optimizer, gradient_manager=GradientManager(), epoch=2)
        expected = small_model()
        torch.autograd.backward(batch_loss(expected))
        total = torch.nn.utils.get_total_norm([param.grad for param in expected.parameters() if param.grad is not None])
        assert report.clipping.norm_before == pytest.approx(float(total), rel=1e-6)
        assert (report.step, report.epoch, report.loss, report.lr) == (1, 2, loss.item(), {"0": 0.25})
        assert report.measured
        assert set(report.groups) == {"0", "2"}
        assert report.statistics is not None
        assert report.statistics.element_count == 53

    def test_own_backward(self) -> None:
        """With `backward=False` the gradients that are there are used and the loss is just recorded."""
        model = small_model()
        loss = batch_loss(model)
        torch.autograd.backward(loss)
        report = GradientManager().step(model, optimizer_of(model), loss.detach(), backward=False)
        assert report.loss == loss.item()

    def test_rows_hold_plain_floats(self) -> None:
        """Every metric of a row is a float, so that no backend has to look at their types."""
        manager = GradientManager(backends=["memory"], grad_log_every_n_steps=1)
        train(manager, 2)
        assert {type(value) for record in rows(manager) for value in record.metrics.values()} == {float}

    def test_weights_are_weighed_for_groups_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step that shows no groups does not measure the weights."""
        monkeypatch.setattr("gradtrack.step.measure.weight_norms", lambda *_: pytest.fail("weights were read"))
        train(GradientManager(grad_log_every_n_steps=1, grad_track_per_weight_matrix=False), 2)
        with pytest.raises(pytest.fail.Exception, match="weights were read"):
            train(GradientManager(grad_log_every_n_steps=1), 2)

    def test_without_a_manager(self) -> None:
        """A model gets a manager of its own, which counts its steps."""
        model = small_model()
        optimizer = optimizer_of(model)
        safe_backward(batch_loss(model), model, optimizer)
        assert safe_backward(batch_loss(model), model, optimizer).step == 2

    def test_measuring_does_not_change_training(self) -> None:
        """Without clipping, weights after fifty steps are those of a plain loop, bit for bit."""
        watched, plain = small_model(), small_model()
        train(GradientManager(enable_gradient_clipping=False, backends=["memory"]), 50, model=watched)
        optimizer = optimizer_of(plain)
        for step in range(1, 51):
            optimizer.zero_grad()
            torch.autograd.backward(batch_loss(plain, step))
            optimizer.step()
        for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_no_graph_is_kept(self) -> None:
        """A report holds the number of the loss, not its graph."""
        model = small_model()
        loss = batch_loss(model)
        report = safe_backward(loss, model, optimizer_of(model), GradientManager())
        assert type(report.loss) is float

    def test_parameters_on_request(self) -> None:
        """`track_parameters` puts every parameter into the report, with its group and its other names."""
        model = small_model()
        layer(model, 2).bias.requires_grad_(False)
        report = train(GradientManager(track_parameters=True), 1, model=model)[0]
        assert list(report.parameters) == ["0.weight", "0.bias", "2.weight"]
        assert report.parameters["0.bias"].group == "0"

    def test_extreme_parameters_are_metrics(self) -> None:
        """With `track_parameters` three of the largest and three of the smallest norms have a curve of their own."""
        model = with_gradients([torch.full((2,), float(size)) for size in (5, 0, 1, 7, 3, 2, 9, 4)])
        report = look(model, track_parameters=True)
        found = {
            name.removeprefix("train/grad_extreme/"): value
            for name, value in report.metrics().items()
            if name.startswith("train/grad_extreme/")
        }
        assert set(found) == {"p1", "p2", "p5", "p0", "p3", "p6"}
        assert found["p6"] == report.parameters["p6"].norm == pytest.approx(9 * 2**0.5)
        assert not [name for name in look(model).metrics() if "extreme" in name]

    def test_missing_gradients_are_named(self) -> None:
        """A parameter without a gradient is missing, not zero."""
        report = look(with_gradients([torch.ones(2), None]))
        assert report.statistics is not None
        assert report.statistics.missing == ["p1"]
        assert report.statistics.element_count == 2


class TestSwitches:
    """Each part can be switched off."""

    def test_monitoring(self) -> None:
        """Without monitoring there are no statistics, groups or issues, and clipping still works."""
        report = look(with_gradients([torch.full((4,), 9.0)]), enable_gradient_monitoring=False)
        assert (report.statistics, report.groups, report.health.healthy) == (None, {}, True)
        assert report.clipping.clipped

    def test_groups(self) -> None:
        """Without tracking per weight matrix there are no groups."""
        assert look(small_model_with_gradients(), grad_track_per_weight_matrix=False).groups == {}

    def test_check_frequency(self) -> None:
        """Between full measurements norm, clipping and windows go on, and the rest is None; due rows are full."""
        manager = GradientManager(check_frequency=5, grad_log_every_n_steps=7, backends=["memory"])
        reports = train(manager, 14)
        assert [report.step for report in reports if report.measured] == [1, 2, 4, 5, 7, 10, 14]
        assert reports[2].statistics is None
        assert reports[2].clipping.norm_before is not None
        assert all("train/grad_mean" in row.metrics for row in rows(manager))

    def test_statistics_can_stay_out_of_the_records(self) -> None:
        """`log_gradient_stats=False` records health and clipping only."""
        manager = GradientManager(log_gradient_stats=False, grad_log_every_n_steps=1, backends=["memory"])
        assert train(manager, 1)[0].statistics is not None
        assert {"train/grad_norm", "train/grad_healthy"} <= set(rows(manager)[0].metrics)
        assert not {name for name in rows(manager)[0].metrics if "mean" in name or "norm/" in name}


def small_model_with_gradients() -> nn.Module:
    """Return a small model after a backward pass."""
    model = small_model()
    torch.autograd.backward(batch_loss(model))
    return model


class TestRecording:
    """Which steps become rows."""

    def test_every_n_steps(self) -> None:
        """A healthy run records every hundredth step, the first ones more densely, and its last one."""
        with GradientManager(backends=["memory"]) as manager:
            train(manager, 250)
            assert [row.step for row in rows(manager)] == [1, 2, 4, 8, 16, 32, 64, 100, 200]
        assert [row.step for row in rows(manager)][-2:] == [200, 250]
        assert rows(manager)[-1].metrics == manager.reports[-1].metrics()

    @given(every=st.integers(1, 40), steps=st.integers(1, 90))
    @checked(max_examples=15, deadline=None)
    def test_rows_of_a_calm_run(self, every: int, steps: int) -> None:
        """Every Nth step has a row, each power of two before, and the last, also in a failed run."""
        manager = GradientManager(backends=["memory"], grad_log_every_n_steps=every, analyzers=[])
        with suppress(ZeroDivisionError), manager:
            train(manager, steps)
            raise ZeroDivisionError
        due = {step for step in range(1, steps + 1) if not step % every or (step < every and step.bit_count() == 1)}
        assert [row.step for row in rows(manager)] == sorted(due | {steps})

    def test_the_last_step_of_each_pair(self) -> None:
        """Each pair of a game has its own."""
        with GradientManager(backends=["memory"]) as manager:
            for name, steps in (("a", 3), ("b", 5)):
                model = small_model()
                optimizer = optimizer_of(model)
                manager.attach(model, optimizer, name=name)
                train(manager, steps, model=model, optimizer=optimizer)
        last = {row.source: row.step for row in rows(manager)}
        assert last == {"a": 3, "b": 5}

    @pytest.mark.parametrize(("chosen", "steps"), [({}, 0), ({"backends": []}, 3), ({"run_dir": "here"}, 3)])
    def test_nothing_kept(self, chosen: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture) -> None:
        """A training that keeps nothing says so in one line at its end, unless it was asked for or made no step."""
        with GradientManager(chosen) as manager:
            train(manager, steps)
        assert not any("nothing was kept" in text for text in caplog.messages)
        with GradientManager() as manager:
            train(manager, 3)
        (line,) = (text for text in caplog.messages if "nothing was kept" in text)
        assert "3 step(s)" in line
        assert "run_dir='runs/exp1'" in line

    def test_events(self) -> None:
        """The first step of a non-finite streak and the first healthy one after it are recorded as well."""
        manager = GradientManager(backends=["memory"])
        train(manager, 60, change=lambda step, loss: loss * (math.nan if 30 <= step < 35 else 1.0))
        assert [row.step for row in rows(manager)] == [1, 2, 4, 8, 16, 30, 32, 35]
        assert rows(manager)[5].issues[0]["issue_type"] == "NUMERICAL"
        assert rows(manager)[5].metrics["train/grad_issues/numerical"] == 1.0

    def test_first_record_carries_the_run(self) -> None:
        """The identity and the settings that were made come with the first row and only there."""
        manager = GradientManager(backends=["memory"], grad_log_every_n_steps=1, max_grad_norm=3.0)
        train(manager, 2)
        assert rows(manager)[0].run.config["max_grad_norm"] == 3.0
        assert rows(manager)[0].run.run_id == manager.status()["run_id"]
        assert rows(manager)[1].run is None

    def test_the_run_names_its_plugins(self) -> None:
        """Who reads a run later sees its backends and analyzers with their options, without a secret."""
        uri = "http://ana:secret@127.0.0.1:9"
        later = {"name": "mlflow", "tracking_uri": uri, "timeout_seconds": 0.1, "own_process": False}
        analyzers = ["updates", {"name": "gain", "blocks": "0|2"}]
        manager = GradientManager(
            backends=["memory", later], analyzers=analyzers, close_timeout_seconds=0.1, grad_log_every_n_steps=1
        )
        train(manager, 1)
        manager.close()
        config = rows(manager)[0].run.config
        assert config["analyzers"] == analyzers
        assert config["backends"][0] == "memory"
        assert (config["backends"][1]["name"], "secret" in str(config)) == ("mlflow", False)
        plain = GradientManager(backends=["memory"], grad_log_every_n_steps=1)
        train(plain, 1)
        assert "analyzers" not in rows(plain)[0].run.config

    def test_memory_writes_no_files(self, tmp_path: Path) -> None:
        """With only memory and console backends there is no run directory."""
        manager = GradientManager(backends=["memory"], grad_log_every_n_steps=1)
        train(manager, 3)
        manager.close()
        assert manager.run_dir is None
        assert list(tmp_path.iterdir()) == []

    def test_weight_norms_come_with_recorded_steps(self) -> None:
        """A recorded report has the norm of each group's weights; others leave them out."""
        model = small_model()
        reports = train(GradientManager(), 4, model=model)
        assert reports[2].groups["0"].weight_norm is None
        weight_norm = reports[3].groups["0"].weight_norm
        assert weight_norm is not None
        assert weight_norm > 0


class TestIssues:
    """Callbacks and the flight recorder."""

    def test_callbacks_hear_an_issue_once(self) -> None:
        """A callback gets the issue and the report when it opens, not on every step."""
        heard: list[tuple[Issue, StepReport]] = []
        manager = GradientManager()
        manager.on_issue(lambda issue, report: heard.append((issue, report)))
        train(manager, 20, change=lambda step, loss: loss * (math.nan if 8 <= step < 12 else 1.0))
        assert [(issue.issue_type.value, report.step) for issue, report in heard] == [("NUMERICAL", 8)]

    def test_a_callback_may_stop_the_training(self) -> None:
        """What it raises comes out of the step, after the step was kept."""
        manager = GradientManager(backends=["memory"])

        @manager.on_issue
        def stop(issue: Issue, report: StepReport) -> None:
            raise KeyboardInterrupt(issue.message)

        with pytest.raises(KeyboardInterrupt, match="NaN or infinite"):
            train(manager, 5, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
        assert rows(manager)[-1].step == 3

    @pytest.mark.parametrize("mute", ["NUMERICAL", "numerical", "0.weight", "NUMERICAL:weight"])
    def test_muted(self, mute: str) -> None:
        """A muted type, layer or type at a layer opens no issue."""
        manager = GradientManager(mute=[mute], nonfinite_action="report")
        model = small_model_with_gradients()
        next(model.parameters()).grad[0, 0] = math.nan  # type: ignore[index]
        assert look(model, manager).health.issues == []
        assert manager.diagnose() == []

    def test_diagnose_names_what_is_open(self) -> None:
        """The open issues are there without a report at hand."""
        manager = GradientManager()
        assert manager.diagnose() == []
        train(manager, 3, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
        assert [issue.issue_type.value for issue in manager.diagnose()] == ["NUMERICAL"]

    def test_flight_recorder_keeps_the_steps_up_to_the_first_fault(self) -> None:
        """The eight steps up to a fault are kept with every parameter and their batches."""
        manager, model = GradientManager(), small_model()
        optimizer = optimizer_of(model)
        for step in range(1, 31):
            optimizer.zero_grad()
            spoil = math.inf if step == 20 else 1.0
            manager.step(model, optimizer, batch_loss(model, step) * spoil, batch=f"batch {step}")
            optimizer.step()
        kept = manager.flight_recorder
        assert [report.step for report in kept] == list(range(13, 21))
        assert set(kept[0].parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert kept[-1].batch == "batch 20"
        assert not kept[-1].health.healthy

    def test_callback_type(self) -> None:
        """Only functions can be called back."""
        with pytest.raises(InputTypeError, match="expected a function"):
            GradientManager().on_issue("stop")  # type: ignore[arg-type]


class TestLoops:
    """Loops that are not the plain one."""

    def test_accumulation(self) -> None:
        """Micro-batches measure nothing; the step sees their sum, once, with their summed loss."""
        model, whole = small_model(), small_model()
        optimizer, manager = optimizer_of(model), GradientManager()
        first, second = batch_loss(model, 1) / 2, batch_loss(model, 2) / 2
        micro = safe_backward(first, model, optimizer, manager, accumulate=True)
        report = safe_backward(second, model, optimizer, manager)
        torch.autograd.backward((batch_loss(whole, 1) + batch_loss(whole, 2)) / 2)
        expected = torch.nn.utils.get_total_norm([param.grad for param in whole.parameters() if param.grad is not None])
        assert (micro.measured, micro.step, micro.statistics, micro.clipping.norm_before) == (False, 0, None, None)
        assert micro.nan_inf.action == "unchecked"
        assert report.step == 1
        assert report.loss == pytest.approx(first.item() + second.item())
        assert report.clipping.norm_before == pytest.approx(float(expected), rel=1e-5)
        assert len(manager.reports) == 1

    def test_several_optimizers(self) -> None:
        """A sequence of optimizers is one pair, with the learning rates of each."""
        model = small_model()
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam([{"params": model[2].parameters(), "name": "head", "lr": 0.2}]),
        ]
        manager = GradientManager()
        for _ in range(2):
            report = manager.step(model, list(optimizers), batch_loss(model))
        assert report.step == 2
        assert report.lr == {"0.0": 0.1, "1.head": 0.2}

    def test_wrapped_optimizer(self) -> None:
        """Any object with param_groups is accepted as an optimizer."""

        class Wrapper:
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.param_groups = inner.param_groups

        model = small_model()
        assert GradientManager().step(model, Wrapper(optimizer_of(model)), batch_loss(model)).step == 1

    def test_wrapped_optimizer_is_watched(self) -> None:
        """Under whatever name a wrapper of the user keeps the optimizer, its steps are measured."""

        class Wrapper:
            def __init__(self, inner: Any) -> None:
                self.param_groups, self._inner = inner.param_groups, inner

            def step(self) -> None:
                self._inner.step()

        model = small_model()
        wrapped = Wrapper(optimizer_of(model))
        manager = gradtrack.watch(model, wrapped, analyzers=["updates"])
        for step in range(5):
            torch.autograd.backward(batch_loss(model, step))
            wrapped.step()
        assert [report.step for report in manager.reports] == [1, 2, 3, 4, 5]
        assert "updates" in manager.reports[-1].analyzers

    def test_optimizer_of_a_part(self) -> None:
        """An optimizer that owns only the head is fine, and the norm is that of the whole model."""
        model = small_model()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        assert set(GradientManager().step(model, optimizer, batch_loss(model)).groups) == {"0", "2"}

    def test_gan(self) -> None:
        """A second pair has its own name, steps, windows and metric names."""
        generator, critic = small_model(1), nn.Linear(3, 1)
        g_step, d_step = optimizer_of(generator), optimizer_of(critic)
        manager = GradientManager(backends=["memory"], grad_log_every_n_steps=2)
        manager.attach(critic, d_step, name="D")
        for step in range(1, 5):
            fake = generator(torch.randn(8, 6))
            for _ in range(2):
                d_step.zero_grad()
                d_report = manager.step(critic, d_step, critic(fake.detach()).mean())
                d_step.step()
            if step == 1:
                manager.attach(generator, g_step, name="G")
            g_step.zero_grad()
            g_report = manager.step(generator, g_step, -critic(fake).mean())
            g_step.step()
        assert (d_report.step, d_report.source, g_report.step, g_report.source) == (8, "D", 4, "G")
        names = {name for row in rows(manager) for name in row.metrics}
        assert {"train/grad_norm/D", "train/grad_norm/G", "train/grad_norm/G/0"} <= names

    def test_second_pair_without_a_name(self) -> None:
        """The error says how to give it one."""
        manager, model = GradientManager(), small_model()
        train(manager, 1, model=model)
        with pytest.raises(UsageError, match=r"manager\.attach\(model, optimizer, name="):
            train(manager, 1, model=small_model(1))
        with pytest.raises(UsageError, match="expected a name"):
            manager.attach(small_model(1))

    def test_replaced_optimizer(self) -> None:
        """Attaching the same model again takes the new optimizer and keeps counting."""
        manager, model = GradientManager(), small_model()
        train(manager, 2, model=model)
        new = optimizer_of(model, torch.optim.Adam)
        manager.attach(model, new)
        assert manager.step(model, new, batch_loss(model)).step == 3

    def test_attached_before_its_optimizer(self) -> None:
        """A model can be attached alone and gets its optimizer with the first step."""
        manager, model = GradientManager(), small_model()
        manager.attach(model, horizon=5)
        assert train(manager, 1, model=model)[0].step == 1

    def test_closure_optimizers(self) -> None:
        """LBFGS calls its closure many times and yields one report per step."""
        model, manager = small_model(), GradientManager()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        calls: list[StepReport] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = batch_loss(model)
            calls.append(safe_backward(loss, model, optimizer, manager))
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        assert len(calls) > 6
        assert [report.step for report in manager.reports] == [1, 2, 3]
        assert {report.step for report in calls} == {1, 2, 3}

    def test_watch(self) -> None:
        """One line makes every optimizer step measured, clipped and safe."""
        model = small_model()
        optimizer = optimizer_of(model)
        manager = gradtrack.watch(model, optimizer, backends=["memory"], max_grad_norm=1e-3)
        before = layer(model, 0).weight.detach().clone()
        torch.autograd.backward(batch_loss(model))
        optimizer.step()
        assert manager.reports[0].clipping.clipped
        assert float((layer(model, 0).weight.detach() - before).norm()) < 1.1e-4
        optimizer.zero_grad()
        torch.autograd.backward(batch_loss(model) * math.nan)
        optimizer.step()
        assert manager.reports[1].skipped
        assert torch.isfinite(layer(model, 0).weight).all()
        manager.close()
        torch.autograd.backward(batch_loss(model))
        optimizer.step()
        assert len(manager.reports) == 2

    @pytest.mark.parametrize(
        ("settings", "clips", "action"),
        [
            ({}, False, "report"),
            ({"grad_log_every_n_steps": 1, "analyzers": ("flow",), "backends": ("memory",)}, False, "report"),
            ({"nonfinite_action": "skip"}, False, "skip"),
            ({"replace_nan_with": 0.5}, False, "replace"),
            ({"clip_type": "value"}, True, "skip"),
            ({"max_grad_norm": 1e-3, "nonfinite_action": "report"}, True, "report"),
            ({"enable_nan_inf_check": False}, False, "off"),
        ],
    )
    @pytest.mark.parametrize("as_config", [False, True])
    def test_watch_changes_nothing_unless_asked(
        self, settings: dict[str, Any], clips: bool, action: str, as_config: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without a setting that asks for it neither weights nor gradients change, also of huge and of bad steps."""
        weights = []
        for watched in (True, False):
            model = small_model()
            optimizer = optimizer_of(model, momentum=0.9)
            manager = None
            if watched:
                given = {"config": GradientConfig.load(None, **settings)} if as_config else settings
                manager = gradtrack.watch(model, optimizer, **given)
            for step, scale in enumerate((1e3, 1.0, math.nan)):
                optimizer.zero_grad()
                torch.autograd.backward(batch_loss(model, step, scale))
                optimizer.step()
                if step == 1:
                    weights.append([param.detach().clone() for param in model.parameters()])
            if manager is not None:
                reports = manager.reports
                manager.close()
        assert all(map(torch.equal, *weights)) is not clips
        assert reports[0].clipping.clipped is clips
        assert reports[2].nan_inf.action == action
        assert not [text for text in caplog.messages if "has no effect" in text]

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
    def test_watch_with_analyzers(self, kind: type[torch.optim.Optimizer]) -> None:
        """A look from within the optimizer's hooks works at every step, sees who clips, and leaves nothing."""
        for left in (1.0, 1e-3):
            model = small_model()
            optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
            manager = gradtrack.watch(model, optimizer, analyzers="auto", enable_gradient_clipping=False)
            foreign = optimizer.register_step_pre_hook(partial(shrink, model, left))
            for step in range(70):
                optimizer.zero_grad()
                torch.autograd.backward(batch_loss(model, step))
                optimizer.step()
            assert [report.step for report in manager.reports] == list(range(1, 71))
            flow: Any = manager.analyzer("flow")
            clips = [sample.clip for sample in flow.case.samples]
            assert clips[1:] == pytest.approx([left] * (len(clips) - 1), rel=1e-4)
            foreign.remove()
            manager.close()
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks

    def test_watch_needs_hooks(self) -> None:
        """What cannot be hooked is refused with the alternative."""

        class Bare:
            param_groups = ()

        with pytest.raises(InputTypeError, match="safe_backward"):
            gradtrack.watch(small_model(), Bare())

    def test_an_issue_says_which_pair_it_is_about(self) -> None:
        """Two models may have a layer of one name; without names no pair is told."""
        manager, pairs = GradientManager(backends=["memory"], engine="torch"), {}
        for name in ("generator", "critic"):
            model = small_model()
            pairs[name] = model, optimizer_of(model)
            manager.attach(*pairs[name], name=name)
        opened: list[Issue] = []
        manager.on_issue(lambda issue, _: opened.append(issue))
        for step in range(1, 4):
            for name, (model, optimizer) in pairs.items():
                scale = math.nan if name == "critic" and step == 2 else 1.0
                report = manager.step(model, optimizer, batch_loss(model, step, scale))
                assert {issue.source for issue in report.health.issues} <= {name}
        assert [issue.source for issue in opened] == ["critic"]
        assert [issue.source for issue in manager.diagnose()] == ["critic"]
        assert " of critic: " in str(manager.diagnose()[0])
        records = manager.backend("memory").records  # type: ignore[attr-defined]
        assert {issue["source"] for record in records for issue in record.issues} == {"critic"}
        alone = GradientManager(engine="torch")
        train(alone, 3, change=lambda step, loss: loss * math.nan if step == 2 else loss)
        assert [issue.source for issue in alone.diagnose()] == [""]

    def test_model_that_changes(self) -> None:
        """A layer that is frozen during training leaves the report."""
        manager, model = GradientManager(), small_model()
        train(manager, 1, model=model, optimizer=(optimizer := optimizer_of(model)))
        model[0].requires_grad_(False)
        assert set(train(manager, 1, model=model, optimizer=optimizer)[0].groups) == {"2"}

    def test_gradient_scaler(self) -> None:
        """With a scaler the report is of unscaled gradients and the scaler decides about bad steps."""
        model, plain = small_model(), small_model()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        manager = GradientManager()
        report = safe_backward(batch_loss(model), model, optimizer, manager, scaler=scaler)
        torch.autograd.backward(batch_loss(plain))
        expected = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
        assert report.clipping.norm_before == pytest.approx(float(expected), rel=1e-5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        before = layer(model, 0).weight.detach().clone()
        report = safe_backward(batch_loss(model) * math.inf, model, optimizer, manager, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        assert (report.nan_inf.action, report.skipped, report.health.healthy) == ("scaler", True, True)
        assert torch.equal(layer(model, 0).weight, before)
        assert scaler.get_scale() == 512.0


class TestRefusals:
    """Input that cannot mean anything."""

    @pytest.mark.parametrize(
        ("loss", "backward", "text"),
        [
            (torch.ones(3, requires_grad=True), True, "loss.mean"),
            (torch.tensor(1.0), True, "backward=False"),
            (3.0, True, "backward=False"),
            ("loss", False, "expected a tensor, a number or None"),
        ],
    )
    def test_loss(self, loss: Any, backward: bool, text: str) -> None:
        """A loss that is not a scalar, needs no gradient or is no loss at all."""
        model = small_model()
        with pytest.raises((UsageError, InputTypeError), match=text):
            GradientManager().step(model, optimizer_of(model), loss, backward)

    def test_model(self) -> None:
        """Not a module, or a module without trainable parameters."""
        with pytest.raises(InputTypeError, match="Module"):
            GradientManager().step("model", None, None, backward=False)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no trainable parameters"):
            GradientManager().attach(nn.ReLU())
        with pytest.raises(UsageError, match="frozen"):
            GradientManager().attach(small_model().requires_grad_(False))

    def test_optimizer(self) -> None:
        """No optimizer at all, or one of another model."""
        with pytest.raises(InputTypeError, match="param_groups"):
            GradientManager().step(small_model(), "adam", None, backward=False)
        with pytest.raises(UsageError, match="owns none"):
            GradientManager().step(small_model(), optimizer_of(small_model()), None, backward=False)

    def test_refused_calls_leave_nothing_behind(self) -> None:
        """After an error the same manager works as if it had not happened."""
        manager, model = GradientManager(), small_model()
        with pytest.raises(UsageError):
            manager.step(model, optimizer_of(small_model()), None, backward=False)
        assert train(manager, 1, model=model)[0].step == 1

    def test_names(self) -> None:
        """Backends and analyzers that are not there are named with those that are."""
        manager = GradientManager(backends=["memory"])
        with pytest.raises(UsageError, match="memory"):
            manager.backend("wandb")
        with pytest.raises(UsageError, match="none"):
            manager.analyzer("flow")
        with pytest.raises(UsageError, match="twice"):
            GradientManager(backends=["memory", "memory"])
        with pytest.raises(UsageError, match=r"'size' is not an option. Its options"):
            GradientManager(backends=[{"name": "memory", "size": 3}])
        with pytest.raises(UsageError, match=r"'tensorboard': 'logdir' is not an option.* Did you mean 'log_dir'"):
            GradientManager(backends=[{"name": "tensorboard", "logdir": "x"}])
        with pytest.raises(UsageError, match=r"'flow': 'dead_treshold' is not .* Did you mean 'dead_threshold'"):
            GradientManager(analyzers=[{"name": "flow", "dead_treshold": 0.5}])

    def test_run_dir(self, tmp_path: Path) -> None:
        """A run directory that is a file is refused before anything starts."""
        (tmp_path / "file").write_text("")
        with pytest.raises(RunDirectoryError, match="Choose another run_dir"):
            GradientManager(run_dir=tmp_path / "file")


class TestLife:
    """From opening to closing, and over it."""

    def test_closed(self) -> None:
        """A closed manager refuses steps, still tells what was, and closes twice without harm."""
        with GradientManager(backends=["memory"]) as manager:
            train(manager, 3)
        manager.close()
        assert manager.get_training_summary().total_steps == 3
        assert manager.status()["steps"] == {"default": 3}
        with pytest.raises(ClosedError, match="Make a new one"):
            train(manager, 1)

    def test_failure_is_passed_on(self) -> None:
        """An exception in the loop closes the backends as failed and goes on its way."""
        with pytest.raises(ZeroDivisionError), GradientManager(backends=["memory"]) as manager:
            raise ZeroDivisionError
        assert manager.backend("memory").failed  # type: ignore[attr-defined]

    def test_history_is_bounded(self) -> None:
        """Only the last reports are kept, and the summary counts all steps."""
        manager = GradientManager(max_gradient_history=5)
        train(manager, 12)
        assert [report.step for report in manager.reports] == [8, 9, 10, 11, 12]
        assert manager.get_training_summary().total_steps == 12

    def test_resume(self) -> None:
        """A training that was saved and resumed reports what an uninterrupted one does."""
        settings: dict[str, Any] = {"adaptive_clipping": True, "adaptive_window_size": 15}
        whole, model = GradientManager(**settings), small_model()
        expected = train(whole, 40, model=model)
        first, second, other = GradientManager(**settings), GradientManager(**settings), small_model()
        optimizer = optimizer_of(other)
        train(first, 25, model=other, optimizer=optimizer)
        second.load_state_dict(first.state_dict())
        for step in range(26, 41):
            optimizer.zero_grad()
            report = second.step(other, optimizer, batch_loss(other, step))
            optimizer.step()
            assert report.model_dump(exclude={"time"}) == expected[step - 1].model_dump(exclude={"time"})
        assert second.get_training_summary() == whole.get_training_summary()

    def test_state_can_be_saved_safely(self, tmp_path: Path) -> None:
        """A checkpoint with our state loads under torch's weights_only."""
        manager = GradientManager()
        train(manager, 30)
        torch.save(manager.state_dict(), tmp_path / "state.pt")
        other = GradientManager()
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.get_training_summary().total_steps == 30

    def test_counting_goes_on_from_a_framework_s_step(self) -> None:
        """The step after `continue_from(40)` is step 41, for reports and analyzers."""
        manager, model = GradientManager(), small_model()
        optimizer = optimizer_of(model)
        manager.attach(model, optimizer)
        manager.continue_from(40)
        reports = train(manager, 2, model=model, optimizer=optimizer)
        assert [report.step for report in reports] == [41, 42]
        with pytest.raises(UsageError, match=r"pair 'critic': expected one that is attached \(''\)"):
            manager.continue_from(1, name="critic")
        with pytest.raises(UsageError, match="step -1: expected a number of optimizer steps"):
            manager.continue_from(-1)

    def test_a_note_is_in_one_report(self) -> None:
        """A note is in the next report and in no other."""
        manager, model = GradientManager(), small_model()
        optimizer = optimizer_of(model)
        manager.attach(model, optimizer)
        manager.note("clipping is left to the framework")
        reports = train(manager, 2, model=model, optimizer=optimizer)
        assert [report.notes for report in reports] == [["clipping is left to the framework"], []]

    def test_foreign_state(self) -> None:
        """The state of another version is refused."""
        with pytest.raises(UsageError, match="version 7"):
            GradientManager().load_state_dict({"version": 7})


def test_interrupted_pictures_do_not_cost_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the pictures are drawn loses no row."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradtrack.pages.at_close.save_pictures", interrupt)
    manager = GradientManager(backends=["json"], run_dir=tmp_path / "run", grad_log_every_n_steps=1)
    train(manager, 3)
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    assert manager.status()["backends"]["json"]["acknowledged"] == 3


def test_flush_after_the_close_waits_for_no_worker(tmp_path: Path) -> None:
    """A flush that comes too late returns, although no worker is there to answer."""
    manager = GradientManager(backends=["json"], run_dir=tmp_path / "run", close_timeout_seconds=3600.0)
    train(manager, 3)
    manager.close()
    manager.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_copy_of_a_training_leaves_no_files(tmp_path: Path) -> None:
    """A forked child that closes its copy of a manager does not end the run of its parent."""
    manager = GradientManager(backends=["json"], run_dir=tmp_path / "run", grad_log_every_n_steps=1)
    train(manager, 3)
    child = os.fork()
    if child == 0:
        try:
            manager.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not (tmp_path / "run" / "run_end.json").exists()
    manager.close()
    assert (tmp_path / "run" / "run_end.json").exists()


def test_verbose_and_debug_logging(caplog: pytest.LogCaptureFixture) -> None:
    """Verbose logs a line for each recorded step, debug every parameter."""
    caplog.set_level(logging.DEBUG, logger="gradtrack")
    train(create_gradient_manager(verbose=True, debug_mode=True, grad_log_every_n_steps=1), 2)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("gradient norm" in line for line in lines) == 2
    assert sum("0.weight" in line for line in lines) == 2


def test_create_gradient_manager_names() -> None:
    """The short names of the common settings reach the configuration, and others pass through."""
    config = create_gradient_manager(
        max_grad_norm=2.0, enable_monitoring=False, enable_nan_inf_check=False, verbose=True, clip_type="value"
    ).config
    assert (config.max_grad_norm, config.enable_gradient_monitoring, config.verbose_logging) == (2.0, False, True)
    assert (config.enable_nan_inf_check, config.clip_type) == (False, "value")


def test_rows_are_made_only_where_they_go_somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a backend and a directory a recorded step makes no row; with either it makes one."""
    made: list[int] = []

    def counted(outcome: Any, *rest: Any) -> Any:
        made.append(outcome.step)
        return to_record(outcome, *rest)

    monkeypatch.setattr(rows_module, "to_record", counted)
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, []),
        ({"backends": ["memory"]}, [1, 2]),
        ({"run_dir": tmp_path / "run"}, [1, 2]),
    ]
    for settings, expected in cases:
        made.clear()
        model = small_model()
        optimizer = optimizer_of(model)
        with GradientManager(grad_log_every_n_steps=1, **settings) as manager:
            for step in range(2):
                model.zero_grad()
                manager.step(model, optimizer, batch_loss(model, step))
        assert made == expected, settings
