"""Four small trainings of unlike kinds, each with dropout or batch statistics, that end in everything they moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributions as td
from torch import Tensor, nn

from gradtrack import GradientManager
from tests.analyzers.transformer.attention_models import SmallGPT, ids, language_loss

Losses = Callable[[int, GradientManager | None], Iterator[Tensor]]


class Residual(nn.Module):
    """A residual block with batch statistics, dropout and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        found: Tensor = x + self.dropout(self.activation(self.norm(self.convolution(x))))
        return found


class Reader(nn.Module):
    """A stacked LSTM with dropout between its layers, and three blocks after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 6), nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read the last output."""
        found: Tensor = self.head(self.blocks(self.rnn(self.embed(tokens))[0][:, -1]))
        return found


class PolicyNetwork(nn.Module):
    """An actor and a critic on a trunk of three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(5, 8), *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)) for _ in range(3))
        )
        self.actor, self.critic = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values."""
        hidden = self.trunk(states).relu()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def convolutional() -> tuple[nn.Module, Losses]:
    """Return a CNN of four blocks that trains on two micro-batches a step."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(*(Residual() for _ in range(4))), nn.Flatten(), nn.Linear(4 * 36, 3)
    )

    def losses(step: int, manager: GradientManager | None) -> Iterator[Tensor]:
        for _ in range(2):
            yield nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(3, (4,)))

    return model, losses


def recurrent() -> tuple[nn.Module, Losses]:
    """Return an LSTM that names sequences."""
    model = Reader()

    def losses(step: int, manager: GradientManager | None) -> Iterator[Tensor]:
        yield nn.functional.cross_entropy(model(torch.randint(11, (6, 9))), torch.randint(3, (6,)))

    return model, losses


def language() -> tuple[nn.Module, Losses]:
    """Return a GPT of three blocks with dropout in its attention."""
    model = SmallGPT(depth=3, dropout=0.1)

    def losses(step: int, manager: GradientManager | None) -> Iterator[Tensor]:
        yield language_loss(model(ids(step)))

    return model, losses


def policy() -> tuple[nn.Module, Losses]:
    """Return an actor-critic that samples its actions and shows its distribution."""
    model = PolicyNetwork()

    def losses(step: int, manager: GradientManager | None) -> Iterator[Tensor]:
        logits, values = model(torch.randn(16, 5))
        found = td.Categorical(logits=logits)
        actions = found.sample()  # type: ignore[no-untyped-call]
        advantages = torch.randn(16)
        if manager is not None:
            observer: Any = manager.analyzer("rl_policy")
            observer.observe(found, episode_return=float(step), values=values, returns=advantages)
        yield (values - advantages).square().mean() - (found.log_prob(actions) * advantages).mean()  # type: ignore[no-untyped-call]

    return model, losses


TRAININGS = {"CNN": convolutional, "LSTM": recurrent, "GPT": language, "policy": policy}


def train(
    name: str, manager: GradientManager, kind: type[torch.optim.Optimizer], *, watched: Collection[str] = ()
) -> list[Tensor]:
    """Train for fifty steps; return weights, buffers, gradients, moments and the state of every random generator.

    `watched` names the analyzers that the manager has: some are shown what only the loop knows.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model, losses = TRAININGS[name]()
    optimizer: Any = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    manager.attach(model, optimizer)
    if "vector" in watched:
        observer: Any = manager.analyzer("vector")
        observer.observe(lambda: next(losses(0, None)))
    for step in range(50):
        optimizer.zero_grad()
        micro_batches = 2 if name == "CNN" else 1
        for index, loss in enumerate(losses(step, manager if "rl_policy" in watched else None), start=1):
            manager.step(model, optimizer, loss, accumulate=index < micro_batches)
        optimizer.step()
    moments = [torch.as_tensor(value) for state in optimizer.state.values() for value in state.values()]
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    numbers: Any = np.random.get_state()
    others = [torch.from_numpy(numbers[1].astype(np.int64)), torch.tensor(random.getstate()[1])]
    return [*model.state_dict().values(), *gradients, *moments, torch.get_rng_state(), *others]
