"""Steps whose numbers stay on the device: the same reports, and no step waits for the device."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import accelerator
from gradtrack import GradientManager, StepReport
from gradtrack.step import data, pair
from gradtrack.step.on_device import PendingDeviceStep
from tests.processes import ROOT
from tests.training import batch_loss, optimizer_of, small_model, train, with_gradients

SETTINGS: list[dict[str, Any]] = [
    {"nonfinite_action": "report"},
    {"nonfinite_action": "replace", "replace_inf_with": 2.0, "replace_nan_with": 0.5},
    {"nonfinite_action": "report", "enable_gradient_clipping": False},
    {"nonfinite_action": "report", "adaptive_clipping": True, "adaptive_window_size": 12},
    {"nonfinite_action": "report", "clip_type": "zscore"},
    {"enable_nan_inf_check": False},
]


def runs(late: bool, monkeypatch: pytest.MonkeyPatch, optimizer: Any, **settings: Any) -> tuple[nn.Module, list[Any]]:
    """Train with the numbers read at once or one step late; return the model and its reports."""
    monkeypatch.setattr(pair, "on_device", lambda grads: late)
    model = small_model()
    manager = GradientManager(max_grad_norm=0.3, engine="torch", backends=["memory"], **settings)
    train(manager, 30, model=model, optimizer=optimizer(model), change=spoil)
    manager.flush()
    return model, [manager.reports, manager.backend("memory").records, manager.get_training_summary()]  # type: ignore[attr-defined]


def spoil(step: int, loss: Tensor) -> Tensor:
    """Make one step infinite."""
    return loss * (math.inf if step == 20 else 1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return a plain optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def comparable(report: StepReport) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a report says and its numbers, by their place, without its clock and the weights of its step."""

    def walk(place: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (dict, list)):
            for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(f"{place}.{name}", entry)
        elif not place.endswith(".weight_norm"):
            yield place, value

    found = dict(walk("report", report.model_dump(exclude={"time"})))
    numbers = {place: value for place, value in found.items() if isinstance(value, float)}
    return {place: value for place, value in found.items() if place not in numbers}, numbers


@pytest.mark.parametrize("settings", SETTINGS)
def test_reports_records_and_weights_are_the_same(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one step late changes no weight, report, record or summary, the rows being under their own steps."""
    model, (reports, records, _) = runs(False, monkeypatch, sgd, **settings)
    late_model, (late_reports, late_records, _) = runs(True, monkeypatch, sgd, **settings)
    for one, other in zip(model.parameters(), late_model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, equal_nan=True)
    for at_once, afterwards in zip(reports, late_reports, strict=True):
        (words, numbers), (late_words, late_numbers) = comparable(at_once), comparable(afterwards)
        assert words == late_words
        assert numbers == pytest.approx(late_numbers, rel=1e-5, abs=1e-9, nan_ok=True)  # what the order of sums leaves
    assert [record.step for record in records] == [record.step for record in late_records]


def test_fused_optimizers_leave_the_step_out_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `found_inf` a bad step is a no-op of weights and state, and no flag stays behind."""
    monkeypatch.setattr(pair, "on_device", lambda grads: True)
    model, manager = small_model(), GradientManager(engine="torch")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    train(manager, 3, model=model, optimizer=optimizer)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    report = manager.step(model, optimizer, batch_loss(model) * math.nan)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(optimizer.state_dict()["state"][0][name], value) for name, value in state[0].items())
    assert report.skipped
    assert not report.health.healthy
    manager.close()
    assert not hasattr(optimizer, "found_inf")


