"""The trainings that the pictures show, each a few seconds long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.gan import network
from examples.gpt import LENGTH, VOCABULARY, Gpt
from gradtrack import GradientManager, RLPolicyAnalyzer, StepReport, safe_backward


class Deep(nn.Module):
    """A classifier of many layers."""

    def __init__(self, width: int = 32, depth: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores


def faulty(
    directory: Path, steps: int = 160, *, is_faulty: bool = True, backends: Sequence[Any] = ("json",)
) -> list[StepReport]:
    """Train a deep classifier whose learning rate becomes far too high early, with a bad batch later on."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plane = torch.randn(16, 4)
    with GradientManager(
        backends=list(backends),
        analyzers=["flow", "gain"],
        run_dir=directory,
        grad_log_every_n_steps=1,
        save_html_report=True,
    ) as manager:
        for step in range(1, steps + 1):
            x = torch.randn(64, 16)
            target = (x @ plane).argmax(1)
            if is_faulty and step == steps * 3 // 4:
                x[3, 5] = torch.inf
            if is_faulty and step == steps // 10:
                optimizer.param_groups[0]["lr"] = 8.0
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), target)
            safe_backward(loss, model, optimizer, manager, batch=f"batch {step}")
            optimizer.step()
    return manager.reports


def untrained(directory: Path, steps: int = 40) -> list[StepReport]:
    """Begin to train the deep classifier, whose gradients shrink on their way back."""
    return faulty(directory, steps, is_faulty=False)


def language_model(directory: Path, steps: int = 400) -> list[StepReport]:
    """Train a small GPT that is healthy."""
    torch.manual_seed(0)
    model = Gpt(width=48, depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with GradientManager(
        backends=["json"], analyzers="auto", run_dir=directory, grad_log_every_n_steps=2, save_html_report=True
    ) as manager:
        manager.attach(model, optimizer)
        for _ in range(steps):
            start, stride = torch.randint(0, VOCABULARY, (16, 1)), torch.randint(1, 4, (16, 1))
            tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
            optimizer.zero_grad()
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            safe_backward(loss, model, optimizer, manager)
            optimizer.step()
    return manager.reports


class Memory(nn.Module):
    """An LSTM that has to give back the first number that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 48, batch_first=True)
        self.readout = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the answer."""
        answer: Tensor = self.readout(self.lstm(x)[0][:, -1])
        return answer


def recurrent(directory: Path, steps: int = 300, length: int = 30) -> list[StepReport]:
    """Train an LSTM on a memory of thirty steps."""
    torch.manual_seed(0)
    model = Memory()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with GradientManager(
        backends=["json"], analyzers="auto", run_dir=directory, grad_log_every_n_steps=2, save_html_report=True
    ) as manager:
        manager.attach(model, optimizer, horizon=length)
        for _ in range(steps):
            x = torch.randn(32, length, 2)
            optimizer.zero_grad()
            safe_backward(nn.functional.mse_loss(model(x), x[:, 0, :1]), model, optimizer, manager)
            optimizer.step()
    return manager.reports


def policy(directory: Path, updates: int = 250) -> list[StepReport]:
    """Train a policy on a game in which the first good action is not the best one, without a bonus for exploring."""
    torch.manual_seed(1)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 6))
    optimizer = torch.optim.Adam(actor.parameters(), lr=0.02)
    analyzer = RLPolicyAnalyzer(actor)
    with GradientManager(
        backends=["json"], analyzers=[analyzer], run_dir=directory, grad_log_every_n_steps=2, save_html_report=True
    ) as manager:
        for _ in range(updates):
            states = torch.randn(128, 4)
            choices = actor(states).log_softmax(-1)
            actions = torch.multinomial(choices.detach().exp(), 1).squeeze(1)
            rewards = (actions == 0) * 0.5 + (actions == 1 + (states[:, 0] > 0).long()) * 1.0
            rewards = rewards + 0.3 * torch.randn(128)
            analyzer.observe(choices, episode_return=float(rewards.mean()))
            optimizer.zero_grad()
            loss = -(choices.gather(1, actions[:, None]).squeeze(1) * (rewards - rewards.mean())).mean()
            safe_backward(loss, actor, optimizer, manager)
            optimizer.step()
    return manager.reports


def game(directory: Path, steps: int = 300) -> list[StepReport]:
    """Train the two networks of a GAN."""
    torch.manual_seed(0)
    networks = {"generator": network(4, 2), "discriminator": network(2, 1)}
    optimizers = {name: torch.optim.Adam(one.parameters(), lr=1e-3) for name, one in networks.items()}
    judge = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    with GradientManager(
        backends=["json"], analyzers=["updates"], run_dir=directory, grad_log_every_n_steps=2, save_html_report=True
    ) as manager:
        for name, one in networks.items():
            manager.attach(one, optimizers[name], name=name)
        generator, discriminator = networks.values()
        for _ in range(steps):
            real, fake = torch.randn(64, 2) * 0.5 + 1, generator(torch.randn(64, 4))
            for name in ("discriminator", "generator"):
                if name == "discriminator":
                    loss = judge(discriminator(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
                else:
                    loss = judge(discriminator(fake), ones)
                optimizers[name].zero_grad()
                safe_backward(loss, networks[name], optimizers[name], manager)
                optimizers[name].step()
    return manager.reports
