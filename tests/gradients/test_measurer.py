"""Both engines against exact arithmetic, alone and together."""

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.errors import MissingExtraError
from gradtrack.gradients import measurer as module
from gradtrack.gradients.measurer import EngineName, Measurer
from gradtrack.gradients.moments import Moments, describe, replaced
from gradtrack.gradients.torch_device import TorchPlan
from tests.gradients.gradients import flat, gradients, oracle, same
from tests.training import ENGINES


def measure(grads: list[Tensor], engine: EngineName, groups: int = 1) -> Moments:
    """Measure gradients that take turns in belonging to the groups."""
    return Measurer(engine).measure(grads, np.arange(len(grads)) % groups, groups)


@pytest.mark.parametrize("engine", ENGINES)
@given(grads=gradients())
def test_statistics_of_everything_each_and_groups(engine: EngineName, grads: list[Tensor]) -> None:
    """The whole, every tensor and every group agree with exact arithmetic over their elements."""
    moments = measure(grads, engine, groups=2)
    assert same(describe(moments.total, sum(grad.numel() for grad in grads)), oracle(flat(grads)))
    for index, grad in enumerate(grads):
        assert same(describe(moments.rows[index].tolist(), grad.numel()), oracle(flat([grad])))
    for group in range(2):
        members = grads[group::2]
        found = describe(moments.group_rows[group].tolist(), sum(grad.numel() for grad in members))
        assert same(found, oracle(flat(members)))


@pytest.mark.parametrize("engine", ENGINES)
@given(grads=gradients())
def test_true_norm_is_not_finite_where_an_element_is_not(engine: EngineName, grads: list[Tensor]) -> None:
    """The norm of the step is NaN with a NaN, infinite with an infinity, and finite otherwise."""
    moments = measure(grads, engine)
    values = flat(grads)
    expected = math.nan if any(map(math.isnan, values)) else math.inf if any(map(math.isinf, values)) else None
    assert moments.finite == (expected is None)
    if expected is None:
        assert math.isfinite(moments.norm)
    else:
        assert math.isnan(moments.norm) if math.isnan(expected) else moments.norm == math.inf


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e150, 1e300, 5e-324])
def test_squares_outside_of_float64(engine: EngineName, scale: float) -> None:
    """The norm of float64 gradients is right where the squares of its elements cannot be held."""
    grad = torch.full((16,), scale, dtype=torch.float64)
    moments = measure([grad], engine)
    assert moments.norm == pytest.approx(4 * scale, rel=1e-12, abs=0.0)
    assert describe(moments.total, 16, moments.exponent)["mean"] == pytest.approx(scale, rel=1e-12, abs=0.0)
    assert describe(moments.total, 16, moments.exponent)["max"] == scale


