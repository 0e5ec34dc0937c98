"""Faulty runs of policies, attention, recurrent states and games."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.corner.agents import SEEN
from benchmarks.diagnosis.corner.book import adam, counting, dense, dice, echo, faulty, fit, from_step, normal, sgd
from benchmarks.diagnosis.corner.series import Reader, Teller
from benchmarks.diagnosis.run import Run
from gradtrack import GradientManager

Reward = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def _chooser(reward: Reward, rate: float, bonus: float, actions: int = 5, **options: Any) -> Run:
    model = dense(6, 32, 32, actions, act=nn.Tanh)
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        x = normal(3_000_000 + step, 64, 6)
        logits = model(x)
        logs = logits.log_softmax(-1)
        chosen = torch.multinomial(logs.exp().detach(), 1, generator=dice(3_100_000 + step))[:, 0]
        gained = reward(x, chosen, dice(3_200_000 + step))
        kept.update(logits=logits.detach(), gained=float(gained.mean()))
        gain = (gained - gained.mean()) / (gained.std() + 1e-6)
        spread = -(logs.exp() * logs).sum(-1).mean()
        return -(gain * logs.gather(1, chosen[:, None])[:, 0]).mean() - bonus * spread

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=kept["gained"])

    return Run(
        model=model, forward=forward, optimizer=adam(model, rate), observe=observe, settings=dict(SEEN), **options
    )


@faulty("policy/certain_of_nothing", "ENTROPY_COLLAPSE", ".*", "INSUFFICIENT_EXPLORATION", "LR_TOO_HIGH")
def certain() -> Run:
    return _chooser(lambda x, chosen, source: torch.randn(64, generator=source), 0.05, 0.0, steps=60)


@faulty("policy/bonus_drowns_the_reward", "OVER_EXPLORATION", ".*")
def drowned() -> Run:
    return _chooser(lambda x, chosen, source: (chosen == x[:, :5].argmax(-1)).float(), 1e-3, 20.0, steps=80)


@faulty("policy/rewards_have_the_wrong_sign_of_bonus", "ENTROPY_COLLAPSE", ".*", "INSUFFICIENT_EXPLORATION")
def wrong_sign() -> Run:
    return _chooser(lambda x, chosen, source: torch.randn(64, generator=source), 3e-3, -2.0, steps=80)


@faulty("attention/scores_thirty_times_too_large", "ATTN_ENTROPY_COLLAPSE", r"blocks")
def sharp() -> Run:
    model = Teller(3)
    for block in model.blocks:
        block.attend.in_proj_weight.data[:64].mul_(30)
    return fit(model, adam(model, 1e-3), counting)


@faulty("attention/second_block_only", "ATTN_ENTROPY_COLLAPSE", r"blocks\.1")
def sharp_second() -> Run:
    model = Teller(3)
    model.blocks[1].attend.in_proj_weight.data[:64].mul_(40)
    return fit(model, adam(model, 1e-3), counting)


@faulty("attention/scores_leap_at_thirty", "ATTN_ENTROPY_COLLAPSE", r"blocks\.0", "EXPLODING")
def sharp_late() -> Run:
    model = Teller(2)
    run = fit(model, adam(model, 1e-3), counting, steps=60)
    return from_step(run, 30, lambda: model.blocks[0].attend.in_proj_weight.data[:64].mul_(60))


@faulty("attention/heads_drawn_once_and_copied", "HEAD_REDUNDANCY", r"blocks")
def copied_heads() -> Run:
    model = Teller(2)
    for block in model.blocks:
        for start in (0, 32, 64):
            part = block.attend.in_proj_weight.data[start : start + 32]
            part.copy_(3 * part[:8].repeat(4, 1))
    return fit(model, sgd(model, 1e-3), counting)


class Bare(nn.Module):
    """Attention after attention with nothing led around it."""

    def __init__(self, depth: int = 8, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(24, width)
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return self.head(x)


@faulty("attention/eight_layers_and_no_skip", "RANK_COLLAPSE", r"layers|^$", "VANISHING", "BOTTLENECK")
def bare() -> Run:
    model = Bare()
    return fit(model, adam(model, 1e-4), counting)


def _recalls(cell: str, gain: float, length: int, **options: Any) -> Run:
    model = nn.ModuleDict({"core": getattr(nn, cell)(3, 32, batch_first=True), "head": nn.Linear(32, 2)})
    with torch.no_grad():
        for part in model["core"].weight_hh_l0.split(32):
            nn.init.orthogonal_(part, gain)

    def forward(step: int) -> Tensor:
        x, y = echo(step, length=length, lag=length - 1)
        return F.cross_entropy(model["head"](model["core"](x)[0][:, -1]), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), horizon=length - 1, **options)


@faulty("recurrent/memory_of_a_third_per_step", "SHORT_MEMORY", r"core", "VANISHING")
def forgetful() -> Run:
    return _recalls("RNN", 0.35, 30)


@faulty("recurrent/lstm_that_forgets_at_once", "SHORT_MEMORY", r"core", "VANISHING")
def closed_gates() -> Run:
    run = _recalls("LSTM", 0.3, 40)
    run.model["core"].bias_ih_l0.data[32:64] = -3.0  # type: ignore[index, operator, union-attr]
    return run


@faulty("recurrent/chaos_by_a_gain_of_four", "SUPERCRITICAL", r"core", "EXPLODING")
def chaotic() -> Run:
    model = nn.ModuleDict({"core": nn.RNN(3, 64, batch_first=True), "head": nn.Linear(64, 2)})
    nn.init.normal_(model["core"].weight_hh_l0, std=4.0 / 8)

    def forward(step: int) -> Tensor:
        x, y = echo(step, length=50)
        return F.cross_entropy(model["head"](model["core"](0.1 * x)[0][:, -1]), y)

    return Run(model=model, forward=forward, optimizer=sgd(model, 1e-4), horizon=50)


@faulty("recurrent/reader_of_letters_with_a_gain_of_five", "SUPERCRITICAL", r"core", "EXPLODING", "SATURATION")
def reader() -> Run:
    model = Reader("RNN", 64)
    nn.init.normal_(model.core.weight_hh_l0, std=5.0 / 8)
    return fit(model, sgd(model, 1e-3), lambda step: counting(step, length=40), horizon=40)


def _players(rate: float, mix: Tensor) -> Run:
    model = nn.ParameterDict({"one": torch.ones(len(mix)), "two": torch.full((len(mix),), 0.5)})

    def value() -> Tensor:
        return model["one"] @ mix @ model["two"]

    def forward(_: int) -> Tensor:
        return model["one"] @ mix @ model["two"].detach() - model["one"].detach() @ mix @ model["two"]

    def observe(manager: GradientManager) -> None:
        manager.analyzer("vector").observe({"one": ([model["one"]], value), "two": ([model["two"]], lambda: -value())})

    settings = {"analyzers": ["flow", "vector"]}
    return Run(model=model, forward=forward, optimizer=sgd(model, rate), observe=observe, settings=settings)


@faulty("game/two_players_of_three_numbers", "ROTATION", ".*", "UNSTABLE")
def three_numbers() -> Run:
    return _players(0.15, torch.linalg.qr(normal(22, 3, 3))[0])


@faulty("game/unobserved_players_that_go_round", "ROTATION", ".*", "UNSTABLE", "LR_TOO_HIGH")
def unobserved() -> Run:
    run = _players(0.2, torch.eye(2))
    run.observe, run.settings = None, {"analyzers": ["flow"]}
    run.steps = 80
    return run
