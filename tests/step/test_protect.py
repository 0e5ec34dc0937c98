"""The protection of one step: non-finite gradients and clipping together."""

import math
from unittest.mock import create_autospec

import pytest
import torch

from gradtrack import GradientClipper, GradientConfig, NaNInfHandler
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.step.data import StepData
from gradtrack.step.loss_scale import Scale
from gradtrack.step.protect import Protection
from tests.training import with_gradients


def protect(*gradients: torch.Tensor, scaled: bool = False, **settings: object) -> tuple[StepData, list[object]]:
    """Protect gradients; return what was done and the gradients that are left."""
    config, measurer = GradientConfig.load(None, **settings), Measurer("torch")
    model = with_gradients(list(gradients))
    grads = ParameterTable(model).gradients()
    protection = Protection(NaNInfHandler(config), GradientClipper(config))
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
