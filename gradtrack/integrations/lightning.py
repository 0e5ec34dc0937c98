"""A callback for Lightning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Unpack
from urllib.parse import urlsplit
from urllib.request import url2pathname

from torch import Tensor, nn

from gradtrack.config import GradientConfig
from gradtrack.delivery.run_files import new_run_id
from gradtrack.errors import MissingExtraError
from gradtrack.integrations.callback import ManagedTraining, clipping_if_asked, joined
from gradtrack.integrations.patching import stand_in
from gradtrack.manager import GradientManager
from gradtrack.step.arguments import LightningSettings, with_graph_of_last
from gradtrack.step.pair import IssueCallback
from gradtrack.support.redact import redact

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
except ImportError as fault:
    raise MissingExtraError("the callback for Lightning", "lightning", "lightning") from fault

_logger = logging.getLogger("gradtrack")
_LOGGERS: Final = {WandbLogger: "wandb", TensorBoardLogger: "tensorboard", MLFlowLogger: "mlflow"}


class GradientStatisticsCallback(ManagedTraining, Callback):  # type: ignore[misc]
    """Reports on the gradients of every optimizer step, unscaled and before the trainer clips them.

    Rows go to the runs of the trainer's own loggers and to two JSON files in its directory, where a picture of four
    panels follows at the end. The steps are the trainer's `global_step`; of several optimizers each has its own count
    and the name of the module that it steps, numbered where that is taken. While the trainer clips, gradtrack only
    measures; it clips by itself only where a setting asks for that. The state of the manager is in every checkpoint.
    `config` is a `GradientConfig`, a mapping or a file, and more keywords are settings; a number in its place is
    `grad_log_every_n_steps`.
    """

    _begins_with = "trainer.fit()"

    def __init__(
        self,
        config: Any = None,  # LightningCLI would give a GradientConfig every default as if it were chosen
        grad_track_per_weight_matrix: bool = True,
        *,
        grad_log_every_n_steps: int = 100,
        run_dir: str | None = None,
        on_issue: IssueCallback | None = None,
        **settings: Unpack[LightningSettings],
    ) -> None:
        super().__init__()
        if isinstance(config, int):
            grad_log_every_n_steps = config
        known = GradientConfig.load(None if isinstance(config, int) else config)
        chosen: dict[str, Any] = {**settings}
        chosen["grad_track_per_weight_matrix"] = grad_track_per_weight_matrix and known.grad_track_per_weight_matrix
        if grad_log_every_n_steps != 100 or "grad_log_every_n_steps" not in known.model_fields_set:
            chosen["grad_log_every_n_steps"] = grad_log_every_n_steps
        if run_dir is not None:
            chosen["run_dir"] = run_dir
        self._prepare(GradientConfig.load(known, **chosen), on_issue)
        self._restored: Mapping[str, Any] | None = None
        self._modules: dict[int, tuple[nn.Module, str]] = {}
        self._seen: dict[int, object] = {}
        self._loss: Tensor | None = None
        self._batch: object = None
        self._last_step = 0
        self._waits = self._trains = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs to go on where this training is."""
        nothing: dict[str, Any] = dict.fromkeys(("_loss", "_batch"))
        nothing |= {"_modules": {}, "_seen": {}, "_waits": False, "_trains": False}
        return {**super().__getstate__(), **nothing, "_restored": self._state() or None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the trainer's loggers, and take back the checkpoint's state."""
        restored = self._state() or None
        limit = trainer.gradient_clip_val
        clips = f"the trainer clips at gradient_clip_val {limit}" if limit else ""
        config = clipping_if_asked(self._config, clips=clips)
        manager = self._begin(_in_its_place(config, trainer), restored)
        self._attach(manager, trainer, pl_module)
        checks = config.enable_nan_inf_check and config.nonfinite_action != "report"
        if not pl_module.automatic_optimization:
            self._look_before_clipping(trainer, pl_module)
        elif config.enable_gradient_clipping or checks:
            self._look_after_the_hooks(trainer, pl_module)
        self._trains = True
        for _, name in self._modules.values() if clips else ():
            manager.note(
                f"{clips}; gradtrack only measures, before it clips. "
                "Leave gradient_clip_val out and set max_grad_norm here to let gradtrack clip.",
                name=name,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch of a step that is made from one, for captures and for the diagnosis of what it holds."""
        alone = pl_module.automatic_optimization and trainer.accumulate_grad_batches == 1
        self._batch = batch if alone and self._trains else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let go of the batch."""
        self._batch = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Add up the loss of the coming optimizer step."""
        if self._trains:
            self._loss = with_graph_of_last(self._loss, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure and report; clipping waits until the other callbacks and the module have seen the gradients."""
        if not self._waits:
            self._look_once(trainer, pl_module, optimizer)

    def _look_once(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure, unless there is no optimizer or the step was measured before the module's own clipping.

        A module may step after its training as well, when the manager is closed.
        """
        if _steps_nothing(optimizer) or not self._trains:
            return
        if self._seen.pop(id(optimizer), None) != _grads_of(optimizer):
            self._look(trainer, pl_module, optimizer)

    def _look(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        module, name = self._modules.get(id(optimizer), (pl_module, ""))
        count = trainer.global_step
        # A closure that is called several times within one step finds its step counted already.
        if not name and self._last_step not in (count, count + 1):
            self.manager.continue_from(count)
        loss, self._loss = self._loss, None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        epoch, batch = trainer.current_epoch, self._batch
        report = self.manager.step(module, optimizer, loss, backward=False, scaler=scaler, epoch=epoch, batch=batch)
        self._last_step = report.step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Deliver the remaining rows, and draw the picture."""
        self._stop()

    def _stop(self, *, failed: bool = False) -> None:
        self._trains, self._batch = False, None
        super()._stop(failed=failed)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the manager as failed."""
        self._stop(failed=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self._state(checkpoint=True)

    def _state(self, *, checkpoint: bool = False) -> dict[str, Any]:
        """Return the same; for a copy of this callback, or for another training, it is no checkpoint."""
        if self._manager is not None and self._restored is None:
            return self._manager.state_dict(checkpoint=checkpoint)
        return dict(self._restored or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint, which is loaded when the training begins."""
        self._restored = state_dict

    def _look_before_clipping(self, trainer: Any, pl_module: Any) -> None:
        """Measure when a module with manual optimization calls its `clip_gradients`, as its step comes after that."""
        plugin = trainer.precision_plugin
        clip = plugin.clip_gradients

        def look_and_clip(optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            stepped = getattr(optimizer, "optimizer", optimizer)
            if getattr(plugin, "scaler", None) is not None:
                return clip(optimizer, *arguments, **keywords)
            if self._seen.get(id(stepped)) != _grads_of(stepped):
                self._look(trainer, pl_module, stepped)
            clipped = clip(optimizer, *arguments, **keywords)
            self._seen[id(stepped)] = _grads_of(stepped)
            return clipped

        stand_in(self._changes, plugin, "clip_gradients", look_and_clip)

    def _look_after_the_hooks(self, trainer: Any, pl_module: Any) -> None:
        """Measure where the trainer would clip, which is after every `on_before_optimizer_step`."""
        plugin = trainer.precision_plugin
        clip = getattr(plugin, "_clip_gradients", None)
        if clip is None:
            return

        def look_and_clip(model: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            self._look_once(trainer, pl_module, optimizer)
            return clip(model, optimizer, *arguments, **keywords)

        self._waits = True
        stand_in(self._changes, plugin, "_clip_gradients", look_and_clip)

    def _attach(self, manager: GradientManager, trainer: Any, pl_module: nn.Module) -> None:
        optimizers = [optimizer for optimizer in trainer.optimizers if not _steps_nothing(optimizer)]
        self._restored, self._loss, self._modules, self._seen, self._waits = None, None, {}, {}, False
        for index, optimizer in enumerate(optimizers):
            module, name = (pl_module, "") if len(optimizers) == 1 else _owned_by(optimizer, pl_module, index)
            # Optimizers may share a module, each with a part of its parameters.
            while name in {taken for _, taken in self._modules.values()}:
                name += f"_{index}"
            self._modules[id(optimizer)] = (module, name)
            manager.attach(module, optimizer, name=name or None)
        if len(optimizers) == 1:
            self._last_step = trainer.global_step
            manager.continue_from(trainer.global_step)


def _steps_nothing(optimizer: Any) -> bool:
    """Whether this is what Lightning itself puts in the place of an optimizer where a module configures none."""
    return type(optimizer).__name__ == "_MockOptimizer"


def _grads_of(optimizer: Any) -> list[tuple[int, int]]:
    """Return a fingerprint of the gradients that a further backward pass changes, without reading their values."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [(id(param.grad), param.grad._version) for param in params if param.grad is not None]


def _in_its_place(config: GradientConfig, trainer: Any) -> GradientConfig:
    """Return the configuration with the trainer's directory and loggers."""
    if trainer.fast_dev_run and config.run_dir is None:  # Lightning leaves no files behind in this mode
        return GradientConfig.load(config, backends=config.backends)
    # Every process has to ask, because the answer of the first one is sent to all.
    directory = trainer.log_dir or trainer.default_root_dir
    if config.run_dir is None:
        local = local_path(str(directory))
        if local is not None and local.resolve() == Path.cwd():  # of loggers without a directory for each run
            local = Path("gradtrack_runs", trainer.strategy.broadcast(new_run_id()))
        if local is not None:
            config = GradientConfig.load(config, run_dir=local)
        elif trainer.is_global_zero:
            _logger.warning(
                "the trainer's directory %s is not on this machine: files of ours go to gradtrack_runs in the current "
                "directory. Set run_dir to choose another one.",
                redact(str(directory)),
            )
    found: dict[str, dict[str, Any]] = {}
    for logger in trainer.loggers:
        name = next((name for kind, name in _LOGGERS.items() if isinstance(logger, kind)), None)
        if name is None:
            continue
        if name in found and trainer.is_global_zero:
            _logger.warning("a second %s gets no rows of ours: the first one has them", type(logger).__name__)
        found.setdefault(name, _options_of(name, logger) if trainer.is_global_zero else {})
    return joined(config, ["json", *found], found.get)


def local_path(directory: str) -> Path | None:
    """Return a directory of Lightning's as a path, or None where it is an address of other storage."""
    if directory.startswith("file:/"):  # of the three slashes Lightning takes two away
        return Path(url2pathname(urlsplit(directory).path))
    return None if "://" in directory else Path(directory)


def _options_of(name: str, logger: Any) -> dict[str, Any]:
    """Return the options that lead a backend into the run of a logger of Lightning's."""
    if name == "mlflow":
        return {"run_id": logger.run_id, "tracking_uri": logger._tracking_uri}
    return {"run" if name == "wandb" else "writer": logger.experiment}


def _owned_by(optimizer: Any, pl_module: nn.Module, index: int) -> tuple[nn.Module, str]:
    """Return the smallest module that holds all parameters of an optimizer, and its name."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    holders = [
        (module, name.replace(".", "_"))
        for name, module in pl_module.named_modules()
        if name and params <= {id(param) for param in module.parameters()}
    ]
    otherwise = pl_module, f"optimizer_{index}"
    return min(holders, key=lambda holder: sum(1 for _ in holder[0].parameters()), default=otherwise)
