"""The Triton engine agrees with float64 arithmetic and with the other engines, bit for bit from call to call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import Moments
from gradtrack.gradients.triton import engine, kernels
from tests.gradients.gradients import gradients as small_gradients
from tests.gradients.native.test_engine import assert_same, gradients

CHUNK = 1 << 14
SIZES = (0, 1, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def measure(grads: list[Tensor], name: Any = "triton") -> Moments:
    """Measure gradients that take turns in belonging to two groups."""
    return Measurer(name).measure(grads, np.arange(len(grads)) % 2, 2)


@given(grads=st.lists(gradients(), min_size=1, max_size=6))
def test_every_statistic_of_every_type_at_once(grads: list[Tensor]) -> None:
    """Sums are right to 1e-6, extremes and counts exactly, whatever types and sizes come together."""
    moments = measure(grads)
    for row, grad in zip(moments.rows, grads, strict=True):
        assert_same(row, grad, moments.exponent)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", KINDS)
def test_chunks_leave_no_gap(dtype: torch.dtype, size: int) -> None:
    """Every element counts once where a chunk or a tile ends."""
    grad = torch.arange(1, size + 1).remainder(7).to(dtype)
    row = measure([grad]).rows[0]
    assert row[0] == grad.double().sum().item()
    assert row[1] == grad.double().square().sum().item()
    assert row[4] == (grad == 0).sum().item()


@given(data=st.data())
def test_sums_do_not_depend_on_where_a_gradient_is(data: st.DataObject) -> None:
    """The same elements at any address have the same sums, to the bit, and so in any company."""
    dtype = data.draw(st.sampled_from(KINDS))
    size, shift = data.draw(st.sampled_from(SIZES)), data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    memory = torch.randn(size + shift, generator=generator, dtype=torch.float64).to(dtype)
    grad = memory[shift:]
    alone, again, copied = measure([grad]), measure([grad]), measure([torch.randn(5), grad.clone()])
    np.testing.assert_array_equal(alone.rows[0], again.rows[0])
    np.testing.assert_array_equal(alone.rows[0], copied.rows[1])


@given(grads=small_gradients())
def test_triton_measures_what_the_others_measure(grads: list[Tensor]) -> None:
    """Beside the native engine and torch, counts are equal and norms within 1e-6."""
    mine = measure(grads)
    for name in ("native", "torch"):
        other = measure(grads, name)
        np.testing.assert_array_equal(mine.rows[:, 2:], other.rows[:, 2:])
        assert mine.norm == pytest.approx(other.norm, rel=1e-6, nan_ok=True)
        np.testing.assert_array_equal(mine.group_rows[:, 4:], other.group_rows[:, 4:])


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0), (0, 2, 3, 1)])
def test_dense_memory_in_any_order_is_read_in_place(dims: tuple[int, ...]) -> None:
    """Transposed and channels-last gradients are covered, and such with gaps left to torch."""
    base = torch.randn(4, 3, 5, 6)
    grad = base.permute(dims)
    assert engine.TritonEngine.covers(grad)
    assert_same(measure([grad]).rows[0], grad)
    for other in (base[:, ::2], base[0, 0, 0].expand(3, 6), base[:, 1:]):
        assert not engine.TritonEngine.covers(other)
        assert_same(measure([other, grad]).rows[0], other)


@pytest.mark.parametrize("number", [1, 20, 2000])
def test_two_launches_measure_any_number_of_tensors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches do not grow with the tensors, and the addresses are sent only where they have changed."""
    launched: list[Any] = []
    monkeypatch.setattr(engine, "launch", lambda kernel, programs, *_, **__: launched.append((kernel, programs)))
    grads = [torch.zeros(3) for _ in range(number)]
    plan = engine.Plan(grads)
    plan.measure(grads)
    assert launched == [(kernels.measure, number), (kernels.merge_chunks, number)]
    sent = plan.inputs.clone()
    plan.inputs.zero_()
    plan.measure(grads)
    assert not plan.inputs.any()
    other = torch.zeros(3)
    plan.measure([other, *grads[1:]])
    assert plan.inputs[1:].equal(sent[1:])
    assert plan.inputs[0] == other.data_ptr()


def test_the_engine_tries_itself() -> None:
    """It runs its kernels once before `auto` takes it for a device."""
    assert engine.TritonEngine().works_on(torch.device("cpu"))


def test_plans_of_several_models_are_kept() -> None:
    """Gradients of the same types and sizes meet their plan again, and only so many plans are kept."""
    mine = engine.TritonEngine().plans
    one, two = [torch.randn(3), torch.randn(4)], [torch.randn(3), torch.randn(4).double()]
    first, second = mine.of(one), mine.of(two)
    assert first is not second
    assert mine.of([torch.randn(3), torch.randn(4)]) is first
    assert mine.of(two) is second
    for size in range(10, 14):
        mine.of([torch.randn(size)])
    assert mine.of(one) is not first


def test_elements_beyond_31_bits() -> None:
    """Offsets are of 64 bits: the last chunk of a gradient of 2**31 + 5 elements, whose other memory is never used."""
    grad = torch.empty(2**31 + 5, dtype=torch.float16)
    grad[2**31 :] = torch.tensor([1.0, -2.0, 0.0, math.nan, math.inf])
    partial = torch.zeros(8, dtype=torch.float64)
    inputs = torch.tensor([grad.data_ptr(), 0, 0])
    sizes, codes = torch.tensor([grad.numel()]), torch.tensor([engine.CODES[torch.float16]], dtype=torch.int32)
    firsts, tensor_of = torch.tensor([-(2**31) // CHUNK], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tables = inputs, sizes, codes, firsts, tensor_of, partial
    engine.launch(kernels.measure, 1, *tables, 1, 1, TYPES=8, CHUNK=CHUNK, FACTORS=False)
    assert partial.tolist() == [-1.0, 5.0, -2.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_large_models_have_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of a lane fit into their bytes with the larger chunks, too."""
    monkeypatch.setattr(engine, "_LARGE", 1)
    for value in (0.0, math.nan, math.inf, -math.inf):
        row = measure([torch.full((1 << 16,), value)]).rows[0]
        assert row[4:].sum() == 1 << 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_ten_million_elements(dtype: torch.dtype) -> None:
    """Sums are those of exact addition to 1e-12, counts and extremes exact."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(10_000_000, generator=generator, dtype=torch.float64).to(dtype)
    grad[::1000], grad[1::100_000], grad[2::1_000_000] = 0.0, math.nan, -math.inf
    row = measure([grad]).rows[0]
    wide = grad.double().numpy()
    finite = wide[np.isfinite(wide)]
    assert row[0] == pytest.approx(math.fsum(finite), rel=1e-12, abs=1e-9)
    assert row[1] == pytest.approx(math.fsum(np.square(finite)), rel=1e-12)
    assert row[2:].tolist() == [finite.min(), finite.max(), (wide == 0).sum(), 100, 0, 10]
