"""The fast path: steps are measured in one call and applied together, with the same results as one by one."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from torch import Tensor, nn

from gradtrack import GradientManager, StepReport
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.health.rule_engine import Health
from gradtrack.step.fast_path import FastPath
from gradtrack.step.pair import Pair
from tests.training import small_model

native = pytest.importorskip("gradtrack.gradients.native.engine", reason="numba is not installed")

Loop = tuple[GradientManager, nn.Sequential, torch.optim.Optimizer]
QUIET = 60
"""After so many steps of a quiet training some are fast."""


@contextmanager
def closely() -> Any:
    """Run every step outside the fast path."""
    with mock.patch.object(FastPath, "open"):
        yield


def quiet_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a batch, which differs little from the last one."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step % 8))
    loss: Tensor = (model(inputs) - 1.0).square().mean()
    return loss


def train(loop: Loop, steps: range, before: Callable[[int], None] = lambda step: None) -> list[StepReport]:
    """Train; `before` is called after the backward pass of each step."""
    manager, model, optimizer = loop
    reports = []
    for step in steps:
        optimizer.zero_grad()
        loss = quiet_loss(model, step)
        torch.autograd.backward(loss)
        before(step)
        reports.append(manager.step(model, optimizer, loss, backward=False))
        optimizer.step()
    return reports


def a_loop(lr: float = 1e-4, **chosen: Any) -> Loop:
    """Return a training."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return GradientManager(engine="native", **chosen), model, optimizer


def pair_of(loop: Loop) -> Pair:
    """Return the only pair of a training."""
    return next(iter(loop[0]._pairs))


def assert_waiting(loop: Loop) -> None:
    """Make sure that the last step was a fast one that is still pending."""
    assert pair_of(loop).pending.held is not None, "no step waits: the test shows nothing"


ACTIONS: dict[str, Callable[[Loop, int], object]] = {
    "read the report": lambda loop, step: loop[0].reports[-1].health,
    "count reports": lambda loop, step: len(loop[0].reports),
    "sum up": lambda loop, step: loop[0].get_training_summary(),
    "diagnose": lambda loop, step: loop[0].diagnose(),
    "checkpoint": lambda loop, step: loop[0].state_dict(),
    "go back": lambda loop, step: loop[0].load_state_dict(loop[0].state_dict()),
    "history": lambda loop, step: loop[0].monitor.history,
    "ask the monitor": lambda loop, step: loop[0].monitor.check_gradient_health([torch.ones(3)]),
    "clipper": lambda loop, step: loop[0].clipper.state_dict(),
    "note": lambda loop, step: loop[0].note("hello"),
    "count on": lambda loop, step: loop[0].continue_from(step + 3),
    "clip": lambda loop, step: setattr(loop[0].config, "max_grad_norm", 0.2),
    "clip hard": lambda loop, step: setattr(loop[0].config, "max_grad_norm", 1e-3),
    "clip nothing": lambda loop, step: setattr(loop[0].config, "max_grad_norm", 100.0),
    "clip not": lambda loop, step: setattr(loop[0].config, "enable_gradient_clipping", False),
    "adapt": lambda loop, step: setattr(loop[0].config, "adaptive_clipping", True),
    "adapt no more": lambda loop, step: setattr(loop[0].config, "adaptive_clipping", False),
    "measure rarely": lambda loop, step: setattr(loop[0].config, "check_frequency", 3),
    "bound": lambda loop, step: setattr(loop[0].config, "exploding_threshold", 1.0),
    "keep few": lambda loop, step: setattr(loop[0].config, "max_gradient_history", 12),
    "learn slower": lambda loop, step: loop[2].param_groups[0].update(lr=1e-5),
    "no rate": lambda loop, step: loop[2].param_groups[0].update(lr=torch.tensor(1e-5)),
    "freeze": lambda loop, step: loop[1].get_parameter("0.bias").requires_grad_(False),
    "thaw": lambda loop, step: loop[1].get_parameter("0.bias").requires_grad_(True),
    "replace": lambda loop, step: setattr(loop[1].get_submodule("0"), "bias", nn.Parameter(torch.zeros(5))),
    "add": lambda loop, step: loop[1].append(nn.Linear(3, 3)),
    "NaN": lambda loop, step: _first_grad(loop).fill_(math.nan),
    "ten times": lambda loop, step: _scale(loop, 11.0),
    "three times": lambda loop, step: _scale(loop, 3.0),
    "none": lambda loop, step: setattr(loop[1].get_parameter("0.weight"), "grad", None),
    "positive": lambda loop, step: _first_grad(loop).fill_(0.01),
    "not contiguous": lambda loop, step: _transpose(loop),
    "shared": lambda loop, step: _share(loop),
    "micro-batch": lambda loop, step: loop[0].step(loop[1], loop[2], 0.5, backward=False, accumulate=True),
}


