"""Non-finite gradients: found, counted, named, and acted on."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientConfig, GradientManager, NaNInfHandler
from gradtrack.errors import NonFiniteGradientError
from gradtrack.protection.nonfinite import first_nonfinite, nonfinite_inputs, nonfinite_parts
from tests.training import batch_loss, layer, look, optimizer_of, small_model, with_gradients

BAD = st.sampled_from([math.nan, math.inf, -math.inf])
OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
]
KINDS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@given(which=st.integers(0, 3), place=st.integers(0, 100), bad=BAD)
def test_one_bad_element_anywhere_is_found_and_named(which: int, place: int, bad: float) -> None:
    """A single NaN or infinity is counted by its kind and named by its parameter."""
    model = small_model()
    torch.autograd.backward(batch_loss(model))
    name, param = list(model.named_parameters())[which]
    assert param.grad is not None
    param.grad.view(-1)[place % param.numel()] = bad
    found = look(model).nan_inf
    assert [parameter.name for parameter in found.parameters] == [name]
    counts = (found.nan_count, found.positive_inf_count, found.negative_inf_count, found.inf_count)
    assert counts == (math.isnan(bad), bad == math.inf, bad == -math.inf, math.isinf(bad))


@given(shape=st.lists(st.integers(1, 5), max_size=3), bad=st.dictionaries(st.integers(0, 124), BAD, max_size=4))
def test_elements_of_data_are_counted_and_the_first_is_placed(shape: list[int], bad: dict[int, float]) -> None:
    """As NumPy counts them, in a tensor and in an array, wherever in a batch they are."""
    array = np.ones(shape, dtype=np.float32)
    for place, value in bad.items():
        array.reshape(-1)[place % array.size] = value
    num_nan, num_inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    where = np.argwhere(np.isnan(array) if num_nan else np.isinf(array))
    for data in (torch.tensor(array), array):
        texts = [text for _, text in nonfinite_parts({"x": [torch.zeros(2), data]}, "batch{}")]
        assert len(texts) == (num_nan + num_inf > 0)
        for text in texts:
            assert text.startswith("batch['x'][1] has ")
            assert (f"{num_nan} NaN" in text) == (num_nan > 0)
            assert (f"{num_inf} Inf" in text) == (num_inf > 0)
            assert text.endswith(f" at {where[0].tolist()}") or not shape


def test_masks_are_no_fault_and_nan_is_named_before_infinities() -> None:
    """Scores get -inf by a mask of zeros and -inf, and numbers of other kinds hold none."""
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    assert not first_nonfinite(nonfinite_parts([mask, torch.arange(3), "text", np.array(["a"]), 1.5, None], "batch{}"))
    spoilt = [mask, torch.tensor([1.0, math.inf]), {"y": torch.tensor(math.nan)}]
    assert first_nonfinite(nonfinite_parts(spoilt, "batch{}")) == "batch[2]['y'] has 1 NaN"
    found = first_nonfinite(nonfinite_inputs((mask,), {"x": spoilt[:2]}, "the model"))
    assert found == "input x[1] of the model has 1 Inf at [1]"


class Lazy(dict[str, Tensor]):
    """A batch that reads its items when they are asked for, and fails."""

    def items(self) -> Any:
        """Fail."""
        raise OSError("gone")


@pytest.mark.parametrize("action", ["skip", "report"])
def test_nan_in_the_batch_is_named_with_the_step(action: Any) -> None:
    """The issue says where the batch has it while it is open, and looks again when it opens anew."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = GradientManager(nonfinite_action=action)
    x = torch.ones(4, 3)
    for step, value in enumerate([1.0, math.nan, math.nan, 1.0, math.inf], start=1):
        data = x.clone()
        data[2, 1] = value
        optimizer.zero_grad()
        loss = batch_loss(model) * (1.0 if value == 1.0 else math.nan)
        report = manager.step(model, optimizer, loss, batch={"x": data, "step": step} if step < 5 else Lazy(x=data))
        first = 2 if step < 4 else 5
        assert [issue.issue_type.value for issue in report.health.issues] == ["NUMERICAL"] * (value != 1.0)
        for issue in report.health.issues:
            named = f"At step {first} batch['x'] has 1 NaN at [2, 1]." in issue.message
            assert named == (step < 4)
            assert ("Look at the data of this batch." in issue.recommendation) == named
            assert "Pass batch=" not in issue.recommendation
    assert "Pass batch=" in manager.step(model, optimizer, batch_loss(model) * math.nan).health.issues[0].recommendation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
