"""Replayed states of recurrent modules, step by step, and gradients through time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradtrack.analyzers.recurrent.cells import Cell, layer_cells
from gradtrack.analyzers.tools.samples import HostCopies

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
    reverse: bool = False
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
    state: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, module: nn.RNNBase, inputs: Tensor | PackedSequence, state: Any, limit: int
    ) -> tuple[Sequences, Tensor]:
        """Take at most `limit` sequences from what a module was called with; also return which ones."""
        padded, lengths = batch_first(module, inputs)
        chosen = choose(lengths, limit)
        parts = (state,) if isinstance(state, Tensor) else tuple(state or ())
        lengths = lengths[chosen]
        return cls(
            inputs=pick(padded, chosen)[:, : int(lengths.max())].detach(),
            lengths=lengths,
            state=tuple(pick(batched(part), chosen, 1).detach() for part in parts),
        ), chosen


def batch_first(module: nn.RNNBase, values: Tensor | PackedSequence) -> tuple[Tensor, Tensor]:
    """Return what a module takes or returns as (B, T, ...), and the length of each sequence."""
    if isinstance(values, PackedSequence):
        return pad_packed_sequence(values, batch_first=True)
    if values.dim() == 2:
        values = values.unsqueeze(0)
    elif not module.batch_first:
        values = values.transpose(0, 1)
    return values, torch.full((values.shape[0],), values.shape[1])


def batched(state: Tensor) -> Tensor:
    """Return a state as (L·D, B, S)."""
    return state.unsqueeze(1) if state.dim() == 2 else state


def choose(lengths: Tensor, limit: int) -> Tensor:
    """Choose the longest sequence and up to `limit - 1` more that are at least half as long, in their order."""
    longest = int(lengths.max())
    order = torch.argsort(lengths, descending=True, stable=True)[:limit]
    return order[lengths[order] >= _SHORTEST * longest].sort().values


def pick(values: Tensor, chosen: Tensor, dim: int = 0) -> Tensor:
    """Return a copy of the chosen sequences; the first ones need no indices on the device."""
    if chosen.tolist() == list(range(len(chosen))):
        return values.narrow(dim, 0, len(chosen)).clone()
    return values.index_select(dim, chosen.to(values.device, non_blocking=True))


def replay(
    module: nn.RNNBase,
    sequences: Sequences,
    name: str = "",
    direct: tuple[Tensor, Sequence[Tensor | None]] | None = None,
    *,
    max_steps: int = 0,
    copies: HostCopies | None = None,
) -> list[Trajectory]:
    """Run a fused module's equations on sequences; return the trajectories by layer and direction.

    `direct` are the gradients that the loss sends to the module's output and to each final state, which is what hooks
    on these tensors see. With them the trajectories get the gradient of the loss at every state of the last steps, zero
    before them. Dropout between layers is left out: its mask exists inside the fused kernel only.
    """
    found: list[Trajectory] = []
    steps: list[list[Tensor]] = []
    inputs = sequences.inputs
    with torch.set_grad_enabled(direct is not None):
        for cells in layer_cells(module, name, copies or HostCopies()):
            layer = []
            for direction, cell in enumerate(cells):
                path, states = _run(cell, inputs, sequences, len(steps), direction == 1, max_steps)
                layer.append(path)
                steps.append(states)
            found += layer
            inputs = outputs(layer)
    if direct is not None:
        ends = [(inputs, direct[0]), *((path.states[-1], last) for path, last in zip(found, direct[1], strict=True))]
        _differentiate(found, [states[-max_steps:] for states in steps], ends)
    return found


def outputs(layer: Sequence[Trajectory]) -> Tensor:
    """Return what the directions of one layer give to the next one, as (B, T, D·P)."""
    parts = [path.states[1:, :, : path.cell.output_size].transpose(0, 1) for path in layer]
    ordered = [input_order(part, path.lengths, path.reverse) for part, path in zip(parts, layer, strict=True)]
    return torch.cat(ordered, dim=-1)


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
    return values.flip(1) if reverse else _shifted(values, lengths - values.shape[1])


def input_order(values: Tensor, lengths: Tensor, reverse: bool) -> Tensor:
    """Put what is in a direction's own time back in the order of the inputs, with zeros beyond the end."""
    num_steps = values.shape[1]
    values = values.flip(1) if reverse else _shifted(values, num_steps - lengths)
    beyond = torch.arange(num_steps) >= lengths.unsqueeze(1)
    return values.masked_fill(beyond.unsqueeze(-1).to(values.device), 0.0) if bool(beyond.any()) else values


def _shifted(values: Tensor, steps: Tensor) -> Tensor:
    """Take each of the sequences so many steps later, its first or last step held where it has no other."""
    if not bool(steps.any()):
        return values
    positions = (torch.arange(values.shape[1]) + steps.unsqueeze(1)).clamp(0, values.shape[1] - 1)
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]).to(values.device))


def _run(
    cell: Cell, inputs: Tensor, sequences: Sequences, index: int, reverse: bool, max_steps: int
) -> tuple[Trajectory, list[Tensor]]:
    """Run one cell over inputs (B, T, I); also return its states after each step, the last ones with a graph."""
    lengths = sequences.lengths
    own = own_time(inputs, lengths, reverse).transpose(0, 1)
    start = own.shape[0] - lengths
    ragged, begin = bool(start.any()), max(0, own.shape[0] - max_steps)
    drives = cell.drive(own)
    if sequences.state:
        states = [torch.cat([part[index].to(drives) for part in sequences.state], dim=-1)]
    else:
        states = [drives.new_zeros(drives.shape[1], cell.state_size)]
    for step, drive in enumerate(drives):
        if step == begin and torch.is_grad_enabled():
            states[-1] = states[-1].detach().requires_grad_()
        following = cell.step(states[-1], drive if step >= begin else drive.detach())
        if ragged:
            following = torch.where((step >= start).unsqueeze(1).to(following.device), following, states[-1])
        states.append(following)
    path = Trajectory(
        cell=cell, states=torch.stack(states), drives=drives, inputs=own, lengths=lengths, reverse=reverse
    )
    return path, states[1:]


def _differentiate(
    paths: Sequence[Trajectory], steps: Sequence[list[Tensor]], ends: Sequence[tuple[Tensor, Tensor | None]]
) -> None:
    """Give each trajectory the gradient at its last steps, from the gradients at the ends, and let go of the graph."""
    known = [(end, gradient.to(end)) for end, gradient in ends if gradient is not None]
    sources = [state for states in steps for state in states]
    found = torch.autograd.grad(
        [end for end, _ in known], sources, [gradient for _, gradient in known], materialize_grads=True
    )
    parts = torch.split(torch.stack(found), [len(states) for states in steps])
    for path, gradients in zip(paths, parts, strict=True):
        before = path.states.new_zeros(len(path.drives) - len(gradients), *gradients.shape[1:])
        path.gradients = torch.cat([before, gradients])
        path.states, path.drives, path.inputs = path.states.detach(), path.drives.detach(), path.inputs.detach()
