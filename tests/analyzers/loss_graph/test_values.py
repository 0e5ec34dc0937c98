"""What the values of a loss tell together with its graph: targets out of range, and a loss that stays at chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrack import GradientManager

Batch = Callable[[], tuple[Tensor, Tensor]]


def signs() -> tuple[Tensor, Tensor]:
    """Return labels of -1 and 1 that follow from the inputs."""
    x = torch.randn(16, 4)
    return x, x[:, :1].sign()


def halves() -> tuple[Tensor, Tensor]:
    """Return the same labels as 0 and 1."""
    x, target = signs()
    return x, (target + 1) / 2


def many(low: float) -> Batch:
    """Return three labels of an input that are 1 or `low`."""

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4)
        return x, torch.where(x[:, :3] > 0, 1.0, low)

    return batch


def train(loss_fn: Callable[[Tensor, Tensor], Tensor], batch: Batch, outputs: int, num_steps: int = 40) -> list[str]:
    """Train, and return the issues of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with GradientManager(analyzers=["loss_graph"], backends=[], engine="torch") as manager:
        for _ in range(num_steps):
            x, target = batch()
            optimizer.zero_grad()
            manager.step(model, optimizer, loss_fn(model(x), target))
            optimizer.step()
        return [issue.key for issue in manager.diagnose()]


def _weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, pos_weight=torch.tensor([1.5]))


