"""Clipping, against torch's own and against the definition of each strategy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrack import GradientClipper, GradientConfig, GradientManager
from gradtrack.protection.strategies import Memory, ZScoreStrategy
from tests.gradients.gradients import gradients
from tests.training import ENGINES, as_one_vector, batch_loss, look, optimizer_of, small_model, train, with_gradients

EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)


def copies(grads: list[Tensor]) -> list[Tensor]:
    """Return the same gradients in other memory."""
    return [grad.clone() for grad in grads]


@given(grads=gradients(special=False), share=st.sampled_from((0.01, 0.5, 0.999, 1e-42)))
def test_a_later_step_is_clipped_as_the_first(grads: list[Tensor], share: float) -> None:
    """To the bit, though it is scaled as planned from the second step on."""
    norm = float(np.linalg.norm(as_one_vector(grads)))
    limit = share * norm if share * norm > 0 else 1.0
    clipped = []
    manager, model = GradientManager(max_grad_norm=limit), with_gradients(copies(grads))
    optimizer = optimizer_of(model)
    for _ in range(3):
        for param, grad in zip(model.parameters(), copies(grads), strict=True):
            param.grad = grad
        manager.step(model, optimizer, None, backward=False)
        clipped.append([param.grad for param in model.parameters()])
    for later in clipped[1:]:
        for one, other in zip(clipped[0], later, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_a_gradient_that_is_given_twice_later_is_clipped_once() -> None:
    """As it is on the first step, though later ones are scaled as planned."""
    model = with_gradients([torch.ones(4), torch.ones(4)])
    manager, optimizer = GradientManager(max_grad_norm=1.0), optimizer_of(model)
    for _ in range(3):
        manager.step(model, optimizer, None, backward=False)
        shared = torch.ones(4)
        for param in model.parameters():
            param.grad = shared
    manager.step(model, optimizer, None, backward=False)
    for param in model.parameters():
        assert param.grad is not None
        assert torch.allclose(param.grad, torch.full((4,), 8**-0.5), rtol=1e-5)


@EACH_ENGINE
@given(grads=gradients(special=False), share=st.floats(0.01, 3.0))
def test_norm_leaves_what_torch_leaves(engine: Any, grads: list[Tensor], share: float) -> None:
    """F7: the gradients after it are those of clip_grad_norm_, within the precision of their type."""
    limit = max(1e-3, share * float(np.linalg.norm(as_one_vector(grads))))
    mine, theirs = with_gradients(copies(grads)), with_gradients([grad.double() for grad in copies(grads)])
    report = GradientClipper(GradientConfig(max_grad_norm=limit, engine=engine)).clip_gradients(mine)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        finfo = torch.finfo(one.grad.dtype)
        tolerance = max(1e-6, 1.01 * finfo.eps)
        assert torch.allclose(one.grad.double(), other.grad, rtol=tolerance, atol=finfo.smallest_normal)
    assert report.clipped == (report.coefficient < 1.0)


@EACH_ENGINE
@given(grads=gradients(special=False))
def test_norm_report(engine: Any, grads: list[Tensor]) -> None:
    """Norms before and after, coefficient and limit fit together."""
    before = float(np.linalg.norm(as_one_vector(grads)))
    report = look(with_gradients(grads), engine=engine, max_grad_norm=0.5).clipping
    assert report.norm_before == pytest.approx(before, rel=1e-6)
    assert report.threshold == 0.5
    assert report.norm_after == pytest.approx(min(before, 0.5), rel=1e-5, abs=3e-6)
    assert report.coefficient == pytest.approx(min(1.0, 0.5 / (before + 1e-6)), rel=1e-6)


def test_untouched_when_not_engaged() -> None:
    """Below the limit no gradient changes by a single bit."""
    model = with_gradients([torch.randn(50)])
    before = next(model.parameters()).grad.clone()  # type: ignore[union-attr]
    assert not look(model, max_grad_norm=1e9).clipping.clipped
    assert torch.equal(next(model.parameters()).grad, before)  # type: ignore[arg-type]


@given(grads=gradients(special=False), limit=st.sampled_from([1e-3, 0.5, 1.0, 1e3]))
def test_value_clamps_elements(grads: list[Tensor], limit: float) -> None:
    """No element is beyond the limit, those within are untouched, and the share is counted."""
    values = as_one_vector(grads)
    model = with_gradients(grads)
    report = look(model, clip_type="value", max_grad_norm=limit).clipping
    rounded = float(torch.tensor(limit, dtype=torch.float64))
    after = as_one_vector([param.grad for param in model.parameters()])
    assert np.all(np.abs(after) <= rounded * (1 + 2**-7))
    inside = np.abs(values) <= limit
    assert np.array_equal(after[inside], values[inside])
    assert report.clipped_fraction == pytest.approx(np.mean(~inside) if len(values) else 0.0)
    assert report.norm_after == pytest.approx(float(np.linalg.norm(after)), rel=1e-6)


class TestAdaptive:
    """The percentile of recent norms as the limit."""

    def test_limit_and_effect(self) -> None:
        """After ten steps the limit is numpy's percentile of the norms before, and it is applied."""
        reports = train(GradientManager(adaptive_clipping=True, adaptive_window_size=8, max_grad_norm=1e9), 30)
        norms = [report.clipping.norm_before for report in reports]
        for index in range(10, 30):
            expected = np.percentile(np.array(norms[index - 8 : index], dtype=float), 95.0)
            assert reports[index].clipping.threshold == expected
            norm = norms[index]
            assert norm is not None
            assert reports[index].clipping.clipped == (expected / (norm + 1e-6) < 1)

    def test_the_switch_wins_over_the_type(self) -> None:
        """`adaptive_clipping` decides, whatever `clip_type` says."""
        assert train(GradientManager(adaptive_clipping=True, clip_type="value"), 1)[0].clipping.clip_type == "adaptive"

    def test_a_nan_step_is_forgotten(self) -> None:
        """After a NaN the limit is finite and the next step clips as usual."""
        manager = GradientManager(clip_type="adaptive", max_grad_norm=1e-3)
        reports = train(manager, 20, change=lambda step, loss: loss * (math.nan if step == 12 else 1.0))
        thresholds = [report.clipping.threshold for report in reports if report.step != 12]
        assert all(threshold is not None and math.isfinite(threshold) for threshold in thresholds)


