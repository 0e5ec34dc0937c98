"""Healthy runs of agents, embeddings, graphs and pairs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.corner.book import Batch, adam, dense, dice, fit, groups, healthy, normal, sgd
from benchmarks.diagnosis.run import Run
from gradtrack import GradientManager

SEEN: dict[str, Any] = {"analyzers": ["flow", "rl_policy"]}


class ActorCritic(nn.Module):
    def __init__(self, actions: int = 4) -> None:
        super().__init__()
        self.body, self.actor, self.critic = dense(6, 48, 48, act=nn.Tanh), nn.Linear(48, actions), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.tanh(self.body(x))
        return self.actor(inside), self.critic(inside)[:, 0]


@healthy("agents/actor_critic_with_entropy_bonus")
def actor_critic() -> Run:
    model = ActorCritic()
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        x = normal(step, 64, 6)
        logits, value = model(x)
        logs = logits.log_softmax(-1)
        chosen = torch.multinomial(logs.exp().detach(), 1, generator=dice(900_000 + step))[:, 0]
        reward = (chosen == x[:, :4].argmax(-1)).float()
        kept.update(logits=logits.detach(), reward=float(reward.mean()))
        advantage = reward - value.detach()
        policy = -(advantage * logs.gather(1, chosen[:, None])[:, 0]).mean()
        return policy + 0.5 * F.mse_loss(value, reward) + 0.01 * (logs.exp() * logs).sum(-1).mean()

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=kept["reward"])

    return Run(
        model=model, forward=forward, optimizer=adam(model, 3e-3), observe=observe, settings=dict(SEEN), steps=120
    )


@healthy("agents/clipped_ratio_ten_epochs_a_batch")
def proximal() -> Run:
    model = ActorCritic(3)
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        if step % 10 == 0:
            x = normal(step, 128, 6)
            with torch.no_grad():
                logs = model(x)[0].log_softmax(-1)
            chosen = torch.multinomial(logs.exp(), 1, generator=dice(910_000 + step))
            reward = (chosen[:, 0] == (x[:, 0] > 0).long()).float()
            kept.update(x=x, chosen=chosen, old=logs.gather(1, chosen)[:, 0], reward=reward)
        logits, value = model(kept["x"])
        reward = kept["reward"]
        gained = reward - reward.mean()
        ratio = (logits.log_softmax(-1).gather(1, kept["chosen"])[:, 0] - kept["old"]).exp()
        bounded = torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained)
        kept["logits"] = logits.detach()
        return -bounded.mean() + 0.5 * F.mse_loss(value, reward)

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=float(kept["reward"].mean()))

    return Run(
        model=model, forward=forward, optimizer=adam(model, 1e-3), observe=observe, settings=dict(SEEN), steps=80
    )


@healthy("agents/values_with_a_target_network")
def deep_q() -> Run:
    model = dense(4, 48, 48, 3)
    target = copy.deepcopy(model)

    def forward(step: int) -> Tensor:
        if step % 20 == 0:
            target.load_state_dict(model.state_dict())
        x, action = normal(step, 32, 4), torch.randint(0, 3, (32, 1), generator=dice(920_000 + step))
        after = 0.9 * x + 0.1 * normal(930_000 + step, 32, 4)
        reward = (x[:, 0] > 0).float() * (action[:, 0] == 1)
        with torch.no_grad():
            aim = reward + 0.95 * target(after).max(-1).values
        return F.smooth_l1_loss(model(x).gather(1, action)[:, 0], aim)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=80)


@healthy("agents/gaussian_cloned_from_an_expert")
def cloned() -> Run:
    model = dense(6, 48, 4, act=nn.Tanh)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(out[:, :2], y, out[:, 2:].exp())

    def batches(step: int) -> Batch:
        x = normal(step, 64, 6)
        return x, torch.sin(x[:, :2]) + 0.1 * normal(940_000 + step, 64, 2)

    return fit(model, adam(model, 3e-3), batches, loss)


class Graph(nn.Module):
    """Layers that mix the nodes by a dense adjacency matrix."""

    def __init__(self, adjacency: Tensor, layers: int = 3) -> None:
        super().__init__()
        degree = adjacency.sum(1)
        self.register_buffer("mix", adjacency / (degree[:, None] * degree[None]).sqrt())
        self.layers = nn.ModuleList(nn.Linear(12 if index == 0 else 24, 24) for index in range(layers))
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(self.mix @ layer(x))
        return self.head(x)


@healthy("graphs/nodes_by_a_dense_adjacency")
def graph() -> Run:
    kinds = torch.arange(60) % 3
    chance = torch.where(kinds[:, None] == kinds[None], 0.3, 0.03)
    drawn = (torch.rand(60, 60, generator=dice(3)) < chance).float().triu(1)
    model = Graph(drawn + drawn.T + torch.eye(60))
    x, known = normal(4, 60, 12) + F.one_hot(kinds, 12), torch.arange(60) < 20

    def forward(step: int) -> Tensor:
        return F.cross_entropy(model(x)[known], kinds[known])

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-2, weight_decay=5e-4), steps=60)


@healthy("embeddings/bags_of_a_large_vocabulary")
def bags() -> Run:
    model = nn.Sequential(nn.EmbeddingBag(20_000, 12, mode="mean"), nn.Linear(12, 3))

    def batches(step: int) -> Batch:
        words = (20_000 * torch.rand(32, 15, generator=dice(950_000 + step)) ** 3).long()
        return words, words[:, 0] % 3

    return fit(model, adam(model, 1e-2), batches)


@healthy("embeddings/factors_of_ratings_by_sgd")
def factors() -> Run:
    users, items = nn.Embedding(300, 8), nn.Embedding(200, 8)
    model = nn.ModuleDict({"user": users, "item": items})

    def forward(step: int) -> Tensor:
        user = torch.randint(0, 300, (64,), generator=dice(960_000 + step))
        item = torch.randint(0, 200, (64,), generator=dice(970_000 + step))
        rating = ((user % 5) == (item % 5)).float()
        return F.mse_loss((users(user) * items(item)).sum(-1), rating)

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.5))


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = dense(20, 48, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.project(torch.relu(self.body(x)))
        return found


@healthy("pairs/triplets_with_a_margin")
def triplets() -> Run:
    model = Twin()

    def forward(step: int) -> Tensor:
        x, y = groups(step, 60, apart=2.5)
        order = y.argsort()
        x, y = x[order], y[order]
        other = torch.roll(x, 30, 0)
        return F.triplet_margin_loss(model(x), model(torch.roll(x, 1, 0)), model(other), margin=0.5)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=80)


@healthy("pairs/siamese_hinge")
def siamese() -> Run:
    model = Twin()

    def forward(step: int) -> Tensor:
        x, y = groups(2 * step)
        z, w = groups(2 * step + 1)
        apart = F.pairwise_distance(model(x), model(z))
        same = (y == w).float()
        return (same * apart.square() + (1 - same) * torch.relu(1 - apart).square()).mean()

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.05, momentum=0.9))


@healthy("pairs/views_and_a_slow_copy")
def slow_copy() -> Run:
    model = nn.ModuleDict({"online": Twin(), "predict": dense(8, 32, 8)})
    slow = copy.deepcopy(model["online"]).requires_grad_(False)

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), model["online"].parameters(), strict=True):
                kept.lerp_(new, 0.02)
        x, _ = groups(step)
        one, two = x + 0.3 * normal(980_000 + step, 64, 20), x + 0.3 * normal(990_000 + step, 64, 20)
        return 2 - 2 * F.cosine_similarity(model["predict"](model["online"](one)), slow(two)).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@healthy("pairs/pupil_of_a_mean_teacher")
def mean_teacher() -> Run:
    model = dense(20, 48, 48, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.05)
        x, y = groups(step)
        labelled = F.cross_entropy(model(x[:16]), y[:16])
        noisy = model(x + 0.3 * normal(1_000_000 + step, 64, 20)).softmax(-1)
        return labelled + F.mse_loss(noisy, teacher(x).softmax(-1))

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3))


@healthy("tasks/three_heads_weighed_a_tenth_one_and_ten")
def three_heads() -> Run:
    model = nn.ModuleDict({"body": dense(20, 64, 64), "kind": nn.Linear(64, 4), "size": nn.Linear(64, 1)})
    model["copy"] = nn.Linear(64, 20)

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        inside = torch.relu(model["body"](x))
        kind = F.cross_entropy(model["kind"](inside), y)
        size = F.mse_loss(model["size"](inside)[:, 0], x.norm(dim=-1))
        return kind + 0.1 * size + 10 * F.mse_loss(model["copy"](inside), x)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=60)


@healthy("tasks/uncertainties_weigh_the_losses")
def uncertain() -> Run:
    model = nn.ModuleDict({"body": dense(20, 64, 64), "kind": nn.Linear(64, 4), "size": nn.Linear(64, 1)})
    model.weights = nn.Parameter(torch.zeros(2))

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        inside = torch.relu(model["body"](x))
        losses = torch.stack(
            [F.cross_entropy(model["kind"](inside), y), F.mse_loss(model["size"](inside)[:, 0], x.norm(dim=-1))]
        )
        return (torch.exp(-model.weights) * losses + model.weights).sum()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=60)
