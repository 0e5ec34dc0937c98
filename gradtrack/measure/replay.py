"""Replaying recurrent layers on what they were given, state by state.

A direction has its own order of time: the reverse direction starts at the last valid step of each sequence. Sequences
of different lengths are aligned at their ends, so that "so many steps before the end" means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradtrack.measure.cells import Cell, layer_cells

_SHORTEST: Final = 0.5


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The states of one cell along its own time: `states[0]` is the initial one, `states[t + 1]` follows `drives[t]`.

    `states` has (T + 1, B, S), `drives` (T, B, D), `inputs` (T, B, I). Before the beginning of a sequence that is
    shorter than T its initial state is repeated. `gradients` are those of the loss with respect to `states[1:]`.
    """

    cell: Cell
    states: Tensor
    drives: Tensor
    inputs: Tensor
    lengths: Tensor
    gradients: Tensor | None = None

    @property
    def window(self) -> int:
        """Return how many of the last steps belong to every sequence."""
        return int(self.lengths.min())


@dataclass(slots=True, kw_only=True)
class Sequences:
    """A batch as (B, T, I) with the length of each sequence, and the initial states if any were given."""

    inputs: Tensor
    lengths: Tensor
    state: tuple[Tensor, ...] | None = None

    @classmethod
    def of(
        cls, module: nn.RNNBase, inputs: Tensor | PackedSequence, state: Any, limit: int
    ) -> tuple[Sequences, Tensor]:
        """Take at most `limit` sequences from what a module was called with; also return which ones."""
        lengths: Tensor | None = None
        if isinstance(inputs, PackedSequence):
            padded, lengths = pad_packed_sequence(inputs, batch_first=True)
        elif inputs.dim() == 2:
            padded = inputs.unsqueeze(0)
        else:
            padded = inputs if module.batch_first else inputs.transpose(0, 1)
        if lengths is None:
            lengths = torch.full((padded.shape[0],), padded.shape[1])
        chosen = choose(lengths, limit)
        parts = (state,) if isinstance(state, Tensor) else tuple(state or ())
        states = tuple(_batched(part)[:, chosen.to(part.device)].detach() for part in parts)
        lengths = lengths[chosen]
        return cls(
            inputs=padded[chosen.to(padded.device), : int(lengths.max())].detach(),
            lengths=lengths,
            state=states or None,
        ), chosen


