"""Hooks that capture calls of recurrent modules: of cells, and of the layers that torch computes in one piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradtrack.analyzers.recurrent.cells import Cell, Step, function_cell, single_cell
from gradtrack.analyzers.recurrent.dynamics import pull_back
from gradtrack.analyzers.recurrent.trajectories import Sequences, Trajectory, batch_first, batched, follow, replay
from gradtrack.analyzers.tools.hooks import Faults
from gradtrack.analyzers.tools.modules import evaluating

SINGLE_CELLS: Final = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
"""Torch's own cells."""


class Capture(ABC):
    """A forward hook that keeps what one module needs to be followed; only forwards with gradients count.

    `faults` keeps what goes wrong in it, and in the hooks that it places on tensors, away from the training.
    """

    def __init__(self, name: str, *, max_sequences: int, max_steps: int) -> None:
        self.faults = Faults()
        self._name = name
        self._max_sequences, self._max_steps = max_sequences, max_steps

    @abstractmethod
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one call."""

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """Replay what was kept."""

    def _listen(self, tensor: Tensor, call: Callable[[Tensor], None]) -> None:
        """Call a function with the gradient that arrives at a tensor."""
        if tensor.requires_grad:
            tensor.register_hook(self.faults.guarded(call))  # type: ignore[no-untyped-call]


class FunctionCapture(Capture):
    """Keeps the input sequence of a module whose state equation the user has given as a function."""

    def __init__(self, name: str, step: Step, state_size: int, **limits: int) -> None:
        super().__init__(name, **limits)
        self._cell = function_cell(name, step, state_size)
        self._inputs: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 3]
        if values and _is_evidence(self._inputs is not None):
            first = values[0].detach()
            rows = first if getattr(module, "batch_first", True) else first.transpose(0, 1)
            self._inputs = rows[: self._max_sequences].clone()

    def trajectories(self) -> list[Trajectory]:
        if self._inputs is None:
            return []
        inputs = self._inputs.transpose(0, 1)
        return [follow(self._cell, inputs.new_zeros(inputs.shape[1], self._cell.state_size), inputs)]


def _is_evidence(already: bool) -> bool:
    """Say whether a forward belongs to a backward; what checkpointing computes again is known already."""
    recomputed = torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not (recomputed and already)


def _state_parts(state: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a state, or nothing where it is not one."""
    if isinstance(state, Tensor):
        return (state,)
    if isinstance(state, (tuple, list)) and all(isinstance(part, Tensor) for part in state):
        return tuple(state)
    return ()


