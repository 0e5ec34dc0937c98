"""What a forward hook keeps of a recurrent module until it is replayed: the interface and what all of them share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradtrack.measure.cells import Step, function_cell
from gradtrack.measure.hooks import Faults
from gradtrack.measure.replay import Trajectory, follow


class Capture(Protocol):
    """A forward hook that keeps what one module needs to be followed; only forwards with gradients count.

    `faults` keeps what goes wrong in it, and in the hooks that it places on tensors, away from the training.
    """

    faults: Faults

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep one call."""

    def trajectories(self) -> list[Trajectory]:
        """Replay what was kept."""


class FunctionCapture:
    """Keeps the input sequence of a module whose state equation the user has given as a function."""

    def __init__(self, module: nn.Module, name: str, step: Step, state_size: int, *, max_sequences: int) -> None:
        self.faults = Faults()
        self._module, self._max_sequences = module, max_sequences
        self._step_cell = function_cell(name, step, state_size)
        self._inputs: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the input sequence of one call."""
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 3]
        if values and is_evidence(self._inputs is not None):
            first = values[0].detach()
            batched = first if getattr(module, "batch_first", True) else first.transpose(0, 1)
            self._inputs = batched[: self._max_sequences].clone()

    def trajectories(self) -> list[Trajectory]:
        """Replay what was kept."""
        if self._inputs is None:
            return []
        inputs = self._inputs.transpose(0, 1)
        state = inputs.new_zeros(inputs.shape[1], self._step_cell.state_size)
        return [follow(self._step_cell, state, inputs)]


def is_evidence(already: bool) -> bool:
    """Say whether a forward belongs to a backward; what checkpointing computes again is known already."""
    recomputed = torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not (recomputed and already)


def is_same(one: object, other: object) -> bool:
    """Say whether two names stand for one object."""
    return one is other


def state_parts(state: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a state, or nothing where it is not one."""
    if isinstance(state, Tensor):
        return (state,)
    if isinstance(state, (tuple, list)) and all(isinstance(part, Tensor) for part in state):
        return tuple(state)
    return ()
