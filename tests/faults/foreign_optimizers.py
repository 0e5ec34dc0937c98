"""Skips a step of every optimizer of torch and other packages: `python -m tests.faults.foreign_optimizers OUT.json`.

An optimizer counts where it can be made from parameters, a model or another optimizer, and moves a small network in
a few steps. So does each setting of it that takes other code: `foreach`, `fused`, `caution` and their like.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

TORCH: Final = "torch.optim"
PACKAGES: Final = (
    TORCH,
    "pytorch_optimizer",
    "torch_optimizer",
    "schedulefree",
    "prodigyopt",
    "dadaptation",
    "heavyball",
    "timm.optim",
)
FLAGS: Final[tuple[tuple[str, Any], ...]] = (
    ("foreach", True),
    ("foreach", False),
    ("fused", True),
    ("multi_tensor", False),
    ("caution", True),
    ("cautious", True),
    ("amsgrad", True),
    ("ams_bound", True),
    ("nesterov", True),
    ("maximize", True),
    ("mars", True),
)
"""Settings that choose other code."""
SECONDS: Final = 60
STEPS: Final = 12
"""After which the slowest of them has moved."""
Make = Callable[[nn.Module], Any]


class TooSlow(Exception):
    """An optimizer takes longer than it is waited for."""


class Candidate(NamedTuple):
    """An optimizer and the ways in which it may be made, of which the first that trains is taken."""

    package: str
    name: str
    makes: list[Make]


def candidates() -> Iterator[Candidate]:
    """Yield every optimizer of the packages with its settings; a class that a second one exports counts once."""
    for package in PACKAGES:
        module = _imported(package)
        if package == "timm.optim":
            yield from _of_timm(module)
            continue
        for name, found in sorted(vars(module).items()):
            if _is_an_optimizer(found) and found.__module__.startswith(TORCH) == (package == TORCH):
                yield Candidate(package, name, _makes(found, {}))
                accepted = inspect.signature(found).parameters
                for flag, value in FLAGS:
                    if flag in accepted and accepted[flag].default is not value:
                        needs_momentum = flag == "nesterov" and "momentum" in accepted
                        more = {flag: value, **({"momentum": 0.9} if needs_momentum else {})}
                        yield Candidate(package, f"{name}({flag}={value})", _makes(found, more))


def _is_an_optimizer(found: Any) -> bool:
    is_one = inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
    return is_one and found is not torch.optim.Optimizer and not inspect.isabstract(found)


def _imported(package: str) -> ModuleType:
    """Import a package; of timm only the optimizers, since its models need a torchvision that fits this torch."""
    if package == "timm.optim":
        spec = importlib.util.find_spec("timm")
        assert spec is not None
        timm, models = ModuleType("timm"), ModuleType("timm.models")
        timm.__path__ = list(spec.submodule_search_locations or ())
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": timm, "timm.models": models})
    module = importlib.import_module(package)
    if package == "heavyball":
        module.utils.compile_mode = None  # compiling would take minutes
    return module


def _of_timm(module: Any) -> Iterator[Candidate]:
    """Yield the optimizers that timm has names for, such as `cadamw` for the cautious AdamW."""
    for name in module.list_optimizers():
        for foreach in (None, True, False):
            more = {} if foreach is None else {"foreach": foreach}
            shown = name if foreach is None else f"{name}(foreach={foreach})"
            kind = module.get_optimizer_info(name).opt_class
            if foreach is None or (callable(kind) and "foreach" in inspect.signature(kind).parameters):
                yield Candidate("timm", shown, [_named(module, name, more)])


def _named(module: Any, name: str, more: dict[str, Any]) -> Make:
    return lambda model: module.create_optimizer_v2(list(model.parameters()), opt=name, lr=1e-3, **more)


def _makes(kind: Any, more: dict[str, Any]) -> list[Make]:
    """Return the ways in which the packages' optimizers are made."""
    sgd = torch.optim.SGD
    makes: list[Make] = [
        lambda model: kind(model.parameters(), lr=1e-3, **more),
        lambda model: kind(model.parameters(), **more),
        lambda model: kind(_by_shape(model), lr=1e-3, **more),
        lambda model: kind(_by_shape(model), **more),
        lambda model: kind(model.parameters(), base_optimizer=sgd, lr=1e-3, **more),
        lambda model: kind(model.parameters(), num_data=16, lr=1e-3, **more),
        lambda model: kind(model.parameters(), num_iterations=100, lr=1e-3, **more),
        lambda model: kind(model.parameters(), threshold=1.0, lr=1e-3, **more),
        lambda model: kind(torch.optim.AdamW(model.parameters(), lr=1e-3), **more),
        lambda model: kind(model, model.parameters(), base_optimizer=sgd, lr=1e-3, **more),
        lambda model: kind(model, lr=1e-3, **more),
        lambda model: kind([{"params": list(model.parameters()), "optimizer": _inner(kind), "lr": 1e-3}], **more),
    ]
    return makes


