"""The equations of torch's recurrent cells over rows of states, and the transposed derivative of each.

`drives` are what the inputs add to the gates, computed beforehand for a whole sequence. The derivative comes in two
parts: the coefficients of many steps are found at once, and then each step is a few products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


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
