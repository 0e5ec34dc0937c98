"""The recorder that finds the recurrent parts of a model and follows their states through one training step."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from torch import Tensor, nn

from gradtrack.analyzers.recurrent.capture import SINGLE_CELLS, Capture, CellCapture, FunctionCapture, FusedCapture
from gradtrack.analyzers.recurrent.cells import TorchCell
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.analyzers.tools.hooks import ModuleHook
from gradtrack.analyzers.tools.modules import evaluating
from gradtrack.analyzers.tools.samples import HostCopies
from gradtrack.errors import UsageError
from gradtrack.registry import nearest
from gradtrack.support.interrupts import Changes, pass_on

_CELL_NAME: Final = re.compile(r"(cell|rnn|lstm|gru|recurrent|reservoir)\d*$", re.IGNORECASE)
_STATES: Final = ("h", "state", "prev", "carry", "mem", "last")
"""How the names of a state begin."""
_LISTED: Final = 30
_EXPECTED: Final = (
    "Expected a function of (states, inputs), or its import path such as 'my_cells:step', and its state size."
)


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
        step_functions: Mapping[str, tuple[Callable[..., Tensor], int]] | None = None,
    ) -> None:
        self._modules = dict(model.named_modules())
        self._captures: dict[str, Capture] = {}
        self._changes = Changes() if changes is None else changes
        functions = step_functions or {}
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
        copies = HostCopies(self._replayed())
        for name, capture in self._captures.items():
            if any(not ancestor or name.startswith(f"{ancestor}.") for ancestor in outer):
                continue
            capture.faults.check()
            trajectories = capture.trajectories(copies)
            if trajectories and isinstance(capture, (CellCapture, FunctionCapture)):
                outer.append(name)
            found += [self._describe(name, trajectory, copies) for trajectory in trajectories if trajectory.window]
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

    def _replayed(self) -> Iterator[Tensor]:
        """Yield what is replayed on the CPU: what captures have kept, with the weights and gradients of the modules."""
        for name, capture in self._captures.items():
            kept = list(capture.replayed())
            yield from kept
            for param in self._modules[name].parameters() if kept else ():
                yield from (param, *([] if param.grad is None else [param.grad]))

    def _describe(self, name: str, trajectory: Trajectory, copies: HostCopies) -> CellRecord:
        module = self._modules[name]
        suffix = f"_{trajectory.cell.name.rpartition('.')[2]}" if isinstance(module, nn.RNNBase) else ""
        weight = module._parameters.get(f"weight_hh{suffix}") if isinstance(trajectory.cell, TorchCell) else None
        dropout = module.dropout if isinstance(module, nn.RNNBase) and module.training else 0.0
        gradient = None if weight is None or weight.grad is None else copies(weight.grad)
        return CellRecord(module=name, gradient=gradient, dropout=dropout, trajectory=trajectory)


def recurrent_modules(model: nn.Module) -> list[str]:
    """Name the innermost modules that are recurrent by their type, by a loop of theirs, or by name and arguments."""
    found = [name for name, module in model.named_modules() if _is_recurrent(module)]
    return [name for name in found if not any(_is_within(name, other) for other in found)]


def _is_within(outer: str, inner: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _capture(
    module: nn.Module, name: str, function: tuple[Callable[..., Tensor], int] | None, limits: Mapping[str, int]
) -> Capture | None:
    if function is not None:
        step, size = function
        takes_module = len(_positional(step)) > 2
        step = partial(_step_of, module, step) if takes_module else step
        return FunctionCapture(name, partial(_checked, name, step), size, **limits)
    if isinstance(module, nn.RNNBase):
        return FusedCapture(module, name, **limits)
    if isinstance(module, SINGLE_CELLS) or _may_be_cell(module):
        return CellCapture(module, name, **limits)
    return None


def _is_recurrent(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or _feeds_back(module):
        return True
    if _CELL_NAME.search(type(module).__name__) is None or not _may_be_cell(module):
        return False
    return any(one.name.lower().startswith(_STATES) for one in _positional(module.forward))


def _may_be_cell(module: nn.Module) -> bool:
    """Say whether a module of the user's own takes two things."""
    if type(module).__module__.startswith("torch."):
        return False
    return len(_positional(module.forward)) >= 2


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function that is written in C
        return []
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _step_of(module: nn.Module, step: Callable[..., Tensor], states: Tensor, inputs: Tensor) -> Tensor:
    with evaluating(module):
        return step(module, states, inputs)