@pytest.mark.parametrize("clip_type", ["norm", "value", "adaptive", "agc", "zscore"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_step_does_not_disable_clipping(clip_type: Any, bad: float) -> None:
    """Whatever the strategy, the step after a non-finite one is reported and clipped as without it."""
    manager = GradientManager(clip_type=clip_type, max_grad_norm=1e-3)
    reports = train(manager, 15, change=lambda step, loss: loss * (bad if step == 13 else 1.0))
    assert not reports[12].clipping.clipped
    after = reports[13].clipping.norm_after
    assert after is not None
    assert math.isfinite(after)


@EACH_ENGINE
@pytest.mark.parametrize("clip_type", ["norm", "value", "agc"])
@pytest.mark.parametrize("kind", ["one for two", "expanded"])
def test_gradients_in_shared_memory(engine: Any, clip_type: Any, kind: str) -> None:
    """What two parameters or many elements share is clipped as separate gradients with the same numbers are."""
    grad = torch.tensor([3.0]).expand(5) if kind == "expanded" else torch.full((5,), 3.0)
    shared, separate = with_gradients([grad, grad]), with_gradients([grad.clone(), grad.clone()])
    reports = [look(model, engine=engine, clip_type=clip_type).clipping for model in (shared, separate)]
    assert reports[0] == reports[1]
    for one, other in zip(shared.parameters(), separate.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@EACH_ENGINE
def test_a_tiny_coefficient_keeps_its_digits(engine: Any) -> None:
    """Where a float32 cannot hold the coefficient, the norm after is the limit all the same."""
    model = with_gradients([torch.full((1_000_000,), 3e38)])
    look(model, engine=engine)
    (param,) = model.parameters()
    assert param.grad is not None
    assert float(param.grad.double().norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_value_at_the_limit_is_within_it(dtype: torch.dtype) -> None:
    """An element that lies where its type puts the limit is not clipped, and clipping says so."""
    report = look(with_gradients([torch.full((5,), 0.1, dtype=dtype)]), clip_type="value", max_grad_norm=0.1).clipping
    assert not report.clipped
    assert report.clipped_fraction == 0.0


class TestAgc:
    """Limits for each unit by its own weights."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("size", [1e3, 6e4, 1e30, 1e200])
    def test_gradients_of_any_size(self, dtype: torch.dtype, size: float) -> None:
        """A unit is scaled down to its limit, neither to zero where its squares overflow nor short of it in halves."""
        if size > torch.finfo(dtype).max:
            return
        model = with_gradients([torch.full((4, 3), size, dtype=dtype)])
        (param,) = model.parameters()
        torch.nn.init.ones_(param)
        look(model, clip_type="agc")
        assert param.grad is not None
        rows = param.grad.double().norm(dim=1)
        assert torch.allclose(rows, torch.full((4,), 0.01 * 3**0.5).double(), rtol=2 * torch.finfo(dtype).eps)

    def test_complex_vectors_are_one_unit(self) -> None:
        """A vector of complex numbers is one unit, as one of real numbers is."""
        model = with_gradients([torch.tensor([300 + 400j, 1j, 0])])
        report = look(model, clip_type="agc").clipping
        assert report.clipped_fraction == 1.0

    def test_every_unit_is_limited_by_its_weights(self) -> None:
        """A row's gradient is at most the factor times the row's weights, and direction is kept."""
        model = small_model()
        torch.autograd.backward(batch_loss(model, scale=1e3))
        before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        report = look(model, clip_type="agc", agc_clip_factor=0.05).clipping
        assert report.clipped
        for param, grad in zip(model.parameters(), before, strict=True):
            assert param.grad is not None
            rows = (param.shape[0], -1) if param.ndim > 1 else (1, -1)
            weight, old, new = (tensor.detach().reshape(rows) for tensor in (param, grad, param.grad))
            limit = 0.05 * weight.norm(dim=1).clamp_min(1e-3)
            assert bool((new.norm(dim=1) <= limit * 1.0001).all())
            assert torch.allclose(torch.nn.functional.cosine_similarity(old, new, dim=1), torch.ones(rows[0]))

    def test_share_of_units(self) -> None:
        """The share counts units, of which a vector is one."""
        model = with_gradients([torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(3)])
        assert look(model, clip_type="agc").clipping.clipped_fraction == pytest.approx(1 / 3)

    def test_sparse_gradients(self) -> None:
        """A sparse gradient's rows are limited by the rows of the weights that they touch."""
        model = torch.nn.Embedding(20, 4, sparse=True)
        torch.autograd.backward(1e4 * model(torch.tensor([3, 7, 7])).sum())
        look(model, clip_type="agc", agc_clip_factor=0.01)
        assert model.weight.grad is not None
        norms = model.weight.grad.to_dense().norm(dim=1)
        limit = 0.01 * model.weight.detach().norm(dim=1)
        assert torch.allclose(norms[[3, 7]], limit[[3, 7]])


@pytest.mark.parametrize("clip_type", ["norm", "value", "agc"])
def test_sparse_gradients_stay_as_they_are_unless_clipped(clip_type: Any) -> None:
    """Where nothing is clipped, repeated tokens round in the optimizer as without a watch, bit by bit."""

    def trained(*, watched: bool) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Embedding(20, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        manager = GradientManager(clip_type=clip_type, max_grad_norm=1e6, agc_clip_factor=1e6)
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(torch.randint(0, 20, (16, 8))).square().mean()
            if watched:
                manager.step(model, optimizer, loss)
            else:
                torch.autograd.backward(loss)
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(trained(watched=True), trained(watched=False))


def test_repeated_tokens_are_clipped_by_value() -> None:
    """The sum of the gradients of one token is what is clamped."""
    model = torch.nn.Embedding(20, 4, sparse=True)
    torch.autograd.backward(model(torch.tensor([3, 7, 7])).sum())
    look(model, clip_type="value", max_grad_norm=1.5)
    assert model.weight.grad is not None
    assert model.weight.grad.to_dense()[[3, 7], 0].tolist() == [1.0, 1.5]


def test_repeated_tokens_are_clipped_by_norm() -> None:
    """The gradient that the optimizer takes has the norm that it was clipped to."""
    model = torch.nn.Embedding(20, 4, sparse=True)
    torch.autograd.backward(model(torch.tensor([3, 7, 7])).sum())
    look(model, clip_type="norm", max_grad_norm=1.5)
    assert model.weight.grad is not None
    assert float(model.weight.grad.to_dense().norm()) == pytest.approx(1.5, rel=1e-5)


def test_repeated_tokens_are_made_finite() -> None:
    """The gradient that the optimizer takes has none of the values that were replaced."""
    model = torch.nn.Embedding(20, 4, sparse=True)
    torch.autograd.backward(model(torch.tensor([3, 7, 7])).sum() * torch.nan)
    look(model, nonfinite_action="replace", enable_gradient_clipping=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.to_dense().any()


@pytest.mark.parametrize("clip_type", ["adaptive", "zscore"])
@pytest.mark.parametrize("after", [5, 31, 32, 33, 80])
def test_a_strategy_that_is_chosen_later_knows_the_norms_before(clip_type: Any, after: int) -> None:
    """Its limit is what it would be if it had been in force from the start, as long as nothing was clipped."""
    limits = []
    for first in ("norm", clip_type):
        config = GradientConfig(clip_type=first, max_grad_norm=1e9, adaptive_percentile=100, zscore_threshold=1e6)
        manager, model = GradientManager(config), small_model()
        optimizer = optimizer_of(model)
        train(manager, after, model=model, optimizer=optimizer)
        config.clip_type = clip_type
        limits.append(train(manager, 1, model=model, optimizer=optimizer)[-1].clipping.threshold)
    assert limits[0] == limits[1]


@pytest.mark.parametrize("asks", [False, True])
def test_a_norm_is_remembered_as_the_settings_of_its_step_say(asks: bool) -> None:
    """A window that grows, or a longer memory, does not bring back what was forgotten; nor does a checkpoint."""
    config = GradientConfig(max_grad_norm=1e9, adaptive_window_size=5, adaptive_percentile=0, zscore_threshold=1.0)
    clipper, oracle = GradientClipper(config), ZScoreStrategy()
    for norm in map(float, range(1, 90)):
        if norm == 60:
            config.zscore_alpha, config.adaptive_window_size = 0.5, 100
        if asks:
            clipper.state_dict()
        clipper.clip_gradients(with_gradients([torch.tensor([norm])]))
        oracle.observe([(norm, norm)], Memory.of(config))
    config.clip_type = "adaptive"
    assert clipper.limit() == 55.0
    config.clip_type = "zscore"
    assert clipper.limit() == oracle.threshold(config)


def test_norms_that_wait_are_gone_with_a_state_that_is_loaded() -> None:
    """What a clipper remembers is what was saved."""
    saved, clipper = GradientClipper(), GradientClipper()
    for norm in range(1, 50):
        saved.clip_gradients(with_gradients([torch.tensor([float(norm)])]))
        clipper.clip_gradients(with_gradients([torch.tensor([9.0])]))
    state = saved.state_dict()
    clipper.load_state_dict(state)
    assert clipper.state_dict() == state


def test_zscore_clips_a_spike() -> None:
    """A sudden norm is brought down to a few standard deviations above the mean."""
    manager = GradientManager(clip_type="zscore", max_grad_norm=1e9)
    reports = train(manager, 40, change=lambda step, loss: loss * (1e4 if step == 35 else 1.0))
    spike = reports[34].clipping
    assert spike.clipped
    assert spike.norm_after is not None
    assert spike.norm_after < 100 * max(report.clipping.norm_before or 0 for report in reports[:34])


def test_rate_is_over_the_last_hundred_steps() -> None:
    """The clip rate is the share of recent steps that were clipped."""
    config = GradientConfig(max_grad_norm=1e9)
    manager, model = GradientManager(config), small_model()
    optimizer = optimizer_of(model)
    train(manager, 150, model=model, optimizer=optimizer)
    config.max_grad_norm = 1e-9
    report = train(manager, 25, model=model, optimizer=optimizer)[-1]
    assert report.clipping.clip_rate == 0.25


def test_switched_off() -> None:
    """Without clipping nothing is scaled and the report says so."""
    model = with_gradients([torch.full((4,), 1e6)])
    report = look(model, enable_gradient_clipping=False).clipping
    assert (report.enabled, report.clipped, report.norm_before, report.norm_after) == (False, False, 2e6, 2e6)
    assert torch.equal(next(model.parameters()).grad, torch.full((4,), 1e6))  # type: ignore[arg-type]
