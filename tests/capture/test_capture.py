"""Capture of a step that broke: whole or absent, bounded, and without any effect on the training."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

from gradtrack import GradientConfig, GradientManager, capture, safe_backward
from gradtrack.capture.replay import replay_step
from gradtrack.step import pair
from tests.capture.planted import Net
from tests.capture.test_replay import SETTINGS, make, train
from tests.processes import ROOT


def captures(run_dir: Path) -> list[str]:
    """Return the names of the captures of a run."""
    return sorted(path.name for path in run_dir.glob("capture-*"))


def test_without_it_nothing_is_hooked(tmp_path: Path) -> None:
    """Off costs nothing: neither the model nor the optimizer has a hook of it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=tmp_path) as manager:
        manager.attach(model, optimizer)
        assert not model._forward_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    with GradientManager(run_dir=tmp_path, capture="nonfinite") as manager:
        manager.attach(model, optimizer)
        assert len(model._forward_pre_hooks) == 1
    assert not model._forward_pre_hooks


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    """With a capture, with two, and with none."""
    plain = train(tmp_path / "plain", capture="off")
    for name, settings in (("one", dict[str, Any]()), ("spikes", {"capture": "spike", "capture_optimizer": True})):
        watched = train(tmp_path / name, **settings)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
        assert captures(tmp_path / name) == ["capture-00006"]


def test_a_spike_that_is_acted_on_is_captured(tmp_path: Path) -> None:
    """Also where it is too small for an issue."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4), torch.randn(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    spikes: dict[str, Any] = {"capture": "spike", "spike_action": "skip", "spike_window": 16}
    with GradientManager(run_dir=tmp_path, **spikes, **SETTINGS) as manager:
        manager.attach(model, optimizer)
        for step in range(1, 31):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() * (5.0 if step == 25 else 1.0)
            report = safe_backward(loss, model, optimizer, manager)
            optimizer.step()
            assert (report.spike is not None) == (step == 25)
            assert report.health.healthy
    assert captures(tmp_path) == ["capture-00025"]
    assert json.loads((tmp_path / "capture-00025" / "capture.json").read_text())["reason"] == "spike"


def test_a_model_that_is_watched_can_be_copied_and_saved(tmp_path: Path) -> None:
    """A copy has a hook that does nothing, and is no part of the run."""
    model = Net()
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        manager.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        again = pickle.loads(pickle.dumps(nn.Sequential(model.first)))
        twin = copy.deepcopy(model)
        assert twin(torch.randn(8, 4)).shape == again(torch.randn(8, 4))[:, :3].shape


def test_the_report_says_where_it_is(tmp_path: Path) -> None:
    """And how it is looked at; the capture itself has the report in full."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        report = safe_backward((model(torch.randn(8, 4)) / 0.0).mean(), model, optimizer, manager)
        (note,) = [note for note in report.notes if "capture" in note]
    assert f"captured: {tmp_path / 'capture-00001'} is this step" in note
    command = shlex.split(note.split("`")[1])
    assert command == ["gradtrack", "replay-step", str(tmp_path / "capture-00001"), "train.py:make"]
    assert "make is a function in your train.py that returns the model" in note
    assert "call manager.attach(model, optimizer) before the first one" in note
    values = json.loads((tmp_path / "capture-00001" / "capture.json").read_text())
    assert values["report"]["step"] == 1
    assert set(values["report"]["parameters"]) == {name for name, _ in model.named_parameters()}
    assert values["report"]["nan_inf"]["nan_count"] > 0


def test_no_more_are_kept_than_asked_for(tmp_path: Path) -> None:
    """Also where the training is resumed in its directory."""
    train(tmp_path, bad=3, steps=3, capture_max_steps=2)
    assert captures(tmp_path) == ["capture-00003"]

    def spoilt(model: nn.Module, run_dir: Path, state: Any = None) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GradientManager(run_dir=run_dir, capture="nonfinite", capture_max_steps=2, **SETTINGS) as manager:
            manager.attach(model, optimizer)
            if state is not None:
                manager.load_state_dict(state)
            for _ in range(4):
                safe_backward(model(torch.full((8, 4), torch.inf)).mean(), model, optimizer, manager)
            hooks = len(model._forward_pre_hooks)
            return manager.state_dict(), hooks

    state, hooks = spoilt(Net(), tmp_path / "new")
    assert captures(tmp_path / "new") == ["capture-00001", "capture-00002"]
    assert hooks == 0
    spoilt(Net(), tmp_path / "new", state)
    assert captures(tmp_path / "new") == ["capture-00001", "capture-00002"]


