"""Spikes of finite steps: which are found, what is done about them, and what a training is after them."""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # which registers the backend
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradtrack import GradientConfig, GradientManager, StepReport, watch
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.protection.spikes import SpikeDetector
from gradtrack.step import data, pair
from tests.docs.pages import DOCS, blocks
from tests.training import batch_loss, small_model

Values = Sequence[tuple[float, float | None]]


def actions(values: Values, **settings: Any) -> list[str]:
    """Return what a detector does about each of several steps."""
    detector, found = SpikeDetector(GradientConfig(spike_action="skip", **settings)), []
    for step, (norm, loss) in enumerate(values, 1):
        spike = detector.judge(step, norm, loss)
        detector.remember(step, norm, loss, spike)
        found.append("" if spike is None else spike["action"])
    return found


def oracle(values: Values, *, window: int, threshold: float, robust: bool, most: int) -> list[str]:
    """Return the same by the definition, with lists and the functions of `statistics`."""
    norms, losses, run, found = list[float](), list[float](), list[tuple[float, float | None]](), list[str]()

    def beyond(value: float, known: list[float]) -> bool:
        known = known[-window:]
        if len(known) < window // 2:
            return False
        centre = statistics.median(known) if robust else statistics.fmean(known)
        if robust:
            spread = 1.4826 * statistics.median([abs(one - centre) for one in known])
        else:
            spread = statistics.stdev(known)
        return value - centre > threshold * max(spread, 1e-3 * abs(centre))

    for norm, loss in values:
        if beyond(norm, norms) or (loss is not None and beyond(loss, losses)):
            run.append((norm, loss))
            if len(run) <= most:
                found.append("skip")
                continue
            found.append("accepted")
            norms, losses = [], []
        else:
            run = [(norm, loss)]
            found.append("")
        norms += [norm for norm, _ in run]
        losses += [loss for _, loss in run if loss is not None]
        run = []
    return found


@given(
    values=st.lists(
        st.tuples(st.floats(0.5, 1.5), st.none() | st.floats(-1.0, 1.0), st.sampled_from([1.0, 1.0, 1.0, 8.0, 50.0])),
        min_size=10,
        max_size=60,
    ),
    window=st.integers(4, 16),
    threshold=st.sampled_from([2.0, 3.0, 6.0]),
    robust=st.booleans(),
    most=st.integers(1, 4),
)
def test_spikes_are_those_of_the_definition(
    values: list[tuple[float, float | None, float]], window: int, threshold: float, robust: bool, most: int
) -> None:
    """By the mean and the standard deviation, or the median and the MAD, of the steps that were none."""
    steps = [(norm * factor, None if loss is None else loss * factor) for norm, loss, factor in values]
    settings = {"spike_window": window, "spike_threshold": threshold, "spike_robust": robust}
    expected = oracle(steps, window=window, threshold=threshold, robust=robust, most=most)
    assert actions(steps, spike_max_in_a_row=most, **settings) == expected


def test_defaults_are_six_deviations_of_128_steps_after_64() -> None:
    """As OLMo-core has them: nothing is a spike among the first 64 steps."""
    noise = [1.0 + 0.01 * math.sin(step) for step in range(300)]
    assert not any(actions([(norm, None) for norm in noise]))
    for step, found in ((63, ""), (64, "skip"), (200, "skip")):
        values = [(norm * (50.0 if index == step else 1.0), None) for index, norm in enumerate(noise)]
        assert actions(values)[step] == found
        losses = [(1.0, norm) for _, norm in enumerate(value for value, _ in values)]
        assert actions(losses)[step] == found


def test_a_new_level_is_accepted() -> None:
    """No more than the setting allows are left out, and from then on the level is that of the training."""
    values = [(1.0 + 0.01 * math.sin(step) + 9.0 * (step >= 100), None) for step in range(300)]
    for robust in (False, True):
        found = actions(values, spike_max_in_a_row=3, spike_robust=robust)
        assert found[100:104] == ["skip", "skip", "skip", "accepted"]
        assert not any(found[104:])


