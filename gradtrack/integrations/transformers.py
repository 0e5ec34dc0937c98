"""A callback for the Trainer of Hugging Face."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Unpack

from torch import Tensor, nn

from gradtrack.config import GradientConfig
from gradtrack.errors import MissingExtraError
from gradtrack.integrations.callback import ManagedTraining, Source, clipping_if_asked, joined
from gradtrack.integrations.patching import AfterBackward, embrace, stand_in
from gradtrack.step.arguments import AllSettings, with_graph_of_last
from gradtrack.step.pair import IssueCallback
from gradtrack.support.interrupts import Changes

try:
    from accelerate.state import GradientState
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback
except ImportError as fault:
    raise MissingExtraError("the callback for the Trainer", "transformers", "transformers") from fault

_NORM: Final = "train/grad_norm"
_TRACKERS: Final = ("wandb", "mlflow", "tensorboard", "trackio")
# What the Trainer's loop calls; an exception out of one ends the training without a word to the callbacks.
_PARTS: Final = ("_run_epoch", "get_batch_samples", "_maybe_log_save_evaluate", "_evaluate", "_finalize_training")
_logger = logging.getLogger("gradtrack")


class GradtrackCallback(ManagedTraining, TrainerCallback, ExportableState):  # type: ignore[misc]
    """Reports on the gradients of every optimizer step of a Trainer, as they are before the Trainer clips them.

    While the Trainer clips, gradtrack only measures; with `max_grad_norm=0` in the training arguments it clips where a
    setting here asks for that. Without `backends` the trackers of `report_to` are used, in the runs that the
    Trainer has open there; `train/grad_norm` is left out where the Trainer itself writes that name and the same values.
    The state of the manager is saved in every checkpoint, and the steps are the Trainer's `global_step`.
    """

    _begins_with = "trainer.train()"

    def __init__(
        self, config: Source = None, *, on_issue: IssueCallback | None = None, **settings: Unpack[AllSettings]
    ) -> None:
        super().__init__()
        self._prepare(GradientConfig.load(config, **settings), on_issue)
        self._after: AfterBackward | None = None
        self._restored: Mapping[str, Any] | None = None
        self._look: Callable[[], None] = _nothing
        self._within_step = self._due = False
        self._measured_step = -1
        self._global_step = 0
        self._loss: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a copy what belongs to this training."""
        return {**super().__getstate__(), "_after": None, "_look": _nothing, "_loss": None}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Join the Trainer's trackers, take back the checkpoint's state, and watch the backward passes."""
        assert model is not None
        self._stop()
        clips = f"the Trainer clips at max_grad_norm {args.max_grad_norm}" if (args.max_grad_norm or 0) > 0 else ""
        config = clipping_if_asked(self._config, clips=clips)
        # A checkpoint from before gradtrack has no place for its state, and the Trainer expects one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {})
        restored = self._restored or (saved.get("attributes", {}).get("_restored") if isinstance(saved, dict) else None)
        config = self._join(config, args, _caller(CallbackHandler))
        with self._failing():
            manager = self._begin(config, restored if state.global_step else None)
            self._watch(model, optimizer, state)
            self._watch_trainer(_caller(Trainer))
            if clips:
                manager.note(
                    f"{clips}; gradtrack only measures, before it clips. Set max_grad_norm=0 in "
                    "TrainingArguments and max_grad_norm here to let gradtrack clip."
                )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count with the Trainer."""
        self._global_step, self._loss = state.global_step, None
        if self._after is not None:
            self._after.reset()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure here where an engine of its own has kept its backward pass to itself."""
        if self._changes and self._measured_step != state.global_step:
            self.manager.note("these gradients were seen after the Trainer's clipping only.")
            self._look()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the rows so far while the Trainer's own writers are still open."""
        if self._changes and control.should_training_stop:
            self.manager.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the remaining rows."""
        self._stop()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain data."""
        attributes = {} if self._manager is None else {"_restored": _plain(self._manager.state_dict())}
        config = self._config.model_dump(mode="json", exclude_unset=True, exclude={"backends", "analyzers", "alerts"})
        return {"args": {"config": config}, "attributes": attributes}

    def _join(self, config: GradientConfig, args: Any, handler: Any) -> GradientConfig:
        def options(name: str) -> dict[str, Any] | None:
            # A second writer in the directory of the Trainer's own TensorBoard callback is not read.
            writers = [getattr(callback, "tb_writer", None) for callback in getattr(handler, "callbacks", ())]
            writer = next(filter(None, writers), None) if name == "tensorboard" else None
            if name not in args.report_to or not (name in ("wandb", "trackio") or writer is not None):
                return None
            _logger.warning(
                "%s is written to %s by the Trainer and is the same as ours; ours is left out there and kept in the "
                "journal",
                _NORM,
                name,
            )
            return {"withhold": [_NORM]} if writer is None else {"withhold": [_NORM], "writer": writer}

        return joined(config, [name for name in _TRACKERS if name in args.report_to], options)

    def _watch(self, model: nn.Module, optimizer: Any, state: Any) -> None:
        manager, scaler = self.manager, getattr(optimizer, "scaler", None)
        inner = getattr(optimizer, "optimizer", optimizer)  # what accelerate has wrapped
        manager.attach(model, inner)
        manager.continue_from(state.global_step)
        self._global_step, self._measured_step = state.global_step, -1
        scaler = scaler if scaler is not None and scaler.is_enabled() else None

        def look() -> None:
            loss, self._loss = self._loss, None
            if self._awake:
                self._measured_step = self._global_step
                manager.continue_from(self._global_step)
                with self._failing():
                    manager.step(model, inner, loss, backward=False, scaler=scaler, epoch=int(state.epoch or 0))

        def take_notice() -> None:  # gradients are measured when no further backward pass of their step can come
            if GradientState().sync_gradients:
                self._due = True
                if not self._within_step:
                    self._look_if_due()

        self._look = look
        if scaler is not None:
            _after_unscaling(self._changes, scaler, look)
        else:
            self._after = AfterBackward(model.parameters(), take_notice, self._changes)
            if hasattr(inner, "register_step_pre_hook"):  # a step of the Trainer's may hold one of the optimizer's
                self._changes.hook(inner.register_step_pre_hook, lambda *_: self._look_if_due())

    def _look_if_due(self) -> None:
        if self._due:
            self._due = False
            self._look()

    def _watch_trainer(self, trainer: Any) -> None:
        """See the Trainer's own backward passes only, and the exceptions that end its training."""
        if trainer is None:
            return
        if self._after is not None:
            self._after.listening = False
        in_a_step = partial(self._in_a_step, getattr(trainer, "callback_handler", None))
        embrace(self._changes, trainer, "training_step", in_a_step)
        self._embrace(trainer, _PARTS)
        self._awake = not hasattr(trainer, "_run_epoch")  # older Trainers have no method around their steps
        self._watch_backward(trainer)
        stand_in(self._changes, trainer, "log", partial(self._log, trainer, trainer.log))

    def _log(
        self, trainer: Any, log: Callable[..., None], logs: dict[str, Any], *arguments: Any, **keywords: Any
    ) -> None:
        """Put the norm from before any clipping into the Trainer's own log, which measures it after ours."""
        if "grad_norm" in logs:
            last = next((report for report in reversed(self.reports) if report.step == trainer.state.global_step), None)
            if last is not None and (last.clipping.clipped or last.nan_inf.action in ("skip", "replace")):
                logs = {**logs, "grad_norm": last.clipping.norm_before}
        log(logs, *arguments, **keywords)

    @contextmanager
    def _in_a_step(self, handler: Any) -> Iterator[None]:
        if handler is not None and self not in handler.callbacks:
            self._stop(failed=True)  # this is a later training, which we have been left out of
            yield
            return
        after = self._after
        if after is not None:
            after.listening = True
        self._within_step, self._due = True, False
        try:
            with self._in_training():
                yield
                if after is not None and GradientState().sync_gradients and self._measured_step != self._global_step:
                    # Gradients without a hook of ours, as after parameters were unfrozen in the middle of a training.
                    self._due = self._due or any(param.grad is not None for param in after.params)
                self._look_if_due()
        finally:
            self._within_step = False
            if after is not None:
                after.listening = False

    def _watch_backward(self, trainer: Any) -> None:
        """Add up the losses that the Trainer runs backward from, which it has scaled for their sum."""
        backward = trainer.accelerator.backward

        def add_and_backward(loss: Tensor, **keywords: Any) -> None:
            self._loss = with_graph_of_last(self._loss, loss)
            with nullcontext() if self._after is None else self._after.at_the_end():
                backward(loss, **keywords)

        stand_in(self._changes, trainer.accelerator, "backward", add_and_backward)

    def _stop(self, *, failed: bool = False) -> None:
        try:
            super()._stop(failed=failed)
        finally:
            self._after = None


def _nothing() -> None:
    """Look at nothing, before a training."""


def _caller(kind: type) -> Any:
    """Return the object of a kind whose method has called us: a callback is given no other way to it."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def _after_unscaling(changes: Changes, scaler: Any, call: Callable[[], None]) -> None:
    """Call a function after the Trainer has unscaled the gradients, until the changes are undone."""
    unscale = scaler.unscale_
    calling = False

    def unscale_and_call(optimizer: Any) -> None:
        nonlocal calling
        unscale(optimizer)
        if not calling:
            calling = True
            try:
                call()
            finally:
                calling = False

    stand_in(changes, scaler, "unscale_", unscale_and_call)


def _plain(state: Mapping[str, Any]) -> Any:
    """Return a state as JSON takes it; one that it cannot take must not cost the checkpoint."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as fault:
        _logger.warning("gradtrack's state is left out of the checkpoint (%s); windows begin anew on resume", fault)
        return None
