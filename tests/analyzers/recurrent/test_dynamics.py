"""Jacobians, exponents and decay against systems whose dynamics are known, and the laws that they obey."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.recurrent.cells import function_cell
from gradtrack.analyzers.recurrent.dynamics import (
    asymptotic_memory,
    decay_rate,
    effective_memory,
    jacobian,
    spaced,
    sweep,
)
from gradtrack.analyzers.recurrent.trajectories import Sequences, follow, replay
from gradtrack.analyzers.tools.spectra import spectral_radius
from tests.analyzers.recurrent.recurrent_goldens import (
    GOLDENS,
    L4_GAINS,
    arnoldi_radius,
    generator,
    l4_random_network,
    random_network_exponent,
)
from tests.analyzers.recurrent.recurrent_models import Case, cases

logs = st.lists(st.floats(-20.0, 20.0), min_size=3, max_size=30)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.__name__)
def test_known_system(golden: Callable[[], None]) -> None:
    """Every number of a system that is known in closed form is right within its tolerance."""
    golden()


@pytest.mark.parametrize(("gain", "expected"), L4_GAINS.items())
def test_random_networks_follow_mean_field_theory(gain: float, expected: float) -> None:
    """L4: five hundred units are close to the theory of infinitely many."""
    l4_random_network(gain, expected)


def test_chaos_begins_where_theory_says() -> None:
    """L4: the exponent changes its sign at a gain of one."""
    assert random_network_exponent(0.95) < 0 < random_network_exponent(1.3)


@given(cases(layouts=["time_first"]))
def test_exponents_of_a_whole_frame_add_up_to_the_volume(case: Case) -> None:
    """The sum of all exponents is the mean ln|det J|, whatever the cell."""
    path = replay(case.module, Sequences.of(case.module, case.inputs, case.state, 4)[0])[0]
    size = path.cell.state_size
    found = sweep(path, generator(), num_exponents=size, warm_up=0).value().exponents
    states, drives = path.states[:-1].flatten(0, 1), path.drives.flatten(0, 1)
    volumes = torch.linalg.slogdet(jacobian(path.cell, states, drives)).logabsdet
    if bool(volumes.min() > -30):
        assert math.isclose(float(found.sum()), float(volumes.mean()), rel_tol=0, abs_tol=1e-6)


@given(st.integers(1, 30), st.integers(0, 2**16))
def test_arnoldi_finds_what_the_dense_method_finds(size: int, seed: int) -> None:
    """With as many vectors as dimensions both radii are the same, complex pairs and defects included."""
    torch.manual_seed(seed)
    matrix, start = torch.randn(size, size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    found = arnoldi_radius(lambda vector: matrix @ vector, start)
    assert math.isclose(found, spectral_radius(matrix), rel_tol=1e-6)


def test_arnoldi_stops_in_an_invariant_subspace() -> None:
    """A start within an eigenspace ends the iteration without a division by zero."""
    assert arnoldi_radius(lambda vector: 0.5 * vector, torch.ones(4, dtype=torch.float64)) == pytest.approx(0.5)
    assert arnoldi_radius(torch.zeros_like, torch.ones(4, dtype=torch.float64)) == 0.0


@given(st.floats(0.05, 0.999), st.integers(3, 60))
def test_a_geometric_decay_is_read_off_exactly(rate: float, num_lags: int) -> None:
    """m = rate^lag has that decay rate, and a memory of -1/ln rate unless it is censored."""
    profile = [lag * math.log(rate) for lag in range(num_lags)]
    memory = effective_memory(profile)
    expected = -1 / math.log(rate)
    assert memory is not None
    assert decay_rate(profile) == pytest.approx(rate, rel=1e-9)
    assert memory.censored == (expected > num_lags - 2 + 1e-9)
    assert memory.length == pytest.approx(num_lags - 2 if memory.censored else expected)


@given(logs, st.floats(-50.0, 50.0))
def test_what_happens_before_the_first_lag_is_no_forgetting(profile: list[float], offset: float) -> None:
    """The hand-over from output to memory scales every lag alike, and changes neither memory nor decay."""
    shifted = [0.0, *(value + offset for value in profile)]
    plain = [0.0, *profile]
    one, other = effective_memory(plain), effective_memory(shifted)
    assert one is not None
    assert other is not None
    assert one.length == pytest.approx(other.length, abs=1e-6)
    assert decay_rate(shifted) == pytest.approx(decay_rate(plain), rel=1e-6)


def test_memory_that_is_lost_at_once_is_none() -> None:
    """A map that ignores its state remembers nothing, and says so without a warning."""
    path = follow(function_cell("none", lambda s, x: x, 2), torch.zeros(1, 2), torch.ones(5, 1, 2))
    found = sweep(path, generator()).value()
    profile = found.log_profile.tolist()
    memory = effective_memory(profile)
    assert profile[1:] == [-math.inf] * 5
    assert memory is not None
    assert (memory.length, memory.censored) == (0.0, False)
    assert decay_rate(profile) == 0.0
    assert asymptotic_memory(float(found.exponents[0])) == 0.0


@pytest.mark.parametrize("num_lags", [0, 1])
def test_one_step_tells_nothing_about_memory(num_lags: int) -> None:
    """Without a second lag there is neither a memory nor a rate, and none is invented."""
    profile = [0.0] * (num_lags + 1)
    assert effective_memory(profile) is None
    assert decay_rate(profile) is None


def test_neutral_dynamics_never_forget() -> None:
    """The memory of an exponent of zero or more is infinite."""
    assert asymptotic_memory(0.0) == asymptotic_memory(0.3) == math.inf


def test_long_decays_do_not_underflow() -> None:
    """Logarithms are carried, so a thousand steps of halving are still told apart in single precision."""
    path = follow(function_cell("half", lambda s, x: 0.5 * s, 2), torch.ones(1, 2), torch.zeros(1000, 1, 0))
    profile = sweep(path, generator()).value().log_profile
    assert float(profile[-1]) == pytest.approx(-1000 * math.log(2), rel=1e-6)


def test_a_sweep_draws_from_its_own_generator() -> None:
    """The state of the global generator stays, and the same seed gives the same numbers."""
    path = follow(function_cell("half", lambda s, x: s * s, 2), torch.ones(1, 2) / 2, torch.zeros(9, 1, 0))
    before = torch.get_rng_state()
    one, other = sweep(path, generator()).value(), sweep(path, generator()).value()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.log_profile, other.log_profile)


@given(st.integers(1, 300), st.integers(1, 300))
def test_points_are_spread_over_the_window(window: int, count: int) -> None:
    """There is one in each of so many equal stretches, at its middle, so that neither end weighs more."""
    found = spaced(window, count)
    assert len(found) == count
    assert all(abs(at + 0.5 - (part + 0.5) * window / count) <= 0.5 for part, at in enumerate(found))
    assert count > window or len(set(found)) == count
    assert (0 in found) == (2 * count > window)  # an end only where there are more points than every second step
