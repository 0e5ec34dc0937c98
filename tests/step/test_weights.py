"""The norms of the weights."""

import pytest
import torch
from torch import nn

from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.step.measure import norms_from_squares, weight_norms, weight_squares


def two_groups(scale: float = 1.0) -> nn.Module:
    """Return a model of two groups, one of them with complex weights."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"real": nn.Linear(4, 3).double(), "complex": nn.Linear(2, 2, dtype=torch.complex128)})
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    return model


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_norms_by_group(scale: float) -> None:
    """A group's norm is that of all its weights as one vector, also where their squares leave the range."""
    model = two_groups(scale)
    found = weight_norms(ParameterTable(model), Measurer("torch"))
    for name, module in model.named_children():
        parts = [torch.view_as_real(param) if param.is_complex() else param for param in module.parameters()]
        together = torch.cat([part.detach().flatten() for part in parts])
        assert found[name] == pytest.approx(float((together / scale).norm()) * scale, rel=1e-12)


def test_squares_add_up_over_ranks() -> None:
    """Two ranks that hold half of the weights each have together the norms of the whole."""
    table, measurer = ParameterTable(two_groups()), Measurer("torch")
    half = weight_squares(table, measurer) / 2
    assert norms_from_squares(table, half + half) == pytest.approx(weight_norms(table, measurer), rel=1e-12)
