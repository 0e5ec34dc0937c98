"""The measurement of a model: its gradients at every step, its weights on request."""

from typing import Any

import pytest
import torch
from torch import distributed, nn

from gradtrack import GradientConfig, GradientManager
from gradtrack.errors import UsageError
from gradtrack.gradients.measurer import Measurer
from gradtrack.step.data import StepData
from gradtrack.step.measure import Measurement
from tests.training import batch_loss, small_model


def read(measurement: Measurement, loss: torch.Tensor | None = None) -> StepData:
    """Collect and read the gradients that are there."""
    grads = measurement.collect()
    facts = StepData(grads.layout, grads.touched_rows)
    measurement.read(grads, facts, loss, row_due=False)
    return facts


def test_the_parameters_of_the_step() -> None:
    """A layer that is frozen or a grouping that is changed during the training counts from the next step on."""
    model, config = small_model(), GradientConfig(engine="torch")
    measurement = Measurement(model, config, Measurer("torch"))
    torch.autograd.backward(batch_loss(model))
    assert set(read(measurement).norms()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    model.get_parameter("0.weight").requires_grad_(False)
    config.groups = {"heads": r"^2\."}
    facts = read(measurement)
    assert set(facts.norms()) == {"0.bias", "2.weight", "2.bias"}
    assert facts.groups()["2.bias"] == "heads"


def test_the_engine_of_the_step() -> None:
    """An engine that is chosen during the training is used from the next step on."""
    config, measurer = GradientConfig(engine="torch"), Measurer("torch")
    measurement = Measurement(small_model(), config, measurer)
    config.engine = "native"
    measurement.collect()
    assert measurer.engine == "native"


def test_loss_and_weights() -> None:
    """The loss is read with the gradients, the weights when they are asked for."""
    model = small_model()
    measurement = Measurement(model, GradientConfig(), Measurer("torch"))
    loss = batch_loss(model)
    torch.autograd.backward(loss)
    facts = read(measurement, loss.detach())
    assert facts.loss == loss.item()
    assert not facts.weight_norms
    facts.event = True
    measurement.measure_weights(facts, model.parameters())
    expected = torch.cat([param.detach().flatten().double() for param in model[0].parameters()]).norm()
    assert facts.weight_norms["0"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("model", "hint"), [(nn.ReLU(), "at least one.$"), (nn.Linear(1, 1), "are frozen")])
def test_nothing_to_read(model: nn.Module, hint: str) -> None:
    """A model without trainable parameters is refused, with the reason where it is known."""
    with pytest.raises(UsageError, match=hint):
        Measurement(model.requires_grad_(False), GradientConfig(), Measurer("torch"))


def test_a_report_that_is_read_later_has_the_sizes_of_its_step() -> None:
    """Also where the ranks of a group have told each other of other sizes since."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager, reports = GradientManager(process_group=distributed.group.WORLD), []
        for outputs in (3, 4, 3):
            model.zero_grad()
            layer = model.get_submodule("1")
            layer.get_parameter("weight").data = torch.randn(outputs, 7)
            layer.get_parameter("bias").data = torch.zeros(outputs)
            reports.append(manager.step(model, optimizer, model(torch.randn(8, 5)).square().mean()))
        counts = [report.statistics.element_count for report in reports if report.statistics is not None]
        assert counts == [42 + 8 * outputs for outputs in (3, 4, 3)]
    finally:
        distributed.destroy_process_group()


def test_an_ordinary_step_is_measured_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, and again after parameters have got other sizes or another engine was used."""
    native = pytest.importorskip("gradtrack.gradients.native.engine", reason="numba is not installed")
    planned: list[bool] = []
    take = native.Plan.take

    def counted(plan: Any, grads: Any) -> bool:
        planned.append(take(plan, grads))
        return planned[-1]

    monkeypatch.setattr(native.Plan, "take", counted)
    manager, model = GradientManager(grad_track_per_weight_matrix=False), small_model()  # rows measure no weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int) -> list[bool]:
        planned.clear()
        for step in range(count):
            model.zero_grad()
            manager.step(model, optimizer, batch_loss(model, step))
        return list(planned)

    assert steps(4) == [True] * 3
    manager.config.engine = "torch"
    assert steps(2) == []
    manager.config.engine = "native"
    assert steps(4) == [True] * 3
    bias = model.get_parameter("2.bias")
    bias.data, model.get_parameter("2.weight").data = torch.zeros(4), torch.ones(4, 5)
    assert steps(4) == [False, True, True, True]
