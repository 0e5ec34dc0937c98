"""The state equations of recurrent cells: the formulas, and which of them a module computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradtrack.analyzers.tools.modules import evaluating
from gradtrack.errors import InputTypeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The detached weights of one layer and direction, under torch's names."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    @property
    def output_size(self) -> int:
        """Return the size of what is read of a state."""
        return self.weight_hh.shape[1]

    def drive(self, inputs: Tensor) -> Tensor:
        """Return what the inputs add to the gates."""
        return functional.linear(inputs.to(self.weight_ih), self.weight_ih, self.bias_ih)

    def undrive(self, vectors: Tensor) -> Tensor:
        """Return what a gradient at the gates is at the inputs."""
        return vectors @ self.weight_ih

    def recur(self, hidden: Tensor) -> Tensor:
        """Return what the last output adds to the gates."""
        return functional.linear(hidden, self.weight_hh, self.bias_hh)


def tanh_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Advance nn.RNN with tanh."""
    return torch.tanh(drives + weights.recur(states))


def relu_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Advance nn.RNN with relu."""
    return torch.relu(drives + weights.recur(states))


def tanh_slopes(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Return the slopes of tanh at many steps."""
    return 1 - tanh_step(weights, states, drives).square()


def relu_slopes(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Return the slopes of relu at many steps."""
    return (relu_step(weights, states, drives) > 0).to(states.dtype)


def rnn_drive_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return what Jᵀv is for the drive instead of the state of nn.RNN."""
    return vectors * slopes


def rnn_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return Jᵀv of one step of nn.RNN."""
    return rnn_drive_pull(weights, slopes, vectors) @ weights.weight_hh


def lstm_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Advance an LSTM whose state is its output followed by its memory."""
    i, f, g, o = _lstm_gates(weights, states, drives)
    memory = f * states[..., weights.output_size :] + i * g
    hidden = o * memory.tanh()
    if weights.weight_hr is not None:
        hidden = functional.linear(hidden, weights.weight_hr)
    return torch.cat([hidden, memory], dim=-1)


def lstm_gates(weights: Weights, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
    """Return the three gates of an LSTM by name."""
    i, f, _, o = _lstm_gates(weights, states, drives)
    return {"input": i, "forget": f, "output": o}


def lstm_slopes(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Return the partial derivatives of many steps: of the memory by its gates, of the output by memory and gate."""
    i, f, g, o = _lstm_gates(weights, states, drives)
    old = states[..., weights.output_size :]
    squashed = (f * old + i * g).tanh()
    by_gates = [g * i * (1 - i), old * f * (1 - f), i * (1 - g.square())]
    return torch.cat([*by_gates, squashed * o * (1 - o), o * (1 - squashed.square()), f], dim=-1)


def lstm_drive_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return what Jᵀv is for the drive instead of the state of an LSTM."""
    return _lstm_pulled(weights, slopes, vectors)[0]


def lstm_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return Jᵀv of one step of an LSTM."""
    by_gates, memory = _lstm_pulled(weights, slopes, vectors)
    return torch.cat([by_gates @ weights.weight_hh, memory * slopes[..., 5 * memory.shape[-1] :]], dim=-1)


def _lstm_pulled(weights: Weights, slopes: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return what reaches the gates before they are squashed, and what reaches the memory."""
    size = weights.weight_hh.shape[0] // 4
    hidden, memory = vectors[..., : weights.output_size], vectors[..., weights.output_size :]
    if weights.weight_hr is not None:
        hidden = hidden @ weights.weight_hr
    memory = memory + hidden * slopes[..., 4 * size : 5 * size]
    return torch.cat([memory, memory, memory, hidden], dim=-1) * slopes[..., : 4 * size], memory


def gru_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Advance a GRU."""
    _, update, new, _ = _gru_gates(weights, states, drives)
    return (1 - update) * new + update * states


def gru_gates(weights: Weights, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
    """Return the two gates of a GRU by name."""
    reset, update, _, _ = _gru_gates(weights, states, drives)
    return {"reset": reset, "update": update}


def gru_slopes(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    """Return the partial derivatives of many steps: by the recurrent terms, the part that is kept, by the new drive."""
    reset, update, new, recurrent = _gru_gates(weights, states, drives)
    by_new = (1 - update) * (1 - new.square())
    by_gates = [by_new * recurrent * reset * (1 - reset), (states - new) * update * (1 - update), by_new * reset]
    return torch.cat([*by_gates, update, by_new], dim=-1)


def gru_drive_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return what Jᵀv is for the drive instead of the state of a GRU."""
    size = weights.output_size
    by_gates = vectors * slopes[..., :size], vectors * slopes[..., size : 2 * size], vectors * slopes[..., 4 * size :]
    return torch.cat(by_gates, dim=-1)


def gru_pull(weights: Weights, slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return Jᵀv of one step of a GRU."""
    size = weights.output_size
    by_gates = torch.cat([vectors, vectors, vectors], dim=-1) * slopes[..., : 3 * size]
    return by_gates @ weights.weight_hh + vectors * slopes[..., 3 * size : 4 * size]


def _lstm_gates(weights: Weights, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, f, g, o = (drives + weights.recur(states[..., : weights.output_size])).chunk(4, dim=-1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


def _gru_gates(weights: Weights, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from_input, from_state = drives.chunk(3, dim=-1), weights.recur(states).chunk(3, dim=-1)
    reset, update = (from_input[0] + from_state[0]).sigmoid(), (from_input[1] + from_state[1]).sigmoid()
    return reset, update, (from_input[2] + reset * from_state[2]).tanh(), from_state[2]


DENSE_LIMIT: Final = 512
"""Up to this many dimensions a state's Jacobian is handled as a matrix."""

Step = Callable[[Tensor, Tensor], Tensor]
Gates = Callable[[Tensor, Tensor], dict[str, Tensor]]

_EQUATIONS: Final[Mapping[str, dict[str, Any]]] = {
    "rnn_tanh": {
        "step": tanh_step,
        "slopes": tanh_slopes,
        "pull": rnn_pull,
        "drive_pull": rnn_drive_pull,
    },
    "rnn_relu": {
        "step": relu_step,
        "slopes": relu_slopes,
        "pull": rnn_pull,
        "drive_pull": rnn_drive_pull,
    },
    "lstm": {
        "step": lstm_step,
        "slopes": lstm_slopes,
        "pull": lstm_pull,
        "drive_pull": lstm_drive_pull,
        "gates": lstm_gates,
    },
    "gru": {
        "step": gru_step,
        "slopes": gru_slopes,
        "pull": gru_pull,
        "drive_pull": gru_drive_pull,
        "gates": gru_gates,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The state equation of one layer and direction, over rows: `step(states, drives)` gives the next states.

    The first `output_size` entries of a state are what the rest of the model reads. `drive(inputs)` is the part of the
    equation that no state enters, computed once for a whole sequence. Where `slopes(states, drives)` and
    `pull(slopes, vectors)` are known they give the transposed derivative; otherwise it is left to autograd. The same
    by the drive is `drive_pull`, and `undrive` takes that further to the inputs.
    """

    name: str
    kind: str
    state_size: int
    output_size: int
    drive: Callable[[Tensor], Tensor]
    step: Step
    slopes: Step | None = None
    pull: Step | None = None
    drive_pull: Step | None = None
    undrive: Callable[[Tensor], Tensor] | None = None
    gates: Gates | None = None


def layer_cells(module: nn.RNNBase, name: str) -> list[list[Cell]]:
    """Return the cells of a fused module by layer, the forward direction before the reverse one."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    kind = module.mode.lower()
    with evaluating(module):
        return [
            [_cell(_join(name, f"l{layer}{suffix}"), kind, module, f"_l{layer}{suffix}") for suffix in directions]
            for layer in range(module.num_layers)
        ]


def single_cell(module: nn.Module, name: str) -> Cell:
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
        return _cell(name, kind, module, "")


def function_cell(name: str, step: Step, state_size: int, output_size: int | None = None) -> Cell:
    """Wrap a function of (states, inputs) over rows that gives the next states."""
    return Cell(
        name=name,
        kind="custom",
        state_size=state_size,
        output_size=state_size if output_size is None else output_size,
        drive=lambda inputs: inputs,
        step=step,
    )


def precision(state_size: int, like: Tensor) -> tuple[torch.dtype, torch.device]:
    """Choose where to replay: small states in float64 on the CPU, large ones in float32 where they are."""
    if state_size <= DENSE_LIMIT:
        return torch.float64, torch.device("cpu")
    return (torch.float64 if like.dtype == torch.float64 else torch.float32), like.device


def _cell(name: str, kind: str, module: nn.Module, suffix: str) -> Cell:
    weights = _weights(module, kind, suffix)
    return Cell(
        name=name,
        kind=kind,
        state_size=_state_size(kind, weights.weight_hh),
        output_size=weights.output_size,
        drive=weights.drive,
        undrive=weights.undrive,
        **{part: partial(equation, weights) for part, equation in _EQUATIONS[kind].items()},
    )


def _weights(module: nn.Module, kind: str, suffix: str) -> Weights:
    found = {name: getattr(module, f"{name}{suffix}", None) for name in Weights.__dataclass_fields__}
    recurrent = found["weight_hh"]
    assert isinstance(recurrent, Tensor)
    dtype, device = precision(_state_size(kind, recurrent), recurrent)
    ready: dict[str, Any] = {
        name: value.detach().to(device=device, dtype=dtype, copy=True)
        for name, value in found.items()
        if isinstance(value, Tensor)
    }
    return Weights(**ready)


def _state_size(kind: str, recurrent: Tensor) -> int:
    rows, output = recurrent.shape
    return output + rows // 4 if kind == "lstm" else output


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
