"""Healthy agents in small worlds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, generator, randn, sgd, stack
from benchmarks.diagnosis.foreign.b_book import chain, clipped, healthy
from benchmarks.diagnosis.foreign.b_transformers import taught
from benchmarks.diagnosis.run import Run

SEEN: dict[str, Any] = {"analyzers": ["flow", "rl_policy"]}


class Actor(nn.Module):
    """A policy over four actions, and the worth of a state."""

    def __init__(self, before: int = 6, actions: int = 4, width: int = 32) -> None:
        super().__init__()
        self.trunk = stack(before, width, width, act=nn.Tanh)
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)
        nn.init.zeros_(self.policy.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.policy(x), self.value(x)[:, 0]


def draw(logits: Tensor, seed: int) -> Tensor:
    return torch.multinomial(logits.detach().softmax(-1), 1, generator=generator(seed))[:, 0]


def spread(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def context(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Return states, and what each of four actions earns there, with noise."""
    state = randn(760_000 + step, size, 6)
    worth = torch.tanh(state @ randn(761_000, 6, 4))
    return state, worth + 0.3 * randn(762_000 + step, size, 4)


def bandit(
    model: Actor, optimizer: Any, bonus: float = 0.01, steps: int = 150, hand: bool = False, pay: float = 1.0
) -> Run:
    """Train a policy on states that do not depend on what it does."""
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        state, worth = context(step)
        logits, value = model(state)
        action = draw(logits, step)
        reward = pay * worth.gather(1, action[:, None])[:, 0]
        kept.update(logits=logits.detach(), reward=float(reward.mean()))
        gain = reward - value.detach()
        log = logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
        return -(gain * log).mean() + 0.5 * F.mse_loss(value, reward) - bonus * spread(logits)

    def observe(manager: Any) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=kept["reward"])

    run = Run(model=model, forward=forward, optimizer=optimizer, steps=steps)
    if hand:
        run.observe, run.settings = observe, dict(SEEN)
    run.model.kept = kept  # type: ignore[assignment]
    return run


@healthy("agents/contextual_bandit_with_baseline")
def baseline() -> Run:
    model = Actor()
    return bandit(model, adam(model, 3e-3), hand=True, steps=200)


@healthy("agents/gradient_bandit")
def arms() -> Run:
    model = nn.Module()
    model.logits = nn.Parameter(torch.zeros(8))
    worth, mean = torch.linspace(0, 1, 8), torch.zeros(())

    def forward(step: int) -> Tensor:
        nonlocal mean
        action = draw(model.logits[None].expand(32, -1), step)
        reward = worth[action] + 0.3 * randn(step, 32)
        gain = reward - mean
        mean = 0.9 * mean + 0.1 * reward.mean()
        return -(gain * model.logits.log_softmax(-1)[action]).mean()

    return Run(model=model, forward=forward, optimizer=torch.optim.SGD(model.parameters(), 1.0), steps=200)


class Corridor:
    """Eight parallel walks of nine places; the right end pays, and every step costs."""

    def __init__(self) -> None:
        self.place = torch.full((8,), 4)

    def see(self) -> Tensor:
        return F.one_hot(self.place, 9).float()

    def move(self, action: Tensor) -> tuple[Tensor, Tensor]:
        self.place = (self.place + 2 * action - 1).clamp(0, 8)
        done = self.place == 8
        reward = done.float() - 0.02
        self.place = torch.where(done, 0 * self.place + 2, self.place)
        return reward, done


def rollout(model: Any, world: Corridor, step: int, length: int = 8) -> tuple[Tensor, ...]:
    """Return states, actions, rewards, ends and the last state of a few steps."""
    found: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for time in range(length):
            state = world.see()
            action = draw(model(state)[0], 1000 * step + time)
            found.append((state, action, *world.move(action)))
    states, actions, rewards, ends = (torch.stack(part) for part in zip(*found, strict=True))
    return states, actions, rewards, ends, world.see()


