"""Fingerprints of steps: where two runs part, why, and by how much."""

from __future__ import annotations

import hashlib
import json
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from gradtrack import GradientManager, read_run, safe_backward
from gradtrack.cli import app
from gradtrack.errors import UsageError
from gradtrack.fingerprints import Difference, first_difference
from gradtrack.support.checksums import fingerprint, hash_of_batch
from tests.capture.planted import Net

Change = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def flip(param: Tensor, index: int = 0) -> None:
    """Change the last bit of one element."""
    with torch.no_grad():
        param.view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1)


def train(
    run_dir: Path, *, every: int = 1, steps: int = 40, seed: int = 1, change: Change | None = None, **settings: Any
) -> Path:
    """Train with fingerprints; `change` is called before each step."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    chosen: dict[str, Any] = {"save_gradient_plots": False, **settings}
    with GradientManager(run_dir=run_dir, fingerprints=every, **chosen) as manager:
        manager.attach(model, optimizer)
        data = torch.Generator().manual_seed(7)
        for step in range(1, steps + 1):
            x, y = torch.randn(8, 4, generator=data), torch.randn(8, 3, generator=data)
            if change is not None:
                change(step, model, optimizer)
            optimizer.zero_grad()
            safe_backward((model(x) - y).square().mean(), model, optimizer, manager, batch=(x, y))
            optimizer.step()
    return run_dir


def at(step: int, change: Callable[[Any, Any], object]) -> Change:
    """Make a change of the model or its optimizer before one step."""
    return lambda now, model, optimizer: void(change(model, optimizer)) if now == step else None


def void(_: object) -> None:
    """Return nothing."""


def parted(first: Path, second: Path) -> Difference:
    """Return where two runs part."""
    found, count = first_difference(first, second)
    assert found is not None
    assert count
    return found


numbers = st.lists(st.floats(width=32, max_value=2.0**60, min_value=-(2.0**60)))


@given(values=numbers)
def test_the_norm_is_that_of_float64(values: list[float]) -> None:
    """Against the exact sum of the squares, and the hash against that of the bytes."""
    tensor = torch.tensor(values, dtype=torch.float32)
    found, norm = fingerprint(tensor)
    exact = math.sqrt(math.fsum(value * value for value in tensor.double().tolist()))
    assert norm == pytest.approx(exact, rel=1e-12)
    assert found == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), data=st.data())
def test_every_bit_counts(values: list[int], data: st.DataObject) -> None:
    """A tensor that differs in one bit, whatever its bits mean, has another hash."""
    bits = torch.tensor(np.array(values, dtype=np.uint32).view(np.int32))
    before = fingerprint(bits.view(torch.float32))[0]
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    bits[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert fingerprint(bits.view(torch.float32))[0] != before


def test_the_hash_of_a_batch_sees_types_shapes_and_numbers() -> None:
    """Anything that a model could tell apart."""
    x = torch.arange(4.0)
    batches: list[Any] = [
        x,
        x.view(2, 2),
        x.double(),
        x.int(),
        [x, 1],
        [x, 2],
        {"x": x, "y": None},
        x.numpy(),
        object(),
    ]
    assert len({hash_of_batch(batch) for batch in batches}) == len(batches)
    assert hash_of_batch(x.clone()) == hash_of_batch(x)
    assert hash_of_batch(x.to_sparse()) == hash_of_batch(x[:2].to_sparse())


@dataclass
class Sample:
    """A batch of one's own."""

    x: Tensor
    size: int = 1


@pytest.mark.parametrize(
    "made", [UserDict, lambda values: Sample(**values), lambda values: [UserDict(s=Sample(**values))]]
)
def test_the_hash_of_a_batch_sees_into_mappings_and_data_classes(made: Callable[[dict[str, Any]], object]) -> None:
    """As tokenizers and collate functions return."""
    same, equal, other = ({"x": torch.full((2,), value)} for value in (1.0, 1.0, 2.0))
    assert hash_of_batch(made(same)) == hash_of_batch(made(equal))
    assert hash_of_batch(made(same)) != hash_of_batch(made(other))


