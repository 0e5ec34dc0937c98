"""Replay of a captured step: the operation that was the first to return what is not finite."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward
from gradtrack.capture.operations import set_switches, switches
from gradtrack.capture.replay import find_make, replay_step
from gradtrack.errors import GradtrackError, UsageError
from tests.capture.planted import FAULTS, Net, Planted, out_of


def captured(fault: Planted, run_dir: Path) -> Path:
    """Make one step with a fault, and return its capture."""
    model = fault.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=run_dir, capture="nonfinite", save_gradient_plots=False) as manager:
        manager.attach(model, optimizer)
        batch = fault.batch()
        loss = fault.loss(model, batch)
        safe_backward(loss, model, optimizer, manager, batch=batch)
        optimizer.step()
    return run_dir / "capture-00001"


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_is_named(name: str, tmp_path: Path) -> None:
    """For each planted fault: the operation, the module, the line of code, and the loss to the last bit."""
    fault = FAULTS[name]
    capture = captured(fault, tmp_path / "run")
    found = replay_step(capture, lambda: (fault.model(), fault.loss))
    print(found)
    assert found.origin is not None
    assert (found.origin.name, found.origin.is_backward) == (fault.operation, fault.is_backward)
    assert found.origin.module == fault.module
    assert fault.line in found.origin.line
    assert found.same_loss
    assert not found.notes


@pytest.mark.parametrize("spoilt", ["input", "target"])
def test_nan_in_the_data_is_named(spoilt: str, tmp_path: Path) -> None:
    """A recurrent layer splits its input into views, of which most are finite: the input stays the origin."""
    torch.manual_seed(3)
    data = {"input": torch.randn(4, 9, 3), "target": torch.randn(4, 9, 5)}
    data[spoilt][3, 7, 0] = math.nan
    fault = Planted(
        model=Recurrent,
        loss=squares,
        batch=lambda: (data["input"], data["target"]),
        operation="",
        line="",
    )
    capture = captured(fault, tmp_path / "run")
    text = str(replay_step(capture, lambda: (Recurrent(), squares)))
    assert f"batch[{int(spoilt == 'target')}] has 1 NaN at [3, 7, 0]: look at the data of this batch" in text
    if spoilt == "input":
        text = str(replay_step(capture, Recurrent))
        assert "input 0 of the model has 1 NaN at [3, 7, 0]: look at the data of this batch" in text


class Recurrent(nn.Module):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state at each time."""
        out: Tensor = self.rnn(x)[0]
        return out


SETTINGS: dict[str, Any] = {"save_gradient_plots": False, "backends": []}


def make() -> tuple[nn.Module, Any]:
    """Return the model of these trainings, and its loss."""
    return Net(), squares


def numpy_keys() -> bytes:
    """Return the state of NumPy's random numbers."""
    state: Any = np.random.get_state()
    return bytes(state[1].tobytes())


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch; a first target of infinity breaks the step, one of 1e6 makes it spike."""
    return (out_of(model, batch[0]) - batch[1]).square().mean()


def train(run_dir: Path, *, bad: int = 6, value: float = math.inf, steps: int = 8, **settings: Any) -> nn.Module:
    """Train with one bad batch, with capture on, and return the model."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    chosen = {"capture": "nonfinite", **SETTINGS, **settings}
    with GradientManager(run_dir=run_dir, **chosen) as manager:
        manager.attach(model, optimizer)
        for step in range(1, steps + 1):
            random.random(), np.random.rand()
            x, y = torch.randn(8, 4), torch.randn(8, 3)
            y[0, 0] = value if step == bad else y[0, 0]
            optimizer.zero_grad()
            safe_backward(squares(model, (x, y)), model, optimizer, manager, batch=(x, y))
            optimizer.step()
    return model


