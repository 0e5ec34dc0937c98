"""The chain of blocks of a model: which one is found, and how it can be named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from gradtrack.analyzers.tools.modules import describe_chain, find_chain
from gradtrack.errors import UsageError


class Block(nn.Module):
    """A block with parameters, and experts if asked."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: Tensor) -> Any:
        """Run the block."""
        return self.linear(x)


def test_the_largest_list_of_one_type_is_the_chain() -> None:
    """Of several lists the one with the most blocks of one type is taken; what stands between them is left out."""
    model = nn.ModuleDict(
        {
            "heads": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
            "layers": nn.ModuleList(Block() for _ in range(5)),
            "mixed": nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)),
        }
    )
    assert list(find_chain(model)) == [f"layers.{index}" for index in range(5)]
    assert list(find_chain(model["mixed"])) == ["0", "2", "4"]
    assert describe_chain(find_chain(model)) == "a chain of 5 Block blocks, layers.0 to layers.4"


def test_experts_inside_of_blocks_are_no_chain() -> None:
    """A longer list that lies in a block of a chain is not taken."""
    model = nn.ModuleDict({"layers": nn.ModuleList(Block(experts=8) for _ in range(3))})
    assert list(find_chain(model)) == ["layers.0", "layers.1", "layers.2"]


def test_the_stages_of_a_network_are_one_chain() -> None:
    """Containers that lie side by side are joined where their blocks are of one type."""
    model = nn.ModuleDict({f"stage{index}": nn.Sequential(Block(), Block()) for index in range(3)})
    assert list(find_chain(model)) == [f"stage{stage}.{index}" for stage in range(3) for index in range(2)]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.LSTM(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_a_shallow_model_has_none(model: nn.Module) -> None:
    """Under three blocks there is no chain."""
    assert find_chain(model) == {}


def test_blocks_can_be_named() -> None:
    """A regular expression matches whole names; a list keeps its order; what matches nothing is an error."""
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(12)), "head": nn.Linear(2, 2)})
    assert list(find_chain(model, r"layers\.1")) == ["layers.1"]
    assert list(find_chain(model, r"layers\.\d+")) == [f"layers.{index}" for index in range(12)]
    assert list(find_chain(model, ["layers.3", "head"])) == ["layers.3", "head"]
    with pytest.raises(UsageError, match=r"blocks 'block\.': expected a regular expression"):
        find_chain(model, "block.")
    with pytest.raises(UsageError, match=r"block 'tail'.*Among them are layers"):
        find_chain(model, ["tail"])