def returns(model: Any, rewards: Tensor, ends: Tensor, last: Tensor) -> Tensor:
    with torch.no_grad():
        worth = model(last)[1]
    found = []
    for reward, end in zip(rewards.flip(0), ends.flip(0), strict=True):
        worth = reward + 0.95 * worth * ~end
        found.append(worth)
    return torch.stack(found[::-1])


@healthy("agents/corridor_actor_critic")
def corridor() -> Run:
    model, world = Actor(9, 2), Corridor()

    def forward(step: int) -> Tensor:
        states, actions, rewards, ends, last = rollout(model, world, step)
        wanted = returns(model, rewards, ends, last).flatten()
        logits, value = model(states.flatten(0, 1))
        log = logits.log_softmax(-1).gather(1, actions.flatten()[:, None])[:, 0]
        gain = wanted - value.detach()
        return -(gain * log).mean() + 0.5 * F.mse_loss(value, wanted) - 0.01 * spread(logits)

    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3, alpha=0.99, eps=1e-5)
    return clipped(Run(model=model, forward=forward, optimizer=optimizer, steps=200), 0.5)


@healthy("agents/corridor_proximal")
def proximal() -> Run:
    model, world = Actor(9, 2), Corridor()
    kept: dict[str, Tensor] = {}

    def collect(step: int) -> None:
        states, actions, rewards, ends, last = rollout(model, world, step, 16)
        wanted = returns(model, rewards, ends, last).flatten()
        with torch.no_grad():
            logits, value = model(states.flatten(0, 1))
        gain = wanted - value
        log = logits.log_softmax(-1).gather(1, actions.flatten()[:, None])[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        kept.update(state=states.flatten(0, 1), action=actions.flatten(), wanted=wanted, gain=gain, log=log)

    def forward(step: int) -> Tensor:
        if step % 8 == 0:
            collect(step)
        rows = torch.randperm(128, generator=generator(step))[:64]
        state, action, wanted, gain, before = (part[rows] for part in kept.values())
        logits, value = model(state)
        ratio = (logits.log_softmax(-1).gather(1, action[:, None])[:, 0] - before).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return -surrogate + 0.5 * F.mse_loss(value, wanted) - 0.01 * spread(logits)

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 1e-3, eps=1e-5), steps=240), 0.5)


@healthy("agents/corridor_deep_q_replay")
def deep_q() -> Run:
    model = stack(9, 48, 2)
    target, world, memory = copy.deepcopy(model), Corridor(), []

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            for time in range(2):
                source = generator(2 * step + time)
                state = world.see()
                free = torch.rand(8, generator=source) < max(0.1, 1 - step / 80)
                action = torch.where(free, torch.randint(0, 2, (8,), generator=source), model(state).argmax(1))
                memory.append((state, action, *world.move(action), world.see()))
            if step % 20 == 0:
                target.load_state_dict(model.state_dict())
        rows = torch.randint(0, len(memory), (8,), generator=generator(770_000 + step)).tolist()
        state, action, reward, end, after = (
            torch.cat(part) for part in zip(*(memory[row] for row in rows), strict=True)
        )
        with torch.no_grad():
            wanted = reward + 0.95 * target(after).amax(1) * ~end
        return F.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], wanted)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=300)


