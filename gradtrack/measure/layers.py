"""What a module is and owns, seen through parametrizations, which give each module a class and parts of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn
from torch.nn.utils import parametrize

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


def _is_parametrized(module: nn.Module) -> bool:
    """Ask torch only where it may be, since it looks for an attribute that other modules do not have."""
    return _PARAMETRIZATIONS in module._modules and parametrize.is_parametrized(module)
