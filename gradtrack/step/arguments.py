"""Arguments of a training loop: checks with the remedy in the error, and the sum of the losses of micro-batches."""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch
from torch import Tensor, nn

from gradtrack.config import Action, ClipType, SpikeAction
from gradtrack.errors import InputTypeError, SecondBackwardError, UsageError
from gradtrack.support.interrupts import Changes

_logger = logging.getLogger("gradtrack")


# The settings of `GradientConfig` as keywords, for completion and type checkers. Each entry point takes some by name.
class _Most(TypedDict, total=False):
    enable_gradient_clipping: bool
    max_grad_norm: float | Mapping[str, float]
    norm_type: float
    clip_type: ClipType
    agc_clip_factor: float
    zscore_threshold: float
    zscore_alpha: float
    adaptive_clipping: bool
    adaptive_window_size: int
    adaptive_percentile: float
    enable_nan_inf_check: bool
    nonfinite_action: Action
    nan_inf_threshold: float
    replace_nan_with: float
    replace_inf_with: float
    spike_action: SpikeAction
    spike_threshold: float
    spike_window: int
    spike_robust: bool
    spike_max_in_a_row: int
    spike_lr_factor: float
    skip_steps: Sequence[Sequence[int]]
    enable_gradient_monitoring: bool
    log_gradient_stats: bool
    save_gradient_plots: bool
    save_html_report: bool
    vanishing_threshold: float | None
    exploding_threshold: float | None
    mute: Sequence[str]
    check_frequency: int
    max_gradient_history: int
    log_histograms: bool
    track_parameters: bool
    per_rank: bool
    groups: Mapping[str, str]
    alerts: Sequence[Any]
    capture: Literal["off", "nonfinite", "spike"]
    capture_max_steps: int
    capture_max_bytes: int
    capture_optimizer: bool
    fingerprints: int
    fingerprints_max_bytes: int
    engine: Literal["auto", "torch", "native", "triton"]
    close_timeout_seconds: float
    debug_mode: bool
    verbose_logging: bool


class _Rows(TypedDict, total=False):
    grad_log_every_n_steps: int
    grad_track_per_weight_matrix: bool
    run_dir: str | Path | None


class _Plugins(TypedDict, total=False):
    backends: Sequence[Any]
    analyzers: Sequence[Any] | Literal["auto"]


class Settings(_Most, _Rows, total=False):
    """The further settings that a manager takes as keywords."""


class LightningSettings(_Most, _Plugins, total=False):
    """The further settings that the callback for Lightning takes as keywords."""


class AllSettings(Settings, _Plugins, total=False):
    """Every setting as a keyword."""


class WatchSettings(AllSettings, total=False):
    """The keywords of `watch`."""

    process_group: Any
    step: Callable[[], int]


def as_sequence(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that were passed as one, as several, or not at all."""
    if optimizer is None:
        return ()
    if isinstance(optimizer, Sequence) and not hasattr(optimizer, "param_groups"):
        return tuple(optimizer)
    return (optimizer,)


def labels_of(optimizers: Iterable[Any]) -> dict[int, str]:
    """Return the names of the optimizers' groups that have one, by the ids of their parameters."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups if group.get("name"))
    return {id(param): str(group["name"]) for group in groups for param in group["params"]}


def as_place(step: object) -> int:
    """Return a place on the user's own axis, or refuse what is none."""
    place = -1 if isinstance(step, bool) or not hasattr(step, "__index__") else operator.index(step)
    if place >= 0:
        return place
    raise UsageError(f"step {step!r}: expected a whole number from 0 on. Pass what your own curves have as their step.")


def is_several(value: object) -> bool:
    """Say whether a value is a collection of values, and not a text or a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def check_model(model: object) -> None:
    """Refuse a model that is not a module."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model {type(model).__name__}: expected a torch.nn.Module. Pass the model itself.")