@dataclass(slots=True, kw_only=True)
class Track:
    """The states of one cell as they were replayed, still connected for differentiation."""

    cell: Cell
    states: list[Tensor]
    drives: Tensor
    inputs: Tensor
    lengths: Tensor

    def freeze(self, gradients: Sequence[Tensor | None] | None = None) -> Trajectory:
        """Return what was replayed, without its graph."""
        states = torch.stack([state.detach() for state in self.states])
        dense = None
        if gradients is not None:
            pairs = zip(gradients, self.states[1:], strict=True)
            dense = torch.stack([torch.zeros_like(state) if grad is None else grad for grad, state in pairs])
        return Trajectory(
            cell=self.cell,
            states=states,
            drives=self.drives.detach(),
            inputs=self.inputs.detach(),
            lengths=self.lengths,
            gradients=dense,
        )


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a module returns, computed again: `output` (B, T, D·P), `final` states (L·D, B, S) and every track."""

    output: Tensor
    final: list[Tensor]
    tracks: list[Track] = field(default_factory=list)


def choose(lengths: Tensor, limit: int) -> Tensor:
    """Choose the longest sequence and up to `limit - 1` more that are at least half as long, in their order."""
    longest = int(lengths.max())
    order = torch.argsort(lengths, descending=True, stable=True)[:limit]
    return order[lengths[order] >= _SHORTEST * longest].sort().values


def replay(module: nn.RNNBase, sequences: Sequences, name: str = "", *, grad_steps: int = 0) -> Replay:
    """Run a fused module's equations on sequences; the last `grad_steps` of every direction can be differentiated.

    Dropout between layers is left out: its mask exists inside the fused kernel only.
    """
    layers = layer_cells(module, name)
    found = Replay(output=sequences.inputs, final=[])
    for cells in layers:
        outputs = []
        for direction, cell in enumerate(cells):
            track = _run(cell, found.output, sequences, len(found.tracks), direction == 1, grad_steps)
            found.tracks.append(track)
            found.final.append(track.states[-1])
            outputs.append(_output(track, direction == 1))
        found.output = torch.cat(outputs, dim=-1)
    return found


def follow(cell: Cell, state: Tensor, inputs: Tensor) -> Trajectory:
    """Run a cell from states (B, S) over inputs (T, B, I)."""
    states = [state]
    with torch.no_grad():
        drives = cell.drive(inputs)
        for drive in drives:
            states.append(cell.step(states[-1], drive))
    lengths = torch.full((state.shape[0],), inputs.shape[0])
    return Trajectory(cell=cell, states=torch.stack(states), drives=drives, inputs=inputs, lengths=lengths)


def backward(found: Replay, output: Tensor | None, final: Sequence[Tensor | None]) -> list[Trajectory]:
    """Return the trajectories with the gradient of the loss at every state, by replaying backwards.

    `output` is the direct gradient at the module's output and `final` the one at each final state: exactly what hooks
    on these tensors see. They hold no influence of one step on later ones, which is what the replay adds.
    """
    terms = [] if output is None else [(found.output * output.to(found.output)).sum()]
    terms += [
        (state * grad.to(state)).sum() for state, grad in zip(found.final, final, strict=True) if grad is not None
    ]
    total = torch.stack([term.to(terms[0]) for term in terms]).sum() if terms else None
    if total is None or not total.requires_grad:
        return [track.freeze() for track in found.tracks]
    wanted = [state for track in found.tracks for state in track.states[1:] if state.requires_grad]
    gradients = dict(zip(map(id, wanted), torch.autograd.grad(total, wanted, allow_unused=True), strict=True))
    return [track.freeze([gradients.get(id(state)) for state in track.states[1:]]) for track in found.tracks]


def _run(cell: Cell, inputs: Tensor, sequences: Sequences, index: int, reverse: bool, grad_steps: int) -> Track:
    lengths = sequences.lengths
    own = _own_time(inputs, lengths, reverse).transpose(0, 1)
    num_steps = own.shape[0]
    start = num_steps - lengths
    ragged = bool(start.any())
    with torch.enable_grad() if grad_steps else torch.no_grad():
        drives = cell.drive(own)
        state = _initial(cell, sequences, index, drives)
        states = [state]
        for step in range(num_steps):
            tracked = step >= num_steps - grad_steps
            with torch.set_grad_enabled(tracked):
                state = state.detach().requires_grad_() if tracked and not state.requires_grad else state
                following = cell.step(state, drives[step])
                if ragged:
                    following = torch.where((step >= start).unsqueeze(1).to(following.device), following, state)
                state = following
                states.append(state)
    return Track(cell=cell, states=states, drives=drives, inputs=own, lengths=lengths)


def _initial(cell: Cell, sequences: Sequences, index: int, like: Tensor) -> Tensor:
    if sequences.state is None:
        return like.new_zeros(like.shape[1], cell.state_size)
    return torch.cat([part[index].to(like) for part in sequences.state], dim=-1).detach()


def _own_time(inputs: Tensor, lengths: Tensor, reverse: bool) -> Tensor:
    """Align sequences (B, T, I) at the end of a direction's own time."""
    num_steps = inputs.shape[1]
    if reverse:
        return inputs.flip(1)
    if bool((lengths == num_steps).all()):
        return inputs
    shift = (num_steps - lengths).unsqueeze(1)
    return _take(inputs, (torch.arange(num_steps) - shift).clamp_min(0))


def _output(track: Track, reverse: bool) -> Tensor:
    """Put the outputs back in the order of the inputs, with zeros beyond the end of a sequence."""
    output = torch.stack(track.states[1:], dim=1)[..., : track.cell.output_size]
    num_steps = output.shape[1]
    if reverse:
        output = output.flip(1)
    elif not bool((track.lengths == num_steps).all()):
        shift = (num_steps - track.lengths).unsqueeze(1)
        output = _take(output, (torch.arange(num_steps) + shift).clamp_max(num_steps - 1))
    beyond = torch.arange(num_steps) >= track.lengths.unsqueeze(1)
    return output.masked_fill(beyond.unsqueeze(-1).to(output.device), 0.0) if bool(beyond.any()) else output


def _take(values: Tensor, positions: Tensor) -> Tensor:
    index = positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]).to(values.device)
    return values.gather(1, index)


def _batched(state: Tensor) -> Tensor:
    return state.unsqueeze(1) if state.dim() == 2 else state
