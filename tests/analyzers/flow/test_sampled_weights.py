"""The elements that are followed through an optimizer step."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradtrack import GradientManager
from gradtrack.analyzers.flow.sampled_weights import Elements
from gradtrack.reports import IssueType


def test_what_is_not_finite_stays_in_the_numbers() -> None:
    """Infinite weights and gradients make NaN of what they touch, also where numpy is told to raise."""
    weight = nn.Parameter(torch.tensor([math.inf, 1.0, 2.0]))
    grad = torch.tensor([math.inf, 1.0, 0.0])
    with np.errstate(all="raise"):
        elements = Elements({"w": weight}, {"w": grad})
        (change,) = elements.changes({"w": weight}).values()
        found = [elements.left({"w": grad}), elements.cosine({"w": weight}, {"w": grad}), elements.cosine_to(elements)]
    assert all(map(math.isnan, [change.ratio, *found]))


def through(dtype: torch.dtype, scale: float, zeros: float = 0.0) -> float:
    """Return the share of subnormal gradients of a weight in float32, whose gradient has gone through a format."""
    torch.manual_seed(0)
    grad = (torch.randn(40, 40) * scale).to(dtype).float()
    grad[torch.rand_like(grad) < zeros] = 0.0
    weight = nn.Parameter(torch.ones(40, 40))
    (change,) = Elements({"w": weight}, {"w": grad}).changes({"w": weight}).values()
    return change.subnormal


def test_gradients_that_have_gone_through_float16_are_known() -> None:
    """Autocast leaves them in float32; there are too few subnormal numbers by chance, or where all others are zero."""
    assert through(torch.float16, 1e-6) == 1.0
    assert through(torch.float16, 1e-6, zeros=0.8) == 1.0
    assert 0.0 < through(torch.float16, 1e-4) < 1.0
    assert through(torch.float16, 1.0) < 0.01
    assert math.isnan(through(torch.float16, 1e-6, zeros=0.99))
    assert math.isnan(through(torch.float32, 1e-6))
    assert math.isnan(through(torch.bfloat16, 1e-5))


def test_zeros_count_where_the_weights_are_in_float16_themselves() -> None:
    """They are gradients that were flushed, as far as can be known; under autocast only what is left is judged."""
    grad = torch.cat([torch.full((60,), 1.0), torch.zeros(140)])
    for dtype, share in ((torch.float16, 0.7), (torch.float32, 0.0)):
        weight = nn.Parameter(torch.ones(200, dtype=dtype))
        (change,) = Elements({"w": weight}, {"w": grad.to(dtype)}).changes({"w": weight}).values()
        assert change.subnormal == pytest.approx(share)


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


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_autocast_to_float16_without_a_scaler_is_told(narrow: torch.dtype) -> None:
    """Gradients that float16 can hardly hold are a fault of the format, also where the weights are in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-16)
    x, y = torch.randn(64, 12), torch.randn(64, 3)
    with GradientManager(analyzers=["flow"], backends=[], enable_gradient_clipping=False) as manager:
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=narrow):
                out = model(x)
            manager.step(model, optimizer, 3e-4 * F.mse_loss(out.float(), y))
            optimizer.step()
        found = [issue for issue in manager.diagnose() if issue.issue_type is IssueType.NUMERICAL]
    assert [("GradScaler" in issue.recommendation) for issue in found] == ([True] if narrow is torch.float16 else [])
