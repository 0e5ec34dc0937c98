"""The flight recorder: which numbers of the last steps are kept, and for how long."""

import gc
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, StepReport

NUM_STEPS = 200
"""Many more than the flight recorder keeps, whose rows count here too."""
NUM_PARAMS = 500
ROW_BYTES = 64


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_an_older_step_keeps_the_numbers_of_no_single_parameter(engine: Any) -> None:
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
            for _ in range(NUM_STEPS):
                manager.step(model, optimizer, None, backward=False)
            gc.collect()  # of what other tests of this process have left
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert grown < NUM_STEPS * NUM_PARAMS * ROW_BYTES / 4
    assert manager.reports[0].groups["weights"].element_count == 2 * NUM_PARAMS


def test_a_report_that_is_kept_keeps_no_model_alive() -> None:
    """Nor its gradients, whether or not a row was made of it, and no histogram for long."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager(backends=["memory"], grad_log_every_n_steps=2, log_histograms=True)
    for _ in range(20):
        model.zero_grad()
        manager.step(model, optimizer, model(torch.ones(4, 3)).sum())
    reports, weight = manager.reports, weakref.ref(model.weight)
    with_histograms = [one for one in reports if _data(one) is not None and _data(one).histograms]
    assert len(with_histograms) <= 8
    manager.close()
    del model, optimizer, manager
    gc.collect()
    assert weight() is None
    assert [report.groups["weight"].element_count for report in reports] == [6] * 20


def _data(report: StepReport) -> Any:
    """Return what a report that was not read yet makes its fields of."""
    private = report.__pydantic_private__
    return getattr(private.get("resolve") if private else None, "__self__", None)
