"""The limits of the strategies, against numpy and against their definition."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack import GradientConfig
from gradtrack.protection.strategies import WARMUP, AdaptiveStrategy, Memory, Strategy, ZScoreStrategy, percentile

NORMS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60)


@given(values=NORMS, percent=st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    """Interpolation is the same, bit for bit."""
    assert percentile(sorted(values), percent) == np.percentile(values, percent)


@given(values=NORMS, size=st.integers(1, 30), percent=st.sampled_from([50.0, 90.0, 95.0, 100.0]))
def test_adaptive_limit_is_the_percentile_of_the_norms_before(values: list[float], size: int, percent: float) -> None:
    """F7: the window holds the last norms without the current one; the fixed limit applies until ten are known."""
    config = GradientConfig(adaptive_window_size=size, adaptive_percentile=percent, max_grad_norm=7.0)
    strategy = AdaptiveStrategy()
    for index, norm in enumerate(values):
        window = values[max(0, index - size) : index]
        expected = np.percentile(window, percent) if index >= WARMUP else 7.0
        assert strategy.threshold(config) == expected
        strategy.observe([(norm, norm)], Memory.of(config))


def test_adaptive_window_can_shrink_during_training() -> None:
    """A smaller window applies at once."""
    config, strategy = GradientConfig(adaptive_window_size=100, adaptive_percentile=0.0), AdaptiveStrategy()
    for norm in range(1, 41):
        strategy.observe([(float(norm), float(norm))], Memory.of(config))
    config.adaptive_window_size = 5
    assert strategy.threshold(config) == 36.0


def test_zscore_limit_is_above_ordinary_norms_and_below_spikes() -> None:
    """Ordinary noise passes, a tenfold norm does not, and clipped spikes do not raise the limit much."""
    config, strategy = GradientConfig(clip_type="zscore"), ZScoreStrategy()
    noise = np.random.default_rng(0).normal(1.0, 0.1, 300)
    for norm in noise:
        strategy.observe([(norm, min(norm, strategy.threshold(config)))], Memory.of(config))
    limit = strategy.threshold(config)
    assert 1.1 < limit < 1.5
    for _ in range(5):
        strategy.observe([(100.0, strategy.threshold(config))], Memory.of(config))
    assert strategy.threshold(config) < 2.5


@given(values=NORMS)
def test_zscore_mean_of_few_norms_is_their_mean(values: list[float]) -> None:
    """As long as all norms weigh the same, the running moments are the plain ones."""
    config, strategy = GradientConfig(zscore_alpha=0.999, zscore_threshold=1.0), ZScoreStrategy()
    for norm in values:
        strategy.observe([(norm, norm)], Memory.of(config))
    if len(values) >= WARMUP:
        expected = np.mean(values) + np.std(values)
        assert strategy.threshold(config) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [AdaptiveStrategy, ZScoreStrategy])
@given(before=NORMS, after=NORMS)
def test_state_continues(kind: type[Strategy], before: list[float], after: list[float]) -> None:
    """A strategy that was saved as JSON and loaded goes on as if nothing had happened."""
    config, one, other = GradientConfig(), kind(), kind()
    for norm in before:
        one.observe([(norm, norm)], Memory.of(config))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for norm in after:
        assert one.threshold(config) == other.threshold(config)
        one.observe([(norm, norm)], Memory.of(config))
        other.observe([(norm, norm)], Memory.of(config))
