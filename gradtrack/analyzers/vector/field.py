"""Divergence and rotation of the vector field that an optimizer follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.linear_maps import LinearMap, check_differentiable
from gradtrack.analyzers.vector.noise import GradientNoise
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.support.statistics import mean

_EXACT_LIMIT: Final = 64


class FieldSamples:
    """Estimates of tr J and of the squared norms of the antisymmetric and symmetric parts of J, one per probe.

    A field of up to 64 dimensions gives its exact numbers, one sample per point; a larger one is probed with random
    signs w: wᵀJw for the trace (Hutchinson), ‖(J ∓ Jᵀ)w‖²/4 for the parts.
    """

    def __init__(self, generator: torch.Generator, num_probes: int) -> None:
        self.exact = False
        self._generator, self._num_probes = generator, num_probes
        self._traces: list[float] = []
        self._parts: list[tuple[float, float]] = []

    def add(self, linear: LinearMap, *, symmetric: bool = False) -> None:
        """Take in the field around one point; a symmetric Jacobian needs half of the products."""
        self.exact = linear.num_inputs <= _EXACT_LIMIT
        if self.exact:
            matrix = linear.matrix().double()
            self._add(float(matrix.trace()), matrix, None if symmetric else matrix.T)
            return
        for _ in range(self._num_probes):
            probe = linear.random(linear.num_inputs, self._generator, signs=True)
            pulled = linear.pull(probe).double()
            self._add(float(probe.double() @ pulled), pulled, None if symmetric else linear.push(probe).double())

    def _add(self, trace: float, pulled: Tensor, pushed: Tensor | None) -> None:
        self._traces.append(trace)
        if pushed is not None:
            parts = (pushed - pulled) / 2, (pushed + pulled) / 2
            self._parts.append((float(parts[0].square().sum()), float(parts[1].square().sum())))

    @property
    def num_probes(self) -> int:
        """Return the number of probes so far, or of points with exact numbers."""
        return len(self._traces)

    @property
    def divergence(self) -> float | None:
        """Return the mean of tr J."""
        return mean(self._traces)

    @property
    def divergence_error(self) -> float | None:
        """Return the standard error of the divergence: zero where it is exact."""
        if len(self._traces) < 2:
            return 0.0 if self.exact and self._traces else None
        traces = torch.tensor(self._traces, dtype=torch.float64)
        return float(traces.std()) / math.sqrt(len(traces))

    @property
    def antisymmetric_norm(self) -> float | None:
        """Return ‖(J - Jᵀ)/2‖."""
        return math.sqrt(fmean(turning for turning, _ in self._parts)) if self._parts else None

    @property
    def symmetric_norm(self) -> float | None:
        """Return ‖(J + Jᵀ)/2‖."""
        return math.sqrt(fmean(other for _, other in self._parts)) if self._parts else None

    @property
    def rotation(self) -> float | None:
        """Return κ = ‖A‖²/(‖A‖² + ‖S‖²), from 0 for a gradient to 1 for pure rotation; None for a constant field."""
        return _share(self._parts)

    @property
    def rotation_error(self) -> float | None:
        """Return the standard error of the rotation, by leaving out one probe after the other."""
        count = len(self._parts)
        if count == 1 and self.exact:
            return 0.0
        shares = [_share(self._parts[:left] + self._parts[left + 1 :]) for left in range(count)]
        known = torch.tensor([share for share in shares if share is not None], dtype=torch.float64)
        return float(known.std(correction=0)) * math.sqrt(len(known) - 1) if len(known) > 1 else None


def _share(parts: Sequence[tuple[float, float]]) -> float | None:
    turning, both = sum(part[0] for part in parts), sum(map(sum, parts))
    return turning / both if both > 0 else None


Loss = Callable[[], Tensor]
Player = tuple[Iterable[Tensor] | nn.Module, Loss]


def players_of(players: Any) -> dict[str, tuple[list[Tensor], Loss]]:
    """Return the players of a game with their parameters in lists, which can be gone through more than once."""
    if not isinstance(players, Mapping) or not players:
        raise UsageError(f"players {players!r}: expected a mapping from the name of a player to (parameters, loss_fn).")
    return {name: _player(name, player) for name, player in players.items()}


def _player(name: str, player: Any) -> tuple[list[Tensor], Loss]:
    if not isinstance(player, tuple) or len(player) != 2 or not callable(player[1]):
        raise UsageError(f"player {name!r} is {type(player).__name__}: expected (parameters, loss_fn).")
    given, loss_fn = player
    if isinstance(given, nn.Module):
        given = given.parameters()
    params = [given] if isinstance(given, Tensor) else list(given)
    if not all(isinstance(param, Tensor) for param in params):
        raise InputTypeError(f"player {name!r}: expected parameters, a list of them or a module.")
    return _real(params), loss_fn


@final
class FieldLook:
    """The sums of one offline analysis of a field.

    It draws from the random generators and leaves gradients alone, unless it steps.
    """

    def __init__(self, generator: torch.Generator, num_probes: int) -> None:
        self._samples = FieldSamples(generator, num_probes)
        self._noise = GradientNoise()
        self._curvatures: list[float] = []
        self._steps: list[float] = []
        self._size = 0
        self._single = self._moved = False

    def add_loss(self, loss_fn: Loss, params: Sequence[Tensor], optimizer: Any = None) -> None:
        """Take in the gradient field of one loss, and the optimizer's step in it where there is an optimizer."""
        self._single = True
        params = _real([param for param in params if param.requires_grad])
        seed = _draw_seed()
        gradient = _gradient(loss_fn, params, seed, create_graph=True)
        linear = LinearMap(gradient, params)
        if gradient.requires_grad:
            self._samples.add(linear, symmetric=True)
        self._add(linear, gradient.detach())
        if optimizer is not None:
            self._follow(loss_fn, params, gradient.detach(), optimizer, seed)

    def add_game(self, players: Mapping[str, tuple[list[Tensor], Loss]]) -> None:
        """Take in the field of a game."""
        owned = {name: _trained(name, params) for name, (params, _) in players.items()}
        everything = [param for params in owned.values() for param in params]
        if len(set(map(id, everything))) < len(everything):
            raise UsageError("a parameter belongs to two players: expected each to have its own.")
        seed = _draw_seed()
        parts = [_gradient(loss_fn, owned[name], seed, create_graph=True) for name, (_, loss_fn) in players.items()]
        self._add_field(torch.cat(parts), everything)

    def add_field(self, field: Callable[[Tensor], Tensor], at: Tensor) -> None:
        """Take in a field given as a function."""
        with torch.enable_grad():
            point = at.detach().clone().requires_grad_()
            value = field(point)
        if not isinstance(value, Tensor):
            raise InputTypeError(
                f"field returned {type(value).__name__}: expected a tensor. Join parts with torch.stack."
            )
        if not value.numel() or value.numel() != point.numel():
            raise UsageError(
                f"field returned {value.numel()} numbers at {point.numel()}: expected as many as it takes."
            )
        check_differentiable(value, "the field")
        self._add_field(value.reshape(-1), [point])

    def numbers(self) -> dict[str, Any]:
        """Sum up; where the weights moved only neighbouring gradients are compared, since they are of unlike points."""
        samples, noise = self._samples, self._noise
        single, fixed = self._single, not self._moved
        return {
            "divergence": samples.divergence,
            "divergence_standard_error": samples.divergence_error,
            "rotation": 0.0 if single else samples.rotation,
            "rotation_standard_error": 0.0 if single else samples.rotation_error,
            "antisymmetric_norm": 0.0 if single else samples.antisymmetric_norm,
            "symmetric_norm": samples.symmetric_norm,
            "coherence": noise.coherence if fixed else None,
            "temporal_coherence": noise.temporal,
            "noise_scale": noise.noise_scale if fixed else None,
            "directional_sharpness": mean(self._curvatures),
            "step_sharpness": mean(self._steps),
            "exact": samples.exact,
            "num_parameters": self._size,
            "num_steps": noise.count,
            "num_probes": samples.num_probes,
        }

    def _add_field(self, value: Tensor, params: Sequence[Tensor]) -> None:
        linear = LinearMap(value, params)
        self._samples.add(linear)
        self._add(linear, value.detach())

    def _add(self, linear: LinearMap, value: Tensor) -> None:
        self._curvatures += _curvature(linear, value)
        self._noise.add(value)
        self._size = linear.num_inputs

    def _follow(self, loss_fn: Loss, params: Sequence[Tensor], before: Tensor, optimizer: Any, seed: int) -> None:
        """Let the optimizer step, and compare the gradient there, of the same batch and randomness, with the slope."""
        self._moved = True
        weights = _flat(params)
        parts = torch.split(before, [param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.reshape(param.shape).clone()
        optimizer.step()
        change, slope = _flat(params).double() - weights.double(), before.double()
        turned = _gradient(loss_fn, params, seed, create_graph=False).double() - slope
        self._steps += _ratio(-float(turned @ change), float(slope @ change))


def _trained(name: str, params: list[Tensor]) -> list[Tensor]:
    found = [param for param in params if param.requires_grad]
    if not found:
        raise UsageError(f"player {name!r} has no parameter that requires a gradient: expected at least one.")
    return found


def _real(params: list[Tensor]) -> list[Tensor]:
    if any(param.is_complex() for param in params):
        raise UsageError("a parameter is complex: expected real ones. Keep it as real numbers, and view it as complex.")
    return params


def _draw_seed() -> int:
    """Draw a seed for the random numbers of one step, so that it can be run again with the same ones."""
    return int(torch.randint(2**62, ()))


def _gradient(loss_fn: Loss, params: Sequence[Tensor], seed: int, *, create_graph: bool) -> Tensor:
    torch.manual_seed(seed)
    loss: object = loss_fn()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(f"loss_fn returned {loss!r}: expected a single number that depends on the parameters.")
    found = torch.autograd.grad(loss, list(params), create_graph=create_graph, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in found])


def _flat(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in params])


def _curvature(linear: LinearMap, gradient: Tensor) -> list[float]:
    """Return vᵀJv/‖v‖², by way of the unit vector, since the squares of a gradient may leave its precision's range."""
    size = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    if not (size > 0 and math.isfinite(size)):
        return []
    unit = (gradient.double() / size).to(gradient)
    return [float(unit.double() @ linear.pull(unit).double())]


def _ratio(numerator: float, denominator: float) -> list[float]:
    return [numerator / denominator] if denominator != 0 and math.isfinite(denominator) else []