def test_a_spike_does_not_hide_the_next() -> None:
    """What was left out is in no window, however large it was."""
    values = [(1.0 + 0.01 * math.sin(step), None) for step in range(140)]
    values[100], values[120] = (1e6, None), (2.0, None)
    assert [step for step, found in enumerate(actions(values)) if found] == [100, 120]


def test_a_constant_run_has_no_spikes_by_rounding() -> None:
    """A deviation is at least a thousandth of the centre."""
    assert actions([(1.0, 2.0)] * 70 + [(1.0 + 1e-9, 2.0 + 1e-9), (1.01, 2.0)])[70:] == ["", "skip"]


def test_tiny_and_huge_values() -> None:
    """Squares of deviations that leave the range of a float64 are no deviations of zero or infinity."""
    for size in (1e-250, 1e250):
        values = [(size * (1.0 + 0.01 * (step % 3)), None) for step in range(100)]
        values[90] = (2.0 * size, None)
        assert [step for step, found in enumerate(actions(values)) if found] == [90]


# Trainings.


def run(
    *,
    spikes: Iterable[int] = (),
    steps: int = 60,
    factor: float = 100.0,
    kind: Callable[[Any], Any] = lambda params: torch.optim.Adam(params, lr=1e-3),
    leave_out: Iterable[int] = (),
    manager: GradientManager | None = None,
    model: nn.Module | None = None,
    scaler: Any = None,
    **settings: Any,
) -> tuple[nn.Module, Any, list[StepReport]]:
    """Train; the loss of some steps is larger, and the loop itself leaves out some."""
    model = model or small_model()
    optimizer = kind(model.parameters())
    manager = manager or GradientManager(**{"max_grad_norm": 1e3, "spike_window": 32, **settings})
    reports = []
    for step in range(1, steps + 1):
        if step in leave_out:
            continue
        optimizer.zero_grad()
        scale = factor if step in spikes else 1.0
        reports.append(manager.step(model, optimizer, batch_loss(model, step % 8, scale=scale), scaler=scaler))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return model, optimizer, reports


