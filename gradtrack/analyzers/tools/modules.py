"""Modules and the tensors that go through them: found in what calls take and return, named, and grouped into blocks."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradtrack.errors import UsageError
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


_FEWEST: Final = 3
Blocks = str | Sequence[str] | None


def find_chain(model: nn.Module, blocks: Blocks = None) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, from input to output; empty where it has no chain.

    `blocks` names them, or is a regular expression that their whole names match. Without it the chain is the largest
    number, at least three, of modules of one type in the same `ModuleList` or `Sequential`; modules with children are
    also joined from several containers that lie side by side, as the stages of a ResNet do. A list inside a block of a
    chain, like that of its experts, is not looked at.
    """
    if blocks is not None:
        return _named(model, blocks)
    found = [chain for chain in _candidates(model).values() if len(chain) >= _FEWEST]
    inside = [chain for chain in found if not any(_contains(other, chain) for other in found)]
    return max(inside, key=lambda chain: (len(chain), _size(chain)), default={})


def describe_chain(chain: dict[str, nn.Module]) -> str:
    """Say what a chain consists of."""
    names = list(chain)
    return f"a chain of {len(chain)} {kind_of(chain[names[0]]).__name__} blocks, {names[0]} to {names[-1]}"


def _candidates(model: nn.Module) -> dict[tuple[str, type[nn.Module]], dict[str, nn.Module]]:
    """Collect the children of containers by the place of the container and by their own type."""
    found: dict[tuple[str, type[nn.Module]], dict[str, nn.Module]] = defaultdict(dict)
    for path, container in layers(model):
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        stages = path.rpartition(".")[0] if path else ""
        for key, child in container.named_children():
            if any(True for _ in child.parameters()) and not isinstance(child, torch.jit.ScriptModule):
                place = stages if has_parts(child) else f"{path}:"
                found[place, kind_of(child)][f"{path}.{key}" if path else key] = child
    return found


def _contains(outer: dict[str, nn.Module], inner: dict[str, nn.Module]) -> bool:
    return outer is not inner and any(name.startswith(f"{owner}.") for name in list(inner)[:1] for owner in outer)


def _size(chain: dict[str, nn.Module]) -> int:
    return sum(param.numel() for module in chain.values() for param in module.parameters())


def _named(model: nn.Module, blocks: str | Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if isinstance(blocks, str):
        names = [name for name in modules if name and re.fullmatch(blocks, name)]
        if not names:
            raise UsageError(f"blocks {blocks!r}: expected a regular expression that matches the names of modules.")
    else:
        names = list(blocks)
    for name in names:
        if name not in modules:
            some = ", ".join(list(modules)[1:8])
            raise UsageError(f"block {name!r}: expected the name of a module of the model. Among them are {some}.")
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise UsageError(f"block {name!r} is a script, which takes no hook: expected an ordinary module.")
    return {name: modules[name] for name in names}
