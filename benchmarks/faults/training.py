"""A training that is struck: it tells each of its steps, with a checksum of the weights, to a pipe as it goes."""

from __future__ import annotations

import contextlib
import copy
import errno
import importlib
import json
import math
import mmap
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import gradtrack
from gradtrack import GradientManager, Record, safe_backward, watch
from gradtrack.delivery.delivery import Delivery

PACKAGE = str(Path(gradtrack.__file__).parent)
QUIET_STEPS = 3
"""After which numba and the trackers' packages are loaded: an interrupted import is no matter of ours."""


@dataclass(kw_only=True)
class Plan:
    """All that a training does, and what strikes it; the same plan makes the same training."""

    directory: str
    kind: str
    seed: int
    model: str = "tanh"
    steps: int = 1000
    way: str = "safe_backward"
    end: str = "close"
    harm: str = ""
    """What the training itself does wrong once, to show that the harness finds it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of the manager; without any the training has none."""

    @property
    def run_dir(self) -> Path:
        return Path(self.directory) / "run"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Training:
    """A small model on eight batches, of which one in fifty has an infinite loss."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(1)
        self.model, optimizer = MODELS[plan.model]()
        self.optimizer: torch.optim.Optimizer = optimizer(self.model.parameters())
        self._batches = [torch.randn(16, 6) for _ in range(8)]
        self.manager: GradientManager | None = None
        self.reported, self.is_broken_off = 0, False
        self._way, self._settings = plan.way, plan.settings

    def begin(self) -> None:
        """Make the manager."""
        if self._settings and self._way == "watch":
            self.manager = watch(self.model, self.optimizer, **self._settings)
        elif self._settings:
            self.manager = GradientManager(**self._settings)

    def step(self, number: int) -> None:
        """Make a step; without a manager one that is not finite is left out by hand."""
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(self._batches[number % 8]) - 1.0).square().mean()
        if number % 50 == 27:
            loss = loss * math.inf
        if self.manager is not None and self._way == "safe_backward":
            self.reported = safe_backward(loss, self.model, self.optimizer, self.manager).step
            self.optimizer.step()
            return
        torch.autograd.backward(loss)
        if self.manager is not None or math.isfinite(self.norm()):
            self.optimizer.step()

    def step_of_row(self, number: int) -> int:
        """Return the step that the row of the last step has; those that were broken off have one of their own."""
        if self._way == "safe_backward" or self.manager is None:
            return self.reported
        return number + 1 if not self.is_broken_off else self.manager.status()["steps"]["default"]

    def norm(self) -> float:
        """Return the norm of the gradients."""
        grads = [param.grad.double() for param in self.model.parameters() if param.grad is not None]
        return float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())

    def checksum(self) -> int:
        """Return a checksum of the weights."""
        found = 0
        for param in self.model.parameters():
            found = zlib.crc32(param.detach().numpy().tobytes(), found)
        return found

    def state(self) -> Any:
        """Return a copy of all that a step changes."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())), torch.get_rng_state()

    def go_back(self, state: Any) -> None:
        """Undo a step that was broken off, as a program that resumes from a checkpoint does."""
        torch.set_grad_enabled(True)  # `torch.no_grad` itself leaves it off where a signal strikes as it is entered
        self.is_broken_off = True
        (weights, optimizer), random_state = state
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random_state)


def _tanh() -> Any:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def _dropout() -> Any:
    model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4))
    return model, lambda params: torch.optim.AdamW(params, lr=1e-4)


def _deep() -> Any:
    layers = [part for _ in range(6) for part in (nn.Linear(12, 12), nn.ReLU())]
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), *layers, nn.Linear(12, 4))
    return model, lambda params: torch.optim.RMSprop(params, lr=1e-5)


MODELS: dict[str, Callable[[], Any]] = {"tanh": _tanh, "dropout": _dropout, "deep": _deep}


class Told:
    """What the training tells the harness: lines in shared memory, which no kill and no faulty disk takes away."""

    BYTES = 4 * 2**20

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), self.BYTES)

    def __call__(self, *words: object) -> None:
        self._memory.write((json.dumps(words) + "\n").encode())

    @classmethod
    def prepare(cls, path: Path) -> None:
        """Make the memory, before the training begins."""
        with path.open("wb") as stream:
            stream.truncate(cls.BYTES)

    @classmethod
    def read(cls, path: Path) -> list[list[Any]]:
        """Return the lines that are whole."""
        lines = path.read_bytes().split(b"\0", 1)[0].split(b"\n")
        return [json.loads(line) for line in lines[:-1]]


