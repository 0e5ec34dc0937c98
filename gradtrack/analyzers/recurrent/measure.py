"""The measurement of one recurrent cell on one batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.recurrent.cells import DENSE_LIMIT
from gradtrack.analyzers.recurrent.dynamics import Decay, jacobian, outer_spectrum, spaced, step_spectrum, sweep
from gradtrack.analyzers.recurrent.recorder import RecurrentRecorder
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.analyzers.tools.linear_maps import condensed
from gradtrack.analyzers.tools.offline import kept
from gradtrack.analyzers.tools.samples import Pending, Reading
from gradtrack.analyzers.tools.spectra import centred, effective_rank, participation_ratio
from gradtrack.gradients.native.threads import threads_for
from gradtrack.records import Metric
from gradtrack.reports import Report

_SATURATED: Final = (0.03, 0.97)
_MOST_ROWS: Final = 512
_WIDEST: Final = 1024
_MOST_STATES: Final = 256
_MOST_FIELDS: Final = 8
_SMALL_WORK: Final = 4096
"""What the eigenvalues of even the smallest matrix cost, where those of a large one cost its size cubed."""
_KRYLOV_WORK: Final = 16
_KRYLOV_CALLS: Final = 2**21
"""What Arnoldi's method costs by the size squared, and by its many small operations."""
_LEAST_KRYLOV: Final = 3


Note = Callable[[Pending[Any], Callable[[Any], None]], None]
"""Takes a part of a look, and what to do with it once it is read."""


class GateStatistics(Report):
    """One gate over units, steps and sequences: its mean, and the share of it that is closed or open for good."""

    mean: Annotated[
        float, Metric("rnn/gates/<gate>/<cell>", "Mean opening of one gate.", unit="share", when="LSTM or GRU")
    ]
    saturated: float