def _are_same(ones: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Say whether two states consist of the same tensors."""
    return list(map(id, ones)) == list(map(id, others))


@dataclass(slots=True)
class _Call:
    """One step of a cell: what it was given, and the gradient that arrives at the first part of its new state."""

    inputs: Tensor
    state: Tensor
    gradient: Tensor | None = None


class CellCapture(Capture):
    """Keeps the calls of a module `(x, h) -> h' | (h', ...)` whose state comes back to it, found by identity.

    The state may be a tensor or a tuple of tensors, and may be any element of what the module returns.
    """

    def __init__(self, module: nn.Module, name: str, **limits: int) -> None:
        super().__init__(name, **limits)
        self._module = module
        self._is_single = isinstance(module, SINGLE_CELLS)
        self._calls: list[_Call] = []
        self._last: Any = None
        self._final: Tensor | None = None
        self._place: int | None = 0 if self._is_single else None
        self._sizes: list[int] = []
        self._keywords: tuple[str, ...] = ()
        self._seen = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one step, or begin anew where the state is not the one that was returned last."""
        values = (*args, *kwargs.values())
        if self._seen or not _is_evidence(bool(self._calls)) or not 1 <= len(values) <= 2:
            return
        inputs, state = values[0], _state_parts(values[1]) if len(values) == 2 else ()
        if not isinstance(inputs, Tensor):
            return
        if self._calls and not self._continues(state):
            self._calls = []
        if not state and self._is_single:
            state = tuple(torch.zeros_like(part) for part in _state_parts(output))
        if not state or any(part.dim() > 2 for part in state):
            return
        self._sizes, self._keywords = [part.shape[-1] for part in state], tuple(kwargs)
        self._calls.append(_Call(self._rows(inputs), self._joined(state)))
        self._last = output
        if self._place is not None:
            following = self._state_in(output)
            self._final = self._joined(following)
            self._listen(following[0], partial(self._hear, self._calls[-1]))

    def trajectories(self) -> list[Trajectory]:
        if self._final is None or len(self._calls) < (1 if self._is_single else 2):
            return []
        cell, calls = self._cell(), self._calls[-self._max_steps :]
        inputs = torch.stack([call.inputs for call in calls])
        states = torch.stack([*(call.state for call in calls), self._final])
        if not self._is_single:  # under autocast the states may have been kept in a lower precision than the weights
            dtype = next((param.dtype for param in self._module.parameters()), states.dtype)
            inputs, states = inputs.to(dtype) if inputs.is_floating_point() else inputs, states.to(dtype)
        with torch.no_grad():
            drives = cell.drive(inputs)
        states = states.to(drives) if self._is_single else states
        lengths = torch.full((states.shape[1],), len(calls))
        found = Trajectory(cell=cell, states=states, drives=drives, inputs=inputs, lengths=lengths)
        if self._seen:
            found.gradients = self._gradients(found, calls)
        return [found]

    def _continues(self, state: tuple[Tensor, ...]) -> bool:
        """Find the state among what the last call returned."""
        if self._place is not None:
            return bool(state) and _are_same(self._state_in(self._last), state)
        for place, part in enumerate(_places(self._last)):
            if state and _are_same(_state_parts(part), state):
                self._place = place
                self._listen(state[0], partial(self._hear, self._calls[-1]))
                return True
        return False

    def _state_in(self, output: Any) -> tuple[Tensor, ...]:
        assert self._place is not None
        return _state_parts(_places(output)[self._place])

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

    def _joined(self, state: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([self._rows(part) for part in state], dim=-1)

    def _cell(self) -> Cell:
        if self._is_single:
            return single_cell(self._module, self._name)
        return function_cell(self._name, self._step, sum(self._sizes), self._sizes[0])

    def _step(self, states: Tensor, inputs: Tensor) -> Tensor:
        parts = torch.split(states, self._sizes, dim=-1)
        values = (inputs, parts[0] if len(parts) == 1 else tuple(parts))
        count = len(values) - len(self._keywords)
        with evaluating(self._module):
            output = self._module.forward(*values[:count], **dict(zip(self._keywords, values[count:], strict=True)))
        return torch.cat(self._state_in(output), dim=-1)


def _places(output: Any) -> list[Any]:
    """Return all that a module's output could hold its state as: the whole of it, then each element."""
    return [output, *output] if isinstance(output, (tuple, list)) else [output]


@dataclass(slots=True)
class _Segment:
    """One call of a fused module, with the direct gradients that arrive at its outputs later."""

    sequences: Sequences
    chosen: Tensor
    output: Tensor | None = None
    final: list[Tensor | None] = field(default_factory=list)
    seen: bool = False


class FusedCapture(Capture):
    """Keeps the calls of an nn.RNN, nn.LSTM or nn.GRU; calls that hand their state on are one sequence."""

    def __init__(self, module: nn.RNNBase, name: str, **limits: int) -> None:
        super().__init__(name, **limits)
        self._module = module
        self._segments: list[_Segment] = []
        self._handed_on: tuple[Tensor, ...] = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the sequences of one call and listen to the gradients of its outputs."""
        if not _is_evidence(bool(self._segments)) or (self._segments and self._segments[0].seen):
            return
        inputs = args[0] if args else kwargs["input"]
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        packed = isinstance(inputs, PackedSequence)
        if not (inputs.data if packed else inputs).numel():
            return
        with torch.no_grad():  # checkpointing compares what two forwards save, and this one must save nothing
            segment = _Segment(*Sequences.of(self._module, inputs, state, self._max_sequences))
        follows = not packed and self._follows(_state_parts(state), segment)
        self._segments = [*self._segments, segment] if follows else [segment]
        self._handed_on = _state_parts(output[1])
        self._hear(segment, output[0])

    def trajectories(self) -> list[Trajectory]:
        if not self._segments:
            return []
        sequences = Sequences(
            inputs=torch.cat([segment.sequences.inputs for segment in self._segments], dim=1),
            lengths=torch.stack([segment.sequences.lengths for segment in self._segments]).sum(dim=0),
            state=self._segments[0].sequences.state,
        )
        if not any(segment.seen for segment in self._segments):
            return replay(self._module, sequences, self._name)
        direct = torch.cat([self._filled(segment) for segment in self._segments], dim=1), self._final_gradients()
        return replay(self._module, sequences, self._name, direct, max_steps=self._max_steps)

    def _follows(self, state: tuple[Tensor, ...], segment: _Segment) -> bool:
        if not self._segments or not state or self._module.bidirectional:
            return False
        return _are_same(state, self._handed_on) and torch.equal(segment.chosen, self._segments[-1].chosen)

    def _hear(self, segment: _Segment, output: Tensor | PackedSequence) -> None:
        def keep_output(grad: Tensor) -> None:
            whole = output._replace(data=grad) if isinstance(output, PackedSequence) else grad
            segment.output = batch_first(self._module, whole)[0][segment.chosen.to(grad.device)].detach()
            segment.seen = True

        def keep_final(position: int, grad: Tensor) -> None:
            segment.final[position] = batched(grad)[:, segment.chosen.to(grad.device)].detach()
            segment.seen = True

        self._listen(output.data if isinstance(output, PackedSequence) else output, keep_output)
        segment.final = [None] * len(self._handed_on)
        for position, state in enumerate(self._handed_on):
            self._listen(state, partial(keep_final, position))

    def _filled(self, segment: _Segment) -> Tensor:
        """Return the direct gradient at the outputs of a segment, zero where none arrived."""
        if segment.output is not None:
            return segment.output
        inputs, width = segment.sequences.inputs, self._module.proj_size or self._module.hidden_size
        return inputs.new_zeros(*inputs.shape[:2], width * (2 if self._module.bidirectional else 1))

    def _final_gradients(self) -> list[Tensor | None]:
        """Return the direct gradient at the final state of every layer and direction."""
        segment, count = self._segments[-1], self._module.num_layers * (2 if self._module.bidirectional else 1)
        like = next((grad for grad in segment.final if grad is not None), None)
        if like is None:
            return [None] * count
        sizes = [self._module.proj_size or self._module.hidden_size, self._module.hidden_size]
        parts = [
            like.new_zeros(count, len(segment.chosen), size) if grad is None else grad
            for grad, size in zip(segment.final, sizes, strict=False)
        ]
        return list(torch.cat(parts, dim=-1))
