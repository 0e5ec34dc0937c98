"""The optimizers of a pair: learning rates, closures, and hooks that run before each optimizer step."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from gradtrack.analyzers.tools.optimizer_hooks import StepWatch, is_stepping, take_off, uncompiled
from gradtrack.gradients.distributed.shards import is_distributed
from gradtrack.gradients.parameters import OutsideParameter, ParameterTable
from gradtrack.step.arguments import HeardLoss, check_optimizer, hookable, needs_closure
from gradtrack.step.loss_scale import Scale, UnseenSkips, has_scaler_nearby, unscale_together
from gradtrack.support.interrupts import Changes

TakeLoss = Callable[[], Tensor | float | None]
_lr = itemgetter("lr")
_logger = logging.getLogger("gradtrack")
_NOT_THERE: Final = object()
_OUTSIDE: Final = (
    "{} computes the gradients anew by calling its closure, so those that are shown outside of it are neither clipped "
    "nor protected: call safe_backward within the closure, and pass the closure to step()."
)


class PairOptimizers:
    """The optimizers that step one model; their steps are hooked for closures and for analyzers only."""

    def __init__(self) -> None:
        self.optimizers: tuple[Any, ...] = ()
        self.may_hold_found_inf = self.has_closures = False
        self._num_groups: list[int] = []
        self._closure_calls: int | None = None
        self._warned = False
        self.outside_note = ""
        """What the next report tells of gradients that were shown outside of a closure."""
        self.held_back: list[SkippedStep] = []
        self._rates: list[list[tuple[Any, Any]]] = []
        self._last_rates: list[Any] = []
        """The rates of the last step, if there is a single optimizer and all of its groups have a rate."""
        self._last_groups: Any = None
        self._watch = StepWatch()

    def bind(self, optimizers: Sequence[Any], table: ParameterTable) -> None:
        """Replace the optimizers; each must own at least one parameter of the table."""
        for optimizer in optimizers:
            # Between its passes FSDP2 has whole parameters in the place of the shards that the optimizer owns.
            owned = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
            if table.has_dtensors or not any(map(is_distributed, owned)):
                check_optimizer(optimizer, table.params)
        self.restore_steps()
        self._watch.close()
        self.optimizers = tuple(optimizers)
        self._num_groups = self._count_groups()
        self._watch_closures()

    def outside(self, known: Container[int]) -> list[OutsideParameter]:
        """Return the parameters that the optimizers own beside those with the ids, named by their groups."""
        found: dict[int, OutsideParameter] = {}
        for position, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer_{position}" if len(self.optimizers) > 1 else "optimizer"
            for index, group in enumerate(optimizer.param_groups):
                label = str(group.get("name") or f"{prefix}_group_{index}")
                params = [param for param in group["params"] if id(param) not in known and _can_be_measured(param)]
                for number, param in enumerate(params):
                    name = label if len(params) == 1 else f"{label}.{number}"
                    found.setdefault(id(param), OutsideParameter(name, label, param))
        return list(found.values())

    def has_new_groups(self) -> bool:
        """Say whether a group was added or removed since the last call."""
        before, self._num_groups = self._num_groups, self._count_groups()
        return before != self._num_groups

    def _count_groups(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self.optimizers]

    def call_before_step(self, look: Callable[[], None]) -> None:
        """Call a function once, when one of the optimizers begins its step, if its steps can be hooked."""
        self._watch.call_before_step(look)

    def watch(self, *, running: bool = True) -> None:
        """Hook every step from now on, for `call_before_step`; while a step may be running, from the next one on."""
        for optimizer in map(hookable, self.optimizers):
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                self._watch.add(optimizer, running=running)

    def params(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizers own."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def rates(self) -> list[list[tuple[Any, Any]]]:
        """Return a copy of the learning rates, since a schedule may change them before the report is read.

        While the rates do not change the same list is returned.
        """
        groups = self.optimizers[0].param_groups if self._last_rates else None
        if groups is not None and groups is self._last_groups:
            try:  # `suppress` would cost half a microsecond on each step
                if list(map(_lr, groups)) == self._last_rates:
                    return self._rates
            except KeyError:  # a group has lost its rate
                pass
        found, plain = list[list[tuple[Any, Any]]](), True
        for optimizer in self.optimizers:
            rates = []
            for index, group in enumerate(optimizer.param_groups):
                rate = group.get("lr", 0.0)
                if isinstance(rate, Tensor):  # which a schedule changes in place
                    rate = rate.detach().clone()
                plain = plain and type(rate) is float
                rates.append((group.get("name", index), rate))
            found.append(rates)
        alone = plain and len(found) == 1 and all("lr" in group for group in self.optimizers[0].param_groups)
        self._last_groups = self.optimizers[0].param_groups if alone else None
        self._last_rates = [rate for _, rate in found[0]] if alone else []
        if not plain or found != self._rates:
            self._rates = found if plain else []
            return found
        return self._rates

    def calls_again(self) -> bool:
        """Count a call of the closure; say whether it is a further one of the same optimizer step."""
        if self._closure_calls is None:
            self._warn_outside()
            return False
        self._closure_calls += 1
        return self._closure_calls > 1

    def _warn_outside(self) -> None:
        """Warn once of gradients that are shown outside of the closure, which the optimizer computes anew."""
        if not self._warned:
            self._warned = True
            names = ", ".join(type(one).__name__ for one in self.optimizers)
            self.outside_note = _OUTSIDE.format(names)
            _logger.warning("%s", self.outside_note)

    @property
    def can_skip(self) -> bool:
        """Whether the coming step of each optimizer can be kept from doing anything, however the loop calls it."""
        found = list(map(hookable, self.optimizers))
        return all(hasattr(one, "_optimizer_step_pre_hooks") and not is_stepping(one) for one in found)

    def skip_step(self) -> None:
        """Keep the coming step of each optimizer from doing anything, but for one whose step is running already."""
        for one in self.optimizers:
            if not is_stepping(one):
                self.held_back.append(SkippedStep(one))
                self.held_back[-1].arm()

    def restore_steps(self) -> None:
        """Let every optimizer step again, also one that was not called for a skipped step."""
        for step in self.held_back:
            step.restore()
        self.held_back = []

    def forget_found_inf(self) -> None:
        """Remove the `found_inf` flag that a step on a device has set, since the host decides about this step."""
        if self.may_hold_found_inf:
            self.may_hold_found_inf = False
            for optimizer in self.optimizers:
                vars(optimizer).pop("found_inf", None)

    def close(self) -> None:
        """Remove the hooks and flags from the optimizers, and let them step."""
        self.restore_steps()
        self._watch.close()
        self.forget_found_inf()

    def _watch_closures(self) -> None:
        """Register hooks that count the closure calls of one step, for optimizers like LBFGS that need a closure."""
        found = [one for one in self.optimizers if isinstance(one, torch.optim.Optimizer) and needs_closure(one)]
        # The first step() of a pair may come from within the closure.
        self._closure_calls = 0 if found else None
        self.has_closures = bool(found)
        if found:
            self._watch = StepWatch(partial(self._count_calls, 0), partial(self._count_calls, None))
            for optimizer in found:
                self._watch.add(optimizer)
        else:
            self._watch = StepWatch()

    def _count_calls(self, calls: int | None) -> None:
        self._closure_calls = calls


class SkippedStep:
    """Keeps the next call of an optimizer's `step` from doing anything but running the hooks of that step.

    To take the gradients away is not enough for a skip: many optimizers count the call, some decay or average weights
    without gradients, and a few raise. It ends with that call, or with `restore`. A loop that has kept the method from
    before calls the real step; the gradients are taken away just before that.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._replaced: list[tuple[Any, Any]] = []
        self._changes = Changes()

    def arm(self) -> None:
        """Replace `step`; what is replaced is known before, so that an exception leaves nothing that stays so."""
        for one in {id(one): one for one in (self._optimizer, hookable(self._optimizer))}.values():
            self._replaced.append((one, getattr(one, "__dict__", {}).get("step", _NOT_THERE)))
            with suppress(AttributeError):  # a wrapper without attributes of its own
                one.step = wraps(one.step)(partial(self._skip, one))
        inner = hookable(self._optimizer)
        if hasattr(inner, "_optimizer_step_pre_hooks"):
            self._changes.hook(inner.register_step_pre_hook, _drop_gradients)

    def restore(self) -> None:
        """Let the optimizer step again; may be called again after an exception."""
        self._changes.undo()
        for one, before in self._replaced:
            if before is _NOT_THERE:
                getattr(one, "__dict__", {}).pop("step", None)
            else:
                one.step = before
        self._replaced = []

    def _skip(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.restore()
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            optimizer._opt_called = True  # or the schedule warns that it was called before the optimizer
        for kind in ("pre", "post"):
            hooks = getattr(optimizer, f"_optimizer_step_{kind}_hooks", {})
            for hook in [*getattr(torch_optimizer, f"_global_optimizer_{kind}_hooks", {}).values(), *hooks.values()]:
                hook(optimizer, (optimizer, *args), kwargs)


def _drop_gradients(optimizer: Any, *_: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


class BeforeSteps:
    """Hooks that call `look(loss, scale)` just before optimizers step, or after each call of a closure.

    With several optimizers, which step after one backward pass, `look` is called before the first of them steps. An
    optimizer begins a new step if it has stepped already or has new gradients, since not all of them step every time.

    Where the program itself is about to clip gradients of these optimizers by their norm, `look_before_clipping(
    take_loss, limit, usable)` is called. If it returns True it has looked, and the coming step of an optimizer is not
    looked at again. Not usable is a clipping that is not the last thing before the step: in a closure, before a scaler
    decides about the step, or of gradients to which more are added.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        look: Callable[..., None],
        look_before_clipping: Callable[[TakeLoss, float, bool], bool] | None = None,
    ) -> None:
        self._look: Callable[..., None] | None = look
        self._look_before_clipping = look_before_clipping
        self._clipped: dict[int, tuple[Callable[[], Tensor | None], int]] = {}
        """The first parameters of what was clipped since the last step: their gradients, and the version of these."""
        self._is_last = True
        self._scaled: bool | None = None
        self._optimizers = tuple(optimizers)
        self._loss = HeardLoss(self._optimizers)
        self._stepped: set[int] = set()
        self._unseen_skips = UnseenSkips()
        self._looked_at: dict[int, Callable[[], Tensor | None]] = {}
        self._hooks = [(one, Changes()) for one in optimizers]

    def register(self) -> None:
        """Register the hooks; the caller keeps this object before that, so that an interrupt leaves none."""
        for optimizer, changes in self._hooks:
            changes.hook(optimizer.register_step_pre_hook, uncompiled(self._before_step))
        self._loss.listen()
        if self._look_before_clipping is not None:
            _hear_clipping(self)

    def remove(self) -> None:
        """Remove the hooks from the optimizers; a second call does nothing."""
        self._look = None
        take_off(self._hooks)
        self._loss.close()
        _hear_clipping_no_more(self)

    def before_clipping(self, params: Sequence[Tensor], limit: float) -> None:
        """Look at gradients that the program itself is about to clip, once for each step of the optimizers."""
        look = self._look_before_clipping
        first = next((param for param in params if param.grad is not None), None)
        if self._look is None or look is None or first is None or not self._owns(first):
            return
        assert first.grad is not None
        grad, known = weakref.ref(first.grad), self._clipped.get(id(first))
        if known is not None and known[0]() is first.grad:
            self._is_last = self._is_last and first.grad._version <= known[1] + 1  # the one change is the clipping
        elif known is not None or not self._clipped:
            self._scaled = has_scaler_nearby() if self._scaled is None else self._scaled
            self._clipped.clear()
            if look(self._loss.take, limit, self._is_last and not self._scaled):
                self._clipped[id(first)] = grad, first.grad._version
        else:  # the parameters of another optimizer, after the same backward pass
            self._clipped[id(first)] = grad, first.grad._version

    def _owns(self, param: Tensor) -> bool:
        groups = (group for one in self._optimizers for group in one.param_groups)
        return any(param is own for group in groups for own in group["params"])

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        look = self._look
        clipped, self._clipped = bool(self._clipped), {}
        if look is None or not (self._begins(optimizer) or clipped):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            scale = unscale_together(optimizer, self._optimizers, self._unseen_skips)
            self._scaled = scale is not None
            if not clipped:
                look(_unscaled(self._loss.take(), scale), scale)
            several = len(self._optimizers) > 1
            self._looked_at = {id(one): _first_grad(one) for one in self._optimizers} if several else {}
            return None

        def looked_at() -> Any:
            self._is_last = False
            loss = closure()
            look(loss, None)
            return loss

        return (args[0],), {**kwargs, "closure": looked_at}

    def _begins(self, optimizer: Any) -> bool:
        """Whether this is the first of the optimizers to step after a backward pass."""
        if id(optimizer) in self._stepped or self._has_new_grads(optimizer):
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        return len(self._stepped) == 1

    def _has_new_grads(self, optimizer: Any) -> bool:
        """Whether a backward pass has made other gradients than those of the last call of `look`."""
        before = self._looked_at.get(id(optimizer))
        return before is not None and _first_grad(optimizer)() is not before()


def _first_grad(optimizer: Any) -> Callable[[], Tensor | None]:
    """Return a weak reference to the first gradient of an optimizer, which is called to get it."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    found = next((param.grad for param in params if param.grad is not None), None)
    return weakref.ref(found) if found is not None else lambda: None


def _unscaled(loss: Tensor | float | None, scale: Scale | None) -> Tensor | float | None:
    """Return a loss as it was before a scaler multiplied it for the backward pass."""
    return loss if loss is None or scale is None or scale.value is None else loss / scale.value


_hearing: weakref.WeakSet[BeforeSteps] = weakref.WeakSet()
_heard = Changes()
_lock = threading.Lock()
_CLIPS: Final = "_clip_grads_with_norm_"
"""What torch's `clip_grad_norm_` calls, however that was imported."""


def _hear_clipping(listener: BeforeSteps) -> None:
    """Tell a listener of every clipping by norm from now on."""
    original = getattr(clip_grad, _CLIPS, None)
    with _lock:
        _hearing.add(listener)
        if _heard or original is None:
            return

        @wraps(original)
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                for one in list(_hearing):
                    one.before_clipping(parameters, float(max_norm))
            return original(parameters, max_norm, *args, **kwargs)

        _heard.note(partial(setattr, clip_grad, _CLIPS, original))
        setattr(clip_grad, _CLIPS, clip)


def _hear_clipping_no_more(listener: BeforeSteps) -> None:
    with _lock:
        _hearing.discard(listener)
        if not _hearing:
            _heard.undo()


def _can_be_measured(param: Any) -> bool:
    return isinstance(param, Tensor) and param.requires_grad and not is_distributed(param)