@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_does_not_overflow(engine: EngineName) -> None:
    """F7: squares of 300 are beyond float16, the norm is not."""
    grad = torch.full((1000,), 300.0, dtype=torch.float16)
    moments = measure([grad], engine)
    assert moments.norm == pytest.approx(300 * 1000**0.5, rel=1e-12)
    assert describe(moments.total, 1000)["variance"] == 0.0


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=st.integers(0, 100), shift=st.sampled_from([0.0, 1.0, 300.0]))
def test_variance_is_that_of_the_concatenation(engine: EngineName, seed: int, shift: float) -> None:
    """F7: tensors with different means are merged, their variances are not averaged."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(40, 3, generator=generator)
    second = torch.randn(70, generator=generator) + shift
    expected = float(torch.cat([first.flatten(), second]).double().var())
    moments = measure([first, second], engine)
    assert describe(moments.total, 190)["variance"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@given(grads=gradients(special=False), coefficient=st.sampled_from([0.5, 0.123, 1e-3]))
def test_scaling_multiplies_in_place(engine: EngineName, grads: list[Tensor], coefficient: float) -> None:
    """Scaling leaves what `mul_` leaves, in the same tensors, but for the last bit of half precision."""
    expected = [grad.clone().mul_(coefficient) for grad in grads]
    Measurer(engine).scale(grads, coefficient)
    for grad, other in zip(grads, expected, strict=True):
        step = torch.finfo(grad.dtype).eps if grad.dtype in (torch.float16, torch.bfloat16) else 0.0
        assert torch.allclose(grad, other, rtol=step, atol=torch.finfo(grad.dtype).smallest_normal * step)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [2.4754e-6, 1.2e-8])
def test_the_factor_is_not_rounded_to_half_precision(
    engine: EngineName, dtype: torch.dtype, coefficient: float
) -> None:
    """A factor that float16 cannot hold scales as it is: what is left is rounded, and not the factor before it."""
    grads = [torch.full((3,), 30000.0, dtype=dtype), torch.full((2,), 30000.0)]
    expected = [grad.double() * coefficient for grad in grads]
    Measurer(engine).scale(grads, coefficient)
    for one, other in zip(grads, expected, strict=True):
        finfo = torch.finfo(one.dtype)
        assert torch.allclose(one.double(), other, rtol=finfo.eps, atol=0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_any_memory_layout(engine: EngineName) -> None:
    """Transposed, strided, expanded and channels-last gradients are measured like contiguous ones."""
    base = torch.randn(4, 6)
    image = torch.randn(2, 3, 4, 5)
    views = [base.t(), base[:, ::2], base[0].expand(3, 6), image.to(memory_format=torch.channels_last), base[1:, 1:4]]
    for view in views:
        assert same(describe(measure([view], engine).total, view.numel()), oracle(flat([view])))
        copy = view.clone(memory_format=torch.preserve_format) if not view.is_contiguous() else view.clone()
        Measurer(engine).scale([copy], 0.5)
        assert torch.equal(copy, view * 0.5)


def test_mixed_engines_agree_with_torch_alone() -> None:
    """Tensors that the native engine does not cover are measured by torch in the same step."""
    grads = [torch.randn(8), torch.randn(6, 6)[:, ::2], torch.randn(3, dtype=torch.float64)]
    mixed, alone = measure(grads, "native", 2), measure(grads, "torch", 2)
    np.testing.assert_allclose(mixed.rows, alone.rows, rtol=1e-6)
    np.testing.assert_allclose(mixed.group_rows, alone.group_rows, rtol=1e-6)


def _other_order(grad: Tensor) -> Tensor:
    return torch.randn(3, 5).t()


def _sparse_in_memory(grad: Tensor) -> Tensor:
    return torch.randn(5, 6)[:, ::2]


LATER = [torch.randn_like, Tensor.double, Tensor.bfloat16, _other_order, _sparse_in_memory]


@pytest.mark.parametrize("later", LATER)
def test_a_plan_is_for_gradients_of_the_same_sizes(later: Callable[[Tensor], Tensor]) -> None:
    """A plan made for the gradients of one step never measures later ones of another type, size or layout."""
    measurer, group_of = Measurer("native"), np.zeros(2, np.int64)
    first = [torch.randn(5, 3), torch.randn(7)]
    batch = measurer.prepare(first)
    assert measurer.prepare([torch.randn(5, 3), torch.randn(7)], batch.plan).plan is batch.plan
    then = [later(first[0]), torch.randn(7)]
    found = measurer.measure(measurer.prepare(then, batch.plan), group_of, 1)
    assert same(describe(found.total, 22), oracle(flat(then)))


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_to_measure(engine: EngineName) -> None:
    """No tensors and empty tensors have a norm of zero."""
    assert measure([], engine).norm == 0.0
    moments = measure([torch.zeros(0), torch.zeros(3, 0)], engine)
    assert moments.norm == 0.0
    assert math.isnan(describe(moments.total, 0)["mean"])


@pytest.mark.parametrize("engine", ENGINES)
def test_large_tensor_against_float64(engine: EngineName) -> None:
    """Where float32 sums drift, ours are right to better than 1e-6."""
    grad = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e-3
    expected = float(torch.linalg.vector_norm(grad.double()))
    assert measure([grad], engine).norm == pytest.approx(expected, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forty_million_elements_against_float64(engine: EngineName, dtype: torch.dtype) -> None:
    """The norm of forty million elements is right to 1e-6, where torch's own float32 norm is off by 1e-3."""
    grad = torch.randn(40_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    squares = [float((piece.double() ** 2).sum()) for piece in torch.split(grad, 1 << 20)]
    exact = math.fsum(squares) ** 0.5
    assert measure([grad], engine).norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@given(grads=gradients(), nan=st.sampled_from([0.0, -2.5]), infinity=st.sampled_from([1e-3, 60000.0, 1e150]))
def test_what_replacing_makes_of_the_sums(engine: EngineName, grads: list[Tensor], nan: float, infinity: float) -> None:
    """The sums of gradients whose NaN and Inf were replaced follow from those before and from the counts."""
    largest = [min(infinity, torch.finfo(grad.dtype).max) for grad in grads]
    values = [torch.tensor([nan, high], dtype=grad.dtype).double() for grad, high in zip(grads, largest, strict=True)]
    pairs = torch.stack(values, dim=1).numpy()
    foreseen = replaced(measure(grads, engine), pairs[0], pairs[1], np.arange(len(grads)) % 1, 1)
    after = [
        torch.nan_to_num(grad, nan=nan, posinf=high, neginf=-high) for grad, high in zip(grads, largest, strict=True)
    ]
    found = describe(foreseen.total, sum(grad.numel() for grad in grads), foreseen.exponent)
    assert same(found, oracle(flat(after)))


class Broken:
    """An engine of Triton on a machine without a compiler."""

    def covers(self, grad: Tensor) -> bool:
        """Cover everything."""
        return True

    def works_on(self, device: torch.device) -> bool:
        """Fail as Triton does."""
        raise RuntimeError("Failed to find C compiler")


def test_torch_measures_where_triton_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` tries once on each device and says why torch measures there; `triton` fails at its first launch."""
    monkeypatch.setitem(sys.modules, "gradtrack.gradients.triton.engine", SimpleNamespace(TritonEngine=Broken))
    grads = [torch.empty(3, device="meta")]
    auto = module.Accelerators("auto")
    assert [auto.triton_for(grads) for _ in range(2)] == [(None, [])] * 2
    assert caplog.text.count("Failed to find C compiler") == 1
    assert isinstance(auto.plan(grads), TorchPlan)
    assert module.Accelerators("triton").triton_for(grads)[1] == [0]
    assert module.Accelerators("native").triton_for(grads) == (None, [])


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package `triton` is refused with the command that installs it, and `auto` is not."""
    monkeypatch.setitem(sys.modules, "gradtrack.gradients.triton.engine", None)
    with pytest.raises(MissingExtraError, match=r"gradtrack\[triton\]"):
        Measurer("triton")
    assert module.Accelerators("auto").triton_for([torch.empty(3, device="meta")]) == (None, [])