def _checked(name: str, step: Callable[..., Any], states: Tensor, inputs: Tensor) -> Tensor:
    """Return the next states, or say with what the user's function was called and what it did."""
    cause = None
    try:
        found = step(states, inputs)
        if isinstance(found, Tensor) and found.shape == states.shape:
            return found
        told = f"it returned {list(found.shape) if isinstance(found, Tensor) else type(found).__name__}"
    except Exception as fault:
        pass_on(fault)
        told, cause = f"it raised {type(fault).__name__}: {fault}", fault
    raise UsageError(
        f"step function of {name!r}: called with states {list(states.shape)} and inputs {list(inputs.shape)}, {told}: "
        "expected the next states, of their shape. Check the state size, and that it takes (states, inputs)."
    ) from cause


def read_step_functions(given: Mapping[str, Any] | None) -> dict[str, tuple[Callable[..., Tensor], int]]:
    """Return state equations with the sizes of their states, of which a function may be given by its import path."""
    found: dict[str, tuple[Callable[..., Tensor], int]] = {}
    for name, pair in (given or {}).items():
        try:
            step, size = pair
            step = pkgutil.resolve_name(step) if isinstance(step, str) else step
        except (ImportError, AttributeError, TypeError, ValueError) as fault:
            raise UsageError(f"step function of {name!r}: {fault}. {_EXPECTED}") from fault
        if not callable(step) or type(size) is not int or size < 1:
            raise UsageError(f"step function of {name!r}: {pair!r}. {_EXPECTED}")
        found[str(name)] = (step, size)
    return found


def check_names(model: nn.Module, functions: Mapping[str, object]) -> None:
    """Refuse a state equation for a module that a model does not have."""
    known = [name for name, _ in model.named_modules()] if functions else []
    for name in functions:
        if name not in known:
            listed = ", ".join(map(repr, known[:_LISTED])) + (", ..." if len(known) > _LISTED else "")
            raise UsageError(f"step function of {name!r}: expected one of {listed}.{nearest(name, known)}")


Ways = dict[str, set[str]]
"""From which variables of the turn before a value comes, and through which attributes of the module."""


def _feeds_back(module: nn.Module) -> bool:
    """Say whether a loop of the forward pass applies weights to what the turn before has left, going by the source."""
    kind: Any = type(module)
    if kind.__module__.startswith("torch."):
        return False
    for name in _fed_back_attributes(kind):
        found = getattr(module, name, None)
        if isinstance(found, nn.Module):
            found = next(found.parameters(), None)
        if isinstance(found, Tensor) or inspect.ismethod(found):
            return True
    return False


@cache
def _fed_back_attributes(kind: type[nn.Module]) -> frozenset[str]:
    """Name the attributes that the loops in `forward`, and in the methods that it calls, apply to their own results."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # a class that was made in a console has no source
        return frozenset()
    methods = {one.name: one for one in getattr(tree, "body", ()) if isinstance(one, ast.FunctionDef)}
    forward = methods.get("forward")
    called = [] if forward is None else [forward, *(methods[name] for name in _attributes(forward) & methods.keys())]
    loops = [loop for method in called for loop in ast.walk(method) if isinstance(loop, (ast.For, ast.While))]
    return frozenset[str]().union(*map(_fed_back_in, loops))


def _fed_back_in(loop: ast.For | ast.While) -> set[str]:
    """Follow the variables through one turn of a loop; layers that the loop itself goes through are none."""
    turn = _names(loop.target) if isinstance(loop, ast.For) else set()
    ways: dict[str, Ways] = {}
    for node in (node for statement in loop.body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Subscript)) and turn & _names(node.func):
            return set()
        if isinstance(node, ast.Assign):
            found = _ways(node.value, ways)
            ways.update(dict.fromkeys((name for target in node.targets for name in _names(target)), found))
        elif isinstance(node, ast.AugAssign):
            ways.update(dict.fromkeys(_names(node.target), _ways(node, ways)))
    return {attribute for name, found in ways.items() for attribute in found.get(name, ())}


def _ways(node: ast.AST, known: Mapping[str, Ways]) -> Ways:
    if isinstance(node, ast.Name):
        return known.get(node.id, {node.id: set()})
    found: Ways = {}
    for child in ast.iter_child_nodes(node):
        for name, attributes in _ways(child, known).items():
            found.setdefault(name, set()).update(attributes)
    if isinstance(node, ast.Call) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)):
        direct = [node.func, *node.args] if isinstance(node, ast.Call) else [node.left, node.right]
        applied = {name for one in direct for name in _applied(one)}
        for attributes in found.values():
            attributes |= applied
    return found


def _applied(node: ast.AST) -> set[str]:
    """Return the attribute of the module that a function or an operand is, such as `self.weight.T`."""
    while isinstance(node, (ast.Attribute, ast.Call)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return {node.attr}
        node = node.func if isinstance(node, ast.Call) else node.value
    return set()


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _attributes(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) for name in _applied(node)}
