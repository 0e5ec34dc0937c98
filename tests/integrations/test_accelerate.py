"""Loops of Hugging Face Accelerate and Lightning Fabric, whose optimizers are wrapped."""

import contextlib
from typing import Any

import pytest
import torch

import gradtrack
from tests.processes import ROOT
from tests.training import batch_loss, optimizer_of, small_model


def accelerated() -> tuple[Any, Any, Any]:
    """Return a model, an optimizer and what runs the backward pass, as Accelerate prepares them."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = small_model()
    return *accelerator.prepare(model, optimizer_of(model)), accelerator.backward


def fabricated() -> tuple[Any, Any, Any]:
    """Return the same as Fabric sets it up."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = small_model()
    return *fabric.setup(model, optimizer_of(model)), fabric.backward


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepare", [accelerated, fabricated])
@pytest.mark.parametrize("one_line", [True, False])
def test_a_prepared_loop_is_looked_at_before_each_step(prepare: Any, one_line: bool) -> None:
    """`watch` and an explicit call report what torch's own clipping returns, and clip as it does."""
    model, optimizer, backward = prepare()
    twin = small_model()
    settings = {"max_grad_norm": 0.05}
    manager = gradtrack.watch(model, optimizer, settings) if one_line else gradtrack.GradientManager(settings)
    twin_optimizer = optimizer_of(twin)
    expected = []
    for step in range(3):
        backward(batch_loss(model, step))
        if not one_line:
            manager.step(model, optimizer, None, backward=False)
        optimizer.step()
        optimizer.zero_grad()
        twin_optimizer.zero_grad()
        torch.autograd.backward(batch_loss(twin, step))
        expected.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)))
        twin_optimizer.step()
    assert [report.clipping.norm_before for report in manager.reports] == pytest.approx(expected, rel=1e-5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    manager.close()


MICRO_BATCHES, STEPS = 3, 2


def accelerated_steps(manager: gradtrack.GradientManager | None) -> gradtrack.GradientManager:
    """Train as the page on Accelerate does, which divides the loss within its own backward pass."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    plain = small_model()
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
    watching = manager or gradtrack.watch(model, optimizer)
    for step in range(MICRO_BATCHES * STEPS):
        with accelerator.accumulate(model):
            loss = batch_loss(model, step)
            accelerator.backward(loss)
            if manager is not None:
                manager.step(
                    model,
                    optimizer,
                    loss / accelerator.gradient_accumulation_steps,
                    backward=False,
                    accumulate=not accelerator.sync_gradients,
                )
            optimizer.step()
            optimizer.zero_grad()
    return watching


def fabricated_steps(manager: gradtrack.GradientManager | None) -> gradtrack.GradientManager:
    """Train as the page on Fabric does, which divides nothing."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    plain = small_model()
    model, optimizer = fabric.setup(plain, optimizer_of(plain))
    watching = manager or gradtrack.watch(model, optimizer)
    for index in range(1, MICRO_BATCHES * STEPS + 1):
        accumulate = index % MICRO_BATCHES != 0
        with fabric.no_backward_sync(model, enabled=accumulate):
            loss = batch_loss(model, index - 1) / MICRO_BATCHES
            fabric.backward(loss)
        if manager is not None:
            manager.step(model, optimizer, loss, backward=False, accumulate=accumulate)
        if not accumulate:
            optimizer.step()
            optimizer.zero_grad()
    return watching


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [accelerated_steps, fabricated_steps])
@pytest.mark.parametrize("one_line", [True, False])
def test_loss_and_norm_are_those_of_the_optimizer_step(train: Any, one_line: bool) -> None:
    """With micro-batches both are of their mean, whichever way they are reported, as a loop of plain torch has it."""
    twin, losses, norms = small_model(), [], []
    optimizer = optimizer_of(twin)
    for step in range(STEPS):
        parts = [batch_loss(twin, step * MICRO_BATCHES + index) for index in range(MICRO_BATCHES)]
        mean = torch.stack(parts).mean()
        optimizer.zero_grad()
        torch.autograd.backward(mean)
        losses.append(float(mean))
        norms.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), torch.inf)))
        optimizer.step()
    with contextlib.closing(train(None if one_line else gradtrack.GradientManager(max_grad_norm=100.0))) as manager:
        assert [report.loss for report in manager.reports] == pytest.approx(losses, rel=1e-5)
        assert [report.statistics.norm for report in manager.reports] == pytest.approx(norms, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_the_page_reports_the_loss_of_the_step() -> None:
    """What the page on Accelerate shows is the mean over the micro-batches, with the gradients of which it clips."""
    pytest.importorskip("accelerate")
    page = (ROOT / "docs" / "frameworks" / "accelerate.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    model, twin = small_model(), small_model()
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
    names = {"model": model, "optimizer": optimizer_of(model), "loader": batches, "criterion": torch.nn.MSELoss()}
    exec(block, names)
    report = names["manager"].reports[0]
    mean = torch.stack([torch.nn.functional.mse_loss(twin(x), y) for x, y in batches]).mean()
    torch.autograd.backward(mean)
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), torch.inf))
    assert (report.loss, report.statistics.norm) == pytest.approx((float(mean), norm), rel=1e-5)