def _summed(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum(1).mean()


RANGES: Final[list[tuple[Callable[[Tensor, Tensor], Tensor], Batch, Batch, int]]] = [
    (F.binary_cross_entropy_with_logits, signs, halves, 1),
    (_weighted, signs, halves, 1),
    (_summed, many(-1.0), many(0.0), 3),
    (F.binary_cross_entropy_with_logits, many(-1.0), many(0.0), 3),
]


@pytest.mark.parametrize(("loss_fn", "wrong", "right", "outputs"), RANGES)
def test_targets_out_of_range_are_named(
    loss_fn: Callable[[Tensor, Tensor], Tensor], wrong: Batch, right: Batch, outputs: int
) -> None:
    """A binary cross-entropy below zero has targets of -1; with 0 it has no issue."""
    assert train(loss_fn, wrong, outputs) == ["TARGET_RANGE:2"]
    assert train(loss_fn, right, outputs) == []


def unrelated(num_classes: int) -> Batch:
    """Return labels that have nothing to do with the inputs."""
    return lambda: (torch.randn(32, 4), torch.randint(num_classes, (32,)))


def related() -> tuple[Tensor, Tensor]:
    """Return the class of the largest input."""
    x = torch.randn(32, 4)
    return x, x.argmax(1)


def slightly(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of logits that begin near zero."""
    return F.cross_entropy(0.1 * output, target)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_loss_that_stays_at_chance_is_told_as_a_hypothesis(num_classes: int) -> None:
    """Labels at random leave the loss at ln(classes); not before 96 steps, and not where it falls."""
    assert train(slightly, unrelated(num_classes), num_classes, 100) == ["CHANCE_LEVEL"]
    assert train(slightly, unrelated(num_classes), num_classes, 90) == []
    assert train(slightly, related, 4, 100) == []


def rare(x: Tensor) -> Tensor:
    """Return labels of which one in seven or so is 1."""
    return (x[:, 0] > 1).long()


def _pairs(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of finding for each row of the output the one of the targets that belongs to it."""
    return F.cross_entropy(output @ target.T / 2, torch.arange(len(output)))


def _masked(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of all rows but each fourth, which has no class."""
    return F.cross_entropy(output, target.where(torch.arange(len(target)) % 4 > 0, -100))


ANSWERS: Final[dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor], int]]] = {
    "rare classes": (F.cross_entropy, rare, 2),
    "classes, some without one": (_masked, lambda x: x.argmax(1), 4),
    "a large weight": (lambda output, target: 4096 * F.cross_entropy(output, target), lambda x: x.argmax(1), 4),
    "a sum": (lambda output, target: F.cross_entropy(output, target, reduction="sum"), lambda x: x.argmax(1), 4),
    "rare labels": (
        lambda output, target: F.binary_cross_entropy_with_logits(output.squeeze(1), target.float()) / 4,
        rare,
        1,
    ),
    "probabilities": (
        lambda output, target: F.binary_cross_entropy(output.sigmoid(), target),
        lambda x: (x[:, :2] > 0).float(),
        2,
    ),
    "numbers": (F.mse_loss, lambda x: 3 * x[:, :2] + 1, 2),
    "numbers with outliers": (F.smooth_l1_loss, lambda x: 3 * x[:, :2], 2),
    "numbers, clipped": (lambda output, target: F.huber_loss(output, target, delta=2.0), lambda x: x[:, :2], 2),
    "pairs": (_pairs, lambda x: x, 4),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_other_inputs_are_told_of_any_function(name: str) -> None:
    """Targets that belong to other rows leave the loss at the best guess; with their own rows it falls below."""
    loss_fn, answer, outputs = ANSWERS[name]

    def batch(of_others: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(256, 4)
        return x, answer(x)[torch.randperm(256)] if of_others else answer(x)

    num_steps = 390 if name in ("rare labels", "probabilities") else 140
    assert train(loss_fn, lambda: batch(True), outputs, num_steps) == ["CHANCE_LEVEL"]
    assert train(loss_fn, lambda: batch(False), outputs, 140) == []


def test_labels_that_are_mostly_noise_take_longer() -> None:
    """Where little can be known, a loss that is right is close to that of guessing as well."""

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 4)
        return x, torch.bernoulli((0.3 * x[:, :1]).sigmoid())

    assert train(F.binary_cross_entropy_with_logits, batch, 1, 250) == []


def test_a_flat_beginning_is_forgotten() -> None:
    """The issue closes when the loss has left the level of guessing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = []
    with GradientManager(analyzers=["loss_graph"], backends=[], engine="torch") as manager:
        for step in range(200):
            x, target = related() if step >= 100 else unrelated(4)()
            optimizer.zero_grad()
            manager.step(model, optimizer, F.cross_entropy(model(x), target))
            optimizer.step()
            found += [[issue.key for issue in manager.diagnose()]] if step in (99, 199) else []
    assert found == [["CHANCE_LEVEL"], []]


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_micro_batches_are_added_up(weight: float) -> None:
    """The level is that of the sum of the micro-batches, whatever the weight of each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with GradientManager(analyzers=["loss_graph"], backends=[], engine="torch") as manager:
        for _ in range(100):
            optimizer.zero_grad()
            for part in range(4):
                x, target = unrelated(4)()
                manager.step(model, optimizer, weight * F.cross_entropy(model(x), target), accumulate=part < 3)
            optimizer.step()
        (issue,) = manager.diagnose()
        assert issue.threshold == pytest.approx(4 * weight * 1.386, rel=0.05)


def test_a_loop_with_a_backward_pass_of_its_own_knows_classes() -> None:
    """What autograd has freed is not needed for a cross-entropy that nothing multiplies; a product is not judged."""
    for weight, expected in ((None, ["CHANCE_LEVEL"]), (2.0, [])):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with GradientManager(analyzers=["loss_graph"], backends=[], engine="torch") as manager:
            for _ in range(140):
                x, target = unrelated(4)()
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), target)
                loss = loss if weight is None else weight * loss
                loss.backward()  # type: ignore[no-untyped-call]
                manager.step(model, optimizer, loss, backward=False)
                optimizer.step()
            assert [issue.key for issue in manager.diagnose()] == expected


def test_a_first_loss_far_above_chance_is_a_note() -> None:
    """Large first logits are information: what they cost is soon made good."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    nn.init.normal_(model.weight, std=50.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with GradientManager(analyzers=["loss_graph"], backends=[], engine="torch") as manager:
        for _ in range(2):
            optimizer.zero_grad()
            report = manager.step(model, optimizer, F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8).long()))
            optimizer.step()
        assert manager.diagnose() == []
    assert any("guessing among 3 classes gives 1.1" in note for note in report.notes)
