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

_EQUATIONS: Final[Mapping[str, dict[str, Any]]] = {
    "rnn_tanh": {
        "step": equations.tanh_step,
        "slopes": equations.tanh_slopes,
        "pull": equations.rnn_pull,
        "drive_pull": equations.rnn_drive_pull,
    },
    "rnn_relu": {
        "step": equations.relu_step,
        "slopes": equations.relu_slopes,
        "pull": equations.rnn_pull,
        "drive_pull": equations.rnn_drive_pull,
    },
    "lstm": {
        "step": equations.lstm_step,
        "slopes": equations.lstm_slopes,
        "pull": equations.lstm_pull,
        "drive_pull": equations.lstm_drive_pull,
        "gates": equations.lstm_gates,
    },
    "gru": {
        "step": equations.gru_step,
        "slopes": equations.gru_slopes,
        "pull": equations.gru_pull,
        "drive_pull": equations.gru_drive_pull,
        "gates": equations.gru_gates,
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
