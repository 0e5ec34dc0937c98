"""The cells of recurrent modules, taken out so that they can be followed and differentiated step by step.

Replaying a cell instead of differentiating its module is what makes this work everywhere: the fused kernels have no
forward-mode and no second derivative on some devices, and they do not show the states between their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.errors import InputTypeError
from gradtrack.measure import equations
from gradtrack.measure.equations import Weights

DENSE_LIMIT: Final = 512
"""Up to this many dimensions a state's Jacobian is handled as a matrix."""

Step = Callable[[Tensor, Tensor], Tensor]
Gates = Callable[[Tensor, Tensor], dict[str, Tensor]]

_EQUATIONS: Final[Mapping[str, tuple[Any, Any, Any, Any]]] = {
    "rnn_tanh": (equations.tanh_step, equations.tanh_slopes, equations.rnn_pull, None),
    "rnn_relu": (equations.relu_step, equations.relu_slopes, equations.rnn_pull, None),
    "lstm": (equations.lstm_step, equations.lstm_slopes, equations.lstm_pull, equations.lstm_gates),
    "gru": (equations.gru_step, equations.gru_slopes, equations.gru_pull, equations.gru_gates),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The state equation of one layer and direction, over rows: `step(states, drives)` gives the next states.

    The first `output_size` entries of a state are what the rest of the model reads. `drive(inputs)` is the part of the
    equation that no state enters, computed once for a whole sequence. Where `slopes(states, drives)` and
    `pull(slopes, vectors)` are known they give the transposed derivative; otherwise it is left to autograd.
    """

    name: str
    kind: str
    state_size: int
    output_size: int
    drive: Callable[[Tensor], Tensor]
    step: Step
    slopes: Step | None = None
    pull: Step | None = None
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
    step, slopes, pull, gates = _EQUATIONS[kind]
    return Cell(
        name=name,
        kind=kind,
        state_size=_state_size(kind, weights.weight_hh),
        output_size=weights.output_size,
        drive=weights.drive,
        step=partial(step, weights),
        slopes=partial(slopes, weights),
        pull=partial(pull, weights),
        gates=None if gates is None else partial(gates, weights),
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
