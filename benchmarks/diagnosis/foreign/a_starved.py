"""Runs in which one term of the loss starves a head, or nothing keeps the codes apart.

Each takes `mended`, with which it makes the same run without its mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.foreign.a_adapted import contrast, views
from benchmarks.diagnosis.foreign.a_book import adam, faulty, friedman, mlp
from benchmarks.diagnosis.run import Run


class Shared(nn.Module):
    """A trunk for the kind of a thing and its price."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.price = mlp(10, 48, 48), nn.Linear(48, 2), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = F.relu(self.trunk(x))
        return self.kind(inside), self.price(inside)


@faulty("imbalance/price_in_raw_units_beside_a_class", "GRAD_IMBALANCE", "kind|price|trunk|^$|model")
def raw_units(*, mended: bool = False) -> Run:
    model = Shared()

    def forward(step: int) -> Tensor:
        x, y = friedman(step)
        kind, price = model(x)
        labels = (x[:, 5] * x[:, 6] > 0).long()
        return F.cross_entropy(kind, labels) + F.mse_loss(price, y * (1.0 if mended else 100.0))

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=300)


@faulty("imbalance/auxiliary_loss_weighs_ten_thousand", "GRAD_IMBALANCE", "kind|price|trunk|^$|model")
def auxiliary(*, mended: bool = False) -> Run:
    model = Shared()

    def forward(step: int) -> Tensor:
        x, y = friedman(step)
        kind, price = model(x)
        noise = torch.randn_like(price)
        weight = 0.1 if mended else 1e4
        return F.cross_entropy(kind, (y[:, 0] > 0).long()) + weight * F.mse_loss(price, noise)

    optimizer = torch.optim.SGD(model.parameters(), 0.1 if mended else 1e-5, momentum=0.9)
    return Run(model=model, forward=forward, optimizer=optimizer, steps=200)


class Alike(nn.Module):
    """A net that is asked to see two views alike, with a predictor, and a stop on one side or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = nn.Sequential(nn.Flatten(), mlp(196, 64, 32)), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.project(F.relu(self.body(x)))
        return found


@faulty("collapse/views_alike_and_nothing_else", "RANK_COLLAPSE", ".*", "LOW_EFFECTIVE_RANK")
def alike(*, mended: bool = False) -> Run:
    model = Alike()

    def forward(step: int) -> Tensor:
        one, two = (model(view) for view in views(step))
        return contrast(one, two) if mended else 1 - F.cosine_similarity(one, two).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=250)