def test_one_bit_of_one_weight_at_step_37_is_found(tmp_path: Path) -> None:
    """The runs are the same before; the weight is named, and by how much its norm differs."""
    one = train(tmp_path / "one")
    assert first_difference(one, train(tmp_path / "twin")) == (None, 41)
    other = train(tmp_path / "other", change=at(37, lambda model, _: flip(model.head.last.weight, 5)))
    found = parted(one, other)
    assert (found.step, found.cause, found.parameter, found.num_parameters) == (37, "update", "head.last.weight", 1)
    assert found.norms[0] != found.norms[1]
    assert 0 < found.relative < 1e-6
    assert "the gradients of step 36 were the same: its update differs, or a change after it" in found.text


@pytest.mark.parametrize(
    ("change", "step", "cause", "parameter"),
    [
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=0.02), 38, "update", "first.weight"),
        (lambda model, optimizer: torch.rand(1), 37, "random numbers", "first.weight"),
        (lambda model, optimizer: np.random.rand(), 37, "random numbers", ""),
    ],
)
def test_the_cause_is_told_from_what_follows_it(
    tmp_path: Path, change: Callable[[Any, Any], object], step: int, cause: str, parameter: str
) -> None:
    """A rate shows in the update, random numbers before the gradients; where no weight follows, that is said."""
    one, other = train(tmp_path / "one"), train(tmp_path / "other", change=at(37, change))
    found = parted(one, other)
    assert (found.step, found.cause, found.parameter) == (step, cause, parameter)
    assert parameter or "no weight and no gradient does" in found.text
    assert ("its learning rate {'0': 0.01} and {'0': 0.02}" in found.text) == (cause == "update")


def test_other_data_are_named(tmp_path: Path) -> None:
    """The gradients differ because of the batch."""

    def spoil(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 37:
            handle = model.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,), prepend=True)
            model.register_forward_hook(lambda *_: handle.remove())

    model_sees = parted(train(tmp_path / "one"), train(tmp_path / "hook", change=spoil))
    assert (model_sees.step, model_sees.cause) == (37, "data")
    seeds = parted(tmp_path / "one", train(tmp_path / "seed", seed=2))
    assert (seeds.step, seeds.cause, seeds.num_parameters) == (1, "initial weights", 4)


def test_a_gradient_that_differs_by_itself_is_one(tmp_path: Path) -> None:
    """As of a kernel that adds in another order."""

    def nudge(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        bias: Any = model.get_parameter("first.bias")
        handle = bias.register_hook(lambda grad: grad * (1 + 1e-6))
        model.register_forward_hook(lambda *_: None if step == 37 else handle.remove())

    found = parted(train(tmp_path / "one", steps=37), train(tmp_path / "other", steps=37, change=nudge))
    assert (found.step, found.cause, found.parameter) == (37, "gradient", "first.bias")
    assert found.relative == pytest.approx(1e-6, rel=0.1)


def test_with_every_tenth_step_the_span_is_told(tmp_path: Path) -> None:
    """The steps between have no fingerprints."""
    change = at(37, lambda model, _: flip(model.first.weight))
    found = parted(train(tmp_path / "one", every=10), train(tmp_path / "other", every=10, change=change))
    assert (found.step, found.cause) == (40, "update")
    assert "step 30 was the same, and the steps after it have no fingerprints: take every step" in found.text


def test_training_is_bitwise_the_same(tmp_path: Path) -> None:
    """Fingerprints read, and nothing else; without them there is no file and no hook."""
    runs = [train(tmp_path / str(every), every=every) for every in (0, 1, 7)]
    norms = [read_run(run).steps["train/grad_norm"] for run in runs]
    assert norms[0] == norms[1] == norms[2]
    assert [len(list(run.glob("fingerprints-*"))) for run in runs] == [0, 1, 1]
    model = Net()
    with GradientManager(run_dir=tmp_path / "off") as manager:
        manager.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert not model._forward_pre_hooks


def test_the_bytes_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends with a note, and what was written can be compared."""
    one = train(tmp_path / "one", fingerprints_max_bytes=5000)
    assert (one / "fingerprints-000.jsonl").stat().st_size <= 5000
    assert "they would have more than 5,000 bytes" in caplog.text
    _, count = first_difference(one, train(tmp_path / "two"))
    assert 0 < count < 40


def test_a_rank_that_does_not_know_the_directory_of_rank_0_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own could be that of another run; it says so, waits for no other, and trains on."""
    monkeypatch.setenv("RANK", "1")
    train(tmp_path, steps=3, capture="nonfinite")
    assert not list(tmp_path.glob("fingerprints-*"))
    assert "rank 1 keeps no captures and no fingerprints, and is not compared with the others" in caplog.text


def test_the_file_is_bounded_however_many_pairs_write_to_it(tmp_path: Path) -> None:
    """The bound is that of the file of a rank."""
    with GradientManager(
        run_dir=tmp_path, fingerprints=1, fingerprints_max_bytes=5000, save_gradient_plots=False
    ) as manager:
        pairs = []
        for name in "ab":
            model = Net()
            pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.01)))
            manager.attach(*pairs[-1], name=name)
        for _ in range(10):
            for model, optimizer in pairs:
                safe_backward(model(torch.ones(8, 4)).square().mean(), model, optimizer, manager)
                optimizer.step()
    assert 4000 < (tmp_path / "fingerprints-000.jsonl").stat().st_size <= 5000


