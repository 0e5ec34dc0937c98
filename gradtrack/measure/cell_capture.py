"""The calls of cells: modules whose returned state comes back to them at the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.measure.captures import is_evidence, is_same, state_parts
from gradtrack.measure.cells import Cell, evaluating, function_cell, single_cell
from gradtrack.measure.dynamics import pull_back
from gradtrack.measure.hooks import Faults
from gradtrack.measure.replay import Trajectory

SINGLE_CELLS: Final = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
"""Torch's own cells."""


@dataclass(slots=True)
class _Call:
    """One step of a cell: what it was given, and the gradient that arrives at the first part of its new state."""

    inputs: Tensor
    state: Tensor
    gradient: Tensor | None = None


class CellCapture:
    """Keeps the calls of a module `(x, h) -> h' | (h', ...)` whose state comes back to it, found by identity.

    The state may be a tensor or a tuple of tensors, and may be any element of what the module returns.
    """

    def __init__(self, module: nn.Module, name: str, *, max_sequences: int, max_steps: int) -> None:
        self.faults = Faults()
        self._module, self._name = module, name
        self._max_sequences, self._max_steps = max_sequences, max_steps
        self._calls: list[_Call] = []
        self._last: Any = None
        self._final: Tensor | None = None
        self._select: Callable[[Any], tuple[Tensor, ...]] | None = (
            state_parts if isinstance(module, SINGLE_CELLS) else None
        )
        self._sizes: list[int] = []
        self._keywords: tuple[str, ...] = ()
        self._seen = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one step, or begin anew where the state is not the one that was returned last."""
        values = (*args, *kwargs.values())
        if self._seen or not is_evidence(bool(self._calls)) or not 1 <= len(values) <= 2:
            return
        inputs, state = values[0], state_parts(values[1]) if len(values) == 2 else ()
        if not isinstance(inputs, Tensor):
            return
        if self._calls and not self._continues(state):
            self._calls = []
        if not state and isinstance(self._module, SINGLE_CELLS):
            state = tuple(torch.zeros_like(part) for part in state_parts(output))
        if not state or any(part.dim() > 2 for part in state):
            return
        self._keep(inputs, state, output, tuple(kwargs))

    def trajectories(self) -> list[Trajectory]:
        """Replay what was kept."""
        if self._final is None or len(self._calls) < (1 if isinstance(self._module, SINGLE_CELLS) else 2):
            return []
        cell, calls = self._cell(), self._calls[-self._max_steps :]
        inputs = torch.stack([call.inputs for call in calls])
        states = torch.stack([*(call.state for call in calls), self._final])
        if cell.slopes is None:  # under autocast the states may have been kept in a lower precision than the weights
            dtype = next((param.dtype for param in self._module.parameters()), states.dtype)
            inputs, states = inputs.to(dtype) if inputs.is_floating_point() else inputs, states.to(dtype)
        with torch.no_grad():
            drives = cell.drive(inputs)
        states = states.to(drives) if cell.slopes else states
        lengths = torch.full((states.shape[1],), len(calls))
        found = Trajectory(cell=cell, states=states, drives=drives, inputs=inputs, lengths=lengths)
        if self._seen:
            found.gradients = self._gradients(found, calls)
        return [found]

    def _keep(self, inputs: Tensor, state: tuple[Tensor, ...], output: Any, keywords: tuple[str, ...]) -> None:
        rows = self._rows(inputs)
        joined = torch.cat([self._rows(part) for part in state], dim=-1)
        self._sizes = [part.shape[-1] for part in state]
        self._keywords = keywords
        self._calls.append(_Call(rows, joined))
        self._last = output
        if self._select is not None:
            following = self._select(output)
            self._final = torch.cat([self._rows(part) for part in following], dim=-1)
            self._listen(self._calls[-1], following)

    def _continues(self, state: tuple[Tensor, ...]) -> bool:
        """Find the state among what the last call returned."""
        for select in [self._select] if self._select else _selectors(self._last):
            found = select(self._last)
            if state and len(found) == len(state) and all(map(is_same, found, state)):
                if self._select is None:
                    self._select = select
                    self._listen(self._calls[-1], state)
                return True
        return False

    def _listen(self, call: _Call, state: tuple[Tensor, ...]) -> None:
        if state[0].requires_grad:
            state[0].register_hook(self.faults.guarded(partial(self._hear, call)))  # type: ignore[no-untyped-call]

    def _hear(self, call: _Call, grad: Tensor) -> None:
        call.gradient = self._rows(grad)
        self._seen = True

    def _gradients(self, path: Trajectory, calls: list[_Call]) -> Tensor:
        """Return the gradient of the loss at every state.

        What arrives at the first part is all there is. At a further part, such as the memory of an LSTM, it may or may
        not hold the way through the first part of the same step, so it is pulled back from the next state instead.
        """
        found = torch.zeros_like(path.states[1:])
        first = self._sizes[0]
        for step in reversed(range(len(calls))):
            heard = calls[step].gradient
            if heard is not None:
                found[step, :, :first] = heard.to(found)
            if len(self._sizes) > 1 and step + 1 < len(calls):
                following = found[step + 1].unsqueeze(1)
                pulled = pull_back(path.cell, path.states[step + 1], path.drives[step + 1], following)
                found[step, :, first:] = pulled[:, 0, first:]
        return found

    def _rows(self, values: Tensor) -> Tensor:
        values = values.detach()
        return (values.unsqueeze(0) if values.dim() == 1 else values[: self._max_sequences]).clone()

    def _cell(self) -> Cell:
        if isinstance(self._module, SINGLE_CELLS):
            return single_cell(self._module, self._name)
        return function_cell(self._name, self._step, sum(self._sizes), self._sizes[0])

    def _step(self, states: Tensor, inputs: Tensor) -> Tensor:
        parts = torch.split(states, self._sizes, dim=-1)
        values = (inputs, parts[0] if len(parts) == 1 else tuple(parts))
        count = len(values) - len(self._keywords)
        with evaluating(self._module):
            output = self._module.forward(*values[:count], **dict(zip(self._keywords, values[count:], strict=True)))
        assert self._select is not None
        return torch.cat(self._select(output), dim=-1)


def _selectors(output: Any) -> Iterator[Callable[[Any], tuple[Tensor, ...]]]:
    """Give every place where a module's output could hold its state."""
    yield state_parts
    if isinstance(output, (tuple, list)):
        for position in range(len(output)):
            yield partial(_part_at, position)


def _part_at(position: int, output: Any) -> tuple[Tensor, ...]:
    return state_parts(output[position])
