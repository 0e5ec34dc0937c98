"""The protection of one step: non-finite gradients and clipping together."""

import math
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from gradtrack import GradientClipper, GradientConfig, GradientManager, NaNInfHandler
from gradtrack.errors import UsageError
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.protection.spikes import SpikeDetector
from gradtrack.step.data import StepData
from gradtrack.step.loss_scale import Scale
from gradtrack.step.protect import Protection
from tests.training import batch_loss, optimizer_of, small_model, with_gradients


def protect(*gradients: torch.Tensor, scaled: bool = False, **settings: object) -> tuple[StepData, list[object]]:
    """Protect gradients; return what was done and the gradients that are left."""
    config, measurer = GradientConfig.load(None, **settings), Measurer("torch")
    model = with_gradients(list(gradients))
    grads = ParameterTable(model).gradients()
    protection = Protection(NaNInfHandler(config), GradientClipper(config), SpikeDetector(config))
    moments = grads.measure(measurer)
    data = StepData(grads.layout, {})
    data.scale = create_autospec(Scale, instance=True) if scaled else None
    protection.protect(grads, moments, data, model.parameters)
    return data, [param.grad for param in model.parameters()]


def test_a_skipped_step_has_no_norm_after() -> None:
    """A step that is left out has its true norm before, none after, and no gradients."""
    made, left = protect(torch.tensor([math.inf, 1.0]), torch.ones(2), nonfinite_action="skip")
    assert made.skipped
    assert made.clipping["norm_before"] == math.inf
    assert made.clipping["norm_after"] is None
    assert left == [None, None]


def test_replaced_gradients_are_clipped_as_they_are_then() -> None:
    """After `replace` the norm that is clipped is that of the replaced gradients, and the true one is reported."""
    made, left = protect(
        torch.tensor([math.nan, 3.0]), torch.tensor([4.0]), nonfinite_action="replace", max_grad_norm=1.0
    )
    assert not made.skipped
    assert math.isnan(made.clipping["norm_before"])
    assert made.clipping["norm_after"] == pytest.approx(1.0, rel=1e-5)
    assert torch.cat(left).tolist() == pytest.approx([0.0, 0.6, 0.8], rel=1e-5)  # type: ignore[arg-type]


def test_the_scaler_decides() -> None:
    """Under a loss scaler non-finite gradients are counted and stay where they are."""
    made, left = protect(torch.tensor([math.nan]), torch.ones(1), scaled=True)
    assert made.skipped
    assert made.nan_inf["action"] == "scaler"
    assert made.nan_inf["nan_count"] == 1
    assert all(grad is not None for grad in left)


def test_raising_waits_for_the_caller() -> None:
    """For `raise` the error is handed over, and the gradients stay as they are."""
    made, left = protect(torch.tensor([math.nan]), nonfinite_action="raise")
    assert "p0" in str(made.error)
    assert left[0] is not None


@pytest.mark.parametrize(("enabled", "action"), [(True, "none"), (False, "off")])
def test_finite_gradients_are_clipped_only(enabled: bool, action: str) -> None:
    """Finite gradients are clipped, whether or not the check for non-finite ones is on."""
    made, _ = protect(torch.tensor([3.0, 4.0]), enable_nan_inf_check=enabled, max_grad_norm=1.0)
    assert made.nan_inf == {"action": action}
    assert made.clipping["clipped"]
    assert not made.skipped


def norms_of(manager: GradientManager, norms: list[float]) -> list[list[str]]:
    """Train by gradients of these norms; return the notes of each report."""
    model = with_gradients([torch.ones(4)])
    optimizer = optimizer_of(model, lr=0.0)
    for norm in norms:
        next(model.parameters()).grad = torch.full((4,), norm / 2)
        manager.step(model, optimizer, 1.0, backward=False)
    return [[note for note in report.notes if "the default" in note] for report in manager.reports]


@pytest.mark.parametrize("engine", ["torch", "auto"])
@pytest.mark.parametrize("first", [1, 3, 40, 130])
def test_the_first_clipped_step_says_so_at_the_default_limit(
    first: int, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One note and one line, on the step that is clipped first, however many steps were not before it."""
    told = norms_of(GradientManager(engine=engine), [0.5] * (first - 1) + [1.5, 0.5, 1.5, 1.5])
    said = "clips at max_grad_norm 1.0, the default"
    assert [step for step, notes in enumerate(told, start=1) if notes] == [first]
    assert told[first - 1] == [f"{said}: set max_grad_norm, or enable_gradient_clipping=False."]
    assert [text for text in caplog.messages if "max_grad_norm" in text] == [f"{said} (step {first})"]


@pytest.mark.parametrize("late", [True, False])
def test_the_limit_of_one_step_is_not_the_default(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note waits for a step that the default limit clips, also where the numbers of steps are read late."""
    monkeypatch.setattr("gradtrack.step.pair.on_device", lambda grads: late)
    monkeypatch.setattr("gradtrack.step.data.next_row", lambda step, every: every)
    model, manager = with_gradients([torch.ones(4)]), GradientManager(engine="torch", nonfinite_action="report")
    optimizer = optimizer_of(model, lr=0.0)
    for limit in (0.01, 1.0, None):
        next(model.parameters()).grad = torch.ones(4)
        manager.step(model, optimizer, 1.0, backward=False, max_grad_norm=limit)
    assert [bool(report.notes) for report in manager.reports] == [False, False, True]


def test_a_limit_of_a_micro_batch_is_refused() -> None:
    """Nothing is clipped before the gradients are complete, and the call says so before the backward pass."""
    model = small_model()
    with pytest.raises(UsageError, match=r"accumulate=True: expected it .*\. Pass it with the last micro-batch"):
        GradientManager().step(model, optimizer_of(model), batch_loss(model), accumulate=True, max_grad_norm=0.1)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 1.0}, {"enable_gradient_clipping": False}, {"adaptive_clipping": True}]
)
def test_a_chosen_limit_needs_no_note(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Where the user has set the limit or the way of clipping, or nothing clips, no step says so."""
    assert not any(norms_of(GradientManager(**settings), [1.5, 1.5, 1.5]))
    assert not caplog.messages