def test_steps_that_are_made_again_begin_a_session(tmp_path: Path) -> None:
    """Where the training goes back, a header with a number that grows comes before them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(run_dir=tmp_path, fingerprints=1, save_gradient_plots=False) as manager:
        state = None
        for step in range(1, 6):
            safe_backward(model(torch.ones(8, 4)).square().mean(), model, optimizer, manager)
            optimizer.step()
            if step == 2:
                state = manager.state_dict()
            elif step == 4:
                assert state is not None
                manager.load_state_dict(state)
    lines = [json.loads(line) for line in (tmp_path / "fingerprints-000.jsonl").read_bytes().split(b"\n") if line]
    found = [("session", line["session"]) if "session" in line else line.get("step") for line in lines]
    assert found == [("session", 0), None, 1, 2, 3, 4, ("session", 1), 3, 4]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    """A process that was killed may have left half a row, and a row may be damaged."""
    one = train(tmp_path / "one", steps=5)
    path = train(tmp_path / "two", steps=5) / "fingerprints-000.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    assert first_difference(one, path.parent)[1] == 5
    path.write_bytes(content.replace(b'"step": 3', b'"step": 4'))
    assert first_difference(one, path.parent)[0] is None


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("one", "none", "'.*none' has no fingerprints: .* Set fingerprints=10"),
        ("none", "one", "'.*none' has no fingerprints: .* Set fingerprints=10"),
        ("one", "", "has one rank: expected two runs, or ranks"),
        ("one", "linear", "has other parameters: .* Compare runs of one model"),
    ],
)
def test_what_cannot_be_compared_is_told_with_a_remedy(tmp_path: Path, first: str, second: str, text: str) -> None:
    """Each is our own error."""
    train(tmp_path / "one", steps=2)
    train(tmp_path / "none", steps=2, every=0)
    model = nn.Linear(4, 1)
    with GradientManager(run_dir=tmp_path / "linear", fingerprints=1, save_gradient_plots=False) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        safe_backward(model(torch.ones(1, 4)).sum(), model, optimizer, manager)
    with pytest.raises(UsageError, match=text):
        first_difference(tmp_path / first, tmp_path / second if second else None)


def test_the_command_names_it(tmp_path: Path) -> None:
    """In words, as data, and by its exit code."""
    one = train(tmp_path / "one", steps=5)
    other = train(tmp_path / "other", steps=5, change=at(3, lambda model, _: flip(model.first.bias)))
    twin = train(tmp_path / "twin", steps=5)
    runner = CliRunner()
    told = runner.invoke(app, ["diff", str(one), str(other), "--first", "--check"])
    assert told.exit_code == 1
    assert "Step 3, at its beginning: the weight of first.bias differs" in told.output.replace("\n", " ")
    data = json.loads(runner.invoke(app, ["diff", str(one), str(other), "--first", "--json"]).output)
    assert (data["step"], data["parameter"], data["cause"], data["parts"]) == (3, "first.bias", "update", True)
    same = runner.invoke(app, ["diff", str(one), str(twin), "--first", "--check"])
    assert (same.exit_code, "No fingerprint differs" in same.output) == (0, True)
