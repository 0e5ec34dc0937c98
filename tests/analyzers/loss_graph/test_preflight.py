"""The preflight: what one batch shows before the first step, and that it leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrack import preflight
from gradtrack.analyzers.loss_graph import PreflightReport
from gradtrack.errors import InputTypeError, UsageError


def network(*behind: nn.Module) -> nn.Sequential:
    """Return a network with batch statistics and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3), *behind)


BATCH: Final = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3)


def failed(report: PreflightReport) -> list[str]:
    """Return the names of the checks that found something."""
    return [check.name for check in report.checks if check.passed is False]


def test_a_sound_training_passes() -> None:
    """Every line is ok, and the first loss is near that of guessing."""
    model = network()
    report = preflight(model, nn.CrossEntropyLoss(), BATCH, torch.optim.SGD(model.parameters(), lr=0.1))
    assert report.passed, report
    assert {check.name for check in report.checks} == {"optimizer", "modes", "gradients", "first loss", "examples"}


def test_it_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each check."""
    report = preflight(network(), nn.CrossEntropyLoss(), BATCH)
    assert capsys.readouterr().out == f"{report}\n"
    assert len(str(report).splitlines()) == len(report.checks)


def _frozen_only(model: nn.Sequential) -> Any:
    model[0].requires_grad_(False)
    return torch.optim.SGD(model[0].parameters(), lr=0.1)


OWNERS: Final[dict[str, tuple[Callable[[nn.Sequential], Any], str]]] = {
    "the head only": (
        lambda model: torch.optim.SGD(model[4].parameters(), lr=0.1),
        "no optimizer has 0.weight, 0.bias, 1.weight and 1 more.",
    ),
    "another model": (
        lambda model: torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1),
        "it has 2 parameters that the model has not.",
    ),
    "frozen ones only": (
        _frozen_only,
        "no optimizer has 1.weight, 1.bias, 4.weight and 1 more; "
        "0.weight, 0.bias are frozen, and an optimizer has them.",
    ),
    "one of two twice": (
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[4].parameters(), lr=0.1)],
        "two groups or optimizers have the same parameter.",
    ),
}


@pytest.mark.parametrize(("make", "text"), OWNERS.values(), ids=OWNERS)
def test_owners_are_compared(make: Callable[[nn.Sequential], Any], text: str) -> None:
    """What no optimizer has, and what one has that is not to be trained here."""
    model = network()
    report = preflight(model, nn.CrossEntropyLoss(), BATCH, make(model))
    assert next(check.text for check in report.checks if check.name == "optimizer") == text
    assert "optimizer" in failed(report)


class Flattened(nn.Module):
    """A view that mixes examples with features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.out(self.inner(x).view(8, -1).T.reshape(-1, 8))  # type: ignore[no-any-return]


class Cut(nn.Module):
    """A layer whose output is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.out(self.inner(x).detach())  # type: ignore[no-any-return]


class Loud(nn.Module):
    """A last layer whose weights are far too large."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        nn.init.normal_(self.out.weight, std=30.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.out(x)  # type: ignore[no-any-return]


FAULTY: Final[dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]]] = {
    "softmax before the loss": (lambda: network(nn.Softmax(dim=1)), F.cross_entropy, "loss"),
    "softmax over the batch": (lambda: network(nn.LogSoftmax(dim=0)), F.nll_loss, "loss"),
    "softmax over the batch mixes": (lambda: network(nn.LogSoftmax(dim=0)), F.nll_loss, "examples"),
    "evaluation mode": (lambda: network().eval(), F.cross_entropy, "modes"),
    "a view": (Flattened, F.cross_entropy, "examples"),
    "detached": (Cut, F.cross_entropy, "gradients"),
    "NaN": (network, lambda output, target: (output - output.detach()).sqrt().sum(), "gradients"),
    "a loud head": (Loud, F.cross_entropy, "first loss"),
}


@pytest.mark.parametrize(("make", "loss_fn", "name"), FAULTY.values(), ids=FAULTY)
def test_a_fault_is_found(make: Callable[[], nn.Module], loss_fn: Callable[..., Tensor], name: str) -> None:
    """Each line looks at one kind of mistake."""
    torch.manual_seed(0)
    assert name in failed(preflight(make(), loss_fn, BATCH))


def test_nothing_is_changed() -> None:
    """Weights, gradients, buffers, modes, the optimizer's state and random numbers are what they were."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    torch.autograd.backward(F.cross_entropy(model(BATCH[0]), BATCH[1]))
    optimizer.step()
    model[3].eval()
    state, owned = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    modes, numbers = [part.training for part in model.modules()], torch.get_rng_state()
    preflight(model, nn.CrossEntropyLoss(), BATCH, optimizer)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(torch.equal(one, param.grad) for one, param in zip(gradients, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(numbers, torch.get_rng_state())
    assert str(optimizer.state_dict()) == str(owned)


def test_inputs_may_be_keywords() -> None:
    """A batch that is no pair goes into the model as a whole."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.out(x), target)

    report = preflight(Model(), lambda output: output, {"x": BATCH[0], "target": BATCH[1]})
    assert report.passed
    assert next(check.passed for check in report.checks if check.name == "examples") is None


def test_what_is_no_training_is_refused() -> None:
    """The error says what was expected."""
    with pytest.raises(InputTypeError, match="expected a model, a loss function"):
        preflight(F.cross_entropy, network(), BATCH)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a single number"):
        preflight(network(), nn.CrossEntropyLoss(reduction="none"), BATCH)