def _first_grad(loop: Loop) -> Tensor:
    param = next(param for param in loop[1].parameters() if param.grad is not None)
    assert param.grad is not None
    return param.grad


def _scale(loop: Loop, factor: float) -> None:
    for param in loop[1].parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def _transpose(loop: Loop) -> None:
    weight = loop[1].get_parameter("0.weight")
    if weight.grad is not None:
        weight.grad = weight.grad.t().contiguous().t()


def _share(loop: Loop) -> None:
    first, second = loop[1].get_parameter("0.bias"), nn.Parameter(torch.zeros(5))
    first.grad = second.grad = torch.full((5,), 0.1)
    loop[1].get_submodule("0").register_parameter("other", second)


def outcome(
    chosen: Mapping[str, Any], actions: Mapping[int, str], late: bool
) -> tuple[list[Any], list[Any], Any, Any, Any]:
    """Return the results of a training: reports, rows, the state, the flight recorder, the weights."""
    torch.manual_seed(0)
    loop = a_loop(backends=["memory"], **chosen)

    reports = train(loop, range(105), partial(run_action, loop, actions))
    manager, model, _ = loop
    shown = [plain(report) for report in (reversed(reports) if late else reports)]
    rows = [(row.step, dict(row.metrics), row.loss, row.issues) for row in manager.backend("memory").records]  # type: ignore[attr-defined]
    state = manager.state_dict()
    state["history"]["reports"] = [plain(report) for report in manager.reports]
    flown = [plain(report) for report in manager.flight_recorder]
    return shown, rows, state, flown, {name: param.detach().numpy() for name, param in model.named_parameters()}


