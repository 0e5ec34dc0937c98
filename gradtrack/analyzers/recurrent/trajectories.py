"""Replayed states of recurrent modules, step by step, and gradients through time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradtrack.analyzers.recurrent.cells import Cell, layer_cells

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
    """The states of one cell as they were replayed, in its own order of time."""

    cell: Cell
    states: list[Tensor]
    drives: Tensor
    inputs: Tensor
    lengths: Tensor
    reverse: bool

    def freeze(self, gradients: Tensor | None = None) -> Trajectory:
        """Return what was replayed, with the gradients of the loss at its states where they are known."""
        return Trajectory(
            cell=self.cell,
            states=torch.stack(self.states),
            drives=self.drives,
            inputs=self.inputs,
            lengths=self.lengths,
            gradients=gradients,
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


def replay(module: nn.RNNBase, sequences: Sequences, name: str = "") -> Replay:
    """Run a fused module's equations on sequences.

    Dropout between layers is left out: its mask exists inside the fused kernel only.
    """
    found = Replay(output=sequences.inputs, final=[])
    with torch.no_grad():
        for cells in layer_cells(module, name):
            outputs = []
            for direction, cell in enumerate(cells):
                track = _run(cell, found.output, sequences, len(found.tracks), direction == 1)
                found.tracks.append(track)
                found.final.append(track.states[-1])
                outputs.append(_output(track))
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


def own_time(values: Tensor, lengths: Tensor, reverse: bool) -> Tensor:
    """Align sequences (B, T, I) at the end of a direction's own time."""
    num_steps = values.shape[1]
    if reverse:
        return values.flip(1)
    if bool((lengths == num_steps).all()):
        return values
    shift = (num_steps - lengths).unsqueeze(1)
    return _take(values, (torch.arange(num_steps) - shift).clamp_min(0))


def input_order(values: Tensor, lengths: Tensor, reverse: bool) -> Tensor:
    """Put what is in a direction's own time back in the order of the inputs, with zeros beyond the end."""
    num_steps = values.shape[1]
    if reverse:
        values = values.flip(1)
    elif not bool((lengths == num_steps).all()):
        shift = (num_steps - lengths).unsqueeze(1)
        values = _take(values, (torch.arange(num_steps) + shift).clamp_max(num_steps - 1))
    beyond = torch.arange(num_steps) >= lengths.unsqueeze(1)
    return values.masked_fill(beyond.unsqueeze(-1).to(values.device), 0.0) if bool(beyond.any()) else values


def _run(cell: Cell, inputs: Tensor, sequences: Sequences, index: int, reverse: bool) -> Track:
    lengths = sequences.lengths
    own = own_time(inputs, lengths, reverse).transpose(0, 1)
    start = own.shape[0] - lengths
    ragged = bool(start.any())
    drives = cell.drive(own)
    states = [_initial(cell, sequences, index, drives)]
    for step, drive in enumerate(drives):
        following = cell.step(states[-1], drive)
        if ragged:
            following = torch.where((step >= start).unsqueeze(1).to(following.device), following, states[-1])
        states.append(following)
    return Track(cell=cell, states=states, drives=drives, inputs=own, lengths=lengths, reverse=reverse)


def _initial(cell: Cell, sequences: Sequences, index: int, like: Tensor) -> Tensor:
    if sequences.state is None:
        return like.new_zeros(like.shape[1], cell.state_size)
    return torch.cat([part[index].to(like) for part in sequences.state], dim=-1).detach()


def _output(track: Track) -> Tensor:
    output = torch.stack(track.states[1:], dim=1)[..., : track.cell.output_size]
    return input_order(output, track.lengths, track.reverse)


def _take(values: Tensor, positions: Tensor) -> Tensor:
    index = positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]).to(values.device)
    return values.gather(1, index)


def _batched(state: Tensor) -> Tensor:
    return state.unsqueeze(1) if state.dim() == 2 else state


@torch.no_grad()
def backward(
    found: Replay, output: Tensor | None, final: Sequence[Tensor | None], *, max_steps: int
) -> list[Trajectory]:
    """Return the trajectories with the gradient of the loss at every state of the last steps, zero before them.

    `output` is the direct gradient at the module's output and `final` the one at each final state: exactly what hooks
    on these tensors see. They hold no influence of one step on later ones, which is what this adds.
    """
    if output is None and all(one is None for one in final):
        return [track.freeze() for track in found.tracks]
    directions = 2 if found.tracks[-1].reverse else 1
    arriving = torch.zeros_like(found.output) if output is None else output.to(found.output)
    gradients: list[Tensor] = []
    for first in range(len(found.tracks) - directions, -1, -directions):
        at_inputs, at_states = [], []
        tracks = found.tracks[first : first + directions]
        for track, part, last in zip(tracks, arriving.chunk(directions, dim=-1), final[first:], strict=False):
            states, inputs = _through_time(track, part, last, max_steps)
            at_states.append(states)
            at_inputs.append(inputs)
        gradients = at_states + gradients
        arriving = torch.stack(at_inputs).sum(dim=0)
    return [track.freeze(states) for track, states in zip(found.tracks, gradients, strict=True)]


def _through_time(track: Track, direct: Tensor, last: Tensor | None, max_steps: int) -> tuple[Tensor, Tensor]:
    """Return the gradients at the states (T, B, S) in the cell's own time and at the inputs (B, T, I) in theirs."""
    cell, num_steps = track.cell, len(track.drives)
    assert cell.slopes is not None
    assert cell.pull is not None
    assert cell.drive_pull is not None
    assert cell.undrive is not None
    begin = max(0, num_steps - max_steps)
    start = num_steps - track.lengths
    running = (torch.arange(num_steps).unsqueeze(1) >= start).unsqueeze(-1).to(track.drives.device)
    arriving = own_time(direct, track.lengths, track.reverse).transpose(0, 1) * running
    slopes = cell.slopes(torch.stack(track.states[begin:-1]), track.drives[begin:])
    found = track.drives.new_zeros(num_steps, *track.states[0].shape)
    carried = torch.zeros_like(track.states[0]) if last is None else last.to(track.drives)
    ragged = bool(start.any())
    for step in range(num_steps - 1, begin - 1, -1):
        found[step] = carried
        found[step, :, : cell.output_size] += arriving[step]
        carried = cell.pull(slopes[step - begin], found[step])
        if ragged:
            carried = torch.where(running[step], carried, found[step])
    at_inputs = track.inputs.new_zeros(track.inputs.shape, dtype=found.dtype, device=found.device)
    at_inputs[begin:] = cell.undrive(cell.drive_pull(slopes, found[begin:])) * running[begin:]
    return found, input_order(at_inputs.transpose(0, 1), track.lengths, track.reverse)
