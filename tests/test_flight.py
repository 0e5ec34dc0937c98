"""What of the last steps is kept, and for how long."""

import tracemalloc

import pytest
import torch
from torch import nn

from gradtrack import GradientManager

NUM_PARAMS = 500
ROW_BYTES = 64


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_an_older_step_keeps_the_numbers_of_no_single_parameter(engine: str) -> None:
    """The memory of a long training does not grow by the number of parameters at every step."""
    model = nn.Module()
    model.weights = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(NUM_PARAMS))
    for param in model.parameters():
        param.grad = torch.randn(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(backends=["memory"], engine=engine) as manager:
        for _ in range(20):
            manager.step(model, optimizer, None, backward=False)
        tracemalloc.start()
        try:
            for _ in range(50):
                manager.step(model, optimizer, None, backward=False)
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert grown < 50 * NUM_PARAMS * ROW_BYTES / 4
    assert manager.reports[0].groups["weights"].element_count == 2 * NUM_PARAMS
