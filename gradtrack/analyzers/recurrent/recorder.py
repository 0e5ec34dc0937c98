"""The recorder that finds the recurrent parts of a model and follows their states through one training step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from gradtrack.analyzers.recurrent.capture import SINGLE_CELLS, Capture, CellCapture, FunctionCapture, FusedCapture
from gradtrack.analyzers.recurrent.cells import Step, TorchCell
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.analyzers.tools.hooks import ModuleHook
from gradtrack.errors import UsageError
from gradtrack.support.interrupts import Changes

_CELL_NAME: Final = re.compile(r"(cell|rnn|lstm|gru|recurrent|reservoir)\d*$", re.IGNORECASE)
_STATES: Final = ("h", "state", "prev", "carry", "mem", "last")
"""How the names of a state begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """One cell of one module, followed, and the gradient of its recurrent weight, where it has one."""

    module: str
    gradient: Tensor | None
    dropout: float
    trajectory: Trajectory


class RecurrentRecorder:
    """Hooks on the recurrent parts of a model for one step. Leaving them changes nothing of the training.

    Known modules and cells are found by their type, others by their behaviour: a module whose returned state comes back
    to it. `step_functions` gives the state equation of modules that neither can be done for, as (step, state size).
    """

    def __init__(
        self,
        model: nn.Module,
        changes: Changes | None = None,
        *,
        max_sequences: int = 4,
        max_steps: int = 256,
        step_functions: Mapping[str, tuple[Step, int]] | None = None,
    ) -> None:
        self._modules = dict(model.named_modules())
        self._captures: dict[str, Capture] = {}
        self._changes = Changes() if changes is None else changes
        functions = step_functions or {}
        for name in functions:
            if name not in self._modules:
                known = ", ".join(repr(name) for name in self._modules if name)
                raise UsageError(f"step function for module {name!r}: expected one of {known}.")
        for name, module in self._modules.items():
            limits = {"max_sequences": max_sequences, "max_steps": max_steps}
            capture = _capture(module, name, functions.get(name), limits)
            if capture is not None:
                self._captures[name] = capture
                hook = ModuleHook(module, capture.faults.guarded(capture))
                self._changes.hook(module.register_forward_hook, hook, with_kwargs=True)

    def recorded(self) -> list[CellRecord]:
        """Replay what was seen, the parts of a custom cell left out where the whole of it was followed."""
        found: list[CellRecord] = []
        outer: list[str] = []
        for name, capture in self._captures.items():
            if any(not ancestor or name.startswith(f"{ancestor}.") for ancestor in outer):
                continue
            capture.faults.check()
            trajectories = capture.trajectories()
            if trajectories and isinstance(capture, (CellCapture, FunctionCapture)):
                outer.append(name)
            found += [self._describe(name, trajectory) for trajectory in trajectories if trajectory.window]
        return found

    @property
    def largest(self) -> int:
        """Return the number of elements of the largest parameter of all that was followed."""
        modules = (self._modules[name] for name in self._captures)
        return max((param.numel() for module in modules for param in module.parameters()), default=0)

    def close(self) -> None:
        """Remove every hook and let go of what was kept; a second call does nothing."""
        self._changes.undo()
        self._captures = {}

    def _describe(self, name: str, trajectory: Trajectory) -> CellRecord:
        module = self._modules[name]
        suffix = f"_{trajectory.cell.name.rpartition('.')[2]}" if isinstance(module, nn.RNNBase) else ""
        weight = module._parameters.get(f"weight_hh{suffix}") if isinstance(trajectory.cell, TorchCell) else None
        dropout = module.dropout if isinstance(module, nn.RNNBase) and module.training else 0.0
        gradient = None if weight is None else weight.grad
        return CellRecord(module=name, gradient=gradient, dropout=dropout, trajectory=trajectory)


def recurrent_modules(model: nn.Module) -> list[str]:
    """Name the modules of a model that are recurrent by their type, or by what they are called and take."""
    return [name for name, module in model.named_modules() if _is_recurrent(module)]


def _capture(
    module: nn.Module, name: str, function: tuple[Step, int] | None, limits: Mapping[str, int]
) -> Capture | None:
    if function is not None:
        return FunctionCapture(name, function[0], function[1], **limits)
    if isinstance(module, nn.RNNBase):
        return FusedCapture(module, name, **limits)
    if isinstance(module, SINGLE_CELLS) or _may_be_cell(module):
        return CellCapture(module, name, **limits)
    return None


def _is_recurrent(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return True
    if _CELL_NAME.search(type(module).__name__) is None or not _may_be_cell(module):
        return False
    return _positional(module)[1].name.lower().startswith(_STATES)


def _may_be_cell(module: nn.Module) -> bool:
    """Say whether a module of the user's own takes two things."""
    if type(module).__module__.startswith("torch."):
        return False
    parameters = _positional(module)
    return len(parameters) >= 2 and all(parameter.default is not parameter.empty for parameter in parameters[2:])


def _positional(module: nn.Module) -> list[inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
