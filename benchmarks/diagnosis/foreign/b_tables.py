"""Healthy embeddings and recommenders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, generator, randn, sgd, stack
from benchmarks.diagnosis.foreign.b_book import chain, decayed, healthy, ratings
from benchmarks.diagnosis.run import Run


class Words(nn.Module):
    """Two tables of word vectors, compared by their products."""

    def __init__(self, base: int = 24, width: int = 12, sparse: bool = False) -> None:
        super().__init__()
        self.centre, self.context = (nn.Embedding(base, width, sparse=sparse) for _ in range(2))
        nn.init.uniform_(self.centre.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.context.weight)

    def forward(self, centre: Tensor, context: Tensor) -> Tensor:
        return (self.centre(centre)[:, None] * self.context(context)).sum(-1)


def sampled(model: Words, step: int) -> Tensor:
    """Return the loss of telling a word that follows from four that were drawn."""
    x, y = (part.flatten() for part in chain(step))
    drawn = torch.randint(0, 24, (len(x), 4), generator=generator(700_000 + step))
    score = model(x, torch.cat([y[:, None], drawn], 1))
    return -F.logsigmoid(score[:, 0]).mean() - F.logsigmoid(-score[:, 1:]).sum(1).mean()


@healthy("embeddings/word_vectors_sparse_adam")
def words_sparse() -> Run:
    model = Words(sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 1e-2)
    return Run(model=model, forward=lambda t: sampled(model, t), optimizer=optimizer, steps=120)


@healthy("embeddings/word_vectors_sgd")
def words_sgd() -> Run:
    model = Words()
    return Run(model=model, forward=lambda t: sampled(model, t), optimizer=sgd(model, 5.0), steps=150)


class Factors(nn.Module):
    """Users and items with factors and biases."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(60, width), nn.Embedding(80, width)
        self.user_bias, self.item_bias = nn.Embedding(60, 1), nn.Embedding(80, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        bias = self.user_bias(user) + self.item_bias(item)
        return self.mean + bias[:, 0] + (self.user(user) * self.item(item)).sum(-1)


def rated(model: nn.Module, step: int) -> Tensor:
    user, item, liked = ratings(step)
    return F.mse_loss(model(user, item), liked)


@healthy("embeddings/factors_adam")
def factors() -> Run:
    model = Factors()
    return Run(model=model, forward=lambda t: rated(model, t), optimizer=adam(model, 1e-2), steps=200)


@healthy("embeddings/factors_adagrad_decay")
def factors_adagrad() -> Run:
    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    return Run(model=model, forward=lambda t: rated(model, t), optimizer=optimizer, steps=200)


class Towers(nn.Module):
    """One net for users and one for items, whose outputs meet on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 16), nn.Embedding(80, 16)
        self.user, self.item = stack(16, 32, 16), stack(16, 32, 16)
        self.sharpness, self.cut = nn.Parameter(torch.tensor(2.3)), False

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        left = F.normalize(self.user(self.users(user)), dim=-1)
        right = F.normalize(self.item(self.items(item)), dim=-1)
        return left @ (right.detach() if self.cut else right).T * self.sharpness.exp()


def matched(model: nn.Module, step: int) -> Tensor:
    """Return the loss of finding what each user took among what all took."""
    user = torch.randperm(60, generator=generator(710_000 + step))[:48]
    item = (user + 20 * torch.randint(0, 2, (48,), generator=generator(711_000 + step))) % 80
    return F.cross_entropy(model(user, item), torch.arange(48))


@healthy("embeddings/two_towers_in_batch")
def towers() -> Run:
    model = Towers()
    return Run(model=model, forward=lambda t: matched(model, t), optimizer=adam(model, 3e-3), steps=120)


class Clicks(nn.Module):
    """Dense features, tables for the rest, their products, and a net above."""

    def __init__(self, width: int = 8, tables: int = 4, rows: int = 50) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.3, 0.3)
        self.bottom, self.top = stack(6, 32, width), stack(width + tables * (tables + 1) // 2, 32, 1)

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        low = self.bottom(dense)
        parts = torch.stack([low, *(table(bags[:, index]) for index, table in enumerate(self.tables))], 1)
        row, column = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        pairs = (parts @ parts.mT)[:, row, column]
        return self.top(torch.cat([low, pairs], 1))[:, 0]


def clicked(model: nn.Module, step: int, size: int = 128) -> Tensor:
    source = generator(720_000 + step)
    dense = torch.randn(size, 6, generator=source)
    bags = torch.randint(0, 50, (size, 4, 2), generator=source)
    worth = randn(721_000, 4, 50)
    score = worth[torch.arange(4)[:, None], bags].sum((1, 2)) + dense[:, 0] - 0.5
    return F.binary_cross_entropy_with_logits(model(dense, bags), (score > 0).float())


@healthy("embeddings/clicks_adagrad")
def clicks() -> Run:
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    return Run(model=model, forward=lambda t: clicked(model, t), optimizer=optimizer, steps=250)


@healthy("embeddings/clicks_two_optimizers")
def two_optimizers() -> Run:
    model = Clicks()
    for table in model.tables:
        table.sparse = True
    optimizers = [
        torch.optim.SparseAdam(list(model.tables.parameters()), 1e-2),
        torch.optim.AdamW([*model.bottom.parameters(), *model.top.parameters()], 2e-3),
    ]
    return Run(model=model, forward=lambda t: clicked(model, t), optimizer=optimizers, steps=250)


@healthy("embeddings/pairwise_ranking")
def ranking() -> Run:
    model = Factors()
    model.user_bias.requires_grad_(False)
    model.mean.requires_grad_(False)

    def forward(step: int) -> Tensor:
        user, item, _ = ratings(step)
        other = torch.randint(0, 80, item.shape, generator=generator(730_000 + step))
        worth = randn(580_000, 60, 3)[user] * (randn(581_000, 80, 3)[item] - randn(581_000, 80, 3)[other])
        sign = torch.sign(worth.sum(-1))
        return -F.logsigmoid(sign * (model(user, item) - model(user, other))).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-2), steps=150)


class Bags(nn.Module):
    """A variational net that completes what a user has bought."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(80, 48, 16, act=nn.Tanh), stack(8, 48, 80, act=nn.Tanh)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encoder(F.normalize(x, dim=-1)).chunk(2, -1)
        spread = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var).sum(-1).mean()
        return self.decoder(mean + (0.5 * log_var).exp() * noise), spread