def test_one_that_is_too_large_is_said_and_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The remedy names the setting."""
    train(tmp_path, capture_max_bytes=1000)
    assert captures(tmp_path) == []
    assert "step 6 was not captured: it has" in caplog.text
    assert "Raise capture_max_bytes" in caplog.text


def test_steps_that_ranks_share_on_a_device_are_said_not_to_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and without a hook from then on: nothing would ever be captured. On a CPU it is."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        for on_device, hooks in ((True, 0), (False, 1)):
            monkeypatch.setattr(capture, "on_device", lambda _, there=on_device: there)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            group: Any = distributed.group.WORLD
            with GradientManager(
                run_dir=tmp_path / str(on_device), capture="nonfinite", process_group=group, **SETTINGS
            ) as manager:
                manager.attach(model, optimizer)
                reports = [
                    safe_backward(model(torch.full((8, 4), value)).mean(), model, optimizer, manager)
                    for value in (1.0, 1.0, math.inf)
                ]
                told = [any("steps are not captured" in note for note in report.notes) for report in reports]
                assert told == [on_device, False, False]
                assert len(model._forward_pre_hooks) == hooks
            assert captures(tmp_path / str(on_device)) == ([] if on_device else ["capture-00003"])
    finally:
        distributed.destroy_process_group()


def test_a_jump_of_the_loss_is_no_spike(tmp_path: Path) -> None:
    """Its issue opens long after the step by which it came, which is gone then."""
    torch.manual_seed(0)
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    opened = []
    with GradientManager(run_dir=tmp_path, capture="spike", **SETTINGS) as manager:
        manager.attach(weight, optimizer)
        for step in range(1, 121):
            loss = weight(torch.ones(1, 1)).sum() + (100.0 if step > 60 else 1.0) + 0.01 * (step % 7)
            report = safe_backward(loss, weight, optimizer, manager)
            opened += [issue.issue_type.value for issue in report.health.issues]
    assert set(opened) == {"LOSS_JUMP"}
    assert captures(tmp_path) == []


def test_a_full_disk_leaves_nothing_and_the_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No half of a capture stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        model = train(tmp_path / "full", backends=["memory"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "step 6 was not captured: [Errno 27] File too large" in caplog.text
    assert captures(tmp_path / "full") == []
    assert not list((tmp_path / "full").glob(".capture-*"))
    plain = train(tmp_path / "plain", capture="off")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_batch_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    """Everything else of the step is kept, and the model's inputs are enough for its forward pass."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        manager.attach(model, optimizer)
        loss = model(torch.full((8, 4), torch.inf)).mean()
        report = safe_backward(loss, model, optimizer, manager, batch=(object(), 4))
    assert any("values of the types builtins.object were left out" in note for note in report.notes)
    found = replay_step(tmp_path / "capture-00001", Net)
    assert found.origin is not None
    assert found.origin.module == "first (Linear)"


