"""Modules and the tensors that go through them: found in what calls take and return, named, and grouped into layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradtrack.support.interrupts import Changes

_DEEPEST: Final = 8


def tensors(value: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors in a nested value, in its own order."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in _parts(value):
            yield from tensors(part, depth - 1)


def floating(value: Any) -> Iterator[Tensor]:
    """Yield the real and complex floating tensors in a nested value."""
    return (tensor for tensor in tensors(value) if tensor.is_floating_point() or tensor.is_complex())


def first_floating(value: Any) -> Tensor | None:
    """Return the first floating tensor that requires a gradient, else the first floating one, else None."""
    found = list(floating(value))
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def unnested(tensor: Tensor) -> Tensor:
    """Return the rows of all parts of a nested tensor one after the other, and any other tensor as it is."""
    if not tensor.is_nested:
        return tensor
    parts = tensor.unbind()
    widths = {part.shape[-1] if part.dim() > 1 else 1 for part in parts}
    width = widths.pop() if len(widths) == 1 else 1
    return torch.cat([part.reshape(-1, width) for part in parts]) if parts else tensor.new_zeros(0, width)


def replace(value: Any, change: Callable[[Tensor], Any], depth: int = _DEEPEST) -> Any:
    """Return a nested value with every tensor changed; what is not a tuple, list or mapping stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if not depth:
        return value
    if isinstance(value, Mapping):
        return {key: replace(part, change, depth - 1) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [replace(part, change, depth - 1) for part in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts)
    return value


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name)
    elif isinstance(data := getattr(value, "data", None), Tensor):
        yield data


_PARAMETRIZATIONS: Final = "parametrizations"


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made from."""
    if not _is_parametrized(module):
        return type(module)
    found: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return found


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module itself, and those that its parametrized ones are computed from."""
    yield from module.parameters(recurse=False)
    if _is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def owns_parameters(module: nn.Module) -> bool:
    """Say whether a module itself has parameters, parametrized ones too."""
    own = any(param is not None for param in module._parameters.values())
    return own or (_is_parametrized(module) and next(own_parameters(module), None) is not None)


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, but not what computes parameters, which is no layer."""
    for name, module in model.named_modules():
        if _PARAMETRIZATIONS not in name.split("."):
            yield name, module


def has_parts(module: nn.Module) -> bool:
    """Say whether a module consists of others, its parametrizations not counted."""
    return any(part is not None and name != _PARAMETRIZATIONS for name, part in module._modules.items())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module as in evaluation, so that it advances no buffer and draws no number; put back every part's mode."""
    with Changes() as changes:
        for part in module.modules():
            changes.note(partial(setattr, part, "training", part.training))
            part.training = False
        yield


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module itself is compiled, so that no hook can look inside."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _is_parametrized(module: nn.Module) -> bool:
    """Ask torch only where it may be, since it looks for an attribute that other modules do not have."""
    return _PARAMETRIZATIONS in module._modules and parametrize.is_parametrized(module)
