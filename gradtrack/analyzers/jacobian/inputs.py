"""The inputs of blocks, kept from a forward pass so that the blocks can be run again on single samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.hooks import Faults, ModuleHook
from gradtrack.analyzers.tools.modules import first_floating, replace, tensors, unnested
from gradtrack.errors import UsageError
from gradtrack.support.interrupts import Changes


class BlockCall:
    """The arguments of one call of a module for the first samples of its batch."""

    def __init__(self, args: Any, kwargs: Any, num_samples: int) -> None:
        args, kwargs = _without_caches(args), _without_caches(kwargs)
        first = _main(args, kwargs)
        size = first.size(0) if first is not None and first.dim() > 1 else None  # a vector is one sample

        batched: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_nested:
                return _nested([part.detach().clone() for part in tensor.unbind()[:num_samples]], tensor)
            if size is None or not tensor.dim() or tensor.shape[0] != size:
                return tensor.detach().clone()
            batched.append(tensor[:num_samples].detach().clone())
            return batched[-1]

        self._args, self._kwargs = replace((args, kwargs), _once(keep))
        self._main = _main(self._args, self._kwargs)
        self._batched = {id(tensor) for tensor in batched}
        self.num_samples = min(num_samples, size) if size else 1

    def function(self, module: nn.Module, sample: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return a module as a function of one sample of its main input, and that sample."""
        main = self._main
        if main is None:
            raise UsageError(
                f"module {type(module).__name__} takes no floating tensor: expected one to differentiate by."
            )
        if not main.numel():
            raise UsageError(f"module {type(module).__name__} got an empty batch: expected at least one sample.")
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), main.dtype)

        def cut(tensor: Tensor) -> Tensor:
            if tensor.is_nested:
                part = tensor.unbind()[sample].unsqueeze(0)
            elif id(tensor) in self._batched:
                part = tensor[sample : sample + 1]
            else:
                part = tensor
            return part.to(dtype) if part.is_floating_point() else part

        def argument(tensor: Tensor, x: Tensor) -> Tensor:
            part = x if tensor is main else cut(tensor)
            return _nested([part.squeeze(0)], tensor) if tensor.is_nested else part

        def run(x: Tensor) -> Tensor:
            args, kwargs = replace((self._args, self._kwargs), lambda tensor: argument(tensor, x))
            output = first_floating(module(*args, **kwargs))
            if output is None:
                raise UsageError(f"module {type(module).__name__} returns no floating tensor: expected one.")
            return unnested(output)

        return run, cut(main)


class BlockInputs:
    """Hooks that keep the inputs of blocks during forward passes that have a graph."""

    def __init__(self, blocks: Mapping[str, nn.Module], changes: Changes, num_samples: int = 1) -> None:
        self._calls: dict[str, BlockCall] = {}
        self._num_samples = num_samples
        self._faults = Faults()
        for name, block in blocks.items():
            hook = ModuleHook(block, self._faults.guarded(partial(self._keep, name)))
            changes.hook(block.register_forward_pre_hook, hook, with_kwargs=True)

    @property
    def calls(self) -> Mapping[str, BlockCall]:
        """Return the last call of each block."""
        self._faults.check()
        return self._calls

    def _keep(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._calls[name] = BlockCall(args, kwargs, self._num_samples)


def _main(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first floating tensor of the positional arguments, else of the others."""
    for value in (args, kwargs):
        found = [tensor for tensor in tensors(value) if tensor.is_floating_point()]
        if found:
            return found[0]
    return None


def _nested(parts: list[Tensor], like: Tensor) -> Tensor:
    """Make a nested tensor of the same kind as another one, through which gradients flow."""
    made: Tensor = torch.nested.as_nested_tensor(parts, layout=like.layout)
    return made


def _without_caches(values: Any) -> Any:
    """Return arguments without the caches of keys and values among them, which a second run would add to."""
    if isinstance(values, dict):
        return {name: None if _is_cache(value) else value for name, value in values.items()}
    return tuple(None if _is_cache(value) else value for value in values)


def _is_cache(value: object) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change a tensor that is passed twice once, so that it stays one tensor."""
    done: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = change(tensor)
        return done[id(tensor)]

    return changed