class Squashed(nn.Module):
    """A squashed Gaussian policy, and two critics of its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = stack(3, 48, 48, 2)
        self.critics = nn.ModuleList(stack(4, 48, 48, 1) for _ in range(2))

    def act(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        raw = mean + log_std.exp() * noise
        log = -0.5 * noise**2 - log_std - 0.92 - 2 * (0.693 - raw - F.softplus(-2 * raw))
        return torch.tanh(raw), log[:, 0]

    def worth(self, state: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([state, action], 1))[:, 0] for critic in self.critics]


@healthy("agents/soft_actor_critic")
def soft() -> Run:
    model = Squashed()
    target = copy.deepcopy(model.critics)

    def forward(step: int) -> Tensor:
        state, after = randn(780_000 + step, 64, 3), randn(781_000 + step, 64, 3)
        action = torch.rand(64, 1, generator=generator(782_000 + step)) * 2 - 1
        reward = -((action[:, 0] - torch.tanh(state[:, 0] + 0.5 * state[:, 1])) ** 2)
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), model.critics.parameters(), strict=True):
                ours.lerp_(theirs, 0.02)
            move, log = model.act(after, randn(783_000 + step, 64, 1))
            seen = torch.cat([after, move], 1)
            wanted = reward + 0.5 * (torch.minimum(*(critic(seen)[:, 0] for critic in target)) - 0.05 * log)
        loss = sum(F.mse_loss(worth, wanted) for worth in model.worth(state, action))
        move, log = model.act(state, randn(784_000 + step, 64, 1))
        for critic in model.critics:
            critic.requires_grad_(False)
        best = torch.minimum(*model.worth(state, move))
        for critic in model.critics:
            critic.requires_grad_(True)
        return loss + (0.05 * log - best).mean()

    optimizers = [adam(model.actor, 1e-3), adam(model.critics, 2e-3)]
    return Run(model=model, forward=forward, optimizer=optimizers, steps=200)


@healthy("agents/cloned_gaussian")
def cloned() -> Run:
    model = stack(5, 48, 48, 4, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        state = randn(790_000 + step, 64, 5)
        taken = torch.tanh(state[:, :2] * state[:, 2:4]) + 0.2 * randn(791_000 + step, 64, 2)
        mean, log_std = model(state).chunk(2, -1)
        return (0.5 * ((taken - mean) / log_std.exp()) ** 2 + log_std).mean()

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=150))


@healthy("agents/value_of_a_walk")
def value() -> Run:
    model = stack(4, 32, 32, 1)

    def forward(step: int) -> Tensor:
        state = randn(800_000 + step, 64, 4)
        with torch.no_grad():
            after = 0.8 * state + 0.6 * randn(801_000 + step, 64, 4)
            wanted = state[:, :1].abs() + 0.8 * model(after)
        return F.mse_loss(model(state), wanted)

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.05), steps=200)


def said(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).log_softmax(-1).gather(2, y[..., None])[..., 0]


@healthy("agents/writer_from_group_rewards")
def grouped() -> Run:
    """A taught writer is paid for even tokens, and kept near what it was."""
    model = taught(60)
    before = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        x, _ = chain(step, size=24)
        logits = model(x)
        y = draw(logits.flatten(0, 1), step).view(x.shape)
        reward = (y % 2 == 0).float()
        gain = (reward - reward.mean()) / (reward.std() + 1e-4)
        log, old = said(model, x, y), said(before, x, y)
        drift = (old - log).exp() - (old - log) - 1
        return -(gain * log).mean() + 0.05 * drift.mean()

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 3e-4), steps=60))


@healthy("agents/writer_from_preferences")
def preferred() -> Run:
    model = taught(60)
    before = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        x, y = chain(step)
        worse = torch.randint(0, 24, y.shape, generator=generator(810_000 + step))
        margin = (said(model, x, y) - said(before, x, y) - said(model, x, worse) + said(before, x, worse)).mean(1)
        return -F.logsigmoid(2.0 * margin).mean()

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 3e-4), steps=60))


@healthy("agents/recurrent_policy_remembers_a_cue")
def cue() -> Run:
    """A recurrent policy is paid at the end for what it saw at the start."""
    model = nn.ModuleDict({"rnn": nn.GRU(3, 24, batch_first=True), "policy": nn.Linear(24, 3)})
    mean = torch.full((), 1 / 3)

    def forward(step: int) -> Tensor:
        nonlocal mean
        cues = torch.randint(0, 3, (64,), generator=generator(820_000 + step))
        x = 0.2 * randn(821_000 + step, 64, 6, 3)
        x[:, 0] += F.one_hot(cues, 3)
        logits = model["policy"](model["rnn"](x)[0][:, -1])
        action = draw(logits, step)
        reward = (action == cues).float()
        gain = reward - mean
        mean = 0.95 * mean + 0.05 * reward.mean()
        return -(gain * logits.log_softmax(-1).gather(1, action[:, None])[:, 0]).mean() - 0.01 * spread(logits)

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=250))
