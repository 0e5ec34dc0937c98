"""The end of managers without a call of `close`."""

import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gradtrack
from gradtrack import GradientManager, safe_backward
from gradtrack.delivery import at_exit
from gradtrack.delivery.run_files import RUN_END
from gradtrack.pages.run_data import load_run
from tests.delivery.training import run_script
from tests.training import batch_loss, optimizer_of, small_model

ANALYZERS = ["flow", "gain", "jacobian", "updates"]


def leave(*, watched: bool, analyzers: Any) -> tuple[nn.Module, list[weakref.ref[Any]]]:
    """Train for some steps and let go of manager and optimizer; return the model, and references to all three."""
    model = small_model()
    optimizer = optimizer_of(model)
    settings: dict[str, Any] = {"backends": ["memory"], "analyzers": analyzers}
    manager = gradtrack.watch(model, optimizer, **settings) if watched else GradientManager(**settings)
    for step in range(3):  # at the fourth the analyzers look, so that their hooks are there
        optimizer.zero_grad()
        if watched:
            batch_loss(model, step).backward()  # type: ignore[no-untyped-call]
        else:
            safe_backward(batch_loss(model, step), model, optimizer, manager)
        optimizer.step()
    return model, [weakref.ref(one) for one in (manager, optimizer, model)]


@pytest.mark.parametrize("analyzers", [[], ANALYZERS], ids=["plain", "analyzed"])
@pytest.mark.parametrize("watched", [False, True], ids=["safe_backward", "watch"])
def test_a_manager_that_is_let_go_of_is_collected(watched: bool, analyzers: Any) -> None:
    """What no variable holds is collected with its optimizer and leaves no hook on the model, which can go as well."""
    model, (manager, optimizer, model_too) = leave(watched=watched, analyzers=analyzers)
    gc.collect()
    assert manager() is None
    assert optimizer() is None
    hooks = [getattr(one, name) for one in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    assert not any(hooks)
    del model
    gc.collect()
    assert model_too() is None


def test_exit_closes_every_manager(tmp_path: Path) -> None:
    """Of several runs that were left open each gets its end, though trackers are set up meanwhile."""
    code = """
from gradtrack.delivery.at_exit import come_first

class Late(FileBackend):
    def close(self, *, failed=False):
        come_first()

loops = [Loop(f"{sys.argv[1]}/{number}", [Late(Path(sys.argv[1], "rows"))]) for number in range(3)]
for loop in loops:
    loop.run(2)
"""
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [number for number in range(3) if (tmp_path / str(number) / RUN_END).is_file()] == [0, 1, 2]


class _Closer:
    def renew(self) -> None:
        """Do nothing."""


def test_trackers_are_set_up_while_managers_are_made() -> None:
    """A worker that renews the closers is not disturbed by managers that begin or end in other threads."""
    interval, stop = sys.getswitchinterval(), threading.Event()

    def make() -> None:
        while not stop.is_set():
            at_exit.remember(_Closer().renew)

    makers = [threading.Thread(target=make) for _ in range(2)]
    kept = [_Closer() for _ in range(200)]
    for closer in kept:
        at_exit.remember(closer.renew)
    sys.setswitchinterval(1e-6)
    try:
        for maker in makers:
            maker.start()
        for _ in range(200):
            at_exit.come_first()
    finally:
        stop.set()
        for maker in makers:
            maker.join()
        sys.setswitchinterval(interval)


def test_thread_that_trains_while_the_interpreter_ends_is_left_alone(tmp_path: Path) -> None:
    """It gets reports that measure nothing, and no error: its manager was closed by nothing that it did."""
    code = """
import threading, time
from gradtrack.delivery.at_exit import come_first

loop = Loop(sys.argv[1], ["json"])
loop.run(1)
steps, stop = [], threading.Event()

def train():
    try:
        while not stop.is_set():
            loop.run(1)
            steps.append(1)
    except BaseException as fault:
        steps.clear()
        print("raised", repr(fault), flush=True)

def wait():
    before = len(steps)
    end = time.monotonic() + 20
    while len(steps) < before + 20 and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()  # torch itself ends the process where a thread is in the middle of it at the very end
    thread.join()
    print("went on" if len(steps) >= before + 20 else "ended", loop.manager.status()["closed"], flush=True)

thread = threading.Thread(target=train, daemon=True)
thread.start()
while len(steps) < 5:
    time.sleep(0.01)
"""
    first = "import atexit; atexit.register(lambda: wait())\n"
    done = run_script(first + code, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["went on True"], done.stdout + done.stderr
    assert "ClosedError" not in done.stderr


@pytest.mark.parametrize("way", ["with", "exit"])
def test_a_training_that_the_user_interrupts_is_said_to_be_interrupted(way: str, tmp_path: Path) -> None:
    """Ctrl-C is no error of the training, whether the manager is closed by `with` or by the end of the interpreter."""
    code = "loop = Loop(Path(sys.argv[1], 'run'), [])\n"
    code += "with loop.manager:\n " if way == "with" else ""
    code += "loop.run(2); raise KeyboardInterrupt"
    assert "KeyboardInterrupt" in run_script(code, tmp_path).stderr
    found = load_run(tmp_path / "run")
    assert (found.state, found.warning) == ("interrupted", "The training was interrupted from the keyboard.")