def test_skip_makes_the_step_a_no_op(optimizer_type: Any, options: dict[str, Any], kind: dict[str, Any]) -> None:
    """Weights, momentum, second moments and step counts are as if the step had not been."""
    model = small_model()
    optimizer = optimizer_of(model, optimizer_type, **options, **kind)
    manager = GradientManager()
    for step in range(3):
        optimizer.zero_grad()
        manager.step(model, optimizer, batch_loss(model, step))
        optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    report = manager.step(model, optimizer, batch_loss(model) * math.nan)
    optimizer.step()
    assert report.skipped
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            old = state["state"][index][name]
            assert torch.equal(value, old) if isinstance(value, Tensor) else value == old
    optimizer.zero_grad()
    assert not manager.step(model, optimizer, batch_loss(model)).skipped


def test_skip_covers_parameters_of_the_optimizer_outside_of_the_model() -> None:
    """What the optimizer owns beyond the model does not move either."""
    model, extra = small_model(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    extra.grad = torch.ones(2)
    GradientManager().step(model, optimizer, batch_loss(model) * math.inf)
    optimizer.step()
    assert torch.equal(extra.detach(), torch.ones(2))


class TestReplace:
    """Values in place of NaN and Inf."""

    def test_signs_are_kept(self) -> None:
        """Each kind gets its value, an infinity with its sign, and the counts are from before."""
        model = with_gradients([torch.tensor([math.nan, math.inf, -math.inf, 1.0])])
        report = look(model, replace_nan_with=0.5, replace_inf_with=3.0, enable_gradient_clipping=False)
        assert torch.equal(next(model.parameters()).grad, torch.tensor([0.5, 3.0, -3.0, 1.0]))  # type: ignore[arg-type]
        assert (report.nan_inf.nan_count, report.nan_inf.inf_count, report.nan_inf.replaced_count) == (1, 2, 3)
        assert not report.skipped

    def test_stays_within_the_type(self) -> None:
        """The default of 1e6 is beyond float16 and becomes its largest number."""
        model = with_gradients([torch.tensor([math.inf, 0.0], dtype=torch.float16)])
        look(model, nonfinite_action="replace", enable_gradient_clipping=False)
        grad = next(model.parameters()).grad
        assert grad is not None
        assert grad.tolist() == [65504.0, 0.0]

    def test_clipping_sees_the_replaced_gradients(self) -> None:
        """The norm before is the true one, the norm after is that of what the optimizer gets."""
        model = with_gradients([torch.tensor([math.inf, 3.0])])
        clipping = look(model, replace_inf_with=4.0, max_grad_norm=1.0).clipping
        assert clipping.norm_before == math.inf
        assert clipping.coefficient == pytest.approx(1 / 5, rel=1e-5)
        assert clipping.norm_after == pytest.approx(1.0, rel=1e-5)


def test_raise_names_the_worst_parameters_and_records_the_step() -> None:
    """The error names the parameters, gradients stay, and the step is recorded."""
    model = with_gradients([torch.tensor([math.nan, math.nan]), torch.tensor([math.inf, 1.0]), torch.ones(2)])
    manager = GradientManager(nonfinite_action="raise", backends=["memory"])
    with pytest.raises(NonFiniteGradientError, match=r"p0 \(2 NaN, 0 \+Inf, 0 -Inf\), p1 .*Look at the loss"):
        look(model, manager)
    assert manager.reports[-1].nan_inf.action == "raise"
    assert manager.backend("memory").records[-1].metrics["train/grad_nan_count"] == 2  # type: ignore[attr-defined]
    assert next(model.parameters()).grad is not None


def test_report_leaves_gradients_as_they_are() -> None:
    """Only looking changes nothing, not even by clipping with a norm that is not finite."""
    model = with_gradients([torch.tensor([math.nan, 5.0, math.inf])])
    report = look(model, nonfinite_action="report")
    grad = next(model.parameters()).grad
    assert grad is not None
    assert torch.equal(grad[1:], torch.tensor([5.0, math.inf]))
    assert (report.nan_inf.action, report.skipped, report.clipping.clipped) == ("report", False, False)


def test_statistics_are_over_the_finite_elements() -> None:
    """NaN and infinities are counted and left out of everything but the true norm."""
    model = with_gradients([torch.tensor([math.nan, 3.0, -math.inf, 4.0])])
    report = look(model, nonfinite_action="report")
    assert report.statistics is not None
    assert (report.statistics.total_norm, report.statistics.min, report.statistics.max) == (5.0, 3.0, 4.0)
    assert report.clipping.norm_before is not None
    assert math.isnan(report.clipping.norm_before)
    assert math.isnan(report.metrics()["train/grad_norm"])


def test_switched_off() -> None:
    """Without the check nothing is counted or changed, and clipping does not spread the NaN."""
    model = with_gradients([torch.tensor([math.nan, 5.0])])
    report = look(model, enable_nan_inf_check=False)
    assert report.nan_inf.action == "off"
    assert "train/grad_nan_count" not in report.metrics()
    assert next(model.parameters()).grad.tolist()[1] == 5.0  # type: ignore[union-attr]


@pytest.mark.parametrize(("threshold", "severity"), [(0.5, "HIGH"), (0.1, "CRITICAL")])
def test_share_that_is_critical(threshold: float, severity: str) -> None:
    """`nan_inf_threshold` is the share of elements above which a step counts as critical."""
    model = with_gradients([torch.tensor([math.nan, 1.0, 1.0, 1.0])])
    assert look(model, nan_inf_threshold=threshold).health.issues[0].severity.value == severity


class TestHandlerAlone:
    """The handler without a manager."""

    def test_gradients(self) -> None:
        """Gradients are counted and fixed as the configuration says."""
        model = with_gradients([torch.tensor([math.nan, 1.0])])
        handler = NaNInfHandler(GradientConfig(nonfinite_action="replace"))
        assert handler.check_and_fix_gradients(model)["nan_count"] == 1
        assert handler.check_and_fix_gradients(model)["nan_count"] == 0

    def test_raise(self) -> None:
        """Raising works alone as well."""
        with pytest.raises(NonFiniteGradientError):
            NaNInfHandler(GradientConfig(nonfinite_action="raise")).check_and_fix_gradients(
                with_gradients([torch.tensor([math.nan])])
            )

    def test_parameters_are_fixed_or_only_counted(self) -> None:
        """Weights, frozen ones too, are counted by name and made finite on request."""
        model = small_model()
        with torch.no_grad():
            layer(model, 0).weight[0, 0] = math.nan
            layer(model, 2).bias[1] = -math.inf
        layer(model, 2).bias.requires_grad_(False)
        handler = NaNInfHandler(GradientConfig())
        counted = handler.check_and_fix_parameters(model=model, replace_values=False)
        assert {parameter.name for parameter in counted.parameters} == {"0.weight", "2.bias"}
        assert not torch.isfinite(layer(model, 0).weight).all()
        fixed = handler.check_and_fix_parameters(model=model, replace_values=True)
        assert fixed.replaced_count == 2
        assert (layer(model, 0).weight[0, 0].item(), layer(model, 2).bias[1].item()) == (0.0, -1e6)
        assert handler.check_and_fix_parameters(model=model).nan_count == 0