@healthy("embeddings/baskets_variational")
def baskets() -> Run:
    model = Bags()

    def forward(step: int) -> Tensor:
        source = generator(740_000 + step)
        kind = torch.randint(0, 4, (64, 1), generator=source)
        chance = torch.where(torch.arange(80)[None] // 20 == kind, 0.4, 0.03)
        bought = (torch.rand(64, 80, generator=source) < chance).float()
        logits, spread = model(bought, torch.randn(64, 8, generator=source))
        return -(logits.log_softmax(-1) * bought).sum(-1).mean() + min(0.2, step / 500) * spread

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=120)


class Hashed(nn.Module):
    """Word vectors of few rows that are shared by hashing, and the mean of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(64, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.bag((x * 2_654_435_761) % 61))
        return found


@healthy("embeddings/hashed_bag_of_words")
def hashed() -> Run:
    model = Hashed()

    def forward(step: int) -> Tensor:
        source = generator(750_000 + step)
        y = torch.randint(0, 4, (64,), generator=source)
        x = 100 * y[:, None] + torch.randint(0, 12, (64, 12), generator=source)
        mixed = torch.where(
            torch.rand(64, 12, generator=source) < 0.6, torch.randint(0, 400, (64, 12), generator=source), x
        )
        return F.cross_entropy(model(mixed), y)

    return Run(model=model, forward=forward, optimizer=decayed(model, 1e-2, 0.0), steps=120)