def test_a_spike_is_replayed_to_the_last_bit(tmp_path: Path) -> None:
    """Dropout draws what it drew, and the loss is the same number; other random numbers give another."""
    train(tmp_path, bad=40, value=1e6, steps=40, capture="spike")
    capture = tmp_path / "capture-00040"
    found = replay_step(capture, make)
    assert (found.reason, found.same_loss, found.origin) == ("spike", True, None)
    values = json.loads((capture / "capture.json").read_text())
    values["batches"][0]["forwards"][0]["rng"]["dict"][1][1] = {"tensor": "other", "device": "cpu"}
    tensors = load_file(capture / "tensors.safetensors")
    save_file({**tensors, "other": torch.Generator().manual_seed(5).get_state()}, capture / "tensors.safetensors")
    (capture / "capture.json").write_text(json.dumps(values))
    assert replay_step(capture, make).same_loss is False


def test_sparse_gradients_are_followed(tmp_path: Path) -> None:
    """Their values lie in a tensor of their own."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        manager.attach(model, optimizer)
        words = torch.tensor([1, 7, 7])
        safe_backward((out_of(model, words) * 0).square().sum().sqrt(), model, optimizer, manager, batch=words)

    def again() -> Any:
        layers = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        return layers, lambda net, words: (net(words) * 0).square().sum().sqrt()

    found = replay_step(tmp_path / "capture-00001", again)
    assert found.origin is not None
    assert (found.origin.name, found.origin.is_backward) == ("aten.sqrt", True)
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert "The loss: 0.0, as in the training to the last bit" in str(found)


def test_a_replay_leaves_random_numbers_and_settings_alone(tmp_path: Path) -> None:
    """It may be called in the middle of a program."""
    train(tmp_path)
    before = random.getstate(), torch.get_rng_state(), numpy_keys(), torch.get_num_threads()
    replay_step(tmp_path / "capture-00006", make)
    after = random.getstate(), torch.get_rng_state(), numpy_keys(), torch.get_num_threads()
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_buffers_are_those_before_the_forward_pass(tmp_path: Path) -> None:
    """The forward pass that broke has moved the running statistics already."""
    model = train(tmp_path, bad=4, steps=4)
    (norm,) = (module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    kept = load_file(tmp_path / "capture-00004" / "tensors.safetensors")
    assert int(norm.num_batches_tracked or 0) == 4
    assert int(kept["buffer.norm.num_batches_tracked"]) == 3


@pytest.mark.parametrize("with_batch", [True, False])
def test_micro_batches_are_replayed_in_order(tmp_path: Path, with_batch: bool) -> None:
    """The one that broke is not the last; without batch=... the model's inputs are the batch."""
    torch.manual_seed(2)
    model = Net(lambda x: x.square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", save_gradient_plots=False) as manager:
        manager.attach(model, optimizer)
        for index in range(3):
            x = torch.randn(8, 4) * (math.inf if index == 1 else 1.0)
            batch = x if with_batch else None
            safe_backward(model(x), model, optimizer, manager, accumulate=index < 2, batch=batch)
    assert load_file(tmp_path / "capture-00001" / "tensors.safetensors")["buffer.norm.num_batches_tracked"] == 0

    def again() -> Any:
        model = Net(lambda x: x.square().mean())
        return (model, lambda model, batch: model(batch)) if with_batch else model

    found = replay_step(tmp_path / "capture-00001", again)
    assert found.same_loss
    assert found.origin is not None
    assert found.origin.name == "aten.addmm"


def test_casts_and_the_loss_scale_are_those_of_the_training(tmp_path: Path) -> None:
    """The loss of a bfloat16 forward pass is the same to the last bit, though make says nothing of it."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        manager.attach(model, optimizer)
        x, y = torch.randn(8, 4), torch.randn(8, 3)
        y[0] = math.inf
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        safe_backward(loss, model, optimizer, manager, scaler=scaler, batch=(x, y))
    values = json.loads((tmp_path / "capture-00001" / "capture.json").read_text())
    assert values["scale"] == 8.0
    assert values["batches"][0]["forwards"][0]["autocast"] == {"cpu": "torch.bfloat16"}
    found = replay_step(
        tmp_path / "capture-00001", lambda: (Net(), lambda m, b: (m(b[0]).float() - b[1]).square().mean())
    )
    assert found.same_loss
    assert found.origin is not None
    assert found.origin.result is not None


def test_overflows_by_which_a_scaler_finds_its_scale_are_not_captured(tmp_path: Path) -> None:
    """They are no fault: captures are kept for steps that are."""
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        report = safe_backward(model(torch.ones(8, 4)).square().sum() * 100, model, optimizer, manager, scaler=scaler)
    assert report.nan_inf.action == "scaler"
    assert not list(tmp_path.glob("capture-*"))


@pytest.mark.parametrize(
    ("maker", "text"),
    [
        (lambda: (nn.Linear(4, 3), squares), "does not fit the capture: it lacks the parameter first.weight"),
        (lambda: (Net(width=5), squares), r"has in another form the parameter first.weight \(torch.float32 \[6, 4\]"),
        (lambda: (Net().double(), squares), "has in another form the parameter first.weight .*float64"),
        (lambda: (nn.ModuleList([Net()]), squares), "does not fit"),
        (lambda: 3, "make returned int: expected a torch.nn.Module"),
        (lambda: 1 / 0, "make raised ZeroDivisionError"),
        (lambda: (Net(), lambda model, batch: batch["x"]), "the step cannot be computed .*TypeError"),
        (lambda: (Net(), lambda model, batch: model(batch[0])), "a loss was expected"),
    ],
)
def test_what_does_not_fit_is_told_with_a_remedy(tmp_path: Path, maker: Any, text: str) -> None:
    """Each error of a make function is ours."""
    train(tmp_path)
    with pytest.raises(GradtrackError, match=text):
        replay_step(tmp_path / "capture-00006", maker)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("training.py", "expected FILE.py:FUNCTION"),
        ("nothing.py:make", "is not"),
        ("training.py:other", "expected a function other in"),
        ("", "make is missing: expected a function .* that returns the model.*train.py:make"),
        ("no.such.module:make", "cannot be imported"),
        ("broken.py:make", "cannot be imported .*RuntimeError: trains.*below"),
        ("ends.py:make", "cannot be imported .*SystemExit"),
    ],
)
def test_a_place_that_has_no_function_is_told(tmp_path: Path, place: str, text: str) -> None:
    """The remedy says how a function is named."""
    Path("training.py").write_text("def make(): ...\n")
    Path("ends.py").write_text("raise SystemExit(2)\n")
    Path("broken.py").write_text("raise RuntimeError('trains')\n")
    with pytest.raises(UsageError, match=text):
        find_make(place)


def test_this_directory_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module by its name is looked for where Python does first, and here at last."""
    for name in ("here", "installed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module_of_replay.py").write_text(f"def make(): return {name!r}\n")
    (tmp_path / "here" / "module_beside.py").write_text("def make(): return 5\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "here")
    path = list(sys.path)
    assert find_make("module_of_replay:make")() == "installed"
    assert find_make("module_beside:make")() == 5
    assert sys.path == path


def test_every_setting_of_torch_is_set_and_put_back(tmp_path: Path) -> None:
    """Those of the training while it is replayed, and those from before afterwards."""
    before = switches()
    turned = {name: not value for name, value in before.items() if isinstance(value, bool)}
    try:
        set_switches(before | turned)
        recorded = switches()
        train(tmp_path)
    finally:
        set_switches(before)
    assert switches() == before
    assert {name: recorded[name] for name in turned} == turned
    seen = []

    def noted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(switches())
        return squares(model, batch)

    replay_step(tmp_path / "capture-00006", lambda: (Net(), noted))
    assert seen == [recorded]
    assert switches() == before


def test_a_file_is_imported_once_and_its_neighbours_are_found(tmp_path: Path) -> None:
    """A training file imports its own package from where it lies."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "neighbour_of_training.py").write_text("VALUE = 4\n")
    (tmp_path / "own" / "training_of_test.py").write_text(
        "from neighbour_of_training import VALUE\ndef make(): return VALUE\n"
    )
    path = list(sys.path)
    assert find_make(str(tmp_path / "own" / "training_of_test.py") + ":make")() == 4
    assert sys.path == path
