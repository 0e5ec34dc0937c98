"""Faulty runs of policies, attention, recurrent states and games."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, faulty, generator, learn, randn, sgd, stack, tokens, waves
from benchmarks.diagnosis.blind.supervised import Forecast, Small
from benchmarks.diagnosis.faults import at
from benchmarks.diagnosis.run import Run
from gradtrack import GradientManager

SEEN = {"analyzers": ["flow", "rl_policy"]}


def _categorical(reward: Any, rate: float, bonus: float = 0.0, returns: bool = True) -> Run:
    model = stack(6, 32, 32, 5, act=nn.Tanh)
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        x = randn(step, 64, 6)
        logits = model(x)
        logs = logits.log_softmax(-1)
        chosen = torch.multinomial(logs.exp().detach(), 1, generator=generator(step))
        gained = reward(x, chosen[:, 0], generator(step + 1))
        kept.update(logits=logits.detach(), gained=float(gained.mean()))
        gain = (gained - gained.mean()) / (gained.std() + 1e-6)
        spread = -(logs.exp() * logs).sum(-1).mean()
        return -(gain * logs.gather(1, chosen)[:, 0]).mean() - bonus * spread

    def observe(manager: GradientManager) -> None:
        told = {"episode_return": kept["gained"]} if returns else {}
        manager.analyzer("rl_policy").observe(kept["logits"], **told)

    return Run(model=model, forward=forward, optimizer=adam(model, rate), observe=observe, settings=dict(SEEN))


@faulty("policy_fault/collapse_on_noise", "ENTROPY_COLLAPSE", ".*", "LR_TOO_HIGH")
def collapse_on_noise() -> Run:
    return _categorical(lambda x, a, g: torch.randn(len(a), generator=g), 0.1)


@faulty("policy_fault/collapse_without_returns", "ENTROPY_COLLAPSE", ".*", "LR_TOO_HIGH")
def collapse_without_returns() -> Run:
    return _categorical(lambda x, a, g: torch.randn(len(a), generator=g), 0.2, returns=False)


@faulty("policy_fault/penalised_entropy", "ENTROPY_COLLAPSE", ".*", "INSUFFICIENT_EXPLORATION")
def penalised_entropy() -> Run:
    return _categorical(lambda x, a, g: torch.randn(len(a), generator=g), 0.02, bonus=-3.0)


@faulty("policy_fault/bonus_far_too_large", "OVER_EXPLORATION", ".*")
def bonus_too_large() -> Run:
    run = _categorical(lambda x, a, g: (a == x[:, :5].argmax(-1)).float(), 3e-3, bonus=20.0)
    with torch.no_grad():
        run.model[-1].weight.mul_(6.0)
    return run


def _gaussian(log_std: float, bonus: float) -> Run:
    model = nn.ModuleDict({"mean": stack(6, 32, 2, act=nn.Tanh)})
    model.log_std = nn.Parameter(torch.full((2,), log_std))
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        spread = torch.distributions.Normal(model["mean"](randn(step, 64, 6)), model.log_std.exp())
        action = (spread.mean + spread.stddev * randn(step + 3, 64, 2)).detach()
        gained = -action.sub(0.5).square().sum(-1).clamp_max(4.0)
        kept.update(pair=(spread.mean.detach(), spread.stddev.detach()), gained=float(gained.mean()))
        gain = (gained - gained.mean()) / (gained.std() + 1e-6)
        return -(gain * spread.log_prob(action).sum(-1)).mean() - bonus * spread.entropy().mean()

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["pair"], episode_return=kept["gained"])

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-2), observe=observe, settings=dict(SEEN))


@faulty("policy_fault/wide_actions", "OVER_EXPLORATION", ".*")
def wide_actions() -> Run:
    return _gaussian(2.0, 2.0)


@faulty("policy_fault/narrow_actions", "LOW_ACTION_STD", ".*", "ENTROPY_COLLAPSE", "INSUFFICIENT_EXPLORATION")
def narrow_actions() -> Run:
    return _gaussian(-4.0, -1.0)


@faulty("attention/sharp_layer", "ATTN_ENTROPY_COLLAPSE", r"parts\.1")
def sharp_layer() -> Run:
    model = Small(3)
    with torch.no_grad():
        model.parts[1].query.weight.mul_(40.0)
        model.parts[1].key.weight.mul_(40.0)
    return learn(model, tokens)


@faulty("attention/late_blow_up", "ATTN_ENTROPY_COLLAPSE", r"parts\.0", "EXPLODING")
def late_blow_up() -> Run:
    model = Small(2)
    run = learn(model, tokens)

    def grow() -> None:
        model.parts[0].query.weight.mul_(60.0)
        model.parts[0].key.weight.mul_(60.0)

    return at(run, 30, grow)


@faulty("attention/unscaled_multihead", "ATTN_ENTROPY_COLLAPSE", r"attend")
def unscaled() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(30, 32), nn.Linear(32, 30)
            self.attend = nn.MultiheadAttention(32, 2, batch_first=True)
            nn.init.normal_(self.attend.in_proj_weight, std=1.5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            y = y + self.attend(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
            out: Tensor = self.out(y)
            return out

    return learn(Model(), tokens)


@faulty("attention/heads_alike", "HEAD_REDUNDANCY", r"parts\.0")
def heads_alike() -> Run:
    model = Small(2)
    part = model.parts[0]
    with torch.no_grad():
        nn.init.normal_(model.embed.weight, std=1.0)
        for layer in (part.query, part.key):
            layer.weight.mul_(4.0)
            for head in range(1, 4):
                layer.weight[6 * head : 6 * head + 6] = layer.weight[:6]
                layer.bias[6 * head : 6 * head + 6] = layer.bias[:6]
    return learn(model, tokens, sgd(model, 1e-3))


class Bare(nn.Module):
    """Attention without any way around it."""

    def __init__(self, depth: int, width: int = 24, start: float = 1.0) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(30, width), nn.Linear(width, 30)
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y, y, y, need_weights=False)[0]
        out: Tensor = self.out(y)
        return out


@faulty("attention/no_skips", "RANK_COLLAPSE", r"layers", "VANISHING", "BOTTLENECK")
def no_skips() -> Run:
    model = Bare(6)
    return learn(model, tokens, adam(model, 1e-4))


@faulty("attention/skips_scaled_away", "RANK_COLLAPSE", r"layers", "BOTTLENECK", "VANISHING")
def skips_scaled_away() -> Run:
    class Faint(Bare):
        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            for layer in self.layers:
                y = F.layer_norm(0.02 * y + layer(y, y, y, need_weights=False)[0], (24,))
            out: Tensor = self.out(y)
            return out

    model = Faint(6)
    return learn(model, tokens, adam(model, 1e-4))


class Last(nn.Module):
    """A recurrent layer whose last state is read."""

    def __init__(self, memory: nn.Module, width: int, classes: int = 2) -> None:
        super().__init__()
        self.memory, self.out = memory, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.memory(x)[0][:, -1])
        return out


def _recall(lag: int, length: int) -> Any:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = randn(step, 24, length, 3)
        return x, (x[:, -1 - lag, 0] > 0).long()

    return batch


@faulty("recurrent_fault/chaotic_tanh", "SUPERCRITICAL", r"memory", "EXPLODING")
def chaotic() -> Run:
    memory = nn.RNN(3, 64, batch_first=True)
    nn.init.normal_(memory.weight_hh_l0, std=3.0 / 8)
    model = Last(memory, 64)
    return learn(model, _recall(40, 60), sgd(model, 1e-4), horizon=40)


@faulty("recurrent_fault/growing_relu", "EXPLODING", r"memory", "SUPERCRITICAL")
def growing_relu() -> Run:
    memory = nn.RNN(3, 24, batch_first=True, nonlinearity="relu")
    nn.init.orthogonal_(memory.weight_hh_l0, 1.9)
    model = Last(memory, 24)
    return learn(model, _recall(30, 40), sgd(model, 1e-14))


@faulty("recurrent_fault/forgetful_lstm", "SHORT_MEMORY", r"memory", "VANISHING")
def forgetful_lstm() -> Run:
    memory = nn.LSTM(3, 32, batch_first=True)
    with torch.no_grad():
        memory.bias_ih_l0[32:64] = -6.0
    model = Last(memory, 32)
    return learn(model, _recall(25, 30), adam(model), horizon=25)


@faulty("recurrent_fault/forgetful_gru", "SHORT_MEMORY", r"memory", "VANISHING")
def forgetful_gru() -> Run:
    memory = nn.GRU(3, 32, batch_first=True)
    with torch.no_grad():
        memory.bias_ih_l0[32:64] = -5.0
    model = Last(memory, 32)
    return learn(model, _recall(30, 40), adam(model), horizon=30)


@faulty("recurrent_fault/contracting_rnn", "SHORT_MEMORY", r"memory", "VANISHING")
def contracting() -> Run:
    memory = nn.RNN(3, 32, batch_first=True)
    nn.init.orthogonal_(memory.weight_hh_l0, 0.4)
    model = Last(memory, 32)
    return learn(model, _recall(20, 30), sgd(model, 0.01), horizon=20)


@faulty("recurrent_fault/saturated_gates", "SATURATION", r"memory|out", "VANISHING", "SHORT_MEMORY")
def saturated_rnn() -> Run:
    model = Forecast(nn.RNN)
    with torch.no_grad():
        model.memory.weight_ih_l0.mul_(200.0)
    return learn(model, waves, adam(model), F.mse_loss)


class Players(nn.Module):
    """Two players' choices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))


def _game(width: int, rate: float, pull: float) -> Run:
    model = Players(width)
    mix = torch.linalg.qr(randn(5, width, width))[0]

    def value() -> Tensor:
        return model.first @ mix @ model.second

    def forward(_: int) -> Tensor:
        x, y = model.first, model.second
        calm = pull * (x.square().sum() + y.square().sum())
        return x @ mix @ y.detach() - x.detach() @ mix @ y + calm

    def observe(manager: GradientManager) -> None:
        players = {"first": ([model.first], value), "second": ([model.second], lambda: -value())}
        manager.analyzer("vector").observe(players)

    run = Run(model=model, forward=forward, optimizer=sgd(model, rate), observe=observe)
    run.settings = {"analyzers": ["flow", "vector"]}
    return run


@faulty("game/matching_pennies", "ROTATION", ".*", "UNSTABLE")
def matching_pennies() -> Run:
    return _game(1, 0.1, 0.0)


@faulty("game/bilinear_of_eight", "ROTATION", ".*", "UNSTABLE")
def bilinear() -> Run:
    return _game(8, 0.2, 0.01)
