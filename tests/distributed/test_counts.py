"""What is sent, counted: on pretended ranks, whose number can be large because nothing leaves the process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradtrack import GradientManager
from tests.distributed.communication import Counted
from tests.processes import ROOT

TENSORS_OF_70B = 80 * 9 + 3


@pytest.fixture
def pretend() -> Iterator[Any]:
    """Return a function that makes this process rank 0 of as many as wanted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(num_ranks: int) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        return init_device_mesh("cpu", (num_ranks,))

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(mesh: Any, num_tensors: int) -> nn.Module:
    """Return a model of small sharded parameters that have gradients."""
    model = nn.Module()
    for index in range(num_tensors):
        param = nn.Parameter(distribute_tensor(torch.ones(mesh.size()), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.ones(mesh.size()), mesh, [Shard(0)])
        model.register_parameter(f"weight{index}", param)
    return model


def sent(model: nn.Module, **settings: Any) -> list[int]:
    """Return the sizes in bytes of what a rank sends in one step."""
    manager = GradientManager(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Counted() as counted:
        manager.step(model, optimizer, 1.0, backward=False)
    sizes: list[int] = counted.sizes
    return sizes


@pytest.mark.parametrize("num_ranks", [2, 8, 1024])
def test_a_report_is_two_collectives_of_a_size_that_does_not_know_the_ranks(pretend: Any, num_ranks: int) -> None:
    """The sum has 64 bytes for each tensor and 16 for the loss, the maximum 16 for each tensor."""
    assert sent(sharded(pretend(num_ranks), 5)) == [64 * 5 + 16, 16 * 5]


@pytest.mark.parametrize("num_ranks", [2, 1024])
@pytest.mark.parametrize("settings", [{"check_frequency": 10}, {"enable_gradient_monitoring": False}])
def test_between_reports_there_is_one_collective(pretend: Any, num_ranks: int, settings: dict[str, Any]) -> None:
    """The norm that clipping and skipping are decided by is in the sum already."""
    assert sent(sharded(pretend(num_ranks), 5), max_grad_norm=0.1, **settings) == [64 * 5 + 16]


def test_a_model_of_70_billion_parameters_on_1024_ranks(pretend: Any) -> None:
    """The table of docs/scale.md: what 723 tensors make a report and a step in between, and what a ring moves of it."""
    model, text = sharded(pretend(1024), TENSORS_OF_70B), (ROOT / "docs" / "scale.md").read_text()
    report, between = sum(sent(model)), sum(sent(model, check_frequency=10))
    assert report <= 128 * TENSORS_OF_70B
    for num_ranks in (8, 1024):
        moved = 2 * (num_ranks - 1) / num_ranks * report
        assert f"| {num_ranks:,} | 2 | {report:,} | {between:,} | {moved:,.0f} |" in text


def test_what_takes_more(pretend: Any) -> None:
    """Clipping by value sums up once more when it engages, replacing measures again, and histograms are a sum."""
    model, report = sharded(pretend(8), 5), [64 * 5 + 16, 16 * 5]
    assert sent(model, clip_type="value", max_grad_norm=2.0) == report
    assert sent(model, clip_type="value", max_grad_norm=0.1) == [*report, 64 * 5 + 16]
    assert sent(model, log_histograms=True, grad_log_every_n_steps=1) == [*report, 3080 * 5]
    grad: Any = model.get_parameter("weight0").grad
    grad.to_local().fill_(math.nan)
    assert sent(model, nonfinite_action="report", check_frequency=10) == report
    assert sent(model, nonfinite_action="replace") == [*report, *report]


def test_the_spread_of_ranks_takes_six_numbers_more(pretend: Any) -> None:
    """Whatever their number, and in the same two collectives."""
    assert sent(sharded(pretend(1024), 5), per_rank=True) == [64 * 5 + 16 + 24, 16 * 5 + 24]


def test_plain_tensors_send_nothing(pretend: Any) -> None:
    """Without DTensors and without a group, as under DDP, no rank hears of another."""
    pretend(8)
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    assert sent(model, per_rank=True) == []


def test_plain_shards_send_their_sizes_too(pretend: Any) -> None:
    """With an explicit group a parameter takes eight bytes more, for its number of elements."""
    pretend(1024)
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    manager = GradientManager(process_group=dist.group.WORLD)
    with Counted() as counted:
        report = manager.step(model, torch.optim.SGD(model.parameters(), lr=0.1), None, backward=False)
    assert counted.sizes == [72 * 2 + 16, 16 * 2]
    assert report.statistics is not None
