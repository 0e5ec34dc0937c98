"""Which units of a network are dormant, over the passes that were watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack.analyzers.rl_policy.update_metrics import DormantUnits


def shares(model: nn.Module, *batches: Tensor) -> dict[str, float]:
    """Watch some passes."""
    units = DormantUnits(model)
    with units.watched(), torch.no_grad():
        for batch in batches:
            model(batch)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return units.shares


def test_a_unit_that_answers_to_one_sample_is_not_dormant() -> None:
    """One sample at a time, a unit counts by its mean over all of them, as it would in one batch."""
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    batch = torch.eye(4)
    batch[:, 3] = -1.0
    assert shares(model, *(one.unsqueeze(0) for one in batch)) == shares(model, batch) == {"1": 0.25}
    assert shares(model, *batch) == {"1": 0.25}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_units_of_a_convolution_are_its_channels(dimensions: int) -> None:
    """One of four channels that never answers is a quarter, batched or not; its places are no units."""
    kinds: list[Any] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
    layer = kinds[dimensions - 1](1, 4, 1)
    model = nn.Sequential(layer, nn.ReLU())
    nn.init.ones_(layer.weight)
    layer.bias.data = torch.tensor([0.0, 0.0, -99.0, 0.0])
    batch = torch.rand(2, 1, *[5] * dimensions)
    assert shares(model, batch) == shares(model, batch[0]) == {"1": 0.25}


def test_units_after_a_linear_layer_are_its_features() -> None:
    """Behind a convolution and a linear layer the last axis has the units, in sequences too."""
    layer = nn.Linear(5, 4)
    model = nn.Sequential(nn.Conv1d(3, 3, 1), layer, nn.ReLU())
    nn.init.ones_(layer.weight)
    layer.bias.data = torch.tensor([99.0, 99.0, -999.0, 99.0])
    assert shares(model, torch.rand(2, 3, 5)) == {"2": 0.25}


def test_a_module_that_is_called_twice_has_units_at_each_call() -> None:
    """What never answers at one of two calls is half of the mean, also where the calls are of unlike width."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(x[:, :2]).sum() + self.relu(-x).sum()  # type: ignore[no-any-return]

    assert shares(Twice(), torch.ones(3, 4), torch.ones(3, 4)) == {"relu": 0.5}
