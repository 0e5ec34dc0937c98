"""What is sent, counted: on pretended ranks, whose number can be large because nothing leaves the process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrack import GradientManager
from tests.distributed.communication import Counted
from tests.distributed.on_device import accelerator
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


def sharded(mesh: Any, num_tensors: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of small sharded parameters whose gradients have this value; the other half of each has ones."""
    return spread(mesh, num_tensors, Shard(0), value, dtype)


def spread(mesh: Any, num_tensors: int, kind: Any, value: float, dtype: torch.dtype) -> nn.Module:
    """Return the same for another placement."""
    model, size = nn.Module(), 2 * mesh.size()
    for index in range(num_tensors):
        param = nn.Parameter(distribute_tensor(torch.ones(size, dtype=dtype), mesh, [kind]))
        param.grad = distribute_tensor(torch.ones(size, dtype=dtype), mesh, [kind])
        local: Any = param.grad
        local.to_local()[0] = value
        model.register_parameter(f"weight{index}", param)
    return model


def sent_each(
    model: nn.Module, num_steps: int, values: Mapping[int, float] = MappingProxyType({}), **settings: Any
) -> list[list[int]]:
    """Return the sizes in bytes that a rank sends in each of some steps; `values` change the gradients from one on."""
    manager, sizes = GradientManager(settings), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = [(param, param.grad) for param in model.parameters()]
    for step in range(1, num_steps + 1):
        for param, grad in grads:
            if step in values:
                local: Any = grad
                local.to_local()[0] = values[step]
            param.grad = None if grad is None else grad.clone()
        with Counted() as counted:
            manager.step(model, optimizer, 1.0, backward=False)
        sizes.append(counted.sizes)
    return sizes


def sent(model: nn.Module, **settings: Any) -> list[int]:
    """Return the sizes in bytes of what a rank sends in its first step, which makes a row."""
    return sent_each(model, 1, **settings)[0]


def sent_between(model: nn.Module, **settings: Any) -> list[int]:
    """Return the same for the third step, which makes no row."""
    return sent_each(model, 3, **settings)[2]


@pytest.mark.parametrize("num_ranks", [2, 8, 1024])
def test_a_report_is_two_collectives_of_a_size_that_does_not_know_the_ranks(pretend: Any, num_ranks: int) -> None:
    """The maximum has 16 bytes for each tensor, the sum after it 64 and 16 for the loss."""
    assert sent(sharded(pretend(num_ranks), 5)) == [16 * 5, 64 * 5 + 16]


@pytest.mark.parametrize("num_ranks", [2, 1024])
@pytest.mark.parametrize("settings", [{"check_frequency": 10}, {"enable_gradient_monitoring": False}])
def test_between_reports_there_is_one_collective(pretend: Any, num_ranks: int, settings: dict[str, Any]) -> None:
    """The norm that clipping and skipping are decided by is in the sum already."""
    assert sent_between(sharded(pretend(num_ranks), 5), max_grad_norm=0.1, **settings) == [64 * 5 + 16]


def test_a_model_of_70_billion_parameters_on_1024_ranks(pretend: Any) -> None:
    """The table of docs/scale.md: what 723 tensors make a report and a step in between, and what a ring moves of it."""
    model, text = sharded(pretend(1024), TENSORS_OF_70B), (ROOT / "docs" / "scale.md").read_text()
    report, between = sum(sent(model)), sum(sent_between(model, check_frequency=10))
    assert report <= 128 * TENSORS_OF_70B
    for num_ranks in (8, 1024):
        moved = 2 * (num_ranks - 1) / num_ranks * report
        assert f"| {num_ranks:,} | 2 | {report:,} | {between:,} | {moved:,.0f} |" in text


ORDINARY: list[dict[str, Any]] = [
    {},
    {"enable_gradient_clipping": False},
    {"adaptive_clipping": True},
    {"clip_type": "zscore"},
    {"enable_nan_inf_check": False},
    {"nonfinite_action": "report"},
    {"nonfinite_action": "replace", "max_grad_norm": 0.1},
    {"track_parameters": True, "groups": {"all": ".*"}},
]
ELEMENTWISE: list[dict[str, Any]] = [
    {"clip_type": "value", "max_grad_norm": 10.0},
    {"clip_type": "value", "max_grad_norm": 0.1},
    {"clip_type": "value", "max_grad_norm": 0.1, "nonfinite_action": "replace"},
]
VALUES = [1.0, 0.0, 1e-30, math.nan, -math.inf]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("settings", [*ORDINARY, *ELEMENTWISE])
def test_whatever_the_settings_a_report_is_two_collectives(
    pretend: Any, settings: dict[str, Any], value: float
) -> None:
    """Clipping each element takes 16 bytes more for each tensor, in the sum; replacing takes none."""
    more = 16 * 5 * (settings in ELEMENTWISE)
    assert sent(sharded(pretend(8), 5, value), **settings) == [16 * 5, 64 * 5 + 16 + more]
    assert 64 * 5 + 16 + more + 16 * 5 <= 128 * 5


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("settings", [*ORDINARY, *ELEMENTWISE])
def test_whatever_the_settings_a_step_between_reports_is_one_collective(
    pretend: Any, settings: dict[str, Any], value: float
) -> None:
    """The first step with an element that is not finite makes a row, which is a report; those after it do not."""
    *_, first, _, second, third = sent_each(sharded(pretend(8), 5), 6, {3: value}, check_frequency=10, **settings)
    more = 16 * 5 * (settings in ELEMENTWISE)
    assert first == [64 * 5 + 16 + more, *([] if math.isfinite(value) else [16 * 5])]
    assert [second, third] == [[64 * 5 + 16 + more]] * 2