def same(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have equal weights."""
    return all(map(torch.equal, one.parameters(), other.parameters()))


KINDS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "fused": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    "momentum and decay": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_spike_is_no_step(kind: str, engine: Any) -> None:
    """To the bit the training is one that never saw the batch: weights, momentum and step count of the optimizer."""
    expected, optimizer, _ = run(leave_out=[40, 50], kind=KINDS[kind])
    model, own, reports = run(spikes=[40, 50], kind=KINDS[kind], spike_action="skip", engine=engine)
    assert same(model, expected)
    assert str(own.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    assert [report.step for report in reports if report.skipped] == [40, 50]
    spike = reports[39].spike
    assert spike is not None
    assert (spike.action, spike.in_a_row, spike.count) == ("skip", 1, 1)
    assert reports[39].clipping.norm_before is not None
    assert reports[39].clipping.norm_before > (spike.norm_limit or math.inf)
    assert reports[39].clipping.norm_after is None
    assert (reports[49].spike or spike).count == 2
    assert [note for note in reports[39].notes if "step 40 is a spike (the norm is" in note]


def test_a_scaler_does_not_back_off() -> None:
    """A spike is no overflow: the step is left out, and the loss scale stays."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, optimizer, reports = run(spikes=[40], scaler=scaler, spike_action="skip")
    assert scaler.get_scale() == 1024.0
    assert optimizer.state_dict()["state"][0]["step"] == 59.0
    assert reports[39].skipped
    assert reports[-1].scaler is not None
    assert reports[-1].scaler.skips == 0


def test_a_spike_is_clipped_to_its_window() -> None:
    """The norm after it is the mean of those before, also with limits of elements and where clipping is off."""
    several: list[dict[str, Any]] = [
        {},
        {"clip_type": "value"},
        {"enable_gradient_clipping": False},
        {"spike_robust": True},
    ]
    for settings in several:
        model, _, reports = run(spikes=[60], spike_action="clip", **settings)
        norms = [report.clipping.norm_before or 0.0 for report in reports[:-1]][-32:]
        centre = statistics.median(norms) if settings.get("spike_robust") else statistics.fmean(norms)
        after = math.hypot(*(float(param.grad.norm()) for param in model.parameters() if param.grad is not None))
        assert after == pytest.approx(centre, rel=1e-5)
        clipping = reports[-1].clipping
        assert clipping.norm_after == pytest.approx(centre)
        assert clipping.coefficient == pytest.approx(centre / (clipping.norm_before or 0.0), rel=1e-4)
        assert (clipping.clipped, reports[-1].skipped) == (True, False)


@pytest.mark.parametrize("clip_type", ["adaptive", "zscore"])
def test_a_clipped_spike_counts_in_the_clip_rate_alone(clip_type: Any) -> None:
    """The windows of the strategies are those of a training without it."""
    known = []
    for spikes in ([], [60]):
        manager = GradientManager(clip_type=clip_type, spike_window=32, spike_action="clip")
        _, _, reports = run(spikes=spikes, steps=59 + len(spikes), manager=manager)
        known.append(manager.state_dict()["pairs"][""]["clipper"]["strategies"])
        num_clipped = sum(report.clipping.clipped for report in reports)
        assert reports[-1].clipping.clip_rate == pytest.approx(num_clipped / len(reports))
    assert known[0] == known[1]
    _, _, reports = run(spikes=[60], spike_action="clip", max_grad_norm=1e6)
    assert [report.clipping.clip_rate for report in reports[-2:]] == [0.0, pytest.approx(1 / 60)]


@pytest.mark.parametrize("settings", [{"max_grad_norm": {".*": 1e6}}, {"max_grad_norm": 1e6, "norm_type": 1.0}])
def test_the_groups_of_a_clipped_spike_are_those_after_it(settings: dict[str, Any]) -> None:
    """The factor and the norm of each have both clippings in them."""
    manager = GradientManager(spike_window=32, spike_action="clip", **settings)
    model, _, reports = run(spikes=[60], manager=manager)
    clipping = reports[-1].clipping
    (group,) = clipping.groups.values()
    grads = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
    assert group.clipped
    assert group.norm_after == pytest.approx(float(grads.norm(settings.get("norm_type", 2.0))), rel=1e-5)
    assert group.coefficient == pytest.approx(group.norm_after / group.norm_before, rel=1e-4)
    assert group.coefficient == pytest.approx(clipping.coefficient)


def test_a_loss_alone_is_a_spike() -> None:
    """Its step is left out though its norm is as ever."""
    model, manager = small_model(), GradientManager(spike_action="skip", spike_window=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(1, 21):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, batch_loss(model, step % 4) + (1e3 if step == 18 else 0.0))
        optimizer.step()
        assert report.skipped == (step == 18)
        if step == 18:
            assert report.spike is not None
            assert (report.spike.loss_deviations or 0.0) > 6.0 > (report.spike.norm_deviations or 0.0)


def test_a_healthy_training_is_the_same_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    """To the bit, whatever would be done about a spike, and nothing is logged."""
    caplog.set_level(logging.WARNING)
    expected = run()[0]
    caplog.clear()
    for action in ("skip", "clip"):
        model, _, reports = run(spike_action=action)
        assert same(model, expected)
        assert not any(report.spike or report.notes for report in reports)
    assert "spike" not in caplog.text


def test_the_issue_of_a_spike_says_that_the_step_was_left_out() -> None:
    """What was done about it is known to the advice."""
    for action, told in (("skip", True), ("report", False)):
        _, _, reports = run(spikes=[60], spike_action=action)
        (issue,) = reports[59].health.issues
        assert issue.recommendation.endswith("The step was left out as a spike.") == told


def test_by_default_a_spike_is_reported_as_it_was() -> None:
    """Nothing is judged by a window and nothing is left out."""
    _, _, reports = run(spikes=[40])
    assert not any(report.spike or report.skipped for report in reports)
    assert not reports[39].health.healthy


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_listed_steps_are_left_out(engine: Any) -> None:
    """Whatever their gradients are, among steps that the fast path takes, and with windows of spikes or without."""
    expected, optimizer, _ = run(leave_out=[5, 6, 7, 30])
    several: list[dict[str, Any]] = [{}, {"spike_action": "skip"}]
    for settings in several:
        model, own, reports = run(skip_steps=[[5, 7], [30, 30]], engine=engine, **settings)
        assert same(model, expected)
        assert str(own.state_dict()["state"]) == str(optimizer.state_dict()["state"])
        assert [report.step for report in reports if report.skipped] == [5, 6, 7, 30]
        assert [report.spike.action for report in reports if report.spike] == ["listed"] * 4


@pytest.mark.parametrize("action", ["skip", "replace", "report", "raise"])
def test_a_listed_step_that_is_not_finite(action: Any) -> None:
    """It is left out, whatever would be done about its values otherwise, and they are counted."""
    expected = run(leave_out=[30])[0]
    model, _, reports = run(skip_steps=[[30, 30]], nonfinite_action=action, spikes=[30], factor=math.inf)
    assert same(model, expected)
    assert (reports[29].skipped, reports[29].nan_inf.action) == (True, "skip")
    assert reports[29].nan_inf.nan_count + reports[29].nan_inf.inf_count > 0


def test_the_loss_of_one_process_decides_nothing() -> None:
    """Processes that share no sums each have a loss of their own: only the norm is judged, on a device too."""
    detector = SpikeDetector(GradientConfig(spike_action="skip", spike_window=8))
    for step in range(8):
        detector.remember(step, 1.0, 1.0, None)
    assert detector.judge(9, 1.0, 100.0) is not None
    assert detector.limits().loss < 100.0
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 - torch does not export it to type checkers
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        assert detector.judge(9, 1.0, 100.0) is None
        assert detector.limits().loss == math.inf
        assert detector.judge(9, 100.0, 1.0) is not None
        assert len(detector.coming_notes) == 1
        detector.losses_are_shared = True
        assert detector.judge(9, 1.0, 100.0) is not None
    finally:
        dist.destroy_process_group()


def test_listed_steps_count_from_the_checkpoint() -> None:
    """After a resume the numbers are those of the whole training."""
    first = GradientManager()
    run(manager=first, steps=20)
    manager = GradientManager(skip_steps=[[22, 23]])
    manager.load_state_dict(first.state_dict())
    assert [report.step for report in run(manager=manager, steps=5)[2] if report.skipped] == [22, 23]


def test_the_window_is_in_the_checkpoint() -> None:
    """A training that goes on from it finds the spike that it would have found, and counts on."""
    first = GradientManager(spike_action="skip", spike_window=32)
    model = run(manager=first, steps=39, spikes=[30])[0]
    state = copy.deepcopy(first.state_dict())
    assert state["pairs"][""]["spikes"]["version"] == 1
    for loaded in (True, False):
        manager = GradientManager(spike_action="skip", spike_window=32)
        if loaded:
            manager.load_state_dict(state)
        report = run(manager=manager, model=copy.deepcopy(model), steps=1, spikes=[1])[2][0]
        assert report.skipped == loaded
        assert report.spike is None or report.spike.count == 2
    state["pairs"][""]["spikes"]["version"] = 2
    manager = GradientManager()
    manager.attach(small_model())
    with pytest.raises(UsageError, match="state of spikes of version 2: expected 1"):
        manager.load_state_dict(state)


class TestRollback:
    """Going back to a checkpoint."""

    def test_the_function_is_called_once_with_the_last_checkpoint(self) -> None:
        """The spike is left out, the rate is cut after the function, and the training goes on from there."""
        model, manager = small_model(), GradientManager(spike_action="rollback", spike_window=16, spike_lr_factor=0.5)
        optimizer, calls = torch.optim.Adam(model.parameters(), lr=1e-3), list[tuple[int, float | None]]()
        saved: dict[int, Any] = {}

        @manager.on_rollback
        def go_back(step: int, report: StepReport) -> None:
            calls.append((step, report.clipping.norm_before))
            one, other, own = copy.deepcopy(saved[step])
            model.load_state_dict(one)
            optimizer.load_state_dict(other)
            manager.load_state_dict(own)

        steps = []
        for batch in range(40):
            if batch in (10, 25):
                state = model.state_dict(), optimizer.state_dict(), manager.state_dict()
                saved[batch] = copy.deepcopy(state)
            optimizer.zero_grad()
            report = manager.step(model, optimizer, batch_loss(model, batch % 8, scale=100.0 if batch == 30 else 1.0))
            optimizer.step()
            steps.append(report.step)
            if batch == 30:
                assert report.skipped
                assert all(map(torch.equal, model.state_dict().values(), saved[25][0].values()))
        assert [step for step, _ in calls] == [25]
        assert steps[29:33] == [30, 31, 26, 27]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
        assert optimizer.state_dict()["state"][0]["step"] == 25 + 9

    def test_it_does_not_go_back_for_ever(self) -> None:
        """Where the same step is a spike each time, it is made after as many times as are allowed."""
        manager = GradientManager(spike_action="rollback", spike_window=16, spike_max_in_a_row=2)
        model, calls = small_model(), list[int]()
        optimizer, saved = torch.optim.SGD(model.parameters(), lr=1e-4), dict[str, Any]()

        @manager.on_rollback
        def go_back(step: int, report: StepReport) -> None:
            calls.append(step)
            manager.load_state_dict(saved["state"])

        step, num_steps = 0, 0
        while step < 40 and num_steps < 200:
            if step == 20 and not saved:
                saved["state"] = copy.deepcopy(manager.state_dict())
            optimizer.zero_grad()
            report = manager.step(model, optimizer, batch_loss(model, step % 4, scale=100.0 if step == 29 else 1.0))
            optimizer.step()
            num_steps += 1
            step = 20 if report.spike is not None and report.spike.action == "rollback" else step + 1
        assert calls == [20, 20]
        assert num_steps == 40 + 2 * 10

    def test_without_a_function(self) -> None:
        """It is refused at the first step, before it counts; so is what cannot be called."""
        manager, model = GradientManager(spike_action="rollback"), small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"Call manager.on_rollback\(function\)"):
            manager.step(model, optimizer, batch_loss(model))
        with pytest.raises(InputTypeError, match=r"a step and a report\. Pass one that loads"):
            manager.on_rollback(3)  # type: ignore[arg-type]
        manager.on_rollback(lambda step, report: None)
        assert manager.step(model, optimizer, batch_loss(model)).step == 1

    def test_the_example_of_the_documentation_goes_back_before_its_first_checkpoint(self) -> None:
        """A spike at step 70 takes it back to the weights and the steps of the beginning."""
        model = torch.nn.Linear(4, 1)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "criterion": nn.functional.mse_loss,
            "loader": [(torch.ones(8, 4), torch.full((8, 1), 1e6 if step == 70 else 50.0)) for step in range(1, 81)],
        }
        (example,) = [block.text for block in blocks(DOCS / "spikes.md") if "on_rollback" in block.text]
        exec(f"from gradtrack import GradientManager, safe_backward\n{example}", names)
        assert [report.step for report in names["manager"].reports][-12:] == [69, 70, *range(1, 11)]
        assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(5e-4)

    def test_without_a_checkpoint_it_is_the_beginning(self) -> None:
        """The step is 0; a function that raises ends the training, and nothing was stepped."""
        manager, model = GradientManager(spike_action="rollback", spike_window=8), small_model()

        @manager.on_rollback
        def stop(step: int, report: StepReport) -> None:
            raise RuntimeError(f"back to {step}")

        with pytest.raises(RuntimeError, match="back to 0"):
            run(manager=manager, model=model, spikes=[20], steps=20)
        assert manager.reports[-1].skipped