def _by_shape(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices and vectors as groups, which the optimizers with an orthogonal update tell apart."""
    params = list(model.parameters())
    matrices, vectors = [one for one in params if one.ndim > 1], [one for one in params if one.ndim < 2]
    return [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]


def _inner(kind: Any) -> Any:
    return importlib.import_module(kind.__module__).AdamW


def plain(value: Any, seen: set[int] | None = None) -> Any:
    """Return a copy of a state that can be compared; objects are their attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return str(value.getstate())
    if id(value) in seen or callable(value) or isinstance(value, (nn.Module, ModuleType)):
        return None
    seen.add(id(value))
    if isinstance(value, dict):
        return {_key(key): plain(part, seen) for key, part in list(value.items()) if not callable(part)}
    if isinstance(value, (list, tuple, collections.deque)):
        return [plain(part, seen) for part in value]
    return {key: plain(part, seen) for key, part in getattr(value, "__dict__", {}).items()}


def _key(key: Any) -> str:
    return str(id(key)) if isinstance(key, Tensor) else str(key)


def same(one: Any, other: Any) -> bool:
    """Say whether two states are bitwise the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(one.equal(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return the weights, all that the optimizer holds, and the state of the random numbers."""
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    return [plain(list(model.parameters())), plain(attributes), torch.get_rng_state()]


class Loop:
    """A training loop that suits an optimizer: with a closure, or with a graph of the gradients, where it asks."""

    def __init__(self, make: Make, *, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 4, bias=bias))
        self.optimizer = make(self.model)
        self.manager: GradientManager | None = None
        self.graph = self.closure = False
        with contextlib.suppress(AttributeError):  # most have no such mode, or wrap one that has none
            self.optimizer.train()

    def loss(self) -> Tensor:
        """Return the loss of a batch."""
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
        loss: Tensor = (self.model(inputs) - 1).square().mean()
        return loss

    def step(self, scale: float = 1.0) -> bool:
        """Make a step, and say whether gradtrack skipped it."""
        self.optimizer.zero_grad()
        loss, skipped = self.loss() * scale, False
        if self.graph or self.manager is None:
            torch.autograd.backward(loss, create_graph=self.graph)
        if self.manager is not None and self.graph:
            skipped = self.manager.step(self.model, self.optimizer, loss, backward=False).skipped
        elif self.manager is not None:
            skipped = safe_backward(loss, self.model, self.optimizer, self.manager).skipped
        if self.closure:
            self.optimizer.step(self._again)
        else:
            self.optimizer.step()
        return skipped

    def _again(self) -> Tensor:
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.loss()
            torch.autograd.backward(loss)
        return loss

    def moves(self) -> None:
        """Make some steps, or raise what keeps the model from moving."""
        before = plain(list(self.model.parameters()))
        for _ in range(STEPS):
            self.step()
        weights = plain(list(self.model.parameters()))
        if same(before, weights):
            raise ValueError(f"it does not move in {STEPS} steps")
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise ValueError("its weights are not finite")

    def rests(self) -> bool:
        """Say whether a skipped step changes nothing, and the next one is made."""
        self.manager = GradientManager()
        self.optimizer.zero_grad()
        before = everything(self.model, self.optimizer)
        skipped = self.step(math.inf)
        rested = skipped and same(before, everything(self.model, self.optimizer))
        self.step()
        return rested and not same(before, everything(self.model, self.optimizer))


def made(makes: list[Make]) -> Loop:
    """Return a loop that trains, or raise the first reason why none does."""
    faults: list[Exception] = []
    for bias, make in itertools.product((True, False), makes):  # some take matrices only
        for closure, graph in ((False, False), (True, False), (False, True)):
            try:
                loop = Loop(make, bias=bias)
                loop.closure, loop.graph = closure, graph
                loop.moves()
            except TooSlow:
                raise
            except Exception as fault:
                faults.append(fault)
                continue
            return loop
    raise next((fault for fault in faults if not isinstance(fault, TypeError)), faults[0])


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"it takes longer than {SECONDS} seconds of the processor")


def main(path: Path) -> None:
    """Try them all and write down what came of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _too_slow)
    found: dict[str, list[str]] = {"rested": [], "moved": [], "left_out": []}
    for package, name, makes in candidates():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            loop = made(makes)
        except Exception as fault:
            found["left_out"].append(f"{package}.{name}: {type(fault).__name__}: {str(fault).strip():.120}")
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            rested = loop.rests()
        except Exception as fault:
            found["moved"].append(f"{package}.{name}: {type(fault).__name__}: {fault!s:.120}")
            continue
        found["rested" if rested else "moved"].append(f"{package}.{name}")
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
