"""The monitor without a manager."""

import math

import pytest
import torch

from gradtrack import GradientConfig, GradientManager, GradientMonitor
from tests.training import batch_loss, small_model, train


def test_statistics_are_those_of_one_vector() -> None:
    """The dictionary access of the statistics agrees with torch on the concatenation."""
    gradients = [torch.randn(5, 6), torch.randn(3), None]
    together = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).double()
    stats = GradientMonitor().update_statistics(gradients)
    assert stats["total_norm"] == pytest.approx(float(together.norm()), rel=1e-6)
    assert stats["mean"] == pytest.approx(float(together.mean()), rel=1e-5)
    assert stats["std"] == pytest.approx(float(together.std()), rel=1e-6)
    assert (stats["nan_count"], stats["inf_count"]) == (0, 0)


def test_checking_remembers_nothing() -> None:
    """Looking twice gives the same answer; updating is what moves the windows."""
    monitor = GradientMonitor()
    for _ in range(20):
        monitor.update_statistics([torch.randn(50)])
    spike = [torch.randn(50) * 1e4]
    first, second = monitor.check_gradient_health(spike), monitor.check_gradient_health(spike)
    assert first == second
    assert not first["healthy"]
    assert first["recommendations"]
    assert monitor.check_gradient_health([torch.randn(50)])["healthy"]


def test_nan_is_found() -> None:
    """A NaN makes the health report unhealthy, with a warning in words."""
    report = GradientMonitor().check_gradient_health([torch.tensor([math.nan, 1.0])])
    assert "NaN" in report["warnings"][0]


def test_manager_feeds_its_monitor() -> None:
    """The monitor of a manager has the history of its steps."""
    manager = GradientManager()
    train(manager, 4)
    norms = [report.clipping.norm_before for report in manager.reports]
    assert [statistics.total_norm for statistics in manager.monitor.history] == norms


def test_history_is_bounded() -> None:
    """Only as many statistics are kept as the configuration says."""
    monitor = GradientMonitor(GradientConfig(max_gradient_history=3))
    for _ in range(5):
        monitor.update_statistics([torch.ones(2)])
    assert len(monitor.history) == 3


def test_gradients_as_the_documents_collect_them() -> None:
    """A plain list of the parameters' gradients is what the monitor takes."""
    model = small_model()
    torch.autograd.backward(batch_loss(model))
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    assert GradientMonitor().check_gradient_health(gradients)["healthy"]