def test_watch_leaves_out_a_spike() -> None:
    """Where gradtrack looks within the step of the optimizer, the weights stay as well."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager = watch(model, optimizer, spike_action="skip", spike_window=16)
    for step in range(1, 31):
        optimizer.zero_grad()
        batch_loss(model, step % 4, scale=100.0 if step == 25 else 1.0).backward()  # type: ignore[no-untyped-call]
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters())) == (step == 25)
    assert [report.step for report in manager.reports if report.skipped] == [25]


@pytest.mark.parametrize("nonfinite_action", ["skip", "report"])
def test_a_device_leaves_out_the_same_steps(nonfinite_action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a flag that the optimizer takes: the same weights, and the same reports one step late."""
    settings: dict[str, Any] = {"spike_action": "skip", "engine": "torch", "nonfinite_action": nonfinite_action}
    settings |= {"spike_max_in_a_row": 2, "steps": 70}
    spikes = [40, 50, 51, 52, 53]
    expected, _, reports = run(spikes=spikes, kind=KINDS["fused"], **settings)
    monkeypatch.setattr(pair, "on_device", lambda grads: True)
    monkeypatch.setattr(data, "next_row", lambda step, every: every)
    model, optimizer, late = run(spikes=spikes, kind=KINDS["fused"], **settings)
    for weight, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(weight, wanted, rtol=1e-5, atol=1e-8)
    assert [report.step for report in late if report.skipped] == [40, 50, 51]
    for one, other in zip(late, reports, strict=True):
        assert (one.spike is None) == (other.spike is None)
        if one.spike is not None and other.spike is not None:
            assert (one.spike.action, one.spike.count) == (other.spike.action, other.spike.count)
            assert one.spike.norm_limit == pytest.approx(other.spike.norm_limit, rel=1e-4)
    assert optimizer.state_dict()["state"][0]["step"] == 67.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"spike_action": "explode"}, "spike_action = 'explode': expected 'report', 'skip', 'clip' or 'rollback'"),
        ({"skip_steps": [[3, 2]]}, r"\[3, 2\] is no range of steps. Write skip_steps=\[\[1200, 1210\]"),
        ({"skip_steps": [[0, 2]]}, r"\[0, 2\] is no range of steps"),
        ({"skip_steps": [7]}, r"Write skip_steps=\[\[1200, 1210\]"),
        ({"spike_lr_factor": 2.0}, "expected less than or equal to 1"),
        ({"spike_max_in_a_row": 0}, "expected greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], text: str) -> None:
    """Each is refused with what to write."""
    with pytest.raises(UsageError, match=text):
        GradientConfig(**settings)


def test_a_step_without_gradients_is_none() -> None:
    """Its norm of zero enters no window, and a NaN neither."""
    values: Values = [(1.0, 1.0)] * 10 + [(0.0, None)] * 100 + [(1.0, math.nan)] * 3
    detector = SpikeDetector(GradientConfig(spike_action="skip", spike_window=8))
    for step, (norm, loss) in enumerate(values, 1):
        detector.remember(step, norm, loss, detector.judge(step, norm, loss))
    state = detector.state_dict()
    assert (state["norms"], state["losses"]) == ([1.0] * 8, [1.0] * 8)
