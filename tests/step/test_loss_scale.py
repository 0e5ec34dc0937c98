"""Mixed precision: gradients are unscaled once, and the scale and skipped steps are reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, StepReport, watch
from tests.training import batch_loss, optimizer_of, small_model


def scaler_of(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    """Return a scaler for the CPU."""
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def train(manager: GradientManager, scaler: torch.amp.GradScaler, bad: frozenset[int] = frozenset()) -> None:
    """Train six steps, of which the bad ones overflow."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(1, 7):
        loss = batch_loss(model, step, math.inf if step in bad else 1.0)
        manager.step(model, optimizer, loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def told(reports: list[StepReport]) -> list[tuple[float | None, int, int]]:
    """Return the scale, the steps left out so far and those in a row, of every report."""
    return [
        (one.scaler.scale, one.scaler.skips, one.scaler.skips_in_a_row) for one in reports if one.scaler is not None
    ]


def test_scale_and_skips_are_reported() -> None:
    """The scale is that of the step, and every overflow of the scaler's own is counted."""
    manager = GradientManager()
    train(manager, scaler_of(), frozenset({2, 3, 5}))
    expected = [(1024.0, 0, 0), (1024.0, 1, 1), (512.0, 2, 2), (256.0, 2, 0), (256.0, 3, 1), (128.0, 3, 0)]
    assert told(manager.reports) == expected
    metrics = manager.reports[2].metrics()
    assert (metrics["train/grad_loss_scale"], metrics["train/grad_scaler_skips"]) == (512.0, 2.0)
    assert [report.skipped for report in manager.reports] == [False, True, True, False, True, False]


def test_nothing_is_told_without_a_scaler() -> None:
    """Neither without one nor with one that is switched off."""
    manager = GradientManager()
    train(manager, scaler_of(enabled=False))
    assert told(manager.reports) == []
    assert not any("scale" in name for name in manager.reports[0].metrics())


def test_skips_are_counted_on_after_a_checkpoint() -> None:
    """The counts are part of the state."""
    first, second = GradientManager(), GradientManager()
    train(first, scaler_of(), frozenset({2, 6}))
    second.load_state_dict(first.state_dict())
    train(second, scaler_of(), frozenset({1}))
    assert told(second.reports)[0][1:] == (3, 2)


@pytest.mark.parametrize("own", [True, False])
def test_gradients_are_unscaled_once(own: bool) -> None:
    """Whether the loop unscales by itself or leaves it to gradtrack, the norm is that of the loss itself."""
    model = small_model()
    optimizer, scaler, manager = optimizer_of(model), scaler_of(), GradientManager(enable_gradient_clipping=False)
    torch.autograd.backward(scaler.scale(batch_loss(model)))
    if own:
        scaler.unscale_(optimizer)
    report = manager.step(model, optimizer, None, backward=False, scaler=scaler)
    twin = small_model()
    torch.autograd.backward(batch_loss(twin))
    expected = float(nn.utils.get_total_norm([param.grad for param in twin.parameters() if param.grad is not None]))
    assert report.clipping.norm_before == pytest.approx(expected, rel=1e-5)


def test_accelerates_optimizer_is_unscaled_once() -> None:
    """Accelerate steps the optimizer within its own, so that one is unscaled."""
    wrapper = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = small_model()
    inner, scaler = optimizer_of(model), scaler_of()
    optimizer = wrapper(inner, device_placement=False, scaler=scaler)
    before = [param.detach().clone() for param in model.parameters()]
    torch.autograd.backward(scaler.scale(batch_loss(model)))
    GradientManager(enable_gradient_clipping=False).step(model, optimizer, None, backward=False, scaler=scaler)
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    optimizer.step()
    for param, start, grad in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(param.detach(), start - 0.1 * grad)


def test_fused_optimizers_tell_their_scale() -> None:
    """An optimizer that unscales within its step is looked at before, and its scale is known."""
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), scaler_of()
    with watch(model, optimizer) as manager:
        for step in range(2):
            torch.autograd.backward(scaler.scale(batch_loss(model, step)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert told(manager.reports) == [(1024.0, 0, 0), (1024.0, 0, 0)]


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_skips_that_no_optimizer_hears_of_are_told(num_optimizers: int) -> None:
    """A watched optimizer is not called where its scaler leaves a step out: the scale tells, from its start on."""
    model, scaler = small_model(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizers = Together.split(model, fused=False) if num_optimizers == 2 else [optimizer_of(model)]
    with watch(model, optimizers) as manager:
        for bad in (True, True, False, False, True, False, True, True, False, False):
            torch.autograd.backward(scaler.scale(batch_loss(model)) * (math.inf if bad else 1.0))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        expected = [(256.0, 2, 0), (256.0, 2, 0), (256.0, 3, 0), (64.0, 5, 0), (64.0, 5, 0)]
        assert told(manager.reports) == expected


def test_skips_from_before_the_watch_are_not_told() -> None:
    """A scaler that has trained already has a scale of its own, and the steps that it skipped then do not count."""
    model = small_model()
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def train(scale: float, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            scaler.scale(batch_loss(model) * scale).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    train(1e38, 3)
    train(1.0, 2)
    with watch(model, optimizer) as manager:
        train(1.0, 2)
        assert manager.reports[-1].scaler is not None
        assert manager.reports[-1].scaler.skips == 0
        train(1e38, 1)
        train(1.0, 1)
        assert manager.reports[-1].scaler.skips == 1


def test_a_scale_set_by_hand_is_no_skip() -> None:
    """A scale that the user lowers by hand is no skipped step; a step that is skipped afterwards is reported."""
    model, scaler = small_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = optimizer_of(model)
    with watch(model, optimizer) as manager:
        for bad, new_scale in (
            (False, 300.0),
            (False, None),
            (False, 150.0),
            (False, None),
            (True, None),
            (False, None),
        ):
            torch.autograd.backward(scaler.scale(batch_loss(model)) * (math.inf if bad else 1.0))
            scaler.step(optimizer)
            scaler.update(new_scale)
            model.zero_grad()
        assert told(manager.reports) == [(1024.0, 0, 0), (300.0, 0, 0), (300.0, 0, 0), (150.0, 0, 0), (75.0, 1, 0)]


def test_skips_of_another_model_are_not_ours() -> None:
    """A scaler that steps two models backs off when one of them overflows; the other has stepped."""
    models, scaler = (small_model(), small_model()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [optimizer_of(model) for model in models]
    managers = [watch(*pair) for pair in zip(models, optimizers, strict=True)]
    for bad in (False, True, False):
        for model, optimizer, factor in zip(models, optimizers, (1.0, math.inf if bad else 1.0), strict=True):
            torch.autograd.backward(scaler.scale(batch_loss(model)) * factor)
            scaler.step(optimizer)
            model.zero_grad()
        scaler.update()
    assert told(managers[0].reports) == [(1024.0, 0, 0), (1024.0, 0, 0), (512.0, 0, 0)]
    assert told(managers[1].reports) == [(1024.0, 0, 0), (512.0, 1, 0)]


def test_skips_are_told_where_another_model_has_stepped_since() -> None:
    """Two models in turn with one scaler, which is updated after each: the other's steps count to the next growth."""
    models, scaler = (small_model(), small_model()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [optimizer_of(model) for model in models]
    manager = watch(models[0], optimizers[0])
    for bad in (False, False, True, True, False):
        for model, optimizer, factor in zip(models, optimizers, (math.inf if bad else 1.0, 1.0), strict=True):
            torch.autograd.backward(scaler.scale(batch_loss(model)) * factor)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert told(manager.reports) == [(1024.0, 0, 0), (1024.0, 0, 0), (256.0, 2, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_and_autocast(dtype: torch.dtype) -> None:
    """Norms of half precision gradients are exact sums, under autocast with float32 weights too."""
    for model, autocast in ((small_model(dtype=dtype), False), (small_model(), True)):
        manager = GradientManager(enable_gradient_clipping=False)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss = batch_loss(model).float()
        report = manager.step(model, optimizer_of(model), loss)
        grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        assert report.clipping.norm_before == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 0.0), (1e-5, 1.0)])
def test_share_of_subnormal_float16_gradients(scale: float, expected: float) -> None:
    """Of float16 gradients the flow analyzer tells how many are too small for all of their digits."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    optimizer, manager = optimizer_of(model), GradientManager(analyzers=["flow"])
    for _ in range(9):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, dtype=torch.float16)).sum() * scale
        manager.step(model, optimizer, loss)
        optimizer.step()
    found: Any = manager.reports[7].analyzers["flow"]
    assert found.metrics()["flow/subnormal_fraction"] == pytest.approx(expected, abs=0.3)


class Together:
    """Two optimizers of one model, with a twin whose loop does by hand what gradtrack is to do."""

    def __init__(self, *, fused: bool = False, scale: float = 1024.0) -> None:
        self.model, self.twin = small_model(), small_model()
        self.optimizers, self.twins = (self.split(model, fused=fused) for model in (self.model, self.twin))
        self.scaler = scaler_of(scale)
        self.manager = watch(self.model, self.optimizers, max_grad_norm=0.05)
        self.norms: list[float] = []

    @staticmethod
    def split(model: nn.Module, *, fused: bool) -> list[torch.optim.Optimizer]:
        """Return one optimizer for the matrices and one for the rest."""
        parts = [[param for param in model.parameters() if (param.ndim > 1) == wide] for wide in (True, False)]
        return [torch.optim.SGD(part, lr=0.1, momentum=0.9, fused=fused) for part in parts]

    def step(self, seed: int, *, bad: bool = False) -> None:
        """Train both for a step, without calling `unscale_`; a bad step overflows in one gradient."""
        for optimizer in (*self.optimizers, *self.twins):
            optimizer.zero_grad()
        torch.autograd.backward(self.scaler.scale(batch_loss(self.model, seed)))
        if bad:
            grad = next(self.model.parameters()).grad
            assert grad is not None
            grad[0, 0] = math.inf
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if not bad:
            torch.autograd.backward(batch_loss(self.twin, seed))
            self.norms.append(float(nn.utils.clip_grad_norm_(self.twin.parameters(), 0.05)))
            for optimizer in self.twins:
                optimizer.step()

    def assert_alike(self) -> None:
        """Both models have the same weights."""
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_watched_optimizers_are_unscaled_together(fused: bool) -> None:
    """The loop need not unscale: the norm before the first of them steps is that of the loss itself, for all."""
    both = Together(fused=fused)
    for seed in range(4):
        both.step(seed)
    assert [report.clipping.norm_before for report in both.manager.reports] == pytest.approx(both.norms, rel=1e-5)
    assert told(both.manager.reports) == [(1024.0, 0, 0)] * 4
    both.assert_alike()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_leaves_out_the_step_of_all(fused: bool) -> None:
    """It is one step, told once and no issue, and the next one is looked at before the first optimizer again."""
    both = Together(fused=fused)
    for seed, bad in enumerate((False, True, False, False)):
        both.step(seed, bad=bad)
    assert [report.skipped for report in both.manager.reports] == [False, True, False, False]
    assert told(both.manager.reports) == [(1024.0, 0, 0), (1024.0, 1, 1), (512.0, 1, 0), (512.0, 1, 0)]
    assert all(report.health.healthy for report in both.manager.reports)
    both.assert_alike()


def test_one_verdict_for_optimizers_that_are_shown_together() -> None:
    """In a loop that passes the scaler, an overflow in the gradients of one leaves out the step of the other too."""
    model = small_model()
    optimizers = Together.split(model, fused=False)
    scaler, before = scaler_of(), [param.detach().clone() for param in model.parameters()]
    torch.autograd.backward(scaler.scale(batch_loss(model)))
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[0, 0] = math.inf
    report = GradientManager().step(model, optimizers, None, backward=False, scaler=scaler)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert report.skipped
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
