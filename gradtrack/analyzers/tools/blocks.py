"""The chain of blocks that a deep model consists of, found by the types of its modules or by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from gradtrack.analyzers.tools.modules import has_parts, kind_of, layers
from gradtrack.errors import UsageError

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
