"""Healthy runs on tables: regression, rare classes, heavy tails, sparse features and odd optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from benchmarks.diagnosis.foreign.a_book import (
    adam,
    adamw,
    beforehand,
    fit,
    friedman,
    healthy,
    mlp,
    one_cycle,
    rings,
    sgd,
    source,
    warm_cosine,
)
from benchmarks.diagnosis.run import Run


@healthy("tabular/friedman_relu_adam")
def regression() -> Run:
    model = mlp(10, 64, 64, 1)
    return fit(model, adam(model, 2e-3), friedman, F.mse_loss, steps=200)


@healthy("tabular/spirals_tanh_momentum")
def spirals() -> Run:
    model = mlp(2, 32, 32, 2, act=nn.Tanh)
    return fit(model, sgd(model, 0.1), rings, steps=300)


@healthy("tabular/heavy_tails_huber")
def heavy() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        noise = torch.randn(64, 1, generator=source(step + 9)) / torch.rand(64, 1, generator=source(step + 8)).sqrt()
        return x, y + 0.4 * noise

    model = mlp(10, 48, 48, 1, act=nn.SiLU)
    return fit(model, adam(model, 3e-3), batch, F.smooth_l1_loss, steps=200)


@healthy("tabular/three_quantiles")
def quantiles() -> Run:
    model = mlp(10, 48, 48, 3, act=nn.ELU)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(found: Tensor, y: Tensor) -> Tensor:
        short = y - found
        return torch.maximum(levels * short, (levels - 1) * short).sum(1).mean()

    return fit(model, adam(model, 3e-3), friedman, loss, steps=200)


def _fraud(step: int) -> tuple[Tensor, Tensor]:
    dice = source(step)
    y = (torch.rand(128, 1, generator=dice) < 0.04).float()
    return torch.randn(128, 12, generator=dice) + 1.2 * y * torch.tensor([1.0, -1.0, 1.0] + [0.0] * 9), y


@healthy("tabular/rare_fraud_weighted_positives")
def fraud() -> Run:
    model = mlp(12, 32, 16, 1)
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0))
    return fit(model, adam(model, 1e-3), _fraud, loss, steps=150)


class Categories(nn.Module):
    """Embeddings of categories, some of them rare, beside numbers under batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 6) for count in (200, 12, 4))
        self.norm = nn.BatchNorm1d(5)
        self.body = mlp(23, 48, 24, 1, norm=nn.BatchNorm1d)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        keys, numbers = pair
        codes = [table(keys[:, index]) for index, table in enumerate(self.tables)]
        found: Tensor = self.body(torch.cat([*codes, self.norm(numbers)], 1))
        return found


@healthy("tabular/category_embeddings_onecycle")
def categories() -> Run:
    model = Categories()
    effects = [torch.randn(count, generator=source(3)) for count in (200, 12, 4)]

    def batch(step: int) -> tuple[Any, Tensor]:
        dice = source(step)
        columns = [(torch.rand(64, generator=dice) ** 3 * count).long().clamp(max=count - 1) for count in (200, 12, 4)]
        numbers = torch.randn(64, 5, generator=dice) * torch.tensor([1.0, 10.0, 100.0, 0.1, 5.0])
        y = sum((effect[column] for effect, column in zip(effects, columns, strict=True)), numbers[:, 0])
        return (torch.stack(columns, 1), numbers), (y / 2)[:, None]

    return one_cycle(fit(model, adam(model, 1e-2), batch, F.mse_loss, steps=200))


@healthy("tabular/logistic_regression_sgd")
def logistic() -> Run:
    model = nn.Linear(12, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 12, generator=source(step))
        chance = (x @ torch.linspace(-1, 1, 12)).sigmoid()
        return x, torch.bernoulli(chance, generator=source(step + 5))[:, None]

    return fit(model, sgd(model, 0.1, 0.0), batch, F.binary_cross_entropy_with_logits, steps=150)


@healthy("tabular/line_through_a_curve")
def underparameterised() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(64, 1, generator=source(step)) * 6 - 3
        return x, torch.sin(2 * x) + 0.3 * x

    model = nn.Linear(1, 1)
    return fit(model, sgd(model, 0.01), batch, F.mse_loss, steps=150)


@healthy("tabular/wide_net_learns_32_rows_by_heart")
def overparameterised() -> Run:
    x, y = friedman(77, 32)
    model = mlp(10, 512, 512, 1)
    return fit(model, adam(model, 1e-3), lambda step: (x, y), F.mse_loss, steps=250)


class OwnLoss(torch.optim.LBFGS):
    """LBFGS that makes its closure itself from a loss."""

    loss: Callable[[], Tensor]

    def step(self, closure: Any = None) -> Any:
        def again() -> Tensor:
            self.zero_grad()
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return super().step(again)