class Struck(Exception):
    """What the user's handler raises."""


class Alarms:
    """Signals at random moments, whose handler raises where it may."""

    def __init__(self, kind: str, chance: random.Random) -> None:
        self._kind, self._chance = kind, chance
        self.armed = self._stopped = False
        self.raised: BaseException | None = None
        self.strikes, self.where, self.struck_us = 0, list[str](), False
        self.mean_seconds = 0.001

    def start(self) -> None:
        """Let the first one come."""
        signal.signal(signal.SIGALRM, self._handle)
        sys.unraisablehook = self._ignore
        self._set()

    def stop(self) -> None:
        """Let no other one come."""
        self.armed, self._stopped = False, True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _set(self) -> None:
        if not self._stopped:  # the handler of a signal that came before may run after it, and the process ends
            signal.setitimer(signal.ITIMER_REAL, self.mean_seconds * self._chance.uniform(0.05, 2.0))

    def _ignore(self, found: Any) -> None:
        """Forget what struck where Python ignores every exception: in a finalizer, or the callback of a reference."""
        if found.exc_value is self.raised:
            self.raised = None
        else:
            sys.__unraisablehook__(found)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._set()
        if not self.armed:
            return
        self.armed = False
        self.strikes += 1
        self.where = traceback.format_stack(frame)[-8:]
        # numba and logging keep what strikes them to themselves.
        self.struck_us = frame is not None and frame.f_code.co_filename.startswith(PACKAGE)
        if self._kind == "KeyboardInterrupt":
            self.raised = KeyboardInterrupt()
        else:
            self.raised = self._chance.choice([Struck, TimeoutError])()
        raise self.raised


