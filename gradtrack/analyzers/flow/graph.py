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
        self._parents = [[parent for parent, _ in node.parents] for node in nodes]
        self.children: list[list[int]] = [[] for _ in nodes]
        self.after: list[list[str]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            for parent, ops in node.parents:
                if node.delta is not None:
                    self.children[parent].append(index)
                self.after[parent].append(ops[0])

    def _chained(self) -> set[str]:
        """Return the modules that feed themselves.

        One without parameters, as a ReLU or a Dropout that several layers share, does so only where no layer with
        parameters lies between its calls: else these layers are what follows one another.
        """
        if len({node.name for node in self.nodes}) == len(self.nodes):
            return set()
        found: set[str] = set()
        above: list[frozenset[str]] = []
        passed: list[frozenset[str]] = []  # those of them after which a layer with parameters came
        for node in self.nodes:
            names = frozenset().union(*(above[parent] | {self.nodes[parent].name} for parent, _ in node.parents))
            layers = (parent for parent, _ in node.parents if self.nodes[parent].parametric)
            left = frozenset().union(*(passed[parent] for parent, _ in node.parents), *(above[one] for one in layers))
            above.append(names)
            passed.append(left)
            if node.name in names and (node.parametric or node.name not in left):
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
        layers = set(own)
        fed = {index for index in own if not layers.isdisjoint(_reached(self._parents[index], self._parents))}
        later = {self.nodes[index].name for index in fed}
        starts = [index for index in own if self.nodes[index].name not in later] or [i for i in own if i not in fed]
        found: dict[str, list[int]] = {}
        for index in starts:
            if self.nodes[index].name not in found:
                found[self.nodes[index].name] = self.path(index)
        return found

    def path(self, index: int) -> list[int]:
        """Return the calls from one to the loss, each time taking the one with the largest gradient."""
        found = [index]
        while self.children[found[-1]]:
            found.append(max(self.children[found[-1]], key=lambda child: self.delta[child]))
        return found

    @cached_property
    def normalised(self) -> set[str]:
        """Return the modules whose output goes into a normalisation and nowhere else."""
        used = [(node.name, all(map(_is_norm, ops))) for node, ops in zip(self.nodes, self.after, strict=True) if ops]
        return {name for name, only in used if only} - {name for name, only in used if not only}

    def turns(self, path: Sequence[int]) -> tuple[str, int]:
        """Return the module of a path that feeds itself most often and its calls there; no name where there is none."""
        calls = Counter(self.nodes[index].name for index in path if self.nodes[index].name in self.chained)
        return max(calls.items(), key=lambda item: item[1], default=("", 0))

    def gammas(self, path: Sequence[int]) -> dict[str, float]:
        """Return for each layer of a path the gradient at its output over that at the last layer's."""
        if path[0] not in self._gammas:
            layers = {self.nodes[index].name: self.delta[index] for index in path if self.nodes[index].parametric}
            last = next(reversed(layers.values()), 0.0)
            self._gammas[path[0]] = {name: delta / last for name, delta in layers.items()} if last > 0 else {}
        return self._gammas[path[0]]

    def separates(self, name: str, path: Sequence[int]) -> bool:
        """Whether every way from the beginning of a path to its end leads through a module."""
        passed = [[child for child in children if self.nodes[child].name != name] for children in self.children]
        starts = [path[0]] if self.nodes[path[0]].name != name else []
        return not any(index == path[-1] or not self.children[index] for index in _reached(starts, passed))


def _reached(starts: Sequence[int], edges: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the calls that can be reached along edges, the starts among them."""
    stack, seen = list(starts), set[int]()
    while stack:
        index = stack.pop()
        if index not in seen:
            seen.add(index)
            stack += edges[index]
            yield index


def _is_norm(function: str) -> bool:
    """Whether a function of autograd normalises, and does not only tell how long something is."""
    return "Norm" in function and not function.startswith(_LENGTHS)
