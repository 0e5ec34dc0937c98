"""The dynamics of a recurrent cell: state Jacobians, Lyapunov exponents and the decay of gradients in time.

Everything rests on products of a vector with the transposed Jacobian of one step, which is what backpropagation through
time does. They need reverse mode only, which every cell has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gradtrack.analyzers.recurrent.cells import Cell, TorchCell
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.analyzers.tools.samples import Pending
from gradtrack.analyzers.tools.spectra import arnoldi

_BLOCKS: Final = 4
_ROWS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """What one backward sweep over a window finds; all logarithms are natural ones.

    `log_profile[lag]` is ln m(lag) with m(0) = 1. `exponents` are the leading Lyapunov exponents per step, over
    `count` steps of `num_sequences` sequences, and `error` is the standard error of the first.
    """

    log_profile: Tensor
    exponents: Tensor
    error: float
    count: int
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """For how many steps a gradient stays above a share of what it is after one step; `censored` means at least."""

    length: float
    censored: bool


def pull_back(cell: Cell, states: Tensor, drives: Tensor, vectors: Tensor) -> Tensor:
    """Return Jᵀv for vectors (N, K, S), with J the Jacobian of one step at states (N, S)."""
    if isinstance(cell, TorchCell):
        return cell.pull(cell.slopes(states, drives).unsqueeze(1), vectors)
    _, num_vectors, size = vectors.shape
    rows = states.detach().unsqueeze(1).expand(-1, num_vectors, -1).reshape(-1, size).requires_grad_()
    repeated = drives.detach().repeat_interleave(num_vectors, dim=0)
    with torch.enable_grad():
        following = cell.step(rows, repeated)
    if not following.requires_grad:
        return torch.zeros_like(vectors)
    weights = vectors.reshape(-1, size).to(following)
    (found,) = torch.autograd.grad(following, rows, weights, materialize_grads=True)
    return found.reshape(vectors.shape).to(vectors)


def jacobian(cell: Cell, states: Tensor, drives: Tensor) -> Tensor:
    """Return the Jacobians (N, S, S) of one step at states (N, S)."""
    size = states.shape[-1]
    basis = torch.eye(size, dtype=_precise(states), device=states.device)
    each = max(1, _ROWS // size)
    parts = [
        pull_back(cell, part, drive, basis.expand(part.shape[0], size, size))
        for part, drive in zip(torch.split(states, each), torch.split(drives, each), strict=True)
    ]
    return torch.cat(parts)


def step_spectrum(cell: Cell, states: Tensor, drives: Tensor) -> Pending[Tensor]:
    """Find the eigenvalues (N, S) of the Jacobians at states (N, S), from the whole matrices."""
    return Pending([jacobian(cell, states, drives)], torch.linalg.eigvals)


def outer_spectrum(cell: Cell, state: Tensor, drive: Tensor, generator: torch.Generator) -> Pending[Tensor]:
    """Find the outermost eigenvalues of the Jacobian at one state (S), from products with it."""
    pull = _pulls(cell, state[None, None], drive[None, None])
    drawn = torch.randn(state.numel(), generator=generator, dtype=torch.float64)
    return arnoldi(
        lambda vector: pull(0, vector.reshape(1, 1, -1)).reshape(-1),
        drawn.to(state.device, _precise(state), non_blocking=True),
    )


def sweep(
    path: Trajectory,
    generator: torch.Generator,
    *,
    max_steps: int | None = None,
    num_probes: int = 8,
    num_exponents: int = 4,
    warm_up: int | None = None,
) -> Pending[Decay]:
    """Carry random gradients and an orthonormal frame backwards over the last steps of a trajectory.

    The probes start as orthonormal vectors in the part of the state that is read, so that as many of them as it has
    dimensions give the exact mean; their mean-square norm after `lag` steps is the decay profile. The frame is
    orthonormalised at every step; the mean logarithms of what that takes out of it are the Lyapunov exponents
    (Benettin's method, on the adjoint, which has the same spectrum), after `warm_up` steps.
    """
    window = min(path.window, max_steps or path.window)
    num_sequences, size = path.states.shape[1:]
    num_probes = min(num_probes, path.cell.output_size)
    probes = path.states.new_zeros(num_sequences, num_probes, size, dtype=_precise(path.states))
    probes[..., : path.cell.output_size] = _orthonormal(path, path.cell.output_size, num_probes, generator)
    frame = _orthonormal(path, size, min(num_exponents, size), generator)
    norms, stretches = [], []
    pull = _pulls(path.cell, path.states[-1 - window : -1], path.drives[-window:])
    for back in range(window):
        pulled = pull(back, torch.cat([probes, frame], dim=1))
        lengths = torch.linalg.vector_norm(pulled[:, :num_probes], dim=-1, keepdim=True, dtype=torch.float64)
        probes = (pulled[:, :num_probes] / lengths.clamp_min(torch.finfo(torch.float64).tiny)).to(probes)
        orthonormal, triangle = torch.linalg.qr(pulled[:, num_probes:].mT)
        frame = orthonormal.mT
        norms.append(lengths)
        stretches.append(triangle)
    begin = min(window // 5 if warm_up is None else warm_up, max(window - 1, 0))

    def finish(lengths: Tensor, stretched: Tensor) -> Decay:
        logs, kept = lengths.log().cumsum(dim=0).flatten(1), stretched.double().log()[begin:]
        return Decay(
            log_profile=torch.cat([logs.new_zeros(1), _log_mean_square(logs)]),
            exponents=kept.mean(dim=(0, 1)),
            error=_error(kept[..., 0]),
            count=len(kept),
            num_sequences=num_sequences,
        )

    return Pending([torch.stack(norms), torch.stack(stretches).diagonal(dim1=-2, dim2=-1).abs()], finish)


def effective_memory(log_profile: Sequence[float], share: float = math.exp(-1.0)) -> Memory | None:
    """Find where m(lag) falls to a share of m(1), interpolating its logarithm; the step from 0 to 1 does not count.

    For an LSTM the gradient of the output first has to enter the cell, so only what follows lag 1 is forgetting, and
    one lag alone tells nothing.
    """
    if len(log_profile) < 3:
        return None
    limit = log_profile[1] + math.log(share)
    for lag in range(2, len(log_profile)):
        before, here = log_profile[lag - 1], log_profile[lag]
        if here <= limit:
            part = (before - limit) / (before - here) if here > -math.inf else 0.0
            return Memory(length=lag - 2 + part, censored=False)
    if log_profile[1] == -math.inf:
        return Memory(length=0.0, censored=False)
    return Memory(length=float(len(log_profile) - 2), censored=True)


def decay_rate(log_profile: Sequence[float]) -> float | None:
    """Return the factor per step of the least-squares line through ln m from lag 1 on; None for fewer than two lags."""
    points = [(lag, value) for lag, value in enumerate(log_profile) if lag >= 1 and math.isfinite(value)]
    if len(points) < 2:
        return 0.0 if len(log_profile) > 1 and log_profile[1] == -math.inf else None
    return math.exp(statistics.linear_regression(*zip(*points, strict=True)).slope)


def asymptotic_memory(exponent: float) -> float:
    """Return the memory that a Lyapunov exponent stands for: infinite where nothing is forgotten."""
    if exponent >= 0:
        return math.inf
    return 0.0 if exponent == -math.inf else -1.0 / exponent


def spaced(window: int, count: int) -> list[int]:
    """Choose the middles of so many equal stretches of a window, counted back from its end.

    So the ends weigh no more than other steps: the first of a sequence starts from its initial state, and is unlike
    those that follow.
    """
    return [(2 * index + 1) * window // (2 * count) for index in range(count)]


def _pulls(cell: Cell, states: Tensor, drives: Tensor) -> Callable[[int, Tensor], Tensor]:
    """Return a function that carries vectors back over the step so many before the last one."""
    if not isinstance(cell, TorchCell):
        return lambda back, vectors: pull_back(cell, states[-1 - back], drives[-1 - back], vectors)
    slopes = cell.slopes(states, drives).unsqueeze(2)
    return lambda back, vectors: cell.pull(slopes[-1 - back], vectors)


def _precise(states: Tensor) -> torch.dtype:
    """Return what to compute with: matrices in half precision have neither eigenvalues nor a QR decomposition."""
    return torch.promote_types(states.dtype, torch.float32)


def _orthonormal(path: Trajectory, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw so many orthonormal vectors for every sequence."""
    drawn = torch.randn(path.states.shape[1], size, count, dtype=torch.float64, generator=generator)
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis.mT.to(path.states.device, _precise(path.states), non_blocking=True)


def _log_mean_square(logs: Tensor) -> Tensor:
    """Return ln of the root mean square of exp(logs) over each row."""
    found: Tensor = (torch.logsumexp(2 * logs, dim=1) - math.log(logs.shape[1])) / 2
    return found


def _error(logs: Tensor) -> float:
    """Return the standard error of a mean over (T, B), from the means of a few stretches of time."""
    blocks = torch.cat([block.mean(dim=0) for block in logs.chunk(_BLOCKS)])
    return float(blocks.std() / math.sqrt(blocks.numel())) if blocks.numel() > 1 else math.nan
