"""Hooks that capture calls of recurrent modules: of cells, and of the layers that torch computes in one piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradtrack.analyzers.recurrent.cells import Cell, Step, function_cell, is_small, single_cell
from gradtrack.analyzers.recurrent.dynamics import pull_back
from gradtrack.analyzers.recurrent.trajectories import (
    Sequences,
    Trajectory,
    batch_first,
    batched,
    follow,
    pick,
    replay,
)
from gradtrack.analyzers.tools.hooks import Faults
from gradtrack.analyzers.tools.modules import evaluating, replace, tensors
from gradtrack.analyzers.tools.samples import HostCopies

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
    def trajectories(self, copies: HostCopies) -> list[Trajectory]:
        """Replay what was kept."""

    def replayed(self) -> Iterator[Tensor]:
        """Yield what is replayed on the CPU, wherever it is now."""
        yield from ()

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

    def trajectories(self, copies: HostCopies) -> list[Trajectory]:
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
    """One step of a cell: the rows of what it was given, and the gradient at the first part of its new state."""

    values: list[Any]
    gradient: Tensor | None = None


class CellCapture(Capture):
    """Keeps the calls of a module whose state comes back to it; which of its arguments that is, the calls tell.

    An argument is the state if it is what the last call returned, whole or as an element; several may be, as in
    `(x, h, c) -> (h, c)`. A state is a tensor or a tuple of tensors.
    """

    def __init__(self, module: nn.Module, name: str, **limits: int) -> None:
        super().__init__(name, **limits)
        self._module = module
        self._is_single = isinstance(module, SINGLE_CELLS)
        self._calls: list[_Call] = []
        self._last: Any = None
        self._final: Tensor | None = None
        self._fed_back: dict[int, int] = {1: 0} if self._is_single else {}
        """The arguments that are the state, and where each is in what the module returns."""
        self._keywords: tuple[str, ...] = ()
        self._seen = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one step, or begin anew where the state is not the one that was returned last."""
        values = [*args, *kwargs.values()]
        if self._seen or not _is_evidence(bool(self._calls)):
            return
        if self._is_single and (len(values) == 1 or values[1] is None):
            parts = tuple(torch.zeros_like(part) for part in _state_parts(output))
            values[1:], kwargs = [parts if isinstance(output, tuple) else parts[0]], {}
        if not any(_may_be_state(value) for value in values):
            return
        if self._last is not None and not self._continues(values):
            self._calls = []
        self._keywords, self._last = tuple(kwargs), output
        if not all(at < len(values) and _may_be_state(values[at]) for at in self._fed_back):
            self._calls = []  # a sequence whose first state the module makes by itself begins with its second step
            return
        self._calls.append(_Call([self._kept(value) for value in values]))
        if self._fed_back:
            following = self._state_in(output)
            self._final = self._joined(following)
            self._listen(following[0], partial(self._hear, self._calls[-1]))

    def trajectories(self, copies: HostCopies) -> list[Trajectory]:
        if self._final is None or len(self._calls) < (1 if self._is_single else 2):
            return []
        cell, last = self._cell(copies), self._calls[-self._max_steps :]
        calls = [_Call(replace(one.values, copies), replace(one.gradient, copies)) for one in last]
        inputs = torch.stack([self._inputs_of(call.values) for call in calls])
        states = torch.stack([*(self._joined(self._state_of(call.values)) for call in calls), copies(self._final)])
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

    def replayed(self) -> Iterator[Tensor]:
        if self._is_single and is_small(self._module):
            yield from tensors([self._final, *((call.values, call.gradient) for call in self._calls)])

    def _continues(self, values: list[Any]) -> bool:
        """Find the state among what the last call returned."""
        places = [_state_parts(part) for part in _places(self._last)]
        if self._fed_back:
            return all(
                at < len(values) and _are_same(places[place], _state_parts(values[at]))
                for at, place in self._fed_back.items()
            )
        for at, value in enumerate(values):
            parts = _state_parts(value)
            found = [place for place, other in enumerate(places) if parts and _are_same(other, parts)]
            if found and _may_be_state(value):
                self._fed_back[at] = found[0]
        self._calls = [call for call in self._calls if all(_may_be_state(call.values[at]) for at in self._fed_back)]
        if self._fed_back and self._calls:
            self._listen(self._state_of(values)[0], partial(self._hear, self._calls[-1]))
        return bool(self._fed_back)

    def _state_of(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the parts of the state among the arguments of a call."""
        return tuple(part for at in self._fed_back for part in _state_parts(values[at]))

    def _inputs_of(self, values: Sequence[Any]) -> Tensor:
        """Return the rows of the tensors among the arguments of a call that are not its state, side by side."""
        found = [self._batched(one).flatten(1) for one in self._drives(values).values()]
        return torch.cat(found, dim=-1) if found else self._joined(self._state_of(values))[:, :1]

    def _drives(self, values: Sequence[Any]) -> dict[int, Tensor]:
        """Return the tensors among the arguments of a call that are not its state, by position."""
        others = ((at, value) for at, value in enumerate(values) if at not in self._fed_back)
        return {at: value for at, value in others if isinstance(value, Tensor) and value.dim()}

    def _state_in(self, output: Any) -> tuple[Tensor, ...]:
        """Return the parts of the state in what the module returned."""
        places = _places(output)
        return tuple(part for place in self._fed_back.values() for part in _state_parts(places[place]))

    def _hear(self, call: _Call, grad: Tensor) -> None:
        call.gradient = self._rows(grad)
        self._seen = True

    def _gradients(self, path: Trajectory, calls: list[_Call]) -> Tensor:
        """Return the gradient of the loss at every state.

        What arrives at the first part is all there is. At a further part, such as the memory of an LSTM, it may or may
        not hold the way through the first part of the same step, so it is pulled back from the next state instead.
        """
        found = torch.zeros_like(path.states[1:])
        first = path.cell.output_size
        for step in reversed(range(len(calls))):
            heard = calls[step].gradient
            if heard is not None:
                found[step, :, :first] = heard.to(found)
            if path.cell.state_size > first and step + 1 < len(calls):
                following = found[step + 1].unsqueeze(1)
                pulled = pull_back(path.cell, path.states[step + 1], path.drives[step + 1], following)
                found[step, :, first:] = pulled[:, 0, first:]
        return found

    def _kept(self, value: Any) -> Any:
        """Return a copy of the rows of an argument that are followed; what is no tensor as it is."""
        parts = tuple(
            part.detach()[: self._max_sequences if part.dim() > 1 else None].clone() if part.dim() else part.detach()
            for part in _state_parts(value)
        )
        return parts[0] if isinstance(value, Tensor) else parts or value

    def _batched(self, values: Tensor) -> Tensor:
        """Return the rows of an argument; without a batch there is one."""
        if self._is_unbatched:
            return values.unsqueeze(0)
        rows = values[: self._max_sequences]
        return rows.unsqueeze(1) if rows.dim() == 1 else rows

    @property
    def _is_unbatched(self) -> bool:
        return self._state_of(self._calls[-1].values)[0].dim() == 1

    def _rows(self, values: Tensor) -> Tensor:
        values = values.detach()
        return (values.unsqueeze(0) if values.dim() == 1 else values[: self._max_sequences]).clone()

    def _joined(self, state: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([self._rows(part) for part in state], dim=-1)

    def _cell(self, copies: HostCopies) -> Cell:
        if self._is_single:
            return single_cell(self._module, self._name, copies)
        sizes = [part.shape[-1] for part in self._state_of(self._calls[-1].values)]
        return function_cell(self._name, self._step, sum(sizes), sizes[0])

    def _step(self, states: Tensor, inputs: Tensor) -> Tensor:
        """Call the module with other states and inputs in the places of those of the last call."""
        values = list(self._calls[-1].values)
        parts = iter(torch.split(states, [part.shape[-1] for part in self._state_of(values)], dim=-1))
        for at in self._fed_back:
            values[at] = next(parts) if isinstance(values[at], Tensor) else tuple(next(parts) for _ in values[at])
        place = 0
        for at, one in self._drives(self._calls[-1].values).items():
            shape = self._batched(one).shape[1:]
            is_number = one.dim() == 1 and not self._is_unbatched
            rows = inputs[:, place : place + shape.numel()].reshape(-1, *(() if is_number else shape))
            values[at] = rows if one.is_floating_point() else rows.to(one.dtype)
            place += shape.numel()
        count = len(values) - len(self._keywords)
        with evaluating(self._module):
            output = self._module.forward(*values[:count], **dict(zip(self._keywords, values[count:], strict=True)))
        return torch.cat(self._state_in(output), dim=-1)


def _may_be_state(value: Any) -> bool:
    """Say whether an argument is a tensor, or a tuple of tensors, with a row for each sequence."""
    parts = _state_parts(value)
    return bool(parts) and all(1 <= part.dim() <= 2 and part.is_floating_point() for part in parts)


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

    def trajectories(self, copies: HostCopies) -> list[Trajectory]:
        if not self._segments:
            return []
        sequences = Sequences(
            inputs=torch.cat([copies(segment.sequences.inputs) for segment in self._segments], dim=1),
            lengths=torch.stack([segment.sequences.lengths for segment in self._segments]).sum(dim=0),
            state=tuple(map(copies, self._segments[0].sequences.state)),
        )
        if not any(segment.seen for segment in self._segments):
            return replay(self._module, sequences, self._name, copies=copies)
        output = torch.cat([self._filled(segment, copies) for segment in self._segments], dim=1)
        direct = output, self._final_gradients(copies)
        return replay(self._module, sequences, self._name, direct, max_steps=self._max_steps, copies=copies)

    def replayed(self) -> Iterator[Tensor]:
        if is_small(self._module):
            for segment in self._segments:
                parts = (*segment.sequences.state, segment.output, *segment.final)
                yield segment.sequences.inputs
                yield from (part for part in parts if part is not None)

    def _follows(self, state: tuple[Tensor, ...], segment: _Segment) -> bool:
        if not self._segments or not state or self._module.bidirectional:
            return False
        return _are_same(state, self._handed_on) and torch.equal(segment.chosen, self._segments[-1].chosen)

    def _hear(self, segment: _Segment, output: Tensor | PackedSequence) -> None:
        def keep_output(grad: Tensor) -> None:
            whole = output._replace(data=grad) if isinstance(output, PackedSequence) else grad
            segment.output = pick(batch_first(self._module, whole)[0], segment.chosen).detach()
            segment.seen = True

        def keep_final(position: int, grad: Tensor) -> None:
            segment.final[position] = pick(batched(grad), segment.chosen, 1).detach()
            segment.seen = True

        self._listen(output.data if isinstance(output, PackedSequence) else output, keep_output)
        segment.final = [None] * len(self._handed_on)
        for position, state in enumerate(self._handed_on):
            self._listen(state, partial(keep_final, position))

    def _filled(self, segment: _Segment, copies: HostCopies) -> Tensor:
        """Return the direct gradient at the outputs of a segment, zero where none arrived."""
        if segment.output is not None:
            return copies(segment.output)
        inputs, width = copies(segment.sequences.inputs), self._module.proj_size or self._module.hidden_size
        return inputs.new_zeros(*inputs.shape[:2], width * (2 if self._module.bidirectional else 1))

    def _final_gradients(self, copies: HostCopies) -> list[Tensor | None]:
        """Return the direct gradient at the final state of every layer and direction."""
        segment, count = self._segments[-1], self._module.num_layers * (2 if self._module.bidirectional else 1)
        final = [None if grad is None else copies(grad) for grad in segment.final]
        like = next((grad for grad in final if grad is not None), None)
        if like is None:
            return [None] * count
        sizes = [self._module.proj_size or self._module.hidden_size, self._module.hidden_size]
        parts = [
            like.new_zeros(count, len(segment.chosen), size) if grad is None else grad
            for grad, size in zip(final, sizes, strict=False)
        ]
        return list(torch.cat(parts, dim=-1))
