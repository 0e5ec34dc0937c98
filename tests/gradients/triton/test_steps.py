"""Steps that the Triton engine measures, decides and protects on the device, beside those of the other engines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import step_cost
from gradtrack import GradientManager, StepReport
from gradtrack.gradients.triton import changes, engine, kernels
from gradtrack.step import pair
from tests.gradients.gradients import gradients
from tests.training import optimizer_of, with_gradients

CLIPPING: list[dict[str, Any]] = [
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 1e30},
    {"clip_type": "value", "max_grad_norm": 0.25},
    {"clip_type": "agc", "agc_clip_factor": 0.3},
    {"enable_gradient_clipping": False},
]
ACTIONS: list[dict[str, Any]] = [
    {"nonfinite_action": "report"},
    {"nonfinite_action": "replace", "replace_inf_with": 2.0, "replace_nan_with": 0.5},
    {"nonfinite_action": "replace", "replace_nan_with": 1e30},
]


def protect(grads: list[Tensor], *, device: bool, engine: Any, **settings: Any) -> tuple[StepReport, list[Tensor]]:
    """Return the report of a step and the gradients after it, decided on the device or on the host."""
    model = with_gradients([grad.clone(memory_format=torch.preserve_format) for grad in grads])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "on_device", lambda tensors: device and bool(tensors))
        manager = GradientManager(engine=engine, track_parameters=True, **settings)
        optimizer = optimizer_of(model)
        watched = between_rows(manager, model, optimizer)
        report = manager.step(model, optimizer, None, backward=False)
        assert (watched.pending.held is not None) == (device and bool(grads))
        manager.flush()
    found = [param.grad for param in model.parameters()]
    return report, [grad for grad in found if grad is not None]


def between_rows(manager: GradientManager, model: nn.Module, optimizer: Any) -> pair.Pair:
    """Return the pair of a training whose next three steps make no row, so that numbers can stay on the device."""
    manager.attach(model, optimizer)
    (found,) = manager._pairs
    found.continue_from(4)
    return found


@pytest.mark.parametrize("clipping", CLIPPING, ids=str)
@pytest.mark.parametrize("action", ACTIONS, ids=str)
@given(grads=gradients())
def test_a_device_decides_as_the_host_does(clipping: Any, action: Any, grads: list[Tensor]) -> None:
    """Clipped and replaced gradients are those that the native engine leaves, and so is the report."""
    expected, theirs = protect(grads, device=False, engine="native", **clipping, **action)
    report, mine = protect(grads, device=True, engine="triton", **clipping, **action)
    for one, other in zip(mine, theirs, strict=True):
        step = torch.finfo(one.dtype).eps
        np.testing.assert_allclose(one.double(), other.double(), rtol=2 * max(step, 1e-7), atol=1e-7)
    assert report.nan_inf == expected.nan_inf
    assert report.clipping.clipped == expected.clipping.clipped
    for name in ("norm_before", "norm_after", "coefficient", "clipped_fraction", "threshold"):
        found, other = getattr(report.clipping, name), getattr(expected.clipping, name)
        same = pytest.approx(0.0 if other is None else other, rel=1e-5, nan_ok=True)
        assert found == other or (found is not None and found == same), name
    mine_again = protect(grads, device=True, engine="triton", **clipping, **action)[1]
    for one, other in zip(mine, mine_again, strict=True):
        np.testing.assert_array_equal(one.double(), other.double())


@pytest.mark.parametrize("clipping", CLIPPING, ids=str)
def test_a_spike_is_left_out_by_the_device(clipping: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the norm before clipping, of which the optimizer gets a flag; the next step is made."""
    monkeypatch.setattr(pair, "on_device", lambda tensors: True)
    monkeypatch.setattr("gradtrack.step.data.next_row", lambda step, every: every)
    model = with_gradients([torch.ones(40, 5), torch.ones(7)])
    manager = GradientManager(engine="triton", spike_action="skip", spike_window=8, **clipping)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    reports = []
    for step in range(12):
        for param in model.parameters():
            param.grad = torch.full_like(param, 50.0 if step == 9 else 1.0 + 0.01 * (step % 3))
        reports.append(manager.step(model, optimizer, None, backward=False))
        assert manager._pairs.find(model, optimizer).pending.held is not None
        optimizer.step()
    assert [report.skipped for report in reports] == [step == 9 for step in range(12)]
    spike = reports[9].spike
    assert spike is not None
    assert reports[9].clipping.norm_before == pytest.approx(50.0 * 207**0.5, rel=1e-6)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 11.0


@pytest.mark.parametrize("clipping", CLIPPING, ids=str)
@pytest.mark.parametrize("bad", [False, True])
def test_nothing_is_written_where_nothing_engages(clipping: dict[str, Any], bad: bool) -> None:
    """Gradients below every limit, and those of a step with a NaN, are read only: their memory may be read-only."""
    grads = [torch.full((40, 50), 1e-3), torch.full((2000,), 1e-3, dtype=torch.bfloat16)]
    if bad:
        grads[0][3, 4] = math.nan
    written: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes._store, "fn", lambda *arguments, **_: written.append(arguments))
        protect(grads, device=True, engine="triton", nonfinite_action="report", **{**clipping, "agc_clip_factor": 1e9})
    assert not written


