"""The elements that are followed through an optimizer step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradtrack.analyzers.flow.sampled_weights import Elements


def test_what_is_not_finite_stays_in_the_numbers() -> None:
    """Infinite weights and gradients make NaN of what they touch, also where numpy is told to raise."""
    weight = nn.Parameter(torch.tensor([math.inf, 1.0, 2.0]))
    grad = torch.tensor([math.inf, 1.0, 0.0])
    with np.errstate(all="raise"):
        elements = Elements({"w": weight}, {"w": grad})
        (change,) = elements.changes({"w": weight}).values()
        found = [elements.left({"w": grad}), elements.cosine({"w": weight}, {"w": grad}), elements.cosine_to(elements)]
    assert all(map(math.isnan, [change.ratio, *found]))


SHAPES = st.lists(st.sampled_from([(), (1,), (7,), (5, 3), (16, 16), (40, 31), (3, 1000)]), min_size=1, max_size=5)


def followed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that are followed: up to 256 at equal distances."""
    flat = tensor.detach().double().reshape(-1)
    return flat[:: max(1, len(flat) // 256)][:256]


def cosine(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the cosine of two gradients, the elements of each tensor standing for all that it has."""
    weights = [len(one.reshape(-1)) / len(followed(one)) for one, _ in pairs]
    parts = [(followed(one), followed(other)) for one, other in pairs]
    inner = sum(weight * float(one @ other) for weight, (one, other) in zip(weights, parts, strict=True))
    first = sum(weight * float(one @ one) for weight, (one, _) in zip(weights, parts, strict=True))
    second = sum(weight * float(other @ other) for weight, (_, other) in zip(weights, parts, strict=True))
    return inner / math.sqrt(first * second)


@given(shapes=SHAPES, seed=st.integers(0, 2**16), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_step_is_what_it_did_to_each_parameter(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> None:
    """Ratios, shares and cosines are those of the elements that are followed, of each parameter by itself."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    params = {str(index): nn.Parameter(draw(shape)) for index, shape in enumerate(shapes)}
    before = {name: param.detach().clone() for name, param in params.items()}
    grads = {name: draw(tuple(param.shape)) for name, param in params.items() if name != "1"}
    elements = Elements(params, grads)
    with torch.no_grad():
        for param in params.values():
            moves = torch.rand(param.shape, generator=generator) < 0.5
            param.add_(torch.where(moves, draw(tuple(param.shape)), torch.zeros((), dtype=dtype)))
    found = elements.changes(params)
    assert list(found) == list(params)
    for name, param in params.items():
        old, new = followed(before[name]), followed(param)
        size = max(float(old.norm()), float(new.norm()))
        assert found[name].ratio == pytest.approx(float((new - old).norm()) / size, rel=1e-12, nan_ok=True)
        live = followed(grads[name]) != 0 if name in grads else torch.zeros(len(old), dtype=torch.bool)
        still = float(((new == old) & live).sum() / live.sum()) if live.any() else math.nan
        assert found[name].unchanged == pytest.approx(still, nan_ok=True)
    others = {name: draw(tuple(grad.shape)) for name, grad in grads.items()}
    pairs = [(grads[name], others[name]) for name in grads]
    assert elements.cosine(params, others) == pytest.approx(cosine(pairs), rel=1e-9, abs=1e-12)
    assert elements.cosine_to(Elements(params, others)) == pytest.approx(cosine(pairs), rel=1e-9, abs=1e-12)
    halves = {name: grad / 2 for name, grad in grads.items()}
    assert elements.left(halves) == pytest.approx(0.5)


def test_other_parameters_are_compared_as_far_as_they_are_the_same() -> None:
    """A parameter that has come, gone or changed its size counts for nothing, and the others as before."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(size)) for name, size in (("a", 40), ("b", 30), ("c", 20))}
    grads = {name: torch.randn(len(param)) for name, param in params.items()}
    elements = Elements(params, grads)
    now = {"a": params["a"], "b": nn.Parameter(torch.zeros(3)), "d": nn.Parameter(torch.zeros(5))}
    after = {"a": 3 * grads["a"], "b": torch.ones(3), "d": torch.ones(5)}
    assert set(elements.changes(now)) == {"a"}
    assert elements.left(after) == pytest.approx(3.0)
    assert elements.cosine(now, after) == pytest.approx(1.0)
    assert Elements(now, after).cosine_to(elements) == pytest.approx(1.0)


def test_sparse_gradients_are_followed_where_they_are_not_zero() -> None:
    """Few rows of a table have a gradient: those are looked at, and whether the step has moved them."""
    table, grad = nn.Parameter(torch.ones(1000, 8)), torch.zeros(1000, 8)
    grad[[3, 500]] = 1.0
    elements = Elements({"table": table}, {"table": grad})
    with torch.no_grad():
        table[3] += 1.0
    (change,) = elements.changes({"table": table}).values()
    assert change.unchanged == 0.5
    assert change.ratio == pytest.approx(math.sqrt(8) / math.sqrt(8 * 4 + 8))
