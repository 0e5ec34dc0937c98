"""Programs that do not do what was meant, each beside its mended twin: rates, modes, owners, and equal units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrack import GradientManager, Issue
from gradtrack.reports import IssueType

Before = Callable[[int, nn.Module, Any], object]


def network(*, batches: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Return a network of three layers, with batch statistics or without."""
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(16)] if batches else []
    return nn.Sequential(
        nn.Linear(8, 16), *norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def batch_of() -> tuple[Tensor, Tensor]:
    """Return inputs and their classes."""
    x = torch.randn(32, 8)
    return x, x[:, :4].argmax(1)


def train(model: nn.Module, before: Before, num_steps: int = 24, optimizer: Any = None) -> list[Issue]:
    """Train; `before` may change anything before a step."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
    with GradientManager(analyzers=["flow"], backends=[], engine="torch", enable_gradient_clipping=False) as manager:
        manager.attach(model, optimizer)
        for step in range(1, num_steps + 1):
            before(step, model, optimizer)
            x, target = batch_of()
            optimizer.zero_grad()
            manager.step(model, optimizer, nn.functional.cross_entropy(model(x), target))
            optimizer.step()
        return manager.diagnose()


def nothing(step: int, model: nn.Module, optimizer: Any) -> None:
    """Change nothing."""


def keys(issues: list[Issue]) -> list[str]:
    """Return types and layers."""
    return [issue.key for issue in issues]


def rate(schedule: Callable[[int], float]) -> Before:
    """Return what sets the learning rate of every group."""

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)

    return before


NEGATIVE: Final[dict[str, tuple[Callable[[int], float], Callable[[int], float]]]] = {
    "a line that goes on past its end": (lambda step: 3e-3 * (1 - step / 12), lambda step: 3e-3 * (1 - step / 25)),
    "a cosine without its offset": (
        lambda step: 3e-3 * math.cos(math.pi * step / 20),
        lambda step: 1.5e-3 * (1 + math.cos(math.pi * step / 25)),
    ),
    "a sign": (lambda step: -1e-3, lambda step: 1e-3),
    "a warm-up that begins below zero": (lambda step: 1e-4 * (step - 30), lambda step: 1e-4 * step),
}


@pytest.mark.parametrize(("wrong", "right"), NEGATIVE.values(), ids=NEGATIVE)
def test_a_negative_rate_is_named(wrong: Callable[[int], float], right: Callable[[int], float]) -> None:
    """A rate below zero is the first issue; the same schedule at its right length has none."""
    assert keys(train(network(), rate(wrong)))[0] == "LR_NEGATIVE"
    assert keys(train(network(), rate(right))) == []


def test_a_negative_rate_that_maximises_is_meant() -> None:
    """Up the slope of what is to become larger, times minus one, is down."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    assert keys(train(model, rate(lambda step: -0.1), optimizer=optimizer)) == []


def switched(when: Callable[[int, nn.Module], object]) -> Before:
    """Return what switches modes."""
    return lambda step, model, optimizer: when(step, model)


def _norms(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


MODES: Final[dict[str, tuple[Callable[[int, nn.Module], object], str, bool]]] = {
    "never train": (lambda step, model: model.eval(), "EVAL_MODE:1", True),
    "training in the loop after the first step": (
        lambda step, model: model.train(step == 1),
        "EVAL_MODE:1",
        True,
    ),
    "eval and no way back": (lambda step, model: model.eval() if step == 9 else None, "EVAL_MODE:1", True),
    "dropout off for good": (lambda step, model: model.eval() if step == 9 else None, "EVAL_MODE:2", False),
}
MENDED: Final[dict[str, Callable[[int, nn.Module], object]]] = {
    "eval and train": lambda step, model: (model.eval(), model.train()),
    "norms frozen from the start": lambda step, model: _norms(model),
    "norms frozen later": lambda step, model: _norms(model) if step == 9 else None,
}


@pytest.mark.parametrize(("when", "found", "batches"), MODES.values(), ids=MODES)
def test_evaluation_mode_in_training_is_named(
    when: Callable[[int, nn.Module], object], found: str, batches: bool
) -> None:
    """Statistics that never saw a batch, and a model that does not come back from evaluation."""
    assert found in keys(train(network(batches=batches, dropout=0.1), switched(when)))


@pytest.mark.parametrize("when", MENDED.values(), ids=MENDED)
def test_modes_that_are_meant_are_left_alone(when: Callable[[int, nn.Module], object]) -> None:
    """A model that comes back from evaluation, and norms that are frozen after a while."""
    assert keys(train(network(batches=True), switched(when))) == []


def test_a_model_that_comes_trained_may_stay_in_evaluation() -> None:
    """Fine-tuning with the statistics of another training is usual."""
    model = network(batches=True)
    model(torch.randn(64, 8))
    assert keys(train(model.eval(), nothing)) == []


def _all(model: nn.Sequential, value: float) -> nn.Sequential:
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def _layer(model: nn.Sequential, index: str, value: float) -> nn.Sequential:
    layer = model.get_submodule(index)
    assert isinstance(layer, nn.Linear)
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return model


EQUAL: Final[dict[str, Callable[[nn.Sequential], nn.Sequential]]] = {
    "all zeros": lambda model: _all(model, 0.0),
    "all one constant": lambda model: _all(model, 0.1),
    "two factors of zero": lambda model: _layer(_layer(model, "3", 0.0), "5", 0.0),
    "two layers of ones": lambda model: _layer(_layer(model, "3", 1.0), "5", 1.0),
}
RANDOM: Final[dict[str, Callable[[nn.Sequential], nn.Sequential]]] = {
    "a last layer of zeros": lambda model: _layer(model, "5", 0.0),
    "a last layer of ones": lambda model: _layer(model, "5", 1.0),
    "a constant layer before random ones": lambda model: _layer(model, "3", 0.1),
    "as torch does it": lambda model: model,
}


@pytest.mark.parametrize("change", EQUAL.values(), ids=EQUAL)
def test_units_that_stay_equal_are_named(change: Callable[[nn.Sequential], nn.Sequential]) -> None:
    """Equal weights with equal gradients are one unit, and weights of zero without a gradient none."""
    assert "EQUAL_UNITS" in [issue.issue_type.value for issue in train(change(network()), nothing)]


class Attending(nn.Module):
    """An encoder of torch, whose queries, keys and values are one matrix."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 4)
        for param in self.encoder.parameters() if constant else ():
            if param.ndim == 2:
                nn.init.constant_(param, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Choose by the mean over the positions."""
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


class Factors(nn.Module):
    """Users and items, whose product of factors is a rating."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 6), nn.Embedding(30, 6)
        for table in (self.users, self.items) if constant else ():
            nn.init.constant_(table.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Rate the pairs whose numbers the first two columns are."""
        users, items = x[:, 0].long() % 20, x[:, 1].long() % 30
        out: Tensor = (self.users(users) * self.items(items)).sum(-1)
        return out


def equal_units(model: nn.Module, x: Tensor, loss_fn: Callable[[Tensor], Tensor]) -> list[str]:
    """Train for some steps and return the layers whose units are named."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with GradientManager(analyzers=["flow"], backends=[], enable_gradient_clipping=False) as manager:
        for _ in range(20):
            optimizer.zero_grad()
            manager.step(model, optimizer, loss_fn(model(x)))
            optimizer.step()
        return [issue.layer for issue in manager.diagnose() if issue.issue_type is IssueType.EQUAL_UNITS]


@pytest.mark.parametrize("constant", [True, False])
def test_units_of_stacked_matrices_and_of_tables_are_compared_as_well(constant: bool) -> None:
    """Queries, keys and values lie above each other; the units of an embedding are its columns."""
    torch.manual_seed(0)
    classes, ratings = torch.randint(0, 4, (16,)), torch.randn(64)
    layers = equal_units(Attending(constant), torch.randn(16, 5, 16), lambda out: F.cross_entropy(out, classes))
    assert layers == (["encoder.layers.0.self_attn"] if constant else [])
    layers = equal_units(
        Factors(constant), torch.randint(0, 600, (64, 2)).float(), lambda out: F.mse_loss(out, ratings)
    )
    assert layers == (["users"] if constant else [])


@pytest.mark.parametrize("change", RANDOM.values(), ids=RANDOM)
def test_units_that_are_told_apart_are_not(change: Callable[[nn.Sequential], nn.Sequential]) -> None:
    """One factor of a product may begin with one number."""
    assert "EQUAL_UNITS" not in [issue.issue_type.value for issue in train(change(network()), nothing)]


def stopping(what: str, since: int) -> Before:
    """Return what puts weights back before each step from one on, as code that restores a state does."""
    kept: dict[str, Tensor] = {}

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        for name, param in model.named_parameters():
            if name.startswith(what) and step >= since:
                param.data.copy_(kept.setdefault(name, param.detach().clone()))

    return before


def taking_out(what: str, since: int) -> Before:
    """Return what takes parameters out of the optimizer at a step."""

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == since:
            gone = {id(param) for name, param in model.named_parameters() if name.startswith(what)}
            for group in optimizer.param_groups:
                group["params"] = [param for param in group["params"] if id(param) not in gone]

    return before


def without_gradient(what: str, since: int) -> Before:
    """Return what freezes parameters at a step, which is no fault."""

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        for name, param in model.named_parameters():
            if step == since and name.startswith(what):
                param.requires_grad_(False)

    return before


@pytest.mark.parametrize("what", ["3.", "0."])
@pytest.mark.parametrize("how", [stopping, taking_out])
def test_updates_that_stop_are_named_soon(how: Callable[[str, int], Before], what: str) -> None:
    """Weights that moved for 24 steps and stand still from then on are named within a dozen."""
    assert f"UNCHANGED:{what[:-1]}" in keys(train(network(), how(what, 25), 37))


def test_what_is_frozen_on_purpose_is_left_alone() -> None:
    """Freezing says that nothing is to move."""
    assert keys(train(network(), without_gradient("3.", 25), 37)) == []


def in_turn(step: int, model: nn.Module, optimizer: Any) -> None:
    """Let two halves of a model train in turn, twelve steps each."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 3e-3 if step // 12 % 2 == index else 0.0


def test_halves_that_train_in_turn_are_left_alone() -> None:
    """What stands still has stood still before, and so has the rest."""
    model = network()
    groups = [{"params": list(part.parameters())} for part in (model[:3], model[3:])]
    assert keys(train(model, in_turn, 60, torch.optim.Adam(groups))) == []


class Branched(nn.Module):
    """A list of blocks, of each of which one parameter is never used."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)}) for _ in range(3))
        self.head, self.used = nn.Linear(8, 4), used

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            found = block["one"](x).tanh()  # type: ignore[index]
            beside = block["two"](x)  # type: ignore[index]
            x = x + found + (beside if self.used else beside.detach())
        return self.head(x)  # type: ignore[no-any-return]


def test_parameters_without_a_gradient_are_named() -> None:
    """The issue is at a module and lists the parameters, not at the container of all blocks."""
    torch.manual_seed(0)
    issue = train(Branched(used=False), nothing)[0]
    assert issue.key == "DISCONNECTED:blocks.0.two"
    assert "blocks.0.two.weight, blocks.0.two.bias, blocks.1.two.weight and 3 more" in issue.message
    assert keys(train(Branched(used=True), nothing)) == []


def test_a_schedule_that_has_come_to_nothing_is_named() -> None:
    """A rate that falls by half a step leaves most of the loss where it is; the same to a tenth does not."""
    assert "LR_TOO_LOW" in keys(train(network(), rate(lambda step: 3e-3 * 0.5**step), 60))
    assert keys(train(network(), rate(lambda step: 3e-3 * 0.96**step), 60)) == []
