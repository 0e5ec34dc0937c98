"""Replay of a captured step: forward and backward again, and the first operation whose result was not finite."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from gradtrack.capture.files import MOST_BYTES, Batch, Forward, SavedCapture, is_plain
from gradtrack.capture.operations import (
    Operation,
    Operations,
    Range,
    checked_numpy_state,
    memory_of,
    range_of,
    set_switches,
    switches,
)
from gradtrack.errors import CaptureError, UsageError
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.protection.nonfinite import nonfinite_inputs, nonfinite_parts
from gradtrack.reports.step import spell
from gradtrack.support.checksums import fingerprint
from gradtrack.support.names import listed

LossFunction = Callable[[nn.Module, Any], Tensor]
_MAKE: Final = "Name a function as train.py:make or package.module:make; it returns the model, or model and loss."
_EXAMPLE: Final = (
    "expected a function of yours that returns the model of the training, or the model and a function "
    "loss(model, batch). Write `def make(): return Net(), loss` in train.py, and end the command with train.py:make."
)
_FINE: Final = Range((), "")
_CASTS: Final = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a captured step did when it was computed again."""

    capture: str
    step: int
    reason: str
    origin: Operation | None = None
    loss: float | None = None
    recorded_loss: float | None = None
    num_operations: int = 0
    gradients: list[str] = field(default_factory=list)
    """The parameters whose gradient is not finite, those of the last layers first."""
    largest: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def same_loss(self) -> bool | None:
        """Whether the loss is the recorded one to the last bit; None where either is unknown."""
        if self.loss is None or self.recorded_loss is None:
            return None
        return self.loss == self.recorded_loss or (math.isnan(self.loss) and math.isnan(self.recorded_loss))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        found: dict[str, Any] = spell(json.loads(json.dumps({**asdict(self), "same_loss": self.same_loss})))
        if self.origin is not None:
            ways = {"inputs": self.origin.inputs, "forward_inputs": self.origin.forward_inputs}
            found["origin"] |= {way: [spell(one._asdict()) for one in ranges] for way, ranges in ways.items()}
            found["origin"]["result"] = spell((self.origin.result or _FINE)._asdict())
        return found

    def __str__(self) -> str:
        lines = [f"Step {self.step}, captured as {self.reason}: {self.capture}"]
        if self.origin is not None:
            lines.append(f"The first result that is not finite:\n{self.origin}")
        else:
            lines.append(
                f"None of the {self.num_operations:,} operations returned what is not finite and reaches the end."
            )
        if self.gradients:
            lines.append(f"Gradients that are not finite: {listed(self.gradients)}")
        if self.largest:
            lines.append(f"The largest gradient: {self.largest}")
        if self.loss is not None:
            same = {None: "", True: ", as in the training" + (" to the last bit" if math.isfinite(self.loss) else "")}
            other = f", where the training had {self.recorded_loss!r}"
            lines.append(f"The loss: {self.loss!r}{same.get(self.same_loss, other)}")
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def replay_step(
    capture: str | Path,
    make: Callable[[], Any] | str,
    *,
    most_bytes: int = MOST_BYTES,
) -> Replay:
    """Load a captured step into the model that `make` returns, and compute it forward and backward again.

    `make` is a function, or its place as `train.py:make` or `package.module:make`. It returns the model, whose outputs
    are then the loss or have one, or the model and a function `loss(model, batch)`. `batch` is what the training
    passed as `batch=`; where it passed none, it is the positional inputs of each forward pass.
    """
    maker = find_make(make) if isinstance(make, str) else make
    saved = SavedCapture(Path(capture), most_bytes=most_bytes)
    try:
        with _state_restored():
            return _Session(saved, *_made(maker)).run()
    finally:
        saved.close()


def find_make(place: str) -> Callable[[], Any]:
    """Import a function by its place; the file is run as a module, so a training in it belongs below `__main__`."""
    if not place:
        raise UsageError(f"make is missing: {_EXAMPLE}")
    where, _, name = place.rpartition(":")
    if not where or not name.isidentifier():
        raise UsageError(f"make {place!r}: expected FILE.py:FUNCTION. {_MAKE}")
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"make {place!r}: expected a file that is there, and {where!r} is not. {_MAKE}")
    home, place_of_home = str(Path.cwd()), len(sys.path)  # no file of this directory hides a module of Python
    if path.suffix == ".py":
        home, place_of_home = str(path.resolve().parent), 0
    is_new = not place_of_home or home not in sys.path
    if is_new:
        sys.path.insert(place_of_home, home)
    try:
        if path.suffix == ".py":
            known = path.stem if path.stem not in {*sys.modules, *sys.stdlib_module_names} else f"{path.stem}_of_make"
            spec = importlib.util.spec_from_file_location(known, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[known] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (Exception, SystemExit) as fault:
        raise UsageError(
            f"make {place!r}: {where} cannot be imported ({type(fault).__name__}: {fault}). Put what trains below "
            "`if __name__ == '__main__'`, and run this where the training ran."
        ) from fault
    finally:
        if is_new:
            sys.path.remove(home)
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"make {place!r}: expected a function {name} in {where}. {_MAKE}")
    return found  # type: ignore[no-any-return]


