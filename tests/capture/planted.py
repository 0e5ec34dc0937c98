"""Trainings with one planted fault each, by which a step is not finite, and the operation that is to be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault: the model, its loss, the batch by which it breaks, and what a replay has to name."""

    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[], tuple[Tensor, Tensor]]
    operation: str
    is_backward: bool = False
    module: str = ""
    line: str
    """What the line of code has that is to be named."""


def out_of(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Return the output of a model."""
    found: Tensor = model(*inputs)
    return found


class Net(nn.Module):
    """A small network whose forward pass ends with a function."""

    def __init__(self, end: Callable[[Tensor], Tensor] = lambda x: x, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.25)
        self.head = Head(end)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the end makes of the hidden units."""
        out: Tensor = self.head(self.dropout(torch.relu(self.norm(self.first(x)))))
        return out


class Head(nn.Module):
    """The last layer, and a function of it."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.last, self.end = nn.Linear(6, 3), end

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of the last layer."""
        return self.end(self.last(x))


class Attention(nn.Module):
    """Attention with a mask that may leave a query nothing to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend among the rows of x."""
        scores = self.query(x) @ x.mT
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(-1)
        out: Tensor = self.out(weights @ x)
        return out


class Words(nn.Module):
    """An embedding of which a row may have been spoilt by an earlier step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of words."""
        out: Tensor = self.last(self.table(x))
        return out


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randn(8, 3)


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (out_of(model, batch[0]) - batch[1]).square().mean()


def _likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    share = out_of(model, batch[0]).clamp(0, 1)
    return -(share * share.log()).sum()


def _distance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    apart = (out_of(model, batch[0]) * 0.0).square().sum(1)
    return apart.sqrt().sum()


def _ratio(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = functional.relu(out_of(model, batch[0]) - 1e9)
    return (out / out.sum(1, keepdim=True)).mean()


def _masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first row has nothing
    return out_of(model, batch[0], mask).square().mean()


def _overflow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    odds = (out_of(model, batch[0]) + 100).exp()
    return (odds / (1 + odds)).mean()


def _half_overflow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    odds = (out_of(model, batch[0]).half() + 12).exp()
    return (odds / odds.sum(1, keepdim=True)).float().mean()


def _angle(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    cosine = functional.cosine_similarity(out_of(model, batch[0]) * 0 + batch[1], batch[1]) * (1 + 1e-3)
    return cosine.acos().sum()


def _angle_at_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    sine = out_of(model, batch[0]).clamp(max=0) * 0 + 1
    return sine.asin().sum()


def _standardised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    reward = out_of(model, batch[0]) * 0.0
    return ((reward - reward.mean()) / reward.std()).square().mean()


def _power(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    error = out_of(model, batch[0]) - batch[1]
    return error.pow(1.5).mean()


def _one_sample(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return out_of(model, batch[0])[:1].var(0).sum()


def _chosen(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = out_of(model, batch[0]) * 0.0
    return torch.where(out > 0, out.log(), out).mean()


def _normed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = out_of(model, batch[0]) * 0.0
    lengths: Tensor = out.norm(dim=1, keepdim=True)
    return (out / lengths).mean()


def _root(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    squares = (out_of(model, batch[0]) * 0.0).square().sum(1)
    return squares.pow(0.5).sum()


def _spoilt() -> nn.Module:
    model = Words()
    with torch.no_grad():
        model.table.weight[7] = torch.nan
    return model


def _half(x: Tensor) -> Tensor:
    return (x.half() * 60000).float()


def _words() -> tuple[Tensor, Tensor]:
    return torch.tensor([1, 7, 3]), torch.randn(3, 3)


FAULTS: Final = {
    "log of zero": Planted(model=Net, loss=_likelihood, batch=_batch, operation="aten.log", line="share.log()"),
    "sqrt at zero": Planted(
        model=Net, loss=_distance, batch=_batch, operation="aten.sqrt", is_backward=True, line="apart.sqrt()"
    ),
    "zero by zero": Planted(model=Net, loss=_ratio, batch=_batch, operation="aten.div", line="out / out.sum"),
    "softmax of an empty row": Planted(
        model=Attention,
        loss=_masked,
        batch=lambda: (torch.randn(5, 4), torch.randn(5, 3)),
        operation="aten._softmax",
        module="the model (Attention)",
        line="scores.softmax(-1)",
    ),
    "exp overflows": Planted(model=Net, loss=_overflow, batch=_batch, operation="aten.exp", line=".exp()"),
    "exp overflows in float16": Planted(
        model=Net, loss=_half_overflow, batch=_batch, operation="aten.exp", line=".half() + 12).exp()"
    ),
    "acos beyond one": Planted(model=Net, loss=_angle, batch=_batch, operation="aten.acos", line="cosine.acos()"),
    "asin at one": Planted(
        model=Net, loss=_angle_at_one, batch=_batch, operation="aten.asin", is_backward=True, line="sine.asin()"
    ),
    "no deviation": Planted(model=Net, loss=_standardised, batch=_batch, operation="aten.div", line="/ reward.std()"),
    "negative base": Planted(model=Net, loss=_power, batch=_batch, operation="aten.pow", line="error.pow(1.5)"),
    "one sample": Planted(model=Net, loss=_one_sample, batch=_batch, operation="aten.var", line=".var(0)"),
    "log that is not chosen": Planted(
        model=Net, loss=_chosen, batch=_batch, operation="aten.log", is_backward=True, line="out.log()"
    ),
    "direction of nothing": Planted(model=Net, loss=_normed, batch=_batch, operation="aten.div", line="out / lengths"),
    "norm at zero": Planted(
        model=Net, loss=_root, batch=_batch, operation="aten.pow", is_backward=True, line="squares.pow(0.5)"
    ),
    "row of an embedding": Planted(
        model=_spoilt,
        loss=_squares,
        batch=_words,
        operation="aten.embedding",
        module="table (Embedding)",
        line="self.table(x)",
    ),
    "cast to float16": Planted(
        model=lambda: Net(_half), loss=_squares, batch=_batch, operation="aten.mul", module="head (Head)", line="60000"
    ),
}
