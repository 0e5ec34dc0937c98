"""The naive versions of the recurrent measurements: each must break at least one known system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtrack.analyzers.recurrent import dynamics, measure, trajectories
from gradtrack.analyzers.recurrent.cells import Cell
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.analyzers.tools.samples import Pending
from gradtrack.analyzers.tools.spectra import spectral_radius
from tests.analyzers.recurrent import recurrent_goldens as goldens
from tests.analyzers.recurrent.recurrent_goldens import GOLDENS, weight_of


def spectrum_of_the_weights(cell: Cell, *_: object, **__: object) -> Pending[Tensor]:
    """Take the eigenvalues of weight_hh, as if the state did not matter."""
    weight = weight_of(cell)
    return Pending([weight[: weight.shape[1]]], torch.linalg.eigvals)


def rayleigh(matvec: Callable[[Tensor], Tensor], start: Tensor, **_: object) -> float:
    """Iterate powers and take the Rayleigh quotient, which is wrong for complex pairs."""
    vector = start
    for _step in range(500):
        image = matvec(vector)
        vector = image / image.norm()
    return float((vector @ matvec(vector)).abs())


def rayleigh_alone(matvec: Callable[[Tensor], Tensor], start: Tensor, **_: object) -> Pending[Tensor]:
    """Take the Rayleigh quotient for the whole of the outer spectrum."""
    return Pending([torch.tensor([rayleigh(matvec, start)])], lambda found: found)


def direct_gradients(paths: list[Trajectory], _: object, ends: list[tuple[Tensor, Tensor]]) -> None:
    """Take output.grad for the gradient of the states."""
    paths[-1].gradients = ends[0][1].transpose(0, 1)


def mean_radius_growth(path: Trajectory, *_: object, **options: Any) -> Pending[dynamics.Decay]:
    """Take the mean radius of single steps for the growth over many."""
    radii = [spectral_radius(one) for one in dynamics.jacobian(path.cell, path.states[:-1, 0], path.drives[:, 0])]
    logs = torch.tensor(radii, dtype=torch.float64).log().nan_to_num(neginf=-30.0)
    profile = torch.cat([logs.new_zeros(1), logs.cumsum(0)])
    decay = dynamics.Decay(
        log_profile=profile, exponents=logs.mean().reshape(1), error=0.0, count=len(logs), num_sequences=1
    )
    return Pending([], lambda: decay)


MUTATIONS = [
    (measure, "step_spectrum", spectrum_of_the_weights, {"r3_saturation", "r4_gru", "r5_lstm", "r6_chrono"}),
    (goldens, "arnoldi_radius", rayleigh, {"ginibre"}),
    (dynamics, "arnoldi", rayleigh_alone, {"r10_complex_pair"}),
    (trajectories, "_differentiate", direct_gradients, {"r11_gradients_through_time"}),
    (measure, "sweep", mean_radius_growth, {"r9_growth_without_radius"}),
]


@pytest.mark.parametrize(("module", "name", "mutant", "expected"), MUTATIONS)
def test_naive_version_breaks_known_systems(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutant: Callable[..., Any], expected: set[str]
) -> None:
    """With the naive version in place those systems come out wrong that it gets wrong."""
    monkeypatch.setattr(module, name, mutant)
    assert {golden.__name__ for golden in GOLDENS if golden.__name__ in expected and fails(golden)} == expected


def test_the_rayleigh_quotient_of_a_rotation() -> None:
    """R10: the naive quotient of 0.9 times a rotation by 1 rad is 0.9 cos 1, so the mutant is the known mistake."""
    turn = 0.9 * torch.linalg.matrix_exp(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64))
    assert rayleigh(lambda vector: turn @ vector, torch.ones(2, dtype=torch.float64)) == pytest.approx(0.4863, abs=1e-4)


def fails(golden: Callable[[], None]) -> bool:
    """Say whether a known system comes out wrong."""
    try:
        golden()
    except Exception:
        return True
    return False
