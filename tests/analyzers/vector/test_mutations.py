"""The golden values catch the naive ways: each of them, swapped in, breaks at least one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientGainMonitor, JacobianAnalyzer, UpdatesAnalyzer, VectorAnalyzer
from gradtrack.analyzers.gain.monitor import Origin
from gradtrack.analyzers.gain.profile import GainProfile
from gradtrack.analyzers.jacobian import report as measure
from gradtrack.analyzers.tools.linear_maps import LinearMap
from gradtrack.analyzers.updates import sums
from gradtrack.analyzers.vector.field import FieldSamples
from gradtrack.analyzers.vector.noise import GradientNoise
from tests.analyzers.vector.fields import saddle, temporal_difference
from tests.training import optimizer_of

Patch = Callable[[pytest.MonkeyPatch], None]


def temporal_difference_golden() -> None:
    """V5."""
    found = VectorAnalyzer().analyze_field(temporal_difference, torch.zeros(3, dtype=torch.float64))
    assert found.rotation == pytest.approx(0.223757, abs=0.02)


def damped_game_golden() -> None:
    """V4."""
    assert VectorAnalyzer().analyze_game(saddle(0.5)).rotation == pytest.approx(0.8, abs=1e-12)


def coherence_golden() -> None:
    """V6, for orthogonal gradients."""
    assert GradientNoise(torch.eye(8)).coherence == pytest.approx(0.125, abs=1e-6)


def noise_golden() -> None:
    """V6, for Gaussian gradients, from few of them, over many repetitions."""
    generator = torch.Generator().manual_seed(0)
    draws = 2 / math.sqrt(50) + torch.randn(200, 50, 50, generator=generator, dtype=torch.float64)
    found = [GradientNoise(part).noise_scale for part in draws]
    known = sorted(value for value in found if value is not None)
    assert known[len(known) // 2] == pytest.approx(12.5, abs=0.7)


def rotation_golden() -> None:
    """R10: 0.9 times a rotation by one radian has the spectral radius 0.9."""
    turn = 0.9 * torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]])
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(turn)
    report = JacobianAnalyzer().analyze(lambda: torch.ones(1, 2), blocks=layer)
    assert report.spectral_radius == pytest.approx(0.9, abs=1e-6)


def siblings_golden() -> None:
    """Sibling heads are no chain."""
    heads = [nn.Linear(3, 3) for _ in range(3)]
    with GradientGainMonitor(heads) as monitor:
        shared = nn.Linear(3, 3)(torch.ones(2, 3))
        torch.autograd.backward(sum((head(shared).sum() for head in heads), start=torch.zeros(())))
    assert monitor.gains() == [None, None]


def cumulative_golden() -> None:
    """24 gains of 0.6 leave 5e-6 of a gradient."""
    profile = GainProfile([0.6**depth for depth in reversed(range(25))])
    assert profile.cumulative_gains()[0] == pytest.approx(0.6**24)


def update_golden() -> None:
    """Weight decay is part of what an optimizer does."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=0.1, weight_decay=1.0)
    report = UpdatesAnalyzer(model).analyze(lambda: torch.zeros(1, 4), lambda out: out.sum(), 1, optimizer=optimizer)
    assert report.ratio == pytest.approx(0.1, rel=1e-5)


def raw_rotation(self: FieldSamples) -> float | None:
    """Take the norm of the antisymmetric part for the rotation, without its share."""
    return self.antisymmetric_norm


def norm_of_jacobian(self: FieldSamples) -> float | None:
    """Take the norm of the whole Jacobian for the rotation."""
    return math.hypot(self.antisymmetric_norm or 0, self.symmetric_norm or 0)


def cosine_coherence(self: GradientNoise) -> float | None:
    """Take the mean cosine of neighbours for the coherence."""
    return self.temporal


def biased_noise(self: GradientNoise) -> float | None:
    """Divide by the squared norm of the mean, which still holds a part of the noise."""
    mean, squares = self._means()
    return (squares - mean) / mean


def rayleigh(matrix: Tensor) -> float:
    """Return the Rayleigh quotient of plain power iteration."""
    vector = torch.ones(len(matrix), dtype=matrix.dtype)
    for _ in range(100):
        vector = matrix @ vector
        vector = vector / vector.norm()
    return abs(float(vector @ matrix @ vector))


def per_transition(self: GainProfile) -> list[float | None]:
    """Judge transitions one by one."""
    return [*self.gains(), 1.0]


def gradient_times_rate(self: sums.SampledPart) -> tuple[Tensor, sums.Flags]:
    """Guess the update from the gradient and the rate."""
    return self.weights - 0.1 * self.gradients, np.ones(len(self.params), dtype=bool)


def swap(owner: object, name: str, naive: object) -> Patch:
    """Return what puts a naive version in place."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, naive)


def transposed(linear: LinearMap, vector: Tensor) -> Tensor:
    """Return Jᵀu where J u is meant."""
    return linear.pull(vector)


GATE: dict[str, tuple[Patch, Callable[[], None]]] = {
    "norm of the antisymmetric part": (swap(FieldSamples, "rotation", property(raw_rotation)), damped_game_golden),
    "norm of the antisymmetric part, TD": (
        swap(FieldSamples, "rotation", property(raw_rotation)),
        temporal_difference_golden,
    ),
    "norm of the Jacobian": (swap(FieldSamples, "rotation", property(norm_of_jacobian)), temporal_difference_golden),
    "cosine for coherence": (swap(GradientNoise, "coherence", property(cosine_coherence)), coherence_golden),
    "biased signal": (swap(GradientNoise, "noise_scale", property(biased_noise)), noise_golden),
    "Rayleigh power iteration": (swap(measure, "spectral_radius", rayleigh), rotation_golden),
    "every neighbour connected": (swap(Origin, "reaches", lambda *_: True), siblings_golden),
    "transitions one by one": (swap(GainProfile, "cumulative_gains", per_transition), cumulative_golden),
    "rate times gradient": (swap(sums.SampledPart, "after", gradient_times_rate), update_golden),
}


@pytest.mark.parametrize("name", GATE)
def test_a_naive_version_breaks_a_golden_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden value holds, and no longer does with the naive version in place."""
    patch, golden = GATE[name]
    golden()
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        golden()


def test_a_transposed_product_for_the_jacobian_hides_all_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Jᵀw in place of Jw, probes see a symmetric matrix where the field is pure rotation."""

    def rotation() -> float | None:
        matrix = torch.zeros(80, 80, dtype=torch.float64)
        matrix[:40, 40:], matrix[40:, :40] = torch.eye(40), -torch.eye(40)
        return VectorAnalyzer().analyze_field(lambda x: matrix @ x, torch.zeros(80, dtype=torch.float64)).rotation

    assert rotation() == pytest.approx(1.0)
    monkeypatch.setattr(LinearMap, "push", transposed)
    assert rotation() == pytest.approx(0.0)
