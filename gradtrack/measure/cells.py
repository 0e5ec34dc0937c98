"""The state equations of torch's recurrent cells, written out so that they can be differentiated step by step.

Replaying a cell instead of differentiating its module is what makes this work everywhere: the fused kernels have no
forward-mode and no second derivative on some devices, and they do not show the states between their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradtrack.errors import InputTypeError

_DENSE: Final = 512

Step = Callable[[Tensor, Tensor], Tensor]
Gates = Callable[[Tensor, Tensor], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The state equation of one layer and direction, over rows: `step(states, drives)` gives the next states.

    The first `output_size` entries of a state are what the rest of the model reads. `drive(inputs)` is the part of the
    equation that no state enters, computed once for a whole sequence.
    """

    name: str
    kind: str
    state_size: int
    output_size: int
    drive: Callable[[Tensor], Tensor]
    step: Step
    gates: Gates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The detached weights of one layer and direction, under torch's names."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None

    def drive(self, inputs: Tensor) -> Tensor:
        """Return what the inputs add to the gates."""
        return functional.linear(inputs.to(self.weight_ih), self.weight_ih, self.bias_ih)

    def recur(self, hidden: Tensor) -> Tensor:
        """Return what the last output adds to the gates."""
        return functional.linear(hidden, self.weight_hh, self.bias_hh)


def precision(state_size: int, weight: Tensor) -> tuple[torch.dtype, torch.device]:
    """Choose where to replay: small states in float64 on the CPU, large ones in float32 where they are."""
    if state_size <= _DENSE:
        return torch.float64, torch.device("cpu")
    return (torch.float64 if weight.dtype == torch.float64 else torch.float32), weight.device


def layer_cells(module: nn.RNNBase, name: str) -> list[list[Cell]]:
    """Return the cells of a fused module by layer, the forward direction before the reverse one."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    kind = module.mode.lower()
    with evaluating(module):
        return [
            [
                _cell(_join(name, f"l{layer}{suffix}"), kind, module, f"_l{layer}{suffix}")
                for suffix in directions
            ]
            for layer in range(module.num_layers)
        ]


def single_cell(module: nn.RNNCellBase, name: str) -> Cell:
    """Return the cell of nn.RNNCell, nn.LSTMCell or nn.GRUCell."""
    kinds = {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}
    kind = next((kind for found, kind in kinds.items() if isinstance(module, found)), None)
    if kind is None:
        if not isinstance(module, nn.RNNCell):
            raise InputTypeError(f"cell {type(module).__name__}: expected nn.RNNCell, nn.LSTMCell or nn.GRUCell.")
        kind = f"rnn_{module.nonlinearity}"
    with evaluating(module):
        return _cell(name or kind, kind, module, "")


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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode for a moment, so that looking at it advances no buffer and draws no number."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        for one, _ in modes:
            one.training = False
        yield
    finally:
        for one, training in modes:
            one.training = training


def _cell(name: str, kind: str, module: nn.Module, suffix: str) -> Cell:
    weights = _weights(module, kind, suffix)
    hidden = weights.weight_hh.shape[1]
    if kind == "lstm":
        return _lstm(name, weights)
    if kind == "gru":
        return Cell(
            name=name,
            kind="gru",
            state_size=hidden,
            output_size=hidden,
            drive=weights.drive,
            step=partial(_gru_step, weights),
            gates=partial(_gru_gates, weights),
        )
    activation = torch.relu if kind == "rnn_relu" else torch.tanh
    return Cell(
        name=name,
        kind=kind,
        state_size=hidden,
        output_size=hidden,
        drive=weights.drive,
        step=lambda states, drives: activation(drives + weights.recur(states)),
    )


def _lstm(name: str, weights: Weights) -> Cell:
    output, hidden = weights.weight_hh.shape[1], weights.weight_hh.shape[0] // 4
    return Cell(
        name=name,
        kind="lstm",
        state_size=output + hidden,
        output_size=output,
        drive=weights.drive,
        step=partial(_lstm_step, weights),
        gates=partial(_lstm_gates, weights),
    )


def _lstm_parts(weights: Weights, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    output = weights.weight_hh.shape[1]
    i, f, g, o = (drives + weights.recur(states[..., :output])).chunk(4, dim=-1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), states[..., output:]


def _lstm_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    i, f, g, o, memory = _lstm_parts(weights, states, drives)
    memory = f * memory + i * g
    hidden = o * memory.tanh()
    if weights.weight_hr is not None:
        hidden = functional.linear(hidden, weights.weight_hr)
    return torch.cat([hidden, memory], dim=-1)


def _lstm_gates(weights: Weights, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
    i, f, _, o, _ = _lstm_parts(weights, states, drives)
    return {"input": i, "forget": f, "output": o}


def _gru_parts(weights: Weights, states: Tensor, drives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from_input, from_state = drives.chunk(3, dim=-1), weights.recur(states).chunk(3, dim=-1)
    reset, update = (from_input[0] + from_state[0]).sigmoid(), (from_input[1] + from_state[1]).sigmoid()
    return reset, update, (from_input[2] + reset * from_state[2]).tanh()


def _gru_step(weights: Weights, states: Tensor, drives: Tensor) -> Tensor:
    _, update, new = _gru_parts(weights, states, drives)
    return (1 - update) * new + update * states


def _gru_gates(weights: Weights, states: Tensor, drives: Tensor) -> dict[str, Tensor]:
    reset, update, _ = _gru_parts(weights, states, drives)
    return {"reset": reset, "update": update}


def _weights(module: nn.Module, kind: str, suffix: str) -> Weights:
    found = {name: getattr(module, f"{name}{suffix}", None) for name in Weights.__dataclass_fields__}
    recurrent = found["weight_hh"]
    assert isinstance(recurrent, Tensor)
    rows, columns = recurrent.shape
    dtype, device = precision(columns + rows // 4 if kind == "lstm" else columns, recurrent)
    ready: dict[str, Any] = {
        name: value.detach().to(device=device, dtype=dtype, copy=True)
        for name, value in found.items()
        if isinstance(value, Tensor)
    }
    return Weights(**ready)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
