"""The trend of a loss, as the rules of the gradient flow read it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradtrack import GradientManager, safe_backward
from gradtrack.analyzers.flow.samples import Trend


@given(
    st.lists(st.integers(-1000, 1000), min_size=10, max_size=60),
    st.integers(-20, 20),
)
def test_trend_is_free_of_scale(losses: list[int], power: int) -> None:
    """A loss times a power of two falls and rises as the loss does."""
    plain = Trend([float(loss) for loss in losses[:16]], [float(loss) for loss in losses])
    scaled = Trend([loss * 2.0**power for loss in losses[:16]], [loss * 2.0**power for loss in losses])
    for name in ("falling", "rising", "learned", "risen", "turning"):
        assert getattr(plain, name) == getattr(scaled, name)


@given(st.integers(0, 63), st.sampled_from([math.nan, math.inf]))
def test_one_bad_batch_is_no_trend(place: int, bad: float) -> None:
    """A loss that falls but for one batch falls and has not risen."""
    losses = [2.0 * 0.97**step for step in range(64)]
    losses[place] = bad
    trend = Trend(losses[:16], losses)
    assert not trend.diverged
    assert not trend.risen
    assert trend.falling
    assert trend.learned or place == 0  # of which the first loss is not known


@given(st.integers(1, 60), st.integers(5, 64))
def test_a_loss_that_stays_no_number_has_risen(sound: int, lost: int) -> None:
    """A training that has run away is told by its last losses, however long it was sound."""
    losses = [2.0] * sound + [math.nan] * lost
    assert Trend(losses[:16], losses).diverged
    assert Trend(losses[:16], losses).risen


def test_a_batch_that_is_left_out_accuses_no_learning_rate() -> None:
    """A training that learns fast is sound but for its one NaN, which is all that is told."""
    torch.manual_seed(0)
    x = torch.randn(2048, 20)
    y = (x[:, :10].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with GradientManager(analyzers=["flow"], backends=[]) as manager:
        for step in range(1, 81):
            chosen = torch.randint(0, 2048, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            safe_backward(loss * math.nan if step == 50 else loss, model, optimizer, manager)
            optimizer.step()
        assert [issue.key for issue in manager.diagnose()] == ["NUMERICAL"]