@pytest.mark.parametrize("value", [1.0, 0.0, 1e200, 1e-200, math.nan])
def test_squares_beyond_the_range_of_a_float64_take_no_collective_more(pretend: Any, value: float) -> None:
    """Parameters of float64 take eight bytes more each, by which squares of any size can be added up."""
    model = sharded(pretend(8), 5, value, torch.float64)
    assert sent(model) == [16 * 5, 72 * 5 + 16]
    assert sent_between(model, check_frequency=10) == [72 * 5 + 16]


def test_clipping_by_unit_is_two_collectives(pretend: Any) -> None:
    """Replicas, of which a rank has all units, are limited like elements; a vector in shards takes 16 bytes more."""
    mesh = pretend(8)
    for kind, each in ((Replicate(), 80), (Shard(0), 96)):
        model = spread(mesh, 5, kind, 1.0, torch.float32)
        sizes = sent_each(model, 4, clip_type="agc", agc_clip_factor=1e-3, check_frequency=2)[2:]
        assert sizes == [[each * 5 + 16], [16 * 5, each * 5 + 16]]


def test_histograms_are_in_the_sum(pretend: Any) -> None:
    """A row with them has 384 and one number more for each group, and no collective more."""
    sizes = sent_each(sharded(pretend(8), 5), 4, log_histograms=True, grad_log_every_n_steps=2)
    more = [3080 * 5 if step in (1, 2, 4) else 0 for step in (1, 2, 3, 4)]
    assert sizes == [[16 * 5, 64 * 5 + 16 + size] for size in more]


def test_the_spread_of_ranks_takes_six_numbers_more(pretend: Any) -> None:
    """Whatever their number, and in the same two collectives."""
    assert sent(sharded(pretend(1024), 5), per_rank=True) == [16 * 5 + 24, 64 * 5 + 16 + 24]


def test_updates_are_in_the_sum(pretend: Any) -> None:
    """The step after one that they look at sends 120 bytes more and 48 for each group, unless that is too much.

    Two steps after one at which analyzers are judged there are 344 bytes of verdicts.
    """
    mesh = pretend(8)
    for num_tensors, more in ((4, 120), (40, 120 + 48)):
        sizes = sent_each(sharded(mesh, num_tensors), 9, analyzers=["updates"], groups={"all": ".*"})
        plain = 64 * num_tensors + 16
        assert [one[1] - plain for one in sizes] == [0, 0, 0, 344, more, 0, 0, 0, more]
        assert all(len(one) == 2 and (num_tensors < 17 or sum(one) <= 128 * num_tensors) for one in sizes)


class OfDTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that DTensors are asked for, each of which takes as long as many of its local part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1, "check_frequency": 2}, {"clip_type": "agc"}])
def test_only_local_parts_are_computed_with(pretend: Any, settings: dict[str, Any]) -> None:
    """A report costs about what one of plain tensors costs: none of the many DTensors is computed with."""
    model = sharded(pretend(8), 5)
    manager, optimizer = GradientManager(settings), torch.optim.SGD(model.parameters(), lr=0.1)
    with OfDTensors() as counted:
        for _ in range(2):
            manager.step(model, optimizer, 1.0, backward=False)
    assert counted.operations == []


@pytest.mark.parametrize("late", [True, False])
def test_a_loss_that_is_a_dtensor_is_reduced_before_anything_else(pretend: Any, late: bool) -> None:
    """Also where the numbers stay on a device, or a rank that looks alone would send them in another order."""
    mesh = pretend(8)
    model = sharded(mesh, 5)
    manager, optimizer = GradientManager(nonfinite_action="report"), torch.optim.SGD(model.parameters(), lr=0.1)
    loss = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])
    with accelerator(late=late) as left, Counted() as counted:
        report = manager.step(model, optimizer, loss, backward=False)
    assert counted.sizes == [4, 16 * 5, 64 * 5 + 16]
    assert (len(left), report.measured) == (late, True)


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
    assert counted.sizes == [16 * 2, 72 * 2 + 16]
    assert report.statistics is not None