def check_loss(loss: object, backward: bool) -> None:
    """Refuse a loss that cannot be recorded, or that cannot be differentiated where that is asked for."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UsageError(
                f"loss of shape {tuple(loss.shape)}: expected a single number. "
                "Reduce it first, with loss.mean() for example."
            )
        if loss.is_complex():
            raise UsageError(
                f"loss of {loss.dtype}: expected a real number, since no optimizer can lower another. "
                "Take loss.abs() or loss.real."
            )
        if backward and not loss.requires_grad:
            raise UsageError(
                "loss does not require grad: expected one that was computed from the model's parameters. "
                "Look for detach(), no_grad() or item() on its way, or pass backward=False after your own backward."
            )
    elif backward:
        raise InputTypeError(
            f"loss {_shown(loss)}: expected a tensor to run backward on. "
            "Pass the tensor, or backward=False after your own backward."
        )
    elif loss is not None and not isinstance(loss, Real):
        raise InputTypeError(f"loss {_shown(loss)}: expected a tensor, a number or None. Mind the order of arguments.")
    elif loss is not None:
        try:
            float(loss)
        except OverflowError:
            raise UsageError(
                f"loss of the type {type(loss).__name__} is too large: expected a number that a float holds. "
                "Pass math.inf for a loss that is not finite."
            ) from None


def _shown(value: object) -> str:
    """Show a plain value as it is, and anything larger by its type."""
    return repr(value) if value is None or isinstance(value, (str, Real)) else type(value).__name__


def add_loss(total: Tensor | float | None, loss: Tensor | float | None) -> Tensor | float | None:
    """Return the sum of the losses of micro-batches with a further one; a loss on a device is added there."""
    if loss is None:
        return total
    value = _summable(loss)
    return value if total is None else total + value


def _summable(loss: Tensor | float) -> Tensor | float:
    """Return a loss as float64 number, or as a tensor of at least float32 where reading it would wait for a device."""
    if not isinstance(loss, Tensor):
        return float(loss)
    if loss.is_cpu and not loss.is_meta and type(loss) in (Tensor, nn.Parameter):
        return float(loss.item())
    return loss.detach() if loss.dtype == torch.float64 else loss.detach().float()


def with_graph_of_last(total: Tensor | None, loss: Tensor) -> Tensor:
    """Return the sum of the losses of micro-batches with a further one, of which the sum has the autograd graph.

    It is a copy, since a loop may go on to change its loss in place.
    """
    wide = torch.float64 if loss.is_cpu else torch.promote_types(loss.dtype, torch.float32)
    with torch.enable_grad():
        return loss.clone() if total is None else total.detach().to(wide) + loss.to(wide)


class HeardLoss:
    """The loss of a loop that passes none: the sum of the numbers whose `backward()` has reached some parameters.

    It begins anew where they had no gradient before, as after `zero_grad`, so that each part of a GAN has its own.
    Nothing of the backward pass is changed. The sum keeps the graph of the last of the numbers until it is taken.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._total: Tensor | None = None
        self._num_heard, self._num_unused, self._has_stepped = 0, 0, False

    def listen(self) -> None:
        """Hear every backward pass from now on."""
        original = torch.autograd.backward
        with _lock:
            _hearing.add(self)
            if _heard:
                return

            @wraps(original)
            def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
                told: list[tuple[HeardLoss, list[int]]] = []
                is_loss = grad_tensors is None and isinstance(tensors, Tensor) and tensors.numel() == 1
                if is_loss and not torch.compiler.is_compiling():
                    told = [(one, one._versions()) for one in list(_hearing)]
                original(tensors, grad_tensors, *args, **kwargs)
                for one, versions in told:
                    one._add(tensors, versions)

            _heard.note(partial(setattr, torch.autograd, _BACKWARD, original))
            setattr(torch.autograd, _BACKWARD, backward)

    def close(self) -> None:
        """Hear nothing more; a second call does nothing."""
        self._tell_of_no_step()
        self._total = None
        with _lock:
            _hearing.discard(self)
            if not _hearing:
                _heard.undo()

    def take(self) -> Tensor | None:
        """Return the sum since the last call, and begin anew."""
        total, self._total, self._has_stepped = self._total, None, True
        return total

    def _tell_of_no_step(self) -> None:
        """Warn once that gradients are computed and no optimizer steps by them."""
        if self._num_heard > 0 and not self._has_stepped:
            self._has_stepped = True
            _logger.warning(
                "%d backward passes and no optimizer.step(): gradtrack.watch measures before each step, so it has "
                "nothing to report. Call step() after the backward pass, on the optimizer that was passed to watch.",
                self._num_heard,
            )

    def _probes(self) -> Iterator[Tensor]:
        groups = (group for one in self._optimizers for group in one.param_groups)
        params = (param for group in groups for param in group["params"] if param.requires_grad)
        return itertools.islice(params, _PROBES)

    def _versions(self) -> list[int]:
        """Return how often the gradients of some parameters were changed; those that are not there, never."""
        return [-1 if param.grad is None else param.grad._version for param in self._probes()]

    def _add(self, loss: Tensor, before: list[int]) -> None:
        changed = [old for old, new in zip(before, self._versions(), strict=False) if new not in (-1, old)]
        if changed:
            begins_anew = changed[0] == -1
            self._num_heard += 1
            self._num_unused += begins_anew
            if self._num_unused > _MOST_UNUSED:
                self._tell_of_no_step()
            self._total = with_graph_of_last(None if begins_anew else self._total, loss)


