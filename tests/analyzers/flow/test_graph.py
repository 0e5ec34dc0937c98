"""The graph of calls: which modules feed themselves, and in what the distance of a gradient is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientFlowAnalyzer, Issue, IssueType
from gradtrack.analyzers.flow.call import Node
from gradtrack.analyzers.flow.graph import FlowGraph


def graph(*calls: str) -> FlowGraph:
    """Return a graph of calls, written as "name<parents"; a name in capitals has parameters."""
    nodes = []
    for call in calls:
        name, _, parents = call.partition("<")
        fed: list[tuple[int, tuple[str, ...]]] = [(int(parent), ("Add",)) for parent in parents.split(",") if parent]
        nodes.append(Node(name, "Linear", name.isupper(), 1, 4, fed, delta=1.0))
    return FlowGraph(nodes)


@pytest.mark.parametrize(
    ("calls", "chained"),
    [
        (("A", "relu<0", "B<1", "relu<2", "C<3"), set()),
        (("A", "relu<0", "B<1", "relu<2,1", "C<3"), set()),
        (("A", "A<0", "A<1"), {"A"}),
        (("A", "relu<0", "A<1", "relu<2"), {"A"}),
        (("X", "tanh<0", "X", "tanh<1,2", "X", "tanh<3,4"), {"tanh"}),
        (("relu", "relu<0", "A<1"), {"relu"}),
        (("A", "B", "relu<0", "relu<1"), set()),
    ],
)
def test_which_modules_feed_themselves(calls: tuple[str, ...], chained: set[str]) -> None:
    """A module without parameters that layers share does not, nor one on a skip connection past a layer."""
    assert graph(*calls).chained == chained


class Shared(nn.Module):
    """A deep network of sigmoids that all layers share, with a Dropout that they share as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.act, self.drop, self.head = nn.Sigmoid(), nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = self.drop(self.act(layer(x)))
        found: Tensor = self.head(x)
        return found


class Unrolled(nn.Module):
    """One layer that feeds itself, with the same modules behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.act, self.drop, self.head = nn.Linear(16, 16), nn.Sigmoid(), nn.Dropout(0.1), nn.Linear(16, 1)
        self.read = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer over and over."""
        x = self.read(x)
        for _ in range(12):
            x = self.drop(self.act(self.cell(x)))
        found: Tensor = self.head(x)
        return found


def vanishing(kind: Callable[[], nn.Module]) -> Issue:
    """Return the issue of a model whose gradient vanishes."""
    torch.manual_seed(0)
    issues = GradientFlowAnalyzer(kind()).analyze(
        input_fn=lambda: torch.randn(32, 16), loss_fn=lambda output: output.square().mean(), steps=5
    )
    (found,) = [issue for issue in issues if issue.issue_type is IssueType.VANISHING]
    return found


def test_what_layers_share_is_no_recurrence() -> None:
    """The distance is counted in layers, and no weights of a Dropout are to be multiplied."""
    found = vanishing(Shared)
    assert "each of the 12 layers in between" in found.message
    assert "per layer (multiply the weights by" in found.recommendation


def test_a_layer_that_feeds_itself_is_one() -> None:
    """The distance is counted in the calls of that layer, not of what is behind it."""
    found = vanishing(Unrolled)
    assert "calls of cell (time steps)" in found.message
    assert "weights of cell by" in found.recommendation
