"""Hooks that record one forward and backward pass: outputs, their gradients, and which call feeds which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.flow.call import Node, axis_of, take_gradient, take_output
from gradtrack.analyzers.tools.hooks import Faults, ModuleHook
from gradtrack.analyzers.tools.modules import floating, has_parts, kind_of, layers, owns_parameters, unnested
from gradtrack.analyzers.tools.samples import Reading
from gradtrack.gradients.native.threads import threads_for
from gradtrack.protection.nonfinite import first_nonfinite, nonfinite_inputs
from gradtrack.support.interrupts import Changes

_MAX_CALLS: Final = 256
_MAX_WALK: Final = 4000
_NO_CODE: Final = (nn.Sequential.forward, nn.Module.forward)


class Probe:
    """Hooks on a model for one forward and backward pass, until its `changes` are undone.

    A fault in a hook never reaches the training: it ends the look and is kept in `faults`.
    """

    def __init__(self, model: nn.Module, changes: Changes) -> None:
        self._model = model
        self.nodes: list[Node] = []
        self.without_grad: set[str] = set()
        self.faults = Faults()
        self.reading = Reading()
        self._calls: dict[str, int] = {}
        self._functions: dict[Any, int] = {}
        self._inputs: tuple[Any, Any] = (), {}
        changes.note(self._forget)
        if not isinstance(model, torch.jit.ScriptModule):
            hook = ModuleHook(model, self._begin)
            changes.hook(model.register_forward_pre_hook, hook, with_kwargs=True)
        for name, module in _observed(model):
            if name:
                changes.hook(module.register_forward_hook, ModuleHook(module, self._seeing(name, module)))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = args, kwargs

    def _forget(self) -> None:
        """Let go of the graph, and of what the model was given."""
        self._functions.clear()
        self._inputs = (), {}

    def _seeing(self, name: str, module: nn.Module) -> Callable[..., None]:
        kind = getattr(module, "mode", "") if isinstance(module, nn.RNN) else kind_of(module).__name__
        parametric = owns_parameters(module)

        def see(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not torch.is_grad_enabled():
                self.without_grad.add(name)
                return
            found = next(floating(output), None)
            compiling = torch.compiler.is_compiling()
            if found is not None and not compiling and _is_transformed(found):
                return  # vmap and its like have no numbers to show until they are over
            calls = self._calls[name] = self._calls.get(name, 0) + 1
            if found is not None and calls <= _MAX_CALLS and not compiling:
                self.faults.guarded(_apart)(found, lambda: self._record(name, kind, parametric, inputs, found))

        return see

    def _record(self, name: str, kind: str, parametric: bool, inputs: Any, output: Tensor) -> None:
        function = output.grad_fn
        if function is None or function in self._functions or not output.numel():
            return
        parents = list(self._walk(function))
        first = self.nodes[parents[0][0]] if parents else None
        values = unnested(output.detach())
        axis = axis_of(kind, parametric, values, first)
        width = values.shape[axis] if values.ndim > 1 else 1
        node = Node(name, kind, parametric, axis, width, parents)
        take_output(node, values, self.reading)
        if not values.is_cpu or not node.finite:
            finite = [torch.isfinite(unnested(value)).all() for value in floating(inputs)]
            self.reading.add(finite, partial(self._trace, node, inputs, self._inputs))
        self._functions[function] = len(self.nodes)
        self.nodes.append(node)
        output.register_hook(lambda gradient: self._receive(node, gradient))  # type: ignore[no-untyped-call]

    def _trace(self, node: Node, inputs: Any, given: tuple[Any, Any], *finite: Tensor) -> None:
        """Find where values come from that are not finite, where a call was given some."""
        node.finite_input = node.finite or all(map(bool, finite))
        if node.finite_input or not all(one.finite for one in self.nodes if one is not node):
            return  # what comes after the first such call is its consequence
        node.bad_input = first_nonfinite(nonfinite_inputs(*given, "the model"))
        node.made_in = "" if node.bad_input else self._made_in(node)
        if not (node.bad_input or node.made_in):
            node.bad_input = first_nonfinite(nonfinite_inputs(inputs, {}, node.name))

    def _made_in(self, node: Node) -> str:
        """Return the innermost module that has code of its own, around a finite parent of a call but not around it."""
        for parent in (self.nodes[index].name for index, _ in node.parents if self.nodes[index].finite):
            while "." in parent:
                parent = parent.rpartition(".")[0]
                if node.name.startswith(f"{parent}."):
                    break
                if type(self._model.get_submodule(parent)).forward not in _NO_CODE:
                    return parent
        return ""

    def _receive(self, node: Node, gradient: Tensor) -> None:
        if not _is_transformed(gradient):
            self.faults.guarded(_apart)(
                gradient, lambda: take_gradient(node, unnested(gradient.detach()), self.reading)
            )

    def _walk(self, start: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Find the recorded calls that a function's value was computed from, with the functions on the way."""
        stack: list[tuple[Any, tuple[str, ...]]] = [(start, ())]
        seen = {start}
        found: set[int] = set()
        while stack and len(seen) < _MAX_WALK:
            function, ops = stack.pop()
            ops = (function.name(), *ops[:7])
            for previous, _ in function.next_functions:
                if previous is None or previous in seen:
                    continue
                seen.add(previous)
                index = self._functions.get(previous)
                if index is None:
                    stack.append((previous, ops))
                elif index not in found:
                    found.add(index)
                    yield index, ops


def _observed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules without children and those that own parameters."""
    for name, module in layers(model):
        leaf = not has_parts(module)
        if not isinstance(module, torch.jit.ScriptModule) and (leaf or owns_parameters(module)):
            yield name or ("model" if leaf else ""), module


def _apart(values: Tensor, call: Callable[[], None]) -> None:
    with threads_for(values.numel()), torch._C.DisableTorchFunction():  # else an analyzer's mode hears it
        call()


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func that is still running."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