_BACKWARD: Final = "backward"
_PROBES: Final = 8
"""Of so many parameters, the first ones, one is reached by the backward pass of a loss of theirs."""
_MOST_UNUSED: Final = 8
"""After so many gradients that went unused, no first step is to be waited for."""
_hearing: weakref.WeakSet[HeardLoss] = weakref.WeakSet()
_heard = Changes()
_lock = threading.Lock()


def run_backward(loss: Tensor) -> None:
    """Run the backward pass; an error says what is wrong with the loss, or that the loop has run the pass already."""
    try:
        torch.autograd.backward(loss)
    except RuntimeError as fault:
        check_loss(loss, backward=True)
        if "a second time" in str(fault):
            raise SecondBackwardError(
                "loss: a backward pass went through its graph a second time: expected the first one, which gradtrack "
                "runs itself. Leave out your own loss.backward(), or call manager.step(model, optimizer, loss, "
                "backward=False) after it. Where you call none, the loss depends on a tensor of an earlier step, such "
                "as a hidden state: detach that."
            ) from fault
        raise


def check_optimizer(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot step the model."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise InputTypeError(
            f"optimizer {type(optimizer).__name__}: expected an optimizer or an object with param_groups. "
            "Pass what your loop calls step() on."
        )
    owned = {id(param) for group in groups for param in group["params"]}
    if not any(id(param) in owned for param in params):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} owns none of the model's trainable parameters: "
            "expected at least one. Make it from model.parameters(), after the model was moved or wrapped."
        )


def check_state(state: object) -> None:
    """Refuse a value that is not the state of a manager, or the state of another version."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise InputTypeError(f"state {type(state).__name__}: expected what manager.state_dict() returned.")
    if state["version"] != 1:
        raise UsageError(f"state version {state['version']!r}: expected 1. Load it with the gradtrack that wrote it.")
    missing = {"history", "pairs"} - state.keys()
    if missing:
        raise UsageError(f"state without {' and '.join(sorted(missing))}: expected what state_dict() returned.")


def hookable(optimizer: Any) -> Any:
    """Return an optimizer whose steps can be hooked: the one inside a wrapper that holds it."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if inner is None and hasattr(optimizer, "param_groups"):
        parts = (
            part for part in getattr(optimizer, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer)
        )
        inner = next((part for part in parts if _params_of(part) == _params_of(optimizer)), None)
    return optimizer if inner is None else inner


def _params_of(optimizer: Any) -> list[int]:
    return [id(param) for group in optimizer.param_groups for param in group["params"]]


def check_hookable(optimizer: object) -> None:
    """Refuse an optimizer whose steps cannot be hooked."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise InputTypeError(
            f"optimizer {type(optimizer).__name__}: expected one with register_step_pre_hook. "
            "Use safe_backward in the loop instead of watch."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer, like LBFGS, cannot step without a closure, which it may then call several times."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