def test_a_buffer_is_copied_only_while_it_changes(tmp_path: Path) -> None:
    """What a forward pass does not write to is kept by reference, and is right in the capture."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("last", torch.zeros(3))
            self.seen: Tensor
            self.table: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.last = x.detach().sum(0)  # another tensor in its place
            return (self.weight * x + self.table).sum()

    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        manager.attach(model, optimizer)
        for step in range(4):
            x = torch.full((2, 3), torch.inf if step == 3 else float(step))
            safe_backward(model(x), model, optimizer, manager)
            optimizer.step()
            optimizer.zero_grad()
    kept = load_file(tmp_path / "capture-00004" / "tensors.safetensors")
    assert kept["buffer.seen"] == 3
    assert kept["buffer.last"].tolist() == [4.0] * 3
    assert kept["buffer.table"].tolist() == [0, 1, 2]
    assert replay_step(tmp_path / "capture-00004", Tables).same_loss


def test_a_compiled_model_is_captured(tmp_path: Path) -> None:
    """Its hook lies around the compiled code; `model.compile()` has no such place, which is said."""
    for name, seen in (("around", True), ("in_place", False)):
        model = Net()
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True) if seen else model
        if not seen:
            model.compile(backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GradientManager(run_dir=tmp_path / name, capture="nonfinite", **SETTINGS) as manager:
            manager.attach(compiled, optimizer)
            x = torch.full((8, 4), torch.inf)
            report = safe_backward(compiled(x).mean(), compiled, optimizer, manager, batch=x)
        assert any("torch.compile(model) does not" in note for note in report.notes) is not seen
        capture = tmp_path / name / "capture-00001"
        found = replay_step(capture, lambda: (Net(), lambda net, batch: net(batch).mean()))
        assert found.origin is not None
        assert found.origin.name == "aten.addmm"


def test_off_may_be_written_as_yaml_reads_it(tmp_path: Path) -> None:
    """The word off is a switch for YAML."""
    (tmp_path / "gradtrack.yaml").write_text("capture: off\nfingerprints: off\n")
    config = GradientConfig.load(tmp_path / "gradtrack.yaml")
    assert (config.capture, config.fingerprints) == ("off", 0)


def test_without_a_directory_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """There is nowhere to keep a capture."""
    model = Net()
    with GradientManager(capture="nonfinite") as manager:
        manager.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "capture: nothing is kept, since the run has no directory. Set run_dir." in caplog.text


@pytest.mark.parametrize("late", [False, True])
def test_on_an_accelerator_it_has_the_weights_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Numbers that would stay on the device until the next step are waited for, while captures are left to make."""
    monkeypatch.setattr(pair, "on_device", lambda grads: late)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"nonfinite_action": "report", "engine": "torch", "grad_log_every_n_steps": 100}
    with GradientManager(run_dir=tmp_path, capture="nonfinite", capture_max_steps=1, **SETTINGS, **settings) as manager:
        manager.attach(model, optimizer)
        for step in range(1, 20):
            x = torch.full((8, 4), math.inf) if step == 13 else torch.randn(8, 4)
            before = copy.deepcopy(dict(model.named_parameters()))
            optimizer.zero_grad()
            safe_backward(model(x).mean(), model, optimizer, manager, batch=x)
            optimizer.step()
            if step == 13:
                break
    kept = load_file(tmp_path / "capture-00013" / "tensors.safetensors")
    assert all(torch.equal(kept[f"parameter.{name}"], param) for name, param in before.items())


def test_each_pair_has_its_own(tmp_path: Path) -> None:
    """A capture is named after its pair."""
    models = {name: Net() for name in ("critic", "an actor")}
    with GradientManager(run_dir=tmp_path, capture="nonfinite", **SETTINGS) as manager:
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        for name, model in models.items():
            manager.attach(model, optimizers[name], name=name)
        for name, model in models.items():
            safe_backward(model(torch.full((8, 4), math.inf)).mean(), model, optimizers[name], manager)
    names = captures(tmp_path)
    assert len(names) == 2
    assert "capture-critic-00001" in names
    assert all(replay_step(tmp_path / name, Net).origin is not None for name in names)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.capture.test_replay import train

stage, run_dir = int(sys.argv[1]), sys.argv[2]
seen = 0

def look(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "shutil.rmtree", "os.remove"):
        if any(".capture-" in str(arg) for arg in args):
            seen += 1
            if seen == stage:
                os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(look)
train(Path(run_dir), bad=2, steps=2)
print("ended", seen)
"""


@pytest.mark.parametrize("stage", [2, 3, 4, 5, 6])
def test_a_killed_training_leaves_a_whole_capture_or_none(tmp_path: Path, stage: int) -> None:
    """The process is killed at each file that a capture opens, and around the rename that ends it."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(stage), str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert captures(run_dir) == (["capture-00002"] if stage > 5 else [])
    assert len(list(run_dir.glob(".capture-*"))) == (stage <= 5)
    for name in captures(run_dir):
        assert replay_step(run_dir / name, make).origin is not None


def test_what_a_killed_process_left_is_removed_by_the_next_capture(tmp_path: Path) -> None:
    """Of the same rank only: another rank may be writing just now."""
    own, other = tmp_path / ".capture-00002.x1y2", tmp_path / ".capture-00002-rank1.x1y2"
    own.mkdir()
    other.mkdir()
    train(tmp_path)
    assert not own.exists()
    assert other.exists()
    assert captures(tmp_path) == ["capture-00006"]