def plain(report: StepReport) -> dict[str, Any]:
    """Return all of a report but when it was made."""
    return {**report.model_dump(), "time": None}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 100.0, "grad_log_every_n_steps": 7},
    {"max_grad_norm": 0.2},
    {"enable_gradient_clipping": False, "track_parameters": True, "grad_log_every_n_steps": 31},
    {"enable_nan_inf_check": False, "grad_track_per_weight_matrix": False},
    {"analyzers": ["flow", "updates"]},
    {"clip_type": "zscore", "zscore_threshold": 0.5},
    {"adaptive_clipping": True, "adaptive_window_size": 20, "adaptive_percentile": 60.0, "max_grad_norm": 0.3},
]


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(SETTINGS),
    st.dictionaries(st.integers(QUIET, 104), st.sampled_from(sorted(ACTIONS)), max_size=4),
    st.booleans(),
)
def test_reports_do_not_tell_fast_steps_from_others(
    chosen: dict[str, Any], actions: dict[int, str], late: bool
) -> None:
    """Reports, rows, state and weights are the same as without the fast path, whatever happens between steps."""
    together = outcome(chosen, actions, late)
    with closely():
        each = outcome(chosen, actions, late)
    for one, other in zip(together, each, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_whatever_comes_between_fast_steps(action: str) -> None:
    """Each action between fast steps has the same results as between other steps."""
    actions = dict.fromkeys((QUIET + 7, QUIET + 8, QUIET + 30), action)
    together = outcome({}, actions, True)
    with closely():
        each = outcome({}, actions, True)
    for one, other in zip(together, each, strict=True):
        np.testing.assert_equal(one, other)


ROWS: list[dict[str, Any]] = [
    {},
    {"enable_gradient_clipping": False},
    {"max_grad_norm": 0.2, "enable_nan_inf_check": False},
    {"log_gradient_stats": False, "grad_log_every_n_steps": 3},
    {"track_parameters": True},
    {"analyzers": ["flow"]},
    {"adaptive_clipping": True},
    {"grad_track_per_weight_matrix": True},
]


@pytest.mark.parametrize("chosen", ROWS)
@pytest.mark.parametrize("action", ["clip", "NaN", "micro-batch", "count on"])
def test_rows_are_those_of_steps_looked_at_closely(tmp_path: Path, chosen: dict[str, Any], action: str) -> None:
    """The journal has the same rows of a step to the bit, but for the time."""
    found = []
    for name in ("together", "each"):
        every = {"grad_log_every_n_steps": 5, "save_gradient_plots": False}
        loop = a_loop(run_dir=tmp_path / name, **{**every, **chosen})
        actions = dict.fromkeys((QUIET + 7, QUIET + 30), action)
        with closely() if name == "each" else nullcontext():
            train(loop, range(110), partial(run_action, loop, actions))
        loop[0].close()
        (journal,) = find_journals(tmp_path / name)
        found.append([(number, dataclasses.replace(record, time=0.0)) for number, record in journal.rows()])
    np.testing.assert_equal(found[0], found[1])


def run_action(loop: Loop, actions: Mapping[int, str], step: int) -> None:
    """Run an action before a step."""
    if step in actions:
        ACTIONS[actions[step]](loop, step)


@pytest.mark.parametrize("epoch", [None, 3, 2**70, 1.5, np.int64(4), "three", True])
def test_epochs_of_every_kind(tmp_path: Path, epoch: Any) -> None:
    """What is passed as an epoch never stops a fast step, and is what it is on others."""
    loop = a_loop(run_dir=tmp_path, grad_log_every_n_steps=1, grad_track_per_weight_matrix=False)
    train(loop, range(QUIET))
    loop[2].zero_grad()
    report = loop[0].step(loop[1], loop[2], quiet_loss(loop[1], 0), epoch=epoch)
    loop[0].flush()
    assert report.epoch is epoch


@pytest.mark.parametrize(
    "chosen", [{"max_grad_norm": 0.05}, {"max_grad_norm": 100.0}, {"clip_type": "zscore"}, {"adaptive_clipping": True}]
)
def test_most_steps_of_a_quiet_training_are_fast(chosen: dict[str, Any]) -> None:
    """Only the first steps and those that make rows are outside the fast path, whether clipping engages or not."""
    loop, taken = a_loop(**chosen), []
    take = FastPath.take

    def counted(self: FastPath, *args: Any) -> StepReport | None:
        taken.append(take(self, *args))
        return taken[-1]

    with mock.patch.object(FastPath, "take", counted):
        train(loop, range(300))
    assert sum(report is not None for report in taken[QUIET:]) > 0.95 * len(taken[QUIET:])


def test_a_report_that_waits_keeps_no_model_alive() -> None:
    """Neither the model nor its gradients, and it can be read when they are gone."""
    loop = a_loop(max_grad_norm=100.0)
    report = train(loop, range(QUIET))[-1]
    assert_waiting(loop)
    model, norm = weakref.ref(loop[1]), float(torch.cat([p.grad.flatten() for p in loop[1].parameters()]).norm())  # type: ignore[union-attr]
    del loop
    gc.collect()
    assert model() is None
    assert report.clipping.norm_before == pytest.approx(norm, rel=1e-6)


def test_the_end_of_a_run_knows_of_every_step() -> None:
    """The summary and the reports have the steps that are pending when the manager is closed."""
    loop = a_loop()
    train(loop, range(QUIET))
    assert_waiting(loop)
    loop[0].close()
    assert loop[0].get_training_summary().total_steps == QUIET
    assert [report.step for report in loop[0].reports] == list(range(1, QUIET + 1))


def test_other_threads_may_ask_while_steps_are_made() -> None:
    """Each answer is of some step, and in the end nothing was left out or counted twice."""
    loop, done = a_loop(max_gradient_history=10_000), threading.Event()
    counts: list[int] = []

    def ask() -> None:
        while not done.wait(1e-4):
            counts.append(loop[0].get_training_summary().total_steps)
            counts.append(len(loop[0].reports))

    asking = threading.Thread(target=ask)
    asking.start()
    reports = train(loop, range(600))
    done.set()
    asking.join()
    assert counts == sorted(counts)
    assert [report.step for report in loop[0].reports] == [report.step for report in reports]
    assert loop[0].get_training_summary().total_steps == 600


def test_a_handler_of_a_signal_may_ask_within_a_step() -> None:
    """A signal handler reads the steps before, and the step that it interrupts is not lost."""
    loop = a_loop()
    train(loop, range(QUIET))
    assert_waiting(loop)
    seen: list[int] = []
    with handler_in_look(lambda: seen.append(len(loop[0].reports))):
        train(loop, range(QUIET, QUIET + 3))
    assert seen
    assert [report.step for report in loop[0].reports] == list(range(1, QUIET + 4))


@contextmanager
def handler_in_look(handle: Callable[[], object]) -> Iterator[None]:
    """Call a function within the next look of a plan, as a signal handler does."""
    look = native.Plan.look

    def interrupted(*args: Any) -> float:
        native.Plan.look = look
        handle()
        return look(*args)  # type: ignore[no-any-return]

    with mock.patch.object(native.Plan, "look", interrupted):
        yield


def test_a_handler_of_a_signal_may_close_within_a_step(tmp_path: Path) -> None:
    """Every step up to the one under way is in summary, reports and journal."""
    loop = a_loop(run_dir=tmp_path, grad_log_every_n_steps=20)
    train(loop, range(QUIET))
    train(loop, range(QUIET, QUIET + 4))
    assert_waiting(loop)
    with handler_in_look(loop[0].close):
        train(loop, range(QUIET + 4, QUIET + 5))
    assert loop[0].get_training_summary().total_steps == len(loop[0].reports) == QUIET + 5
    (journal,) = find_journals(tmp_path)
    assert [record.step for _, record in journal.rows()] == [1, 2, 4, 8, 16, 20, 40, 60]


def test_a_handler_of_a_signal_may_note_something_within_a_step() -> None:
    """No step is lost, and the next report has the note."""
    loop = a_loop()
    train(loop, range(QUIET))
    assert_waiting(loop)
    with handler_in_look(lambda: loop[0].note("hello")):
        reports = train(loop, range(QUIET, QUIET + 2))
    assert reports[-1].notes == ["hello"]
    assert loop[0].get_training_summary().total_steps == len(loop[0].reports) == QUIET + 2


def test_an_interrupt_within_a_step_costs_no_other() -> None:
    """Wherever it strikes: reports stay those of their steps, and nothing raises later."""
    for name in ("rates", "deferred", "engage"):
        loop = a_loop(max_grad_norm=100.0)
        train(loop, range(QUIET))
        assert_waiting(loop)
        pair = pair_of(loop)
        owner: Any = {"rates": pair.optimizer_steps, "deferred": StepReport, "engage": pair.clipper}[name]
        with mock.patch.object(owner, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            train(loop, range(QUIET, QUIET + 1))
        train(loop, range(QUIET + 1, QUIET + 5))
        train(loop, range(QUIET + 5, QUIET + 6), partial(run_action, loop, {QUIET + 5: "NaN"}))
        loop[0].close()
        assert len(loop[0].flight_recorder) == 8
        assert [report.step for report in loop[0].reports] == list(range(1, QUIET + 6))


def test_a_group_that_has_lost_its_rate() -> None:
    """It is reported with a rate of zero, as ever."""
    loop = a_loop()
    train(loop, range(QUIET))
    rate = loop[2].param_groups[0].pop("lr")
    loop[2].zero_grad()
    report = loop[0].step(loop[1], loop[2], quiet_loss(loop[1], 0))
    assert rate > 0
    assert report.lr == {"0": 0.0}


def test_lines_are_logged_for_fast_steps_too(caplog: pytest.LogCaptureFixture) -> None:
    """One for every recorded step, also where rows go nowhere."""
    caplog.set_level("INFO", "gradtrack")
    settings = {"verbose_logging": True, "grad_log_every_n_steps": 5, "grad_track_per_weight_matrix": False}
    train(a_loop(**settings), range(200))
    assert sum(message.startswith("step ") for message in caplog.messages) == 43  # with steps 1, 2 and 4


def test_a_setting_counts_from_the_step_after_its_assignment() -> None:
    """Also where a step was made while it was being assigned."""
    loop = a_loop(max_grad_norm=100.0)
    train(loop, range(QUIET))
    set_value = BaseModel.__setattr__

    def step_first(self: BaseModel, name: str, value: Any) -> None:
        train(loop, range(QUIET, QUIET + 2))
        set_value(self, name, value)

    with mock.patch.object(BaseModel, "__setattr__", step_first):
        loop[0].config.max_grad_norm = 0.01
    assert train(loop, range(QUIET + 2, QUIET + 3))[0].clipping.threshold == 0.01


def test_where_no_step_is_fast_the_path_is_hardly_tried() -> None:
    """As where the limit is assigned before every step."""
    loop = a_loop()
    train(loop, range(QUIET))

    def assign(step: int) -> None:
        loop[0].config.max_grad_norm = 1.0 + step

    with mock.patch.object(Health, "band", autospec=True, side_effect=Health.band) as asked:
        train(loop, range(QUIET, QUIET + 300), assign)
    assert asked.call_count < 40
    train(loop, range(QUIET, QUIET + 100))
    assert_waiting(loop)


def test_a_forked_copy_trains_on(tmp_path: Path) -> None:
    """Also where another thread of its parent was reading."""
    loop = a_loop()
    train(loop, range(QUIET))
    with ThreadPoolExecutor(1) as other:
        other.submit(pair_of(loop).pending.lock.acquire).result()
        child = os.fork()
        if not child:
            train(loop, range(QUIET, QUIET + 3))
            os._exit(0)
        other.submit(pair_of(loop).pending.lock.release).result()
    assert os.waitpid(child, 0)[1] == 0


def test_a_loss_that_cannot_be_read_is_refused_as_ever() -> None:
    """Also where the step would have been a fast one."""
    loop = a_loop()
    train(loop, range(QUIET))
    with pytest.raises(ValueError, match="expected a single number"):
        loop[0].step(loop[1], loop[2], torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match="expected a tensor"):
        loop[0].step(loop[1], loop[2], "loss", backward=False)  # type: ignore[arg-type]


def test_another_thread_reads_reports_while_steps_are_made() -> None:
    """Each report has the numbers of its own step, whatever is measured meanwhile."""
    loop, done = a_loop(max_grad_norm=100.0, track_parameters=True), threading.Event()
    reports: list[StepReport] = []
    norms: list[float] = []

    def keep_norm(step: int) -> None:
        grads = [param.grad.flatten() for param in loop[1].parameters() if param.grad is not None]
        norms.append(float(torch.cat(grads).norm()))

    def read() -> None:
        while not done.wait(1e-5):
            for report in reports[-3:]:
                report.resolve()

    reading = threading.Thread(target=read)
    reading.start()
    for step in range(600):
        reports += train(loop, range(step, step + 1), keep_norm)
    done.set()
    reading.join()
    for report, norm in zip(reports, norms, strict=True):
        assert report.clipping.norm_before == pytest.approx(norm, rel=1e-5)
        parts = [found.norm for found in report.parameters.values()]
        assert math.hypot(*parts) == pytest.approx(norm, rel=1e-5)
