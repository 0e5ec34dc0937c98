"""The graph of module calls of one step, through which the gradient flows back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

from gradtrack.analyzers.flow.call import Node

_LENGTHS: Final = ("Norm", "LinalgVectorNorm", "LinalgMatrixNorm")


class FlowGraph:
    """The recorded calls that a gradient reached, which call feeds which, and the path that carries the most gradient.

    The calls of a module that feeds itself count together, so that a cell that is unrolled in time is one layer.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.chained = self._chained()
        self.delta = self._deltas()
        self._gammas: dict[int, dict[str, float]] = {}
        self.children: list[list[int]] = [[] for _ in nodes]
        self.after: list[list[str]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            for parent, ops in node.parents:
                if node.delta is not None:
                    self.children[parent].append(index)
                self.after[parent].append(ops[0])

    def _chained(self) -> set[str]:
        """Return the modules that feed themselves."""
        if len({node.name for node in self.nodes}) == len(self.nodes):
            return set()
        found: set[str] = set()
        above: list[frozenset[str]] = []
        for node in self.nodes:
            names = frozenset().union(*(above[parent] | {self.nodes[parent].name} for parent, _ in node.parents))
            above.append(names)
            if node.name in names:
                found.add(node.name)
        return found

    def _deltas(self) -> list[float]:
        """Return the gradient at every call; where a module feeds itself, for every module that of all its calls."""
        if not self.chained:
            return [node.delta or 0.0 for node in self.nodes]
        squares: dict[str, float] = {}
        for node in self.nodes:
            squares[node.name] = squares.get(node.name, 0.0) + (node.delta or 0.0) ** 2
        return [math.sqrt(squares[node.name]) for node in self.nodes]

    @cached_property
    def paths(self) -> dict[str, list[int]]:
        """Return, for each parametric module that no other one feeds in any call, the calls from it to the loss.

        The first call of a part of a recurrent model starts from a state that nothing has fed yet.
        """
        own = [index for index, node in enumerate(self.nodes) if node.parametric and node.delta is not None]
        fed = {index for index in own if self._fed(index)}
        later = {self.nodes[index].name for index in fed}
        starts = [index for index in own if self.nodes[index].name not in later] or [i for i in own if i not in fed]
        found: dict[str, list[int]] = {}
        for index in starts:
            if self.nodes[index].name not in found:
                found[self.nodes[index].name] = self.path(index)
        return found

    def _fed(self, index: int) -> bool:
        stack, seen = [parent for parent, _ in self.nodes[index].parents], set()
        while stack:
            parent = stack.pop()
            if parent in seen:
                continue
            seen.add(parent)
            node = self.nodes[parent]
            if node.parametric and node.delta is not None:
                return True
            stack += [further for further, _ in node.parents]
        return False

    def path(self, index: int) -> list[int]:
        """Return the calls from one to the loss, each time taking the one with the largest gradient."""
        found = [index]
        while self.children[found[-1]]:
            found.append(max(self.children[found[-1]], key=lambda child: self.delta[child]))
        return found

    def layers(self, path: Sequence[int]) -> list[Node]:
        """Return the parametric calls of a path, each module once, the one next to the loss last."""
        found = {self.nodes[index].name: self.nodes[index] for index in path if self.nodes[index].parametric}
        return list(found.values())

    @cached_property
    def normalised(self) -> set[str]:
        """Return the modules whose output goes into a normalisation and nowhere else."""
        found = {node.name for node, ops in zip(self.nodes, self.after, strict=True) if ops and all(map(_is_norm, ops))}
        return found - {
            node.name for node, ops in zip(self.nodes, self.after, strict=True) if not all(map(_is_norm, ops))
        }

    def turns(self, path: Sequence[int]) -> tuple[str, int]:
        """Return the module of a path that feeds itself most often and its calls there; no name where there is none."""
        calls = Counter(self.nodes[index].name for index in path if self.nodes[index].name in self.chained)
        return max(calls.items(), key=lambda item: item[1], default=("", 0))

    def gammas(self, path: Sequence[int]) -> dict[str, float]:
        """Return for each layer of a path the gradient at its output over that at the last layer's."""
        known = self._gammas.get(path[0])
        if known is None:
            known = self._gammas[path[0]] = self._ratios(path)
        return known

    def _ratios(self, path: Sequence[int]) -> dict[str, float]:
        layers = {self.nodes[index].name: self.delta[index] for index in path if self.nodes[index].parametric}
        if not layers or not (last := list(layers.values())[-1]) > 0:
            return {}
        return {name: delta / last for name, delta in layers.items()}

    def separates(self, name: str, path: Sequence[int]) -> bool:
        """Whether every way from the beginning of a path to its end leads through a module."""
        stack, seen = [path[0]], set()
        while stack:
            index = stack.pop()
            if index in seen or self.nodes[index].name == name:
                continue
            if index == path[-1] or not self.children[index]:
                return False
            seen.add(index)
            stack += self.children[index]
        return True

    def calls(self) -> Iterator[tuple[str, list[Node]]]:
        """Return every module with its calls that a gradient reached, in forward order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.delta is not None:
                found.setdefault(node.name, []).append(node)
        yield from found.items()


def _is_norm(function: str) -> bool:
    """Whether a function of autograd normalises, and does not only tell how long something is."""
    return "Norm" in function and not function.startswith(_LENGTHS)
