"""The state equations of recurrent cells: the formulas, and which of them a module computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradtrack.analyzers.tools.modules import evaluating
from gradtrack.analyzers.tools.samples import HostCopies
from gradtrack.errors import InputTypeError

DENSE_LIMIT: Final = 512
"""Up to this many dimensions a state's Jacobian is handled as a matrix."""

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """The state equation of one layer and direction, over rows: `step(states, drives)` gives the next states.

    The first `output_size` entries of a state are what the rest of the model reads. `drive(inputs)` is the part of the
    equation that no state enters, computed once for a whole sequence.
    """

    name: str
    kind: str
    state_size: int
    output_size: int

    @abstractmethod
    def drive(self, inputs: Tensor) -> Tensor:
        """Return what the inputs add to the equation."""

    @abstractmethod
    def step(self, states: Tensor, drives: Tensor) -> Tensor:
        """Return the next states."""

    def gates(self, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
        """Return the gates by name, where the cell has some."""
        return {}


@dataclass(frozen=True, kw_only=True)
class FunctionCell(Cell):
    """A state equation that is given as a function of (states, inputs), of which only autograd has the derivative."""

    function: Step

    def drive(self, inputs: Tensor) -> Tensor:
        return inputs

    def step(self, states: Tensor, drives: Tensor) -> Tensor:
        return self.function(states, drives)


@dataclass(frozen=True, kw_only=True)
class TorchCell(Cell):
    """A cell of torch's own with its detached weights, under torch's names, and the derivative J of its equation.

    `slopes(states, drives)` are the partial derivatives at many steps, from which `pull` finds Jᵀv.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    def drive(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs.to(self.weight_ih), self.weight_ih, self.bias_ih)

    def recur(self, hidden: Tensor) -> Tensor:
        """Return what the last output adds to the gates."""
        return functional.linear(hidden, self.weight_hh, self.bias_hh)

    @abstractmethod
    def slopes(self, states: Tensor, drives: Tensor) -> Tensor:
        """Return the partial derivatives of many steps."""

    @abstractmethod
    def pull(self, slopes: Tensor, vectors: Tensor) -> Tensor:
        """Return Jᵀv of one step."""


class RNN(TorchCell):
    """The equation of nn.RNN, with tanh or relu."""

    def step(self, states: Tensor, drives: Tensor) -> Tensor:
        return (torch.relu if self.kind == "rnn_relu" else torch.tanh)(drives + self.recur(states))

    def slopes(self, states: Tensor, drives: Tensor) -> Tensor:
        following = self.step(states, drives)
        return (following > 0).to(states.dtype) if self.kind == "rnn_relu" else 1 - following.square()

    def pull(self, slopes: Tensor, vectors: Tensor) -> Tensor:
        return (vectors * slopes) @ self.weight_hh


class LSTM(TorchCell):
    """The equation of nn.LSTM, whose state is its output followed by its memory.

    Its slopes are those of the memory by its gates, of the output by its gate and by the memory, and the forget gate.
    """

    def step(self, states: Tensor, drives: Tensor) -> Tensor:
        i, f, g, o = self._gates(states, drives)
        memory = f * states[..., self.output_size :] + i * g
        hidden = o * memory.tanh()
        if self.weight_hr is not None:
            hidden = functional.linear(hidden, self.weight_hr)
        return torch.cat([hidden, memory], dim=-1)

    def gates(self, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
        i, f, _, o = self._gates(states, drives)
        return {"input": i, "forget": f, "output": o}

    def slopes(self, states: Tensor, drives: Tensor) -> Tensor:
        i, f, g, o = self._gates(states, drives)
        old = states[..., self.output_size :]
        squashed = (f * old + i * g).tanh()
        by_gates = [g * i * (1 - i), old * f * (1 - f), i * (1 - g.square())]
        return torch.cat([*by_gates, squashed * o * (1 - o), o * (1 - squashed.square()), f], dim=-1)

    def pull(self, slopes: Tensor, vectors: Tensor) -> Tensor:
        size = self.weight_hh.shape[0] // 4
        hidden, memory = vectors[..., : self.output_size], vectors[..., self.output_size :]
        if self.weight_hr is not None:
            hidden = hidden @ self.weight_hr
        memory = memory + hidden * slopes[..., 4 * size : 5 * size]
        by_gates = torch.cat([memory, memory, memory, hidden], dim=-1) * slopes[..., : 4 * size]
        return torch.cat([by_gates @ self.weight_hh, memory * slopes[..., 5 * size :]], dim=-1)

    def _gates(self, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        i, f, g, o = (drives + self.recur(states[..., : self.output_size])).chunk(4, dim=-1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


class GRU(TorchCell):
    """The equation of nn.GRU, whose slopes are those by the recurrent terms, and the part of the state that is kept."""

    def step(self, states: Tensor, drives: Tensor) -> Tensor:
        _, update, new, _ = self._gates(states, drives)
        return (1 - update) * new + update * states

    def gates(self, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
        reset, update, _, _ = self._gates(states, drives)
        return {"reset": reset, "update": update}

    def slopes(self, states: Tensor, drives: Tensor) -> Tensor:
        reset, update, new, recurrent = self._gates(states, drives)
        by_new = (1 - update) * (1 - new.square())
        by_gates = [by_new * recurrent * reset * (1 - reset), (states - new) * update * (1 - update), by_new * reset]
        return torch.cat([*by_gates, update], dim=-1)

    def pull(self, slopes: Tensor, vectors: Tensor) -> Tensor:
        size = self.output_size
        by_gates = torch.cat([vectors, vectors, vectors], dim=-1) * slopes[..., : 3 * size]
        return by_gates @ self.weight_hh + vectors * slopes[..., 3 * size :]

    def _gates(self, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from_input, from_state = drives.chunk(3, dim=-1), self.recur(states).chunk(3, dim=-1)
        reset, update = (from_input[0] + from_state[0]).sigmoid(), (from_input[1] + from_state[1]).sigmoid()
        return reset, update, (from_input[2] + reset * from_state[2]).tanh(), from_state[2]


_NO_COPIES: Final = HostCopies()
_CLASSES: Final[dict[str, type[TorchCell]]] = {"rnn_tanh": RNN, "rnn_relu": RNN, "lstm": LSTM, "gru": GRU}


def is_small(module: nn.Module) -> bool:
    """Say whether the states of a module of torch's own are replayed on the CPU."""
    hidden: Any = module.hidden_size
    is_lstm = isinstance(module, (nn.LSTM, nn.LSTMCell))
    memory = (getattr(module, "proj_size", 0) or hidden) if is_lstm else 0
    return int(hidden + memory) <= DENSE_LIMIT


def layer_cells(module: nn.RNNBase, name: str, copies: HostCopies = _NO_COPIES) -> list[list[TorchCell]]:
    """Return the cells of a fused module by layer, the forward direction before the reverse one."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    kind, prefix = module.mode.lower(), f"{name}." if name else ""
    with evaluating(module):
        return [
            [_cell(f"{prefix}l{layer}{suffix}", kind, module, f"_l{layer}{suffix}", copies) for suffix in directions]
            for layer in range(module.num_layers)
        ]


def single_cell(module: nn.Module, name: str, copies: HostCopies = _NO_COPIES) -> TorchCell:
    """Return the cell of nn.RNNCell, nn.LSTMCell or nn.GRUCell."""
    if isinstance(module, nn.RNNCell):
        kind = f"rnn_{module.nonlinearity}"
    elif isinstance(module, nn.LSTMCell):
        kind = "lstm"
    elif isinstance(module, nn.GRUCell):
        kind = "gru"
    else:
        raise InputTypeError(f"cell {type(module).__name__}: expected nn.RNNCell, nn.LSTMCell or nn.GRUCell.")
    with evaluating(module):
        return _cell(name, kind, module, "", copies)


def function_cell(name: str, step: Step, state_size: int, output_size: int | None = None) -> FunctionCell:
    """Wrap a function of (states, inputs) over rows that gives the next states."""
    output_size = state_size if output_size is None else output_size
    return FunctionCell(name=name, kind="custom", state_size=state_size, output_size=output_size, function=step)


def _cell(name: str, kind: str, module: nn.Module, suffix: str, copies: HostCopies) -> TorchCell:
    """Copy the weights: small states are replayed in float64 on the CPU, large ones in float32 where they are."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    found = {name: getattr(module, f"{name}{suffix}", None) for name in names}
    recurrent = found["weight_hh"]
    assert isinstance(recurrent, Tensor)
    rows, output_size = recurrent.shape
    state_size = output_size + rows // 4 if kind == "lstm" else output_size
    dtype = torch.float64 if state_size <= DENSE_LIMIT or recurrent.dtype == torch.float64 else torch.float32
    device = torch.device("cpu") if state_size <= DENSE_LIMIT else recurrent.device
    weights: dict[str, Any] = {
        name: copies(value).detach().to(device=device, dtype=dtype, copy=True)
        for name, value in found.items()
        if isinstance(value, Tensor)
    }
    return _CLASSES[kind](name=name, kind=kind, state_size=state_size, output_size=output_size, **weights)
