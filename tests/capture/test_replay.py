"""Replay of a captured step: the operation that was the first to return what is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradtrack import GradientManager, safe_backward
from gradtrack.capture.replay import replay_step
from tests.capture.planted import FAULTS, Planted


def captured(fault: Planted, run_dir: Path) -> Path:
    """Make one step with a fault, and return its capture."""
    model = fault.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=run_dir, capture="nonfinite", save_gradient_plots=False) as manager:
        manager.attach(model, optimizer)
        batch = fault.batch()
        loss = fault.loss(model, batch)
        safe_backward(loss, model, optimizer, manager, batch=batch)
        optimizer.step()
    return run_dir / "capture-00001"


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_is_named(name: str, tmp_path: Path) -> None:
    """For each planted fault: the operation, the module, the line of code, and the loss to the last bit."""
    fault = FAULTS[name]
    capture = captured(fault, tmp_path / "run")
    found = replay_step(capture, lambda: (fault.model(), fault.loss))
    print(found)
    assert found.origin is not None
    assert (found.origin.name, found.origin.is_backward) == (fault.operation, fault.is_backward)
    assert found.origin.module == fault.module
    assert fault.line in found.origin.line
    assert found.same_loss
    assert not found.notes