class StateField(Report):
    """The change of the state per step as a vector field: expansion, share of rotation, and steadiness of direction."""

    divergence: Annotated[
        float,
        Metric("rnn/divergence/<cell>", "Divergence of the field of state changes.", when="enable_vector_analysis"),
    ]
    rotation: Annotated[
        float,
        Metric(
            "rnn/rotation/<cell>", "Antisymmetric share of its Jacobian.", unit="share", when="enable_vector_analysis"
        ),
    ]
    coherence: Annotated[
        float, Metric("rnn/coherence/<cell>", "Cosine between successive state changes.", when="enable_vector_analysis")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions:
    """The parts of a look at a recurrent cell, and its limits."""

    jacobian: bool = True
    vector: bool = False
    states: bool = True
    max_steps: int = 256
    num_probes: int = 8
    num_exponents: int = 4
    radius_work: float = 2**27
    least_states: int = 1
    dense_limit: int = DENSE_LIMIT

    def radius_states(self, path: Trajectory, window: int) -> list[tuple[int, int]]:
        """Choose states to find eigenvalues at, as (steps back, sequence): all, or fewer of larger matrices.

        Fewer ones are spread over the window, the sequences taking turns. Their number is odd, so that the median of
        their radii is the radius of one of them.
        """
        size = path.cell.state_size
        each, least = size**3 + _SMALL_WORK, self.least_states
        if size > self.dense_limit:
            each, least = _KRYLOV_WORK * size**2 + _KRYLOV_CALLS, min(least, _LEAST_KRYLOV)
        count = min(_MOST_STATES, max(least, math.ceil(self.radius_work / each)))
        lengths = path.lengths.clamp_max(self.max_steps).tolist()
        if sum(lengths) <= count:
            return [(back, sequence) for sequence, length in enumerate(lengths) for back in range(length)]
        count = min(count, window * len(lengths))
        count -= 1 - count % 2
        return [(back, index % len(lengths)) for index, back in enumerate(spaced(window, count))]


@dataclass(slots=True, kw_only=True)
class CellLook:
    """The raw numbers of one look at one cell of a module; nothing but the sizes where its states were not finite.

    `numbers` are those of which a report has the median over looks, by its own names.
    """

    module: str
    kind: str
    state_size: int
    num_sequences: int
    window: int
    finite: bool = True
    dropout: float = 0.0
    radii: list[float] = field(default_factory=list)
    eigenvalues: list[tuple[float, float]] = field(default_factory=list)
    decay: Decay | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    gradient_profile: list[float] = field(default_factory=list)
    gates: dict[str, GateStatistics] = field(default_factory=dict)
    state_field: StateField | None = None


def look_around(recorder: RecurrentRecorder, model: nn.Module, options: LookOptions, seed: int) -> dict[str, CellLook]:
    """Measure every cell that was recorded, with no trace in the random generators or in the kind of arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    device = next((param.device.type for param in model.parameters()), "cpu")
    looks, reading = {}, Reading()
    with threads_for(recorder.largest), kept(model), torch.autocast(device_type=device, enabled=False):
        for recorded in recorder.recorded():
            look = _look(recorded.trajectory, recorded.gradient, options, generator, reading)
            look.module, look.dropout = recorded.module, recorded.dropout
            looks[recorded.trajectory.cell.name] = look
        reading.read()
    return looks


def look_at(
    path: Trajectory, weight_gradient: Tensor | None, options: LookOptions, generator: torch.Generator
) -> CellLook:
    """Measure one trajectory."""
    reading = Reading()
    look = _look(path, weight_gradient, options, generator, reading)
    reading.read()
    return look


def _look(
    path: Trajectory,
    weight_gradient: Tensor | None,
    options: LookOptions,
    generator: torch.Generator,
    reading: Reading,
) -> CellLook:
    """Measure one trajectory; what is on an accelerator is known once it is read."""
    look = CellLook(
        module=path.cell.name,
        kind=path.cell.kind,
        state_size=path.cell.state_size,
        num_sequences=path.states.shape[1],
        window=min(path.window, options.max_steps),
    )
    finite = path.states.isfinite().all()
    reading.add([finite], lambda known: setattr(look, "finite", bool(known)))
    if not look.finite:
        return look

    def note(part: Pending[Any], take: Callable[[Any], None]) -> None:
        def finish(*values: Tensor) -> None:
            if look.finite:
                take(part.finish(*values))

        reading.add(part.tensors, finish)

    with torch.no_grad():
        if options.jacobian:
            _measure_jacobian(path, look, options, generator, note)
        if options.states:
            _measure_ranks(path, look, weight_gradient, note)
            _measure_gates(path, look, note)
        if options.vector and path.cell.state_size <= DENSE_LIMIT:
            note(_state_field(path, look.window), lambda found: setattr(look, "state_field", found))
        if path.gradients is not None:
            norms = path.gradients[-look.window :].double().square().sum(dim=-1).mean(dim=1).sqrt().flip(0)
            note(Pending([norms], _shares), lambda found: setattr(look, "gradient_profile", found))
    return look


def _measure_jacobian(
    path: Trajectory, look: CellLook, options: LookOptions, generator: torch.Generator, note: Note
) -> None:
    decay = sweep(
        path,
        generator,
        max_steps=look.window,
        num_probes=options.num_probes,
        num_exponents=options.num_exponents,
    )
    note(decay, lambda found: setattr(look, "decay", found))
    backs, sequences = map(torch.tensor, zip(*options.radius_states(path, look.window), strict=True))
    device, number = path.states.device, path.states.shape[1]
    states, drives = (
        values.flatten(0, 1)[((len(values) - behind - backs) * number + sequences).to(device, non_blocking=True)]
        for values, behind in ((path.states, 2), (path.drives, 1))
    )
    if path.cell.state_size <= options.dense_limit:
        spectra = [step_spectrum(path.cell, states, drives)]
    else:
        pairs = zip(states, drives, strict=True)
        spectra = [outer_spectrum(path.cell, state, drive, generator) for state, drive in pairs]

    def take(found: list[Tensor]) -> None:
        rows = [row for spectrum in found for row in (spectrum if spectrum.dim() > 1 else [spectrum])]
        look.radii = [float(eigenvalues.abs().max()) for eigenvalues in rows]
        middle = statistics.median(look.radii)
        typical = min(range(len(rows)), key=lambda at: (abs(look.radii[at] - middle), at))
        look.eigenvalues = torch.view_as_real(rows[typical]).tolist()

    note(Pending.joined(spectra, lambda *found: list(found)), take)


def _measure_ranks(path: Trajectory, look: CellLook, gradient: Tensor | None, note: Note) -> None:
    """Find the ranks of the hidden states and what they could be at most, and that of the weight's gradient.

    The latter comes from the Gram matrix of the tall gradient, where that is finite and not too wide.
    """
    hidden = _centred(path.states[-look.window :, :, : path.cell.output_size])
    inputs = _centred(path.inputs[-look.window :])
    highest = min(float(hidden.shape[1]), float(hidden.shape[0] - 1))

    def take(found: tuple[Tensor, Tensor]) -> None:
        values, of_inputs = map(torch.linalg.svdvals, found)
        look.numbers["effective_rank"] = effective_rank(values)
        look.numbers["participation_ratio"] = participation_ratio(values)
        look.numbers["rank_bound"] = min(highest, effective_rank(of_inputs) if of_inputs.numel() else 0.0)

    note(Pending([condensed(hidden), condensed(inputs)], lambda *found: found), take)
    if gradient is None or gradient.shape[1] > _WIDEST:
        return
    finite = gradient.isfinite().all()
    if finite.is_cpu and not finite:
        return
    dense = gradient.double() / gradient.abs().max().clamp_min(torch.finfo(gradient.dtype).tiny)

    def take_gram(found: tuple[Tensor, Tensor]) -> None:
        if found[0]:
            squares = torch.linalg.eigvalsh(found[1]).clamp_min(0.0)
            look.numbers["weight_gradient_rank"] = effective_rank(squares.sqrt())

    note(Pending([finite, dense.T @ dense], lambda *found: found), take_gram)


def _centred(values: Tensor) -> Tensor:
    """Return rows around their mean, at most some hundreds of them."""
    rows = values.flatten(0, 1)
    return centred(rows[:: max(1, math.ceil(rows.shape[0] / _MOST_ROWS))].double())


def _measure_gates(path: Trajectory, look: CellLook, note: Note) -> None:
    low, high = _SATURATED
    for name, gate in path.cell.gates(path.states[-1 - look.window : -1], path.drives[-look.window :]).items():
        saturated = ((gate < low) | (gate > high)).double().mean()
        note(Pending([gate.mean(), saturated], _gate), partial(look.gates.__setitem__, name))
        if name in ("forget", "update"):
            per_unit = 1.0 / gate.double().log().mean(dim=(0, 1)).abs()  # infinite where a gate is open for good
            note(Pending([per_unit.median()], float), partial(look.numbers.__setitem__, "cell_memory_length"))


def _gate(mean: Tensor, saturated: Tensor) -> GateStatistics:
    return GateStatistics(mean=float(mean), saturated=float(saturated))


def _state_field(path: Trajectory, window: int) -> Pending[StateField]:
    """Measure the field f(s) - s at some states, and how its direction turns from one step to the next."""
    count = max(1, min(_MOST_FIELDS, 256 // path.cell.state_size, window))
    backs = torch.tensor(spaced(window, count)).to(path.states.device, non_blocking=True)
    states, drives = path.states[-2 - backs, 0], path.drives[-1 - backs, 0]
    derivative = jacobian(path.cell, states, drives)
    derivative = derivative - torch.eye(derivative.shape[-1], dtype=derivative.dtype, device=derivative.device)
    turned = derivative.transpose(1, 2)
    rotating, rest = (derivative - turned).square().sum(), (derivative + turned).square().sum()
    changes = path.states.diff(dim=0)
    cosines = torch.cosine_similarity(changes[1:], changes[:-1], dim=-1)
    divergence = derivative.diagonal(dim1=1, dim2=2).sum(dim=-1).mean()

    def finish(divergence: Tensor, rotating: Tensor, rest: Tensor, *cosine: Tensor) -> StateField:
        return StateField(
            divergence=float(divergence),
            rotation=float(rotating / (rotating + rest)) if float(rotating + rest) > 0 else 0.0,
            coherence=float(cosine[0]) if cosine else 1.0,
        )

    return Pending([divergence, rotating, rest, *([cosines.mean()] if cosines.numel() else [])], finish)


def _shares(norms: Tensor) -> list[float]:
    """Return norms as shares of the largest."""
    largest = float(norms.max())
    return (norms / largest).tolist() if math.isfinite(largest) and largest > 0 else []
