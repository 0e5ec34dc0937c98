"""The variance of gradients that are far from zero and close together."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientManager, GradientMonitor, StepReport
from gradtrack.gradients.collected import find_deviations
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from tests.training import ENGINES, batch_loss, look, optimizer_of, small_model, with_gradients


def exact_variance(tensors: list[Tensor]) -> float:
    """Return the unbiased variance of the finite elements by the arithmetic of fractions."""
    values = [Fraction(x) for tensor in tensors for x in tensor.double().flatten().tolist() if np.isfinite(x)]
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return float(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def reported(tensors: list[Tensor], engine: Any) -> StepReport:
    """Return the report of these gradients."""
    return look(
        with_gradients([tensor.clone() for tensor in tensors]),
        engine=engine,
        track_parameters=True,
        nonfinite_action="report",
    )


offsets = st.one_of(st.just(0.0), st.floats(-1e9, 1e9), st.floats(-1.0, 1.0))
noise = st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=30)


@pytest.mark.parametrize("engine", ENGINES)
@given(
    parts=st.lists(st.tuples(noise, st.booleans()), min_size=1, max_size=4),
    offset=offsets,
    spread=st.sampled_from([1.0, 1e-3, 1e-6]),
    holes=st.booleans(),
)
def test_the_variance_is_exact_whatever_the_mean(
    engine: Any, parts: list[tuple[list[float], bool]], offset: float, spread: float, holes: bool
) -> None:
    """Of every parameter, every group and the whole: to 1e-6 by the arithmetic of fractions, at any offset."""
    tensors = [
        torch.tensor(values, dtype=torch.float64) * spread + (-offset if mirrored else offset)
        for values, mirrored in parts
    ]
    if holes:
        tensors[0][0] = float("nan")
    report = reported(tensors, engine)
    assert report.statistics is not None
    scale = max(1.0, abs(offset)) ** 2 * 1e-28  # what float64 itself leaves of differences
    assert report.statistics.variance == pytest.approx(exact_variance(tensors), rel=1e-6, abs=scale)
    for index, tensor in enumerate(tensors):
        expected = exact_variance([tensor])
        assert report.parameters[f"p{index}"].variance == pytest.approx(expected, rel=1e-6, abs=scale)
        assert report.groups[f"p{index}"].variance == pytest.approx(expected, rel=1e-6, abs=scale)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_large_mean_does_not_hide_the_variance(engine: Any, dtype: torch.dtype) -> None:
    """A mean of 1e9 spreads in float64 (1e5 in float32) leaves the variance right, also over pieces and threads."""
    generator = torch.Generator().manual_seed(0)
    offset = 1e9 if dtype is torch.float64 else 1e5
    values = (offset + torch.randn(1_500_000, generator=generator, dtype=torch.float64)).to(dtype)
    report = reported([values, values[:1000] - 2.0], engine)
    assert report.statistics is not None
    both = torch.cat([values, values[:1000] - 2.0]).double().numpy()
    assert report.statistics.variance == pytest.approx(both.var(ddof=1), rel=1e-9)
    assert report.parameters["p0"].variance == pytest.approx(values.double().numpy().var(ddof=1), rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_scalars_vary_together(engine: Any) -> None:
    """Tensors of one element have no variance of their own, and together they have the right one."""
    values = [torch.tensor([1e9 + index % 2], dtype=torch.float64) for index in range(8)]
    report = reported(values, engine)
    assert report.statistics is not None
    assert report.statistics.variance == pytest.approx(2 / 7, rel=1e-12)
    assert report.parameters["p0"].variance == 0.0


def test_values_beyond_the_range_of_squares_vary_as_well() -> None:
    """The second pass divides as the first one did."""
    values = 1e160 * (1.0 + 1e-9 * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    report = reported([values], "torch")
    assert report.statistics is not None
    assert report.statistics.std == pytest.approx((values / 1e160).numpy().std(ddof=1) * 1e160, rel=1e-5)


def test_ordinary_gradients_are_read_once() -> None:
    """Only a mean that hides its variance is worth a second pass; a constant tensor has none, and needs none."""
    model, measurer = small_model(), Measurer()
    torch.autograd.backward(batch_loss(model))
    grads = ParameterTable(model).gradients()
    assert find_deviations(grads, grads.measure(measurer)) is None
    constant = ParameterTable(with_gradients([torch.full((5,), 3.0), torch.zeros(4)])).gradients()
    found = find_deviations(constant, constant.measure(measurer))
    assert found is not None
    assert found.rows.tolist() == [0.0, 0.0]
    assert found.total == pytest.approx(9 * 5 * 4 / 9, rel=1e-12)


def test_the_monitor_has_the_same_variance() -> None:
    """A list of gradients is measured as those of a model are."""
    values = 1e9 + torch.arange(100, dtype=torch.float64) % 2
    assert GradientMonitor().update_statistics([values]).variance == pytest.approx(25 / 99, rel=1e-12)


def test_data_of_another_shape_is_counted_as_it_is() -> None:
    """A parameter that gets data of another shape has the new number of elements from the next step on."""
    for engine in ENGINES:
        model = nn.Linear(4, 1, bias=False)
        optimizer, manager = optimizer_of(model), GradientManager(engine=engine)
        first = manager.step(model, optimizer, model(torch.ones(2, 4)).sum())
        optimizer.zero_grad()
        model.weight.data = torch.ones(1, 7)
        second = manager.step(model, optimizer, model(torch.ones(2, 7)).sum())
        assert first.statistics is not None
        assert second.statistics is not None
        assert (first.statistics.element_count, second.statistics.element_count) == (4, 7)
        assert second.statistics.mean == pytest.approx(2.0)
        assert second.groups["weight"].element_count == 7
