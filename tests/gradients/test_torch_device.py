"""The sums of the torch engine on an accelerator, by the same operations on the CPU."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.gradients import torch_device
from gradtrack.gradients.moments import describe
from gradtrack.gradients.torch_device import Orders, Plans, TorchPlan
from tests.gradients.gradients import flat, gradients, oracle, same

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(grads=gradients())
def test_statistics_of_each_gradient(grads: list[Tensor]) -> None:
    """They agree with exact arithmetic, whatever types and shapes come together."""
    rows = TorchPlan(grads).rows(grads)
    for row, grad in zip(rows, grads, strict=True):
        assert same(describe(row.tolist(), grad.numel()), oracle(flat([grad])))


@settings(max_examples=30)
@given(grads=gradients(), most=st.sampled_from([512, 1024]))
def test_windows_leave_no_gap(grads: list[Tensor], most: int) -> None:
    """Small windows, and gradients that are larger than one, give the same sums."""
    long = torch.arange(5000.0).remainder(7) - 3
    grads = [*grads, long, long.view(100, 50).t().double(), long[::2].view(50, 50)]
    whole = TorchPlan(grads).rows(grads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_device, "_MOST_ELEMENTS", most)
        rows = TorchPlan(grads).rows(grads)
    np.testing.assert_allclose(rows, whole, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("most", [512, torch_device._MOST_ELEMENTS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_replacement_reaches_every_element(
    dtype: torch.dtype, most: int, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and infinities are replaced in place, and the norm to clip is that after it."""
    monkeypatch.setattr(torch_device, "_MOST_ELEMENTS", most)
    memory = torch.randn(4001, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory[::100], memory[2::400], memory[4::800] = math.nan, math.inf, -math.inf
    grad = memory[::2] if strided else memory
    expected = torch.nan_to_num(grad, 0.5, 2.0, -2.0)
    norm, num_bad = float(expected.double().norm()), int((~grad.isfinite()).sum())
    orders = Orders(limit=norm / 2, replacements={dtype: (0.5, 2.0)})
    plan = TorchPlan([grad])
    sums = plan.read(plan.start([grad], orders).double().numpy(), orders)
    assert plan.found_inf == 1.0
    assert sums.rows[0, 5:].sum() == num_bad
    torch.testing.assert_close(grad, expected * 0.5)


def test_two_windows_are_below_64_megabytes() -> None:
    """Two halves in float64, and half of one again for what an operation needs."""
    assert 2.5 * 8 * torch_device._MOST_ELEMENTS <= 64e6


def test_plans_share_their_memory() -> None:
    """Several models, as in a game, take no more than the largest of them."""
    memory: dict[torch.device, list[Tensor]] = {}
    one, two = [torch.randn(1000, 1000)], [torch.randn(900, 1000), torch.randn(5)]
    plans = [TorchPlan(grads, memory) for grads in (one, two)]
    (halves,) = memory.values()
    assert sum(half.nbytes for half in halves) <= 64e6
    for plan, grads in ((plans[0], one), (plans[1], two), (plans[0], one)):
        expected = [float(grad.double().sum()) for grad in grads]
        assert plan.rows(grads)[:, 0] == pytest.approx(expected)
    TorchPlan([torch.randn(5)], memory)
    assert list(memory.values()) == [halves]


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_scaled_by_an_exact_factor(dtype: torch.dtype) -> None:
    """The product is rounded and not the factor, which bfloat16 would hold with three digits."""
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = grad.to(torch.float64, copy=True)
    coefficient = float(np.float32(0.123)) if dtype != torch.float64 else 0.123
    plan = TorchPlan([grad])
    plan.start([grad], Orders(limit=0.123 * float(wide.norm())))
    torch.testing.assert_close(grad, (wide * coefficient).to(dtype), rtol=1e-6, atol=0.0)


def test_plans_of_several_models_are_kept() -> None:
    """Gradients of the same types and shapes meet their plan again, and only so many plans are kept."""
    plans = Plans(TorchPlan)
    one, two = [torch.randn(3), torch.randn(4)], [torch.randn(3), torch.randn(4).double()]
    first, second = plans.of(one), plans.of(two)
    assert first is not second
    assert plans.of([torch.randn(3), torch.randn(4)]) is first
    for size in range(10, 14):
        plans.of([torch.randn(size)])
    assert plans.of(one) is not first
