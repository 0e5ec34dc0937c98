"""Looks in one thread: the number of threads is theirs alone, and that of the training is what it was."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gradtrack import GradientManager
from gradtrack.analyzers.flow import probe
from gradtrack.analyzers.gain import monitor
from gradtrack.analyzers.recurrent import measure
from gradtrack.analyzers.transformer import recorder
from gradtrack.analyzers.updates import sums
from gradtrack.gradients.native import threads
from gradtrack.gradients.native.threads import one_thread, threads_for
from tests.analyzers.every_step import every_step
from tests.processes import ROOT

__all__ = ["every_step"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Let torch have two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_block_has_one_thread_and_nothing_else_does() -> None:
    """Inside it is one, nested too; another thread keeps two, and after an error there are two again."""
    found: list[int] = []

    def inside() -> None:
        with one_thread():
            with one_thread():
                found.append(torch.get_num_threads())
            found.append(torch.get_num_threads())
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        inside()
    assert found == [1, 1, 2]
    assert torch.get_num_threads() == 2
    assert "mkl_get_max_threads() : 2" in torch.__config__.parallel_info()


def test_large_tensors_have_all_threads() -> None:
    """Where more threads pay they are there."""
    with threads_for(1 << 21):
        assert torch.get_num_threads() == 2
    with threads_for(1 << 10):
        assert torch.get_num_threads() == 1


def test_without_the_functions_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a build of torch that has other threads the block runs as it is."""
    monkeypatch.setattr(threads, "_library", lambda: None)
    with one_thread():
        assert torch.get_num_threads() == 2


class Model(nn.Module):
    """A recurrent layer and a chain of blocks with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all of them."""
        return self.blocks(self.rnn(x)[0])  # type: ignore[no-any-return]


LOOKS = [
    (measure, "sweep"),
    (sums, "_array"),
    (probe, "take_output"),
    (probe, "take_gradient"),
    (monitor, "_norms"),
    (recorder, "measure_heads"),
    (recorder, "token_statistics"),
]


@pytest.mark.parametrize(("home", "name"), LOOKS)
def test_looks_run_in_one_thread_and_the_training_in_all(
    home: Any, name: str, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each small look has one thread, and the optimizer after it has two."""
    look, found = getattr(home, name), []

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.append(torch.get_num_threads())
        return look(*args, **kwargs)

    monkeypatch.setattr(home, name, watched)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(analyzers="auto") as manager:
        manager.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            manager.step(model, optimizer, model(torch.randn(2, 5, 4)).square().mean())
            assert torch.get_num_threads() == 2
            optimizer.step()
    assert found
    assert set(found) == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP survives a fork elsewhere, or nothing forks")
def test_a_forked_child_that_imports_us_first_has_no_team() -> None:
    """Its parent may never have heard of us: what the child measures must not wait for the parent's threads."""
    program = """
import os, sys, torch
torch.set_num_threads(2)
grads = [torch.ones(10**6).exp().fill_(1.0)]
if os.fork() == 0:
    from gradtrack.gradients.native.engine import Plan
    print(Plan(grads).measure([0], 1).total[0], flush=True)
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1000000.0\n", done.stderr


@pytest.mark.skipif(threads.team() is None, reason="this torch has no OpenMP that runs work for others")
def test_a_forked_child_has_no_team() -> None:
    """OpenMP would wait there for threads that stayed behind."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(threads.team()), daemon=True)
    child.start()
    assert receiver.poll(30)
    assert receiver.recv() is None
    assert threads.team() is not None
    child.join(30)
    assert child.exitcode == 0


def test_another_build_of_torch_has_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no library that runs work for others, and nothing forks, as on Windows, there is none."""
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert runpy.run_path(threads.__file__)["team"]() is None
