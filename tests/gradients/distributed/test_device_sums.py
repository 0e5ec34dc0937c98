"""Gradients that are spread over accelerators which are not there: any read of a value would raise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrack import GradientManager
from gradtrack.gradients.distributed import agreement
from gradtrack.step import data, measure
from tests.distributed.communication import Counted

SPREAD: dict[str, tuple[tuple[int, ...], Sequence[Any]]] = {
    "FSDP2": ((8,), [Shard(0)]),
    "HSDP": ((2, 4), [Replicate(), Shard(0)]),
    "tensor parallel, columns": ((8,), [Shard(1)]),
    "FSDP2 and tensor parallel": ((2, 4), [Shard(0), Shard(1)]),
}
SETTINGS: list[dict[str, Any]] = [
    {"nonfinite_action": "report"},
    {"nonfinite_action": "replace", "replace_inf_with": 2.0, "replace_nan_with": 0.5},
    {"nonfinite_action": "report", "enable_gradient_clipping": False},
    {"nonfinite_action": "report", "adaptive_clipping": True},
    {"enable_nan_inf_check": False, "per_rank": True},
]


_START_NOTHING = (
    *("prim.", "detach", "view", "empty", "select", "split", "narrow", "slice", "alias", "unbind", "expand"),
    *("aten.t.", "unsqueeze"),
)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations, and where the host waits: it reads a value, or copies and stays for the copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []
        self.operations = 0
        self.flag: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        self.operations += not any(word in name for word in _START_NOTHING)
        source, target = (args[1], args[0].device) if name.startswith("aten.copy_") else (None, None)
        if name.startswith("aten._to_copy"):
            source, target = args[0], kwargs.get("device")
        crosses = source is not None and target is not None and source.device.type != target.type
        if "_local_scalar_dense" in name or (crosses and not kwargs.get("non_blocking")):
            self.places.append(name)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process rank 0 of eight, between two rows."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(data, "next_row", lambda step, every: every)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def spread(case: str, number: int = 5) -> tuple[nn.Module, FakeTensorMode]:
    """Return a model on an accelerator without data: of every three parameters the last is a plain one beside them."""
    shape, placements = SPREAD[case]
    mesh, model, mode = init_device_mesh("cuda", shape), nn.Module(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for index in range(number):

            def tensor(index: int = index) -> Tensor:
                local = torch.randn(4, 3, device="cuda")
                return local if index % 3 == 2 else DTensor.from_local(local, mesh, placements, run_check=False)

            param = nn.Parameter(tensor())
            if index:
                param.grad = tensor()
            model.register_parameter(f"p{index}", param)
    return model, mode


def watched(model: nn.Module, mode: FakeTensorMode, optimizer: Any, **settings: Any) -> tuple[Waits, list[list[int]]]:
    """Take three steps; return where the host waits in the last two, and the bytes of what they send."""
    manager, waits, sizes = GradientManager(**settings), Waits(), []
    manager.attach(model, optimizer)
    with mode:
        loss = torch.ones((), device="cuda")
        manager.step(model, optimizer, loss, backward=False)
        for _ in range(2):
            with Counted() as counted, waits:
                manager.step(model, optimizer, loss, backward=False)
            sizes.append(counted.sizes)
        waits.flag = getattr(optimizer, "found_inf", None)  # which the manager takes away at its end
    return waits, sizes


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return a plain optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("case", SPREAD)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_step_waits(case: str, settings: dict[str, Any]) -> None:
    """Steps between rows read no value, send what the host would, and the ranks meet before the first one only."""
    model, mode = spread(case)
    with mock.patch.object(measure, "agree", wraps=agreement.agree) as agree:
        waits, sizes = watched(model, mode, sgd(model), **settings)
    assert waits.places == []
    more = 24 * ("per_rank" in settings)
    assert sizes == [[16 * 5 + more, 64 * 5 + 16 + more]] * 2
    assert agree.call_count == 1


def test_between_reports_one_collective_is_enough() -> None:
    """The ends are left out, as by the host."""
    model, mode = spread("FSDP2")
    waits, sizes = watched(model, mode, sgd(model), nonfinite_action="report", check_frequency=10)
    assert (waits.places, sizes) == ([], [[64 * 5 + 16]] * 2)


def test_skip_does_not_wait_with_fused_optimizers() -> None:
    """The flag by which all ranks skip is on the device; an optimizer that takes none makes the host decide."""
    model, mode = spread("FSDP2", 2)
    with mode:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    waits, _ = watched(model, mode, optimizer)
    assert waits.places == []
    assert waits.flag.device.type == "cuda"
    assert not isinstance(waits.flag, DTensor)
    with pytest.raises(RuntimeError, match="numpy"):
        watched(model, mode, sgd(model))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_operations_do_not_grow_with_the_number_of_tensors(settings: dict[str, Any]) -> None:
    """A step of 20 or 400 tensors starts the same operations."""
    operations = set()
    for number in (20, 400):
        model, mode = spread("FSDP2", number)
        operations.add(watched(model, mode, sgd(model), **settings)[0].operations // 2)
    assert len(operations) == 1
    assert operations.pop() <= 80


def test_float64_is_left_to_the_host() -> None:
    """Squares of two ranks may not fit into one number, so that the host reads them."""
    model, mode = spread("FSDP2", 2)
    with mode, torch.no_grad():
        for param in model.parameters():
            grad = None if param.grad is None else param.grad.double()
            param.grad, param.data = None, param.data.double()
            param.grad = grad
    with pytest.raises(RuntimeError, match="numpy"):
        watched(model, mode, sgd(model), nonfinite_action="report")