@pytest.fixture(autouse=True)
def _between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin between two rows, since a step that makes one waits for its device."""
    monkeypatch.setattr(data, "next_row", lambda step, every: every)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the reads of values and the operations in all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += "prim.device" not in str(func)  # a question, which starts nothing
        self.reads += "_local_scalar_dense" in str(func) or "item" in str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda(make: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> Iterator[tuple[nn.Module, Any, Tensor]]:
    """Give a model, an optimizer and a loss on a device that has no data: any read of a value raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Module()
        for index, shape in enumerate([(5, 6), (5,), (3, 5), (3,)]):
            model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, device="cuda")))
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        yield model, make(model), torch.ones((), device="cuda")


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that takes `found_inf`."""
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_step_waits_on_an_accelerator(settings: dict[str, Any]) -> None:
    """Several steps between reports read no value at all."""
    with fake_cuda() as (model, optimizer, loss):
        manager = GradientManager(**settings)
        for _ in range(5):
            assert manager.step(model, optimizer, loss, backward=False).step > 0


def test_spikes_do_not_wait_with_fused_optimizers() -> None:
    """The device itself leaves a spike out, by the limits of the steps before; other actions wait for the norm."""
    for action in ("skip", "clip"):
        with fake_cuda(fused) as (model, optimizer, loss):
            manager = GradientManager(spike_action=action, spike_window=4)
            manager.attach(model, optimizer)
            (found,) = manager._pairs
            for step in range(4):
                found.spikes.remember(step, 1.0, 1.0, None)
            if action == "skip":
                for _ in range(3):
                    manager.step(model, optimizer, loss, backward=False)
                assert optimizer.found_inf.device.type == "cuda"
            else:
                with pytest.raises(Exception, match=r"fake|Fake|numpy|data"):
                    manager.step(model, optimizer, loss, backward=False)


def test_skip_does_not_wait_with_fused_optimizers() -> None:
    """The default action reads nothing where the optimizer takes `found_inf`, and once where it does not."""
    with fake_cuda(fused) as (model, optimizer, loss):
        manager = GradientManager()
        manager.step(model, optimizer, loss, backward=False)
        assert optimizer.found_inf.device.type == "cuda"
    with fake_cuda() as (model, optimizer, loss), pytest.raises(RuntimeError, match="numpy"):
        GradientManager().step(model, optimizer, loss, backward=False)


def test_the_first_read_is_what_waits() -> None:
    """The report can be handed on; reading a number of it needs the device."""
    with fake_cuda() as (model, optimizer, loss):
        report = GradientManager(nonfinite_action="report").step(model, optimizer, loss, backward=False)
        assert report.step == 1
        with pytest.raises(Exception, match=r"fake|Fake|numpy|data"):
            report.clipping.norm_before  # noqa: B018


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]])
def test_operations_do_not_grow_with_the_number_of_tensors(settings: dict[str, Any], dtypes: list[torch.dtype]) -> None:
    """A step of 20, 400 or 2,000 tensors starts the same operations, at most 60, and any read of a value raises."""
    counts = set()
    for number in (20, 400, 2000):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = nn.Module()
            for index in range(number):
                param = nn.Parameter(torch.randn(3 + index % 5, 4, device="cuda", dtype=dtypes[index % len(dtypes)]))
                param.grad = torch.randn_like(param)
                model.register_parameter(f"p{index}", param)
            optimizer, loss = sgd(model), torch.ones((), device="cuda")
            manager = GradientManager(**settings)
            manager.step(model, optimizer, loss, backward=False)
            with Reads() as reads:
                manager.step(model, optimizer, loss, backward=False)
        counts.add(reads.operations)
        assert reads.reads == 0
    assert len(counts) == 1
    assert counts.pop() <= 60


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 0.3, "nonfinite_action": "report"}, {"nonfinite_action": "replace"}]
)
def test_repeated_tokens_are_changed_on_the_device(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse gradient with repeated tokens is clipped and made finite as where the numbers are read at once."""

    def gradients(*, late: bool) -> list[Tensor]:
        monkeypatch.setattr(pair, "on_device", lambda grads: late)
        model = nn.Embedding(20, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        clips = "max_grad_norm" in settings
        manager = GradientManager(engine="torch", enable_gradient_clipping=clips, **settings)
        found = []
        for factor in (1.0, 2.0, 1.0 if clips else math.inf, 1.0):
            model.zero_grad()
            manager.step(model, optimizer, factor * model(torch.tensor([3, 7, 7])).sum())
            assert model.weight.grad is not None
            found.append(model.weight.grad.to_dense())
        manager.flush()
        return found

    for mine, theirs in zip(gradients(late=True), gradients(late=False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mean_does_not_hide_the_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of float64 have the right one on the device too: each, their groups and all of them."""
    monkeypatch.setattr(pair, "on_device", lambda grads: True)
    noise = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = [1e9 + noise[:30], 1e9 + noise[30:31], noise[31:]]
    grads.append(torch.tensor([-1e9, math.nan, -1e9 - 1], dtype=torch.float64))
    model = with_gradients([grad.clone() for grad in grads])
    manager = GradientManager(nonfinite_action="report", engine="torch", track_parameters=True)
    with mock.patch("gradtrack.step.pair.PendingDeviceStep", wraps=PendingDeviceStep) as late:
        report = manager.step(model, optimizer_of(model), None, backward=False)
    assert late.called
    assert report.statistics is not None
    for index, grad in enumerate(grads):
        expected = variance(grad) if len(grad) > 1 else 0.0
        assert report.parameters[f"p{index}"].variance == pytest.approx(expected, rel=1e-9)
        assert report.groups[f"p{index}"].variance == pytest.approx(expected, rel=1e-9)
    assert report.statistics.variance == pytest.approx(variance(torch.cat(grads)), rel=1e-9)


def variance(values: Tensor) -> float:
    """Return the variance of the finite elements, from their deviations."""
    return float(values[values.isfinite()].numpy().var(ddof=1))


def test_the_last_step_is_among_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and the monitor's history have the step whose numbers are still on the device, as it was before."""
    torch.manual_seed(0)
    monkeypatch.setattr(pair, "on_device", lambda grads: True)
    model = small_model()
    optimizer = optimizer_of(model)
    manager = GradientManager(engine="torch", max_grad_norm=1e-3)
    monitor = manager.monitor
    for step in range(1, 4):
        optimizer.zero_grad()
        manager.step(model, optimizer, batch_loss(model, step))
        last = manager.reports[-1]
        assert (last.step, len(monitor.history)) == (step, step)
        assert last.clipping.norm_before == pytest.approx(monitor.history[-1].total_norm)
        assert monitor.history[-1].total_norm > 1e-3 >= (last.clipping.norm_after or 1.0)
        optimizer.step()


def test_the_model_of_a_gpu_counts_what_runs() -> None:
    """Of the launches that the documentation tells, Triton's are as many for any model, copies included."""
    rows = [row for row in accelerator.steps() if "Triton" in row.case]
    assert {row.note.partition(" launches")[0] for row in rows} == {"6"}
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert all(row.note in text for row in rows)
