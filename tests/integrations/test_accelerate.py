"""Loops of Hugging Face Accelerate and Lightning Fabric, whose optimizers are wrapped."""

from typing import Any

import pytest
import torch

import gradtrack
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
