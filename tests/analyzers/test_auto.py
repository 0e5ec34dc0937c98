"""`analyzers: auto` looks at the model, picks, and says what it picked and why."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, RLPolicyAnalyzer
from gradtrack.analyzers.recurrent.recorder import recurrent_modules
from tests.analyzers.watched_trainings import TRAININGS
from tests.training import optimizer_of

EVERY = {"flow": "every model", "gain": "blocks", "loss_graph": "a loss", "updates": "every training"}
PICKED = {
    "CNN": EVERY,
    "LSTM": {**EVERY, "recurrent": "LSTM"},
    "GPT": {**EVERY, "transformer": "Attention"},
    "policy": {**EVERY, "rl_policy": "PolicyNetwork"},
}


@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_the_first_report_says_what_was_picked_and_why(name: str) -> None:
    """Each kind of model gets its analyzers and no others, with the reason, in the first report only."""
    torch.manual_seed(0)
    model, losses = TRAININGS[name]()
    manager, optimizer = GradientManager(analyzers="auto"), optimizer_of(model)
    first, second = (manager.step(model, optimizer, next(losses(step, None))) for step in range(2))
    said = dict(re.findall(r"analyzer (\w+) was chosen: (.*)", "\n".join(first.notes)))
    assert said.keys() == PICKED[name].keys()
    assert all(reason in said[analyzer] for analyzer, reason in PICKED[name].items()), said
    assert not any("was chosen" in note for note in second.notes)


class CellGraph(nn.Module):
    """A layer of a graph of cells, which is nothing recurrent."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Pass messages."""
        return edges @ x


class Cell(nn.Module):
    """A building block of a network that was searched for, with two inputs."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Add them up."""
        return first + second


class LeakyCell(nn.Module):
    """A recurrent cell of one's own."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Leak."""
        return 0.9 * hidden + x


def test_cells_are_known_by_their_names_and_what_they_take() -> None:
    """A word in a name is not enough: a recurrent cell is called one, and takes a state."""
    found = recurrent_modules(nn.ModuleDict({"graph": CellGraph(), "block": Cell(), "leaky": LeakyCell()}))
    assert found == ["leaky"]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("FeatureExtractor", False),
        ("Reactor", False),
        ("ContractorNet", False),
        ("Reagent", False),
        ("Actor", True),
        ("SACActor", True),
        ("actor_net", True),
        ("my_agent", True),
        ("PPOAgent", True),
        ("mlppolicy", True),
        ("ActorCriticPolicy", True),
    ],
)
def test_an_actor_is_a_word_of_a_name(name: str, chosen: bool) -> None:
    """An extractor and a reactor are no policies."""
    model = nn.Sequential(type(name, (nn.Module,), {})())
    assert (RLPolicyAnalyzer.suits(model) is not None) is chosen
