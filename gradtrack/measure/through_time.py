"""The gradient of the loss at every state of a replayed module, from the gradients at what the module returned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrack.measure.replay import Replay, Track, Trajectory, input_order, own_time


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