class FaultyDisk:
    """Makes the calls of the system fail for a while, in every thread."""

    def __init__(self, kind: str, plan: Plan, chance: random.Random) -> None:
        self._kind, self._run_dir, self._chance = kind, plan.run_dir, chance
        self.failing, self.faults = False, 0
        self._limit = chance.choice([0, 4096, 20_000, 100_000])
        if kind == "read-only":
            for name in ("open", "write", "mkdir", "replace", "rename", "unlink", "ftruncate"):
                setattr(os, name, self._failing(getattr(os, name), errno.EROFS))
        elif kind == "full":
            os.write = self._failing(os.write, errno.ENOSPC, half=True)
        elif kind == "fsync":
            os.fsync = self._failing(os.fsync, errno.EIO)

    def strike(self) -> None:
        """Begin to fail, or remove the directory."""
        self.failing = True
        if self._kind == "removed":
            self.faults += 1
            shutil.rmtree(self._run_dir, ignore_errors=True)
        elif self._kind == "limit":
            self.faults += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, resource.RLIM_INFINITY))

    def mend(self) -> None:
        """Be a good disk again."""
        self.failing = False
        if self._kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _failing(self, call: Any, code: int, *, half: bool = False) -> Any:
        def fail(*given: Any, **options: Any) -> Any:
            writes = call is not os_open or bool(given[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not self.failing or not writes or self._chance.random() < 0.3:
                return call(*given, **options)
            self.faults += 1
            if half and self._chance.random() < 0.5 and len(given[1]) > 1:
                return call(given[0], given[1][: len(given[1]) // 2])
            raise OSError(code, os.strerror(code))

        return fail


os_open = os.open


def train(plan: Plan) -> None:
    """Train as planned."""
    tell, chance = Told(Path(plan.directory) / "told"), random.Random(plan.seed)
    training = Training(plan)
    kind, _, variant = plan.kind.partition(": ")
    step: Callable[[int], None] = training.step
    alarms = Alarms(variant, chance) if kind == "interrupt" else None
    disk = FaultyDisk(variant, plan, chance) if kind == "disk" else None
    tell("begins")
    training.begin()
    if plan.harm:
        _do(plan.harm, training, plan.settings["grad_log_every_n_steps"])
    strikes = set(chance.sample(range(QUIET_STEPS, plan.steps), 6)) if disk is not None else set()
    for number in range(plan.steps):
        if disk is not None and number in strikes:
            disk.mend() if disk.failing else disk.strike()
        if alarms is not None and number == QUIET_STEPS:
            alarms.start()
        if alarms is not None:
            _step_under_alarms(training, number, alarms, tell)
        else:
            step(number)
        if training.manager is None:
            tell("step", number, 0, training.checksum(), training.norm())
        else:
            tell("step", number, training.step_of_row(number), training.checksum())
    if disk is not None:
        disk.mend()
        tell("struck", disk.faults)
    _end(plan, training, alarms, tell)


HARMS = ("lose a row", "write a row twice", "raise", "change a weight")


def _do(harm: str, training: Training, every: int) -> None:
    """Let the first row that is due by the setting, or the step after which it is, go wrong."""
    write, done = Delivery.write, list[str]()

    def wrong(delivery: Delivery, record: Record) -> None:
        first = not done and record.step % every == 0
        done.extend([harm] * first)
        if first and harm == "raise":
            raise ValueError(harm)
        if first and harm == "change a weight":
            next(training.model.parameters()).data[0] += 1e-3
        for _ in range({"lose a row": 0, "write a row twice": 2}.get(harm, 1) if first else 1):
            write(delivery, record)

    Delivery.write = wrong  # type: ignore[method-assign]


def _step_under_alarms(training: Training, number: int, alarms: Alarms, tell: Told) -> None:
    """Make a step, again and again until no signal breaks it off."""
    started = time.perf_counter()
    while True:
        state, alarms.raised = training.state(), None
        try:
            alarms.armed = number >= QUIET_STEPS
            training.step(number)
            alarms.armed = False
        except BaseException as fault:
            alarms.armed = False
            if fault is not alarms.raised:
                tell("raised", f"step {number}: {type(fault).__name__}: {fault}", _where(fault))
            training.go_back(state)
            # A step that takes longer than the time between two signals would never end.
            alarms.mean_seconds = min(alarms.mean_seconds * 1.2, 0.1)
        else:
            if alarms.raised is not None and alarms.struck_us:
                tell("raised", f"step {number}: what the handler raised was kept from the training", alarms.where)
            alarms.mean_seconds = max(1.5 * (time.perf_counter() - started), 2e-4)
            return


def _where(fault: BaseException) -> list[str]:
    return traceback.format_exception(fault)[-8:]


def _end(plan: Plan, training: Training, alarms: Alarms | None, tell: Told) -> None:
    """End as planned: killed, closed, or without either."""
    manager = training.manager
    if plan.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if manager is None:
        return
    if alarms is not None:
        alarms.raised = None
        try:
            alarms.mean_seconds = 0.02
            alarms.armed = True
            manager.close()
            alarms.armed = False
        except BaseException as fault:
            if fault is not alarms.raised:
                tell("raised", f"close: {type(fault).__name__}: {fault}", _where(fault))
        alarms.stop()
        tell("struck", alarms.strikes)
    if plan.end == "close":
        manager.close()
        tell("status", manager.status())
    tell("ended")


def main() -> None:
    """Read what is to be done, a line each, and fork a process for it: it has all packages loaded already."""
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(task)
            return
        print(json.dumps(pid), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _become(task: dict[str, Any]) -> None:
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for handle, name in ((1, "out"), (2, "err")):
        with open(task[name], "ab") as stream:
            os.dup2(stream.fileno(), handle)
    if "plan" in task:
        train(Plan(**task["plan"]))
    else:
        from gradtrack.cli import main as command

        sys.argv = task["command"]
        command()


def _load_everything() -> None:
    """Import all packages, of which torch loads some with the first step of an optimizer."""
    for found in pkgutil.walk_packages([PACKAGE], "gradtrack."):
        if "__main__" not in found.name and "triton" not in found.name and "integrations" not in found.name:
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    for name in ("tensorboard.compat.proto.event_pb2", "rich.progress", "typer.main"):
        importlib.import_module(name)
    for make in MODELS.values():  # without a backward pass, after which torch does not work in a fork
        model, optimizer = make()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer(model.parameters()).step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _load_everything()
    main()