def test_large_gradients_are_scaled_and_clamped_to_their_ends() -> None:
    """Several chunks, aligned or not, of every type at once."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(50_001, generator=generator)
    grads = [memory.clone(), memory[1:].view(500, 100), memory.double(), memory[3:].bfloat16(), memory.half()]
    for clipping in CLIPPING[:3]:
        expected, theirs = protect(grads, device=False, engine="native", nonfinite_action="report", **clipping)
        report, mine = protect(grads, device=True, engine="triton", nonfinite_action="report", **clipping)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)
        assert report.clipping.clipped_fraction == expected.clipping.clipped_fraction
        assert report.clipping.norm_after == pytest.approx(expected.clipping.norm_after, rel=1e-4)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations outside of launches, and fails at a read of a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clipping", CLIPPING, ids=str)
@pytest.mark.parametrize("action", ACTIONS[:2], ids=str)
def test_at_most_five_launches_and_fifteen_operations(
    clipping: dict[str, Any], action: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for 20, 400 and 2,000 tensors, launches included, two copies among them; no value is read."""
    monkeypatch.setattr(pair, "on_device", lambda tensors: True)
    monkeypatch.setattr(pair, "add_loss", lambda before, loss: loss)  # which reads a loss of the CPU
    counts = set()
    for number in (20, 400, 2000):
        model = with_gradients([torch.ones(3 + index % 5, 4) for index in range(number)])
        optimizer, loss = optimizer_of(model), torch.ones(())
        manager = GradientManager(engine="triton", **clipping, **action)
        watched = between_rows(manager, model, optimizer)
        launched: list[Any] = []
        monkeypatch.setattr(engine, "launch", lambda kernel, *_, launched=launched, **__: launched.append(kernel))
        manager.step(model, optimizer, loss, backward=False)
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # elsewhere
        launched.clear()
        watched.pending.held = None  # whose numbers no kernel has written
        with Operations() as operations:
            manager.step(model, optimizer, loss, backward=False)
        counts.add((len(operations.names), len(launched)))
        watched.pending.held = None
    assert len(counts) == 1
    ((num_operations, num_launches),) = counts
    assert num_launches <= 5
    assert num_operations + num_launches <= 15, operations.names


def test_fused_optimizers_skip_by_the_flag_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels set `found_inf` of an optimizer that takes it, on bad steps only."""
    monkeypatch.setattr(pair, "on_device", lambda tensors: True)
    model = nn.Linear(4, 3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    manager = GradientManager(engine="triton")
    between_rows(manager, model, optimizer)
    before = model.weight.clone()
    for value, flag in ((math.nan, 1.0), (1.0, 0.0)):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        report = manager.step(model, optimizer, None, backward=False)
        assert float(optimizer.found_inf) == flag
        optimizer.step()
        assert report.skipped == bool(flag)
        assert torch.equal(model.weight, before) == bool(flag)


@given(data=st.data())
def test_a_mean_does_not_hide_a_variance(data: st.DataObject) -> None:
    """Of float64 gradients each has the right one, wherever its elements are."""
    offset, scale = data.draw(st.sampled_from([0.0, 1.0, 1e9])), data.draw(st.sampled_from([1.0, 1e-3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sizes = data.draw(st.lists(st.sampled_from([2, 30, 20_000]), min_size=1, max_size=3))
    grads = [torch.randn(size, generator=generator, dtype=torch.float64) * scale + offset for size in sizes]
    report, _ = protect(grads, device=True, engine="triton", nonfinite_action="report", enable_gradient_clipping=False)
    for index, grad in enumerate(grads):
        assert report.parameters[f"p{index}"].variance == pytest.approx(float(grad.var()), rel=1e-6)
    assert report.statistics is not None
    assert report.statistics.variance == pytest.approx(float(torch.cat(grads).var()), rel=1e-6)


def test_agc_of_odd_memory_is_left_to_the_host() -> None:
    """Units that do not lie in one piece, and weights of another type, are limited on the host."""
    plan = engine.Plan([torch.randn(4, 5)])
    weight = nn.Parameter(torch.randn(4, 5))
    assert plan.clips("agc", [torch.randn(4, 5)], [weight])
    assert not plan.clips("agc", [torch.randn(5, 4).t()], [weight])
    assert not plan.clips("agc", [torch.randn(4, 5)], [nn.Parameter(torch.randn(4, 5).double())])
    assert plan.clips("value", [torch.randn(5, 4).t()], [weight])
    assert kernels.COLUMNS.value == 8


def test_the_benchmark_of_a_step_runs_with_this_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What times a step on a GPU times one here: the same comparison, on the memory of the CPU."""
    monkeypatch.setattr(pair, "on_device", lambda tensors: True)
    monkeypatch.setitem(step_cost.ROUNDS, "small", 2)
    found = step_cost._compare(
        "small", [(4, 4), (4,)], torch.float32, engaged=True, engine="triton", bar=None, quick=False
    )
    assert found.ratio > 0
