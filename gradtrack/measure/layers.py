"""What a module is and owns, seen through parametrizations, which give each module a class and parts of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made from."""
    found: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return found


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module itself, and those that its parametrized ones are computed from."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, but not what computes parameters, which is no layer."""
    for name, module in model.named_modules():
        if "parametrizations" not in name.split("."):
            yield name, module


def has_parts(module: nn.Module) -> bool:
    """Say whether a module consists of others, its parametrizations not counted."""
    return any(name != "parametrizations" for name, _ in module.named_children())
