"""Hooks on the modules of a model: copies and pickles of the model have none of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager
from gradtrack.analyzers.flow.probe import Probe
from gradtrack.analyzers.gain.monitor import GradientGainMonitor
from gradtrack.analyzers.jacobian.inputs import BlockInputs
from gradtrack.analyzers.recurrent.recorder import RecurrentRecorder
from gradtrack.analyzers.tools.hooks import Faults
from gradtrack.support.interrupts import Changes

Copying = Callable[[nn.Module], nn.Module]


def pickled(model: nn.Module) -> nn.Module:
    """Save a whole model, and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def perceptron() -> nn.Sequential:
    """Return a rectified network."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize("copying", [copy.deepcopy, pickled])
def test_a_probe_sees_nothing_of_a_copy(copying: Copying) -> None:
    """Neither while the probe looks at the model nor when it is closed, and the model itself is seen."""
    model = perceptron()
    changes = Changes()
    probe = Probe(model, changes)
    other = copying(model)
    other(torch.randn(4, 8))
    assert not probe.nodes
    model(torch.randn(4, 8))
    assert [node.name for node in probe.nodes] == ["0", "1", "2"]
    changes.undo()
    other(torch.randn(4, 8))
    assert len(probe.nodes) == 3


def test_a_probe_sees_nothing_of_a_shallow_copy() -> None:
    """A copy that shares the hooks of a module is another module."""
    model = perceptron()
    changes = Changes()
    probe = Probe(model, changes)
    copy.copy(model[0])(torch.randn(4, 8))
    assert not probe.nodes
    changes.undo()


@pytest.mark.parametrize("copying", [copy.deepcopy, pickled])
def test_a_recurrent_recorder_keeps_nothing_of_a_copy(copying: Copying) -> None:
    """A model is copied between its forward and backward pass, and the copy is not followed."""
    model = nn.Sequential(nn.LSTM(4, 4))
    recorder = RecurrentRecorder(model)
    output: Tensor = model(torch.randn(5, 2, 4))[0]
    other = copying(model)
    other(torch.randn(7, 2, 4))
    torch.autograd.backward(output.sum())
    assert [one.trajectory.window for one in recorder.recorded()] == [5]
    recorder.close()


@pytest.mark.parametrize("owner", [BlockInputs, GradientGainMonitor])
@pytest.mark.parametrize("copying", [copy.deepcopy, pickled])
def test_watches_of_blocks_see_nothing_of_a_copy(owner: Any, copying: Copying) -> None:
    """The copy of a block that is watched runs unseen."""
    model = perceptron()
    with Changes() as changes:
        watch: Any = BlockInputs({"0": model[0]}, changes) if owner is BlockInputs else owner(model)
        copying(model)(torch.randn(4, 8))
        assert not (watch.calls if owner is BlockInputs else watch.num_forwards)


@pytest.mark.parametrize("copying", [copy.deepcopy, pickled])
def test_a_model_can_be_copied_at_any_step(copying: Copying) -> None:
    """The copies of every step of a watched training give what the model gives."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)
    with GradientManager(analyzers="auto") as manager:
        manager.attach(model, optimizer)
        for _ in range(12):
            assert torch.equal(copying(model)(x), model(x))
            optimizer.zero_grad()
            manager.step(model, optimizer, model(x).square().mean())
            optimizer.step()


def test_a_fault_waits_until_it_is_asked_for() -> None:
    """What a guarded function raises first is raised by `check`, and nothing is called after it."""
    faults, called = Faults(), []

    def fail(number: int) -> None:
        called.append(number)
        raise ValueError(number)

    guarded = faults.guarded(fail)
    faults.check()
    guarded(1)
    guarded(number=2)
    with pytest.raises(ValueError, match="1"):
        faults.check()
    assert called == [1]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
class _ToSparse(nn.Module):
    """A block whose output, and so the gradient there, is sparse."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


def test_what_a_watch_cannot_read_does_not_stop_the_pass() -> None:
    """Beside a monitor a pass over sparse gradients runs, and the monitor says later what was wrong."""
    block = _ToSparse()
    monitor = GradientGainMonitor([block])
    block(torch.ones(2, 3, requires_grad=True)).to_dense().sum().backward()
    for ask in (monitor.norms, monitor.report):
        with pytest.raises(RuntimeError, match="Sparse"):
            ask()
    monitor.reset()
    assert monitor.norms() == [None]
