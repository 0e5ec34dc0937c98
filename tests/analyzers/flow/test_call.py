"""What a call shows is the same whether compiled loops have looked or numpy and torch, and is what float64 says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.analyzers.flow import call as module
from gradtrack.analyzers.flow import squares as loops
from gradtrack.analyzers.flow.call import SIGMOID_LIMIT, TANH, TANH_LIMIT, Node, take_gradient, take_output
from gradtrack.analyzers.tools.samples import MOST

pytest.importorskip("gradtrack.gradients.native.engine", reason="numba is not installed")
SHAPES = [(2, 1), (64, 10), (3, 5, 7), (40, 64), (4, 3, 300), (2, 6, 5, 5), (1, 1), (700, 130)]


def looked(output: Tensor, gradient: Tensor, axis: int, kind: str, *, compiled: bool) -> Node:
    """Return what a look finds, with the compiled loops or without."""
    found = Node("layer", kind, True, axis, output.shape[axis])
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(module, "loops_over", lambda _: None)
            patch.setattr(loops, "loops_over", lambda _: None)
        take_output(found, output)
        take_gradient(found, gradient)
    return found


def facts(node: Node) -> dict[str, Any]:
    """Return the numbers of a node that are not arrays."""
    names = ("finite", "rows", "varies", "beyond_tanh", "beyond_sigmoid", "slope_tanh", "slope_sigmoid")
    return {name: getattr(node, name) for name in names}


@given(
    shape=st.sampled_from(SHAPES),
    channels=st.booleans(),
    kind=st.sampled_from(["Linear", "RNN_TANH"]),
    size=st.sampled_from([0.0, 1e-30, 0.5, 2.0, 5.0, 1e30]),
    broken=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 1000),
)
def test_compiled_looks_find_the_same(
    shape: tuple[int, ...], channels: bool, kind: str, size: float, broken: float | None, seed: int
) -> None:
    """Ranges and counts are equal, and those of the elements; sums agree to six digits."""
    torch.manual_seed(seed)
    output, gradient = torch.randn(shape) * size, torch.randn(shape) * size
    output = output.tanh() if kind == "RNN_TANH" else output
    if broken is not None:
        output.view(-1)[seed % output.numel()] = broken
    axis = 1 if channels else len(shape) - 1
    one, other = (looked(output, gradient, axis, kind, compiled=compiled) for compiled in (True, False))
    assert one.finite == (broken is None)
    assert facts(one) == pytest.approx(facts(other), abs=0.01 if output.numel() > MOST else 1e-6, nan_ok=True)
    assert one.delta == pytest.approx(float(gradient.double().norm()), rel=1e-6)
    assert other.delta == pytest.approx(one.delta, rel=1e-6)
    if one.finite:
        units = output.movedim(axis, -1).reshape(-1, shape[axis]).double().numpy()
        assert one.unit_min is not None
        assert one.unit_max is not None
        for node in (one, other):
            np.testing.assert_array_equal(node.unit_min, units.min(0))
            np.testing.assert_array_equal(node.unit_max, units.max(0))
        if output.numel() <= MOST:
            beyond = [(np.abs(units) > np.float32(limit)).mean() for limit in (TANH_LIMIT, SIGMOID_LIMIT)]
            if kind == "RNN_TANH":
                beyond = [(np.abs(units) > np.float32(TANH)).mean(), 0.0]
            assert [one.beyond_tanh, one.beyond_sigmoid] == pytest.approx(beyond)
    if one.gram is None or other.gram is None:
        assert one.gram is other.gram is None
    else:
        np.testing.assert_allclose(one.gram, other.gram, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_looked_at_by_other_means(dtype: torch.dtype) -> None:
    """What is not float32, and what is not contiguous, has the numbers of its elements as well."""
    torch.manual_seed(0)
    values = torch.randn(30, 8).to(dtype)
    for output in (values, values.float().T):
        found = looked(output, output, 1, "Linear", compiled=True)
        units = output.double().numpy()
        np.testing.assert_array_equal(found.unit_max, units.max(0))
        assert found.delta == pytest.approx(float(np.linalg.norm(units)), rel=1e-6)


def test_the_compiler_is_not_loaded_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second is too much for a training whose engine is torch's."""
    monkeypatch.setattr(loops, "_ENGINE", "nowhere")
    assert loops.loops_over(torch.ones(3, 3)) is None


def test_a_compiler_that_fails_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Looks go on without it."""
    monkeypatch.setattr(loops, "_LOOPS", "gradtrack.gradients.nowhere")
    loops._loops.cache_clear()
    try:
        assert loops.loops_over(torch.ones(3, 3)) is loops.loops_over(torch.ones(3, 3)) is None
    finally:
        loops._loops.cache_clear()
    assert [record.message for record in caplog.records] == [
        "the loops for looks could not be compiled: looks take longer"
    ]