def _made(make: Callable[[], Any]) -> tuple[nn.Module, LossFunction | None]:
    """Call the user's function, and return its model and its loss function."""
    try:
        found = make()
    except Exception as fault:
        raise UsageError(f"make raised {type(fault).__name__}: {fault}. It is called without arguments.") from fault
    model, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise UsageError(
            f"make returned {type(found).__name__}: expected a torch.nn.Module, or one with a function "
            "loss(model, batch). Return the model, or (model, loss)."
        )
    return model, loss


@contextlib.contextmanager
def _state_restored() -> Iterator[None]:
    """Leave random numbers and the settings of torch as they were."""
    states, before = (random.getstate(), np.random.get_state()), switches()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            set_switches(before)


class _Session:
    """One replay: the model with the state of the capture, and its passes."""

    def __init__(self, saved: SavedCapture, model: nn.Module, loss: LossFunction | None) -> None:
        self._saved, self._loss, self._values = saved, loss, saved.values
        self._model = unwrapped(model)
        self._notes = list(self._values.notes)
        self._outputs: list[Tensor] = []
        self._device = self._load()
        self._modules: list[str] = []
        self._given: dict[int, str] = {}
        for kind, named in (("parameter", self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, tensor in named:
                here = range_of(tensor.detach())
                # A buffer with infinities is a mask.
                if here is not None and (here.num_nan or (kind == "parameter" and here.num_inf)):
                    self._given[memory_of(tensor)] = f"the {kind} {name} was not finite before this step"
        self._operations = Operations(self._given, self._modules)

    def run(self) -> Replay:
        """Run every micro-batch of the step, and tell what was the first that was not finite."""
        losses = list[Tensor]()
        with contextlib.ExitStack() as stack:
            self._name_modules(stack)
            try:
                for batch in self._values.batches:
                    losses += self._run_batch(batch)
            except CaptureError:
                raise
            except Exception as fault:
                if self._operations.first is None:
                    raise UsageError(
                        f"the step cannot be computed ({type(fault).__name__}: {fault}): expected loss(model, batch) "
                        "to do what the training did. Call it on a batch of the training first."
                    ) from fault
                self._notes.append(f"the step ended with {type(fault).__name__}: {fault}")
        if not losses:
            self._notes.append(
                "only the forward pass was computed. Let make return the model and a function loss(model, batch), and "
                "pass batch=... in the training, for the loss and the gradients"
            )
        return self._told(losses)

    def _load(self) -> torch.device:
        """Put the parameters and buffers of the capture into the model, on the device of the capture if it is here."""
        saved, values, model = self._saved, self._values, self._model
        buffers = {name: one for name, one in model.named_buffers() if is_plain(one)}
        saved.check_fits("parameter", values.parameters, dict(model.named_parameters()))
        saved.check_fits("buffer", values.buffers, buffers)
        with saved.checked():
            device = torch.device(values.device)
            if device.type != "cpu" and not torch.get_device_module(device).is_available():
                self._notes.append(f"the training ran on {device}, which is not here, and the CPU rounds otherwise")
                device = torch.device("cpu")
        if all(one.device.type == "cpu" for one in model.parameters()):
            model.to(device)
        with torch.no_grad(), saved.checked():
            for name, param in model.named_parameters():
                param.copy_(saved.tensor(f"parameter.{name}"))
                param.requires_grad_(name not in values.frozen)
                param.grad = None
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(saved.tensor(f"buffer.{name}"))
            set_switches(values.switches)
        for name, module in model.named_modules():
            module.training = name not in values.evaluating
        return device

    def _name_modules(self, stack: contextlib.ExitStack) -> None:
        """Note while the model runs in which of its modules it is."""
        for name, module in self._model.named_modules():
            title = f"{name or 'the model'} ({type(module).__name__})"
            stack.callback(module.register_forward_pre_hook(partial(self._enter, title)).remove)
            stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)

    def _enter(self, title: str, *_: object) -> None:
        self._modules.append(title)

    def _leave(self, *_: object) -> None:
        self._modules.pop()

    def _run_batch(self, batch: Batch) -> list[Tensor]:
        """Run what one backward pass was made from, and return the losses."""
        forwards, losses = batch.forwards, list[Tensor]()
        if self._loss is not None and batch.batch is not None:
            given = self._saved.decode(batch.batch, self._device)
            self._note_given(nonfinite_parts(given, "batch{}"))
            losses.append(self._run(forwards, partial(self._loss, self._model, given)))
        else:
            for forward in forwards:
                args, kwargs = self._inputs(forward)
                call = partial(self._model, *args, **kwargs)
                if self._loss is not None:
                    call = partial(self._loss, self._model, args)
                output = self._run([forward], call)
                self._outputs += [one for one in tree_leaves(output) if isinstance(one, Tensor)]
                loss = _loss_in(output)
                losses += [loss] if loss is not None else []
        for loss in losses:
            if _loss_in(loss) is None:
                raise TypeError("a loss was expected, a tensor with one element that requires a gradient")
            with self._operations:
                torch.autograd.backward(loss if self._values.scale is None else loss * self._values.scale)
        return losses

    def _note_given(self, found: Iterable[tuple[Any, str]]) -> None:
        tensors = ((one, text) for one, text in found if isinstance(one, Tensor))
        self._given |= {memory_of(one): f"{text}: look at the data of this batch" for one, text in tensors}

    def _inputs(self, forward: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = self._saved.decode(forward.inputs, self._device)
        if isinstance(found, tuple) and [type(one) for one in found] == [tuple, dict]:
            args, kwargs = found
            self._note_given(nonfinite_inputs(args, kwargs, "the model"))
            return args, kwargs
        raise CaptureError("the capture holds no inputs of a forward pass. Copy the whole directory again.")

    def _run(self, forwards: list[Forward], call: Callable[[], Any]) -> Any:
        """Call a function; each forward pass in it begins with the random numbers and casts of the training."""
        waiting, casts = list(forwards), contextlib.ExitStack()

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            if waiting and torch.is_grad_enabled():
                with _disable_current_modes():
                    forward = waiting.pop(0)
                    self._set_rng(forward)
                for kind, dtype in forward.autocast.items():
                    casts.enter_context(torch.autocast(kind, _CASTS.get(dtype, torch.float32)))

        if forwards:
            self._set_rng(forwards[0])
        hooks = [
            self._model.register_forward_pre_hook(begin),
            self._model.register_forward_hook(lambda *_: casts.close(), always_call=True),
        ]
        try:
            with casts, self._operations:
                found = call()
        finally:
            for hook in hooks:
                hook.remove()
        if waiting:
            self._notes.append(f"{len(waiting)} forward passes of the training were not made again")
        return found

    def _set_rng(self, forward: Forward) -> None:
        with self._saved.checked():
            states = self._saved.decode(forward.rng)
            random.setstate(states.pop("python"))
            np.random.set_state(checked_numpy_state(states.pop("numpy")))
            torch.set_rng_state(states.pop("torch").cpu())
            for name, state in states.items():
                device = torch.device(name)
                if torch.get_device_module(device).is_available():
                    place = () if device.type == "mps" else (device,)
                    torch.get_device_module(device).set_rng_state(state.cpu(), *place)

    def _told(self, losses: list[Tensor]) -> Replay:
        values, followed = self._values, self._operations
        grads = {name: one.grad for name, one in self._model.named_parameters() if one.grad is not None}
        ranges = {name: range_of(grad) for name, grad in grads.items()}
        bad = [name for name, found in ranges.items() if found is not None and not found.finite]
        results = [one for one in losses or self._outputs if not (range_of(one.detach()) or _FINE).finite]
        origins = [one for found in results or [grads[name] for name in bad] if (one := followed.origin(found))]
        if not (origins or followed.first is None) and (results or bad):
            origins = [followed.first]
        norms = {
            name: fingerprint(grad.coalesce().values() if grad.is_sparse else grad)[1] for name, grad in grads.items()
        }
        largest = max(norms, key=norms.__getitem__) if norms and not bad else ""
        with self._saved.checked():
            recorded = None if values.loss is None else float(values.loss)
        if not origins and values.reason == "nonfinite" and losses:
            rank = f", as that of another of the {values.ranks} ranks may be" if values.ranks > 1 else ""
            self._notes.append(f"the step was not finite in the training{rank}")
        return Replay(
            capture=str(self._saved.directory),
            step=values.step,
            reason=values.reason,
            origin=min(origins, key=lambda one: one.order, default=None),
            loss=_sum(losses),
            recorded_loss=recorded,
            num_operations=followed.count,
            gradients=bad[::-1],
            largest=f"{largest}, norm {norms[largest]:.4g}" if largest else "",
            notes=self._notes,
        )


def _sum(losses: list[Tensor]) -> float | None:
    """Return the sum of the losses of micro-batches as the training has made it: on a device, or as numbers."""
    if not losses or losses[0].is_cpu:
        return sum(float(loss.detach()) for loss in losses) if losses else None
    wide = [loss.detach() if loss.dtype == torch.float64 else loss.detach().float() for loss in losses]
    return float(sum(wide[1:], wide[0]))


def _loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a model or a loss function returns: that itself, or what it holds by the name loss."""
    if not isinstance(output, Tensor):
        output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad
    return output if is_loss else None