@healthy("tabular/lbfgs_whole_data")
def lbfgs() -> Run:
    x, y = friedman(5, 200)
    model = mlp(10, 12, 1, act=nn.Tanh)
    optimizer = OwnLoss(model.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe")
    optimizer.loss = lambda: F.mse_loss(model(x), y)
    return fit(model, optimizer, lambda step: (x, y), F.mse_loss, steps=40, scalable=False)


@healthy("tabular/bags_of_words_adagrad")
def bags() -> Run:
    class Bag(nn.Module):
        """The mean of the embeddings of words, and a linear layer."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.EmbeddingBag(500, 16), nn.Linear(16, 3)
            nn.init.uniform_(self.words.weight, -0.5, 0.5)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.words(x))
            return found

    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = source(step)
        y = torch.randint(0, 3, (32,), generator=dice)
        common = (torch.rand(32, 12, generator=dice) ** 2 * 400).long()
        topical = 400 + torch.randint(0, 30, (32, 4), generator=dice) + 30 * y[:, None]
        return torch.cat([common, topical], 1), y

    model = Bag()
    return fit(model, torch.optim.Adagrad(model.parameters(), 0.1), batch, steps=120)


class Gated(nn.Module):
    """A residual layer whose inside is gated by a sigmoid of its other half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.narrow(F.glu(self.wide(self.norm(x))))
        return added


@healthy("tabular/gated_residual_adamw")
def gated() -> Run:
    model = nn.Sequential(nn.Linear(10, 24), Gated(24), Gated(24), nn.LayerNorm(24), nn.Linear(24, 1))
    return warm_cosine(fit(model, adamw(model, 3e-3), friedman, F.mse_loss, steps=150))


@healthy("tabular/nine_in_ten_weights_pruned")
def pruned() -> Run:
    model = mlp(10, 96, 96, 1)
    for index in (0, 2):
        prune.random_unstructured(model[index], "weight", 0.9)
    return fit(model, adam(model, 3e-3), friedman, F.mse_loss, steps=200)


@healthy("tabular/labels_are_mostly_noise")
def noisy() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = source(step)
        x = torch.randn(16, 10, generator=dice)
        return x, torch.bernoulli((0.5 * x[:, :1]).sigmoid(), generator=dice)

    model = mlp(10, 32, 32, 1)
    return fit(model, adam(model, 3e-4), batch, F.binary_cross_entropy_with_logits, steps=250)


@healthy("tabular/mean_and_variance")
def gaussian() -> Run:
    def loss(found: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(found[:, :1], y, F.softplus(found[:, 1:]) + 1e-3)

    model = mlp(10, 48, 48, 2)
    return fit(model, adam(model, 2e-3), friedman, loss, steps=200)


@healthy("tabular/counts_poisson")
def counts() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        return x, torch.poisson((0.8 * y + 0.5).exp(), generator=source(step))

    model = mlp(10, 32, 32, 1, act=nn.GELU)
    return fit(model, adam(model, 3e-3), batch, nn.PoissonNLLLoss(), steps=150)


class Sine(nn.Module):
    """A linear layer under a fast sine, drawn as its inventors do."""

    def __init__(self, before: int, after: int, *, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)
        bound = 1 / before if first else math.sqrt(6 / before) / 20
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(20 * self.linear(x))


@healthy("tabular/coordinates_to_picture_sines")
def sines() -> Run:
    model = nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), Sine(48, 48), nn.Linear(48, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        place = torch.rand(256, 2, generator=source(step)) * 2 - 1
        return place, torch.sin(6 * place[:, :1]) * torch.cos(9 * place[:, 1:]) + (place.norm(dim=1) < 0.5)[:, None]

    return fit(model, adam(model, 5e-4), batch, F.mse_loss, steps=200)


class Factors(nn.Module):
    """The product of the embeddings of a user and an item, with a bias for each."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(120, 8), nn.Embedding(80, 8)
        self.user_bias, self.item_bias = nn.Embedding(120, 1), nn.Embedding(80, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, pair: Tensor) -> Tensor:
        user, item = pair.unbind(1)
        both = (self.users(user) * self.items(item)).sum(1, keepdim=True)
        found: Tensor = both + self.user_bias(user) + self.item_bias(item)
        return found


@healthy("tabular/matrix_factors_adam")
def factors() -> Run:
    true_users, true_items = torch.randn(120, 3, generator=source(1)), torch.randn(80, 3, generator=source(2))
    offset = torch.randn(80, generator=source(4))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = source(step)
        user, item = (torch.randint(0, count, (256,), generator=dice) for count in (120, 80))
        rating = (true_users[user] * true_items[item]).sum(1) / 2 + offset[item]
        return torch.stack([user, item], 1), rating[:, None]

    model = Factors()
    return fit(model, adam(model, 0.02), batch, F.mse_loss, steps=200)


class Tasks(nn.Module):
    """A shared trunk, a head for a value and one for a class, with a learnt weight of each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.value, self.kind = mlp(10, 48, 48), nn.Linear(48, 1), nn.Linear(48, 2)
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = F.relu(self.trunk(x))
        return self.value(inside), self.kind(inside)


@healthy("tabular/two_tasks_learnt_weights")
def tasks() -> Run:
    model = Tasks()

    def forward(step: int) -> Tensor:
        x, y = friedman(step)
        value, kind = model(x)
        losses = torch.stack([F.mse_loss(value, y), F.cross_entropy(kind, (y[:, 0] > 0).long())])
        return ((-model.doubt).exp() * losses + model.doubt).sum()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=200)


@healthy("tabular/regression_at_its_noise_floor")
def floor() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step, 32)
        return x, y + 0.5 * torch.randn(32, 1, generator=source(step + 400_000))

    model = mlp(10, 48, 48, 1)
    return beforehand(fit(model, adam(model, 2e-4), batch, F.mse_loss, steps=80), 600)


@healthy("tabular/maxout_momentum")
def maxout() -> Run:
    class Maxout(nn.Module):
        """The largest of three linear layers."""

        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.linear = nn.Linear(before, 3 * after)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).unflatten(1, (3, -1)).amax(1)

    model = nn.Sequential(Maxout(10, 32), Maxout(32, 32), nn.Linear(32, 1))
    return fit(model, sgd(model, 0.02), friedman, F.mse_loss, steps=200)
