"""The demo's network, its task, and its training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradtrack import demo
from gradtrack.gradients.groups import assign_groups


def test_units_leak_with_their_own_time_constants() -> None:
    """Without input and recurrence, a unit decays by exactly its rate per step."""
    cell = demo.LeakyCell(2, 4, (2.0, 8.0))
    for param in cell.parameters():
        torch.nn.init.zeros_(param)
    hidden = cell(torch.zeros(1, 2), torch.ones(1, 4))
    assert hidden[0].tolist() == pytest.approx([0.5, 0.5, 0.875, 0.875])


def test_parameters_fall_into_the_groups_of_a_recurrent_network() -> None:
    """The four matrices and the biases are the groups that people look for."""
    model = demo.MultiTimescaleRNN()
    names = [name for name, _ in model.named_parameters()]
    assert set(assign_groups(model, names, {})) == {"W_in", "W_rec", "W_out", "W_h_init", "biases"}


def test_targets_are_running_averages() -> None:
    """Each target follows its signal at the speed of its time constant, from where the context says."""
    inputs, context, targets = next(demo.running_averages(batch_size=1, length=3, time_constants=(4.0,)))
    average = context[0, 0].double()
    for step in range(3):
        average = average + 0.25 * (inputs[0, step, 0].double() - average)
        assert targets[0, step, 0].item() == pytest.approx(average.item(), abs=1e-6)


def test_training_learns_in_spite_of_a_bad_batch(tmp_path: Path) -> None:
    """The bad batch is skipped and reported, and the loss falls all the same."""
    finding = demo.run(tmp_path, steps=60)
    assert finding.skipped == [40]
    assert finding.losses[-1] < finding.losses[0] / 2
    assert any("NUMERICAL" in issue for issue in finding.issues)
    assert finding.summary.total_steps == 60
