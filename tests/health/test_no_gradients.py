"""The rule that tells of steps without any gradient."""

import pytest
import torch

import gradtrack
from gradtrack import IssueType
from tests.training import batch_loss, optimizer_of, small_model


class TestNoGradients:
    """A loop that never runs a backward pass, or throws its gradients away."""

    @pytest.mark.parametrize("mistake", ["no backward", "zero_grad after it"])
    def test_is_told_until_a_gradient_comes(self, mistake: str) -> None:
        """Three steps in a row without any gradient are an issue that says where to look; a gradient closes it."""
        model = small_model()
        optimizer = optimizer_of(model)
        manager = gradtrack.watch(model, optimizer)
        for step in range(4):
            loss = batch_loss(model, step)
            if mistake != "no backward":
                torch.autograd.backward(loss)
            optimizer.zero_grad()
            optimizer.step()
        assert [report.health.healthy for report in manager.reports] == [True, True, False, False]
        (issue,) = manager.diagnose()
        assert (issue.issue_type, issue.layer) == (IssueType.DISCONNECTED, "")
        assert "zero_grad" in issue.recommendation
        torch.autograd.backward(batch_loss(model))
        optimizer.step()
        assert manager.reports[-1].health.healthy
