"""The callback for the Hugging Face Trainer, in real trainings of a tiny GPT-2."""

import copy
import logging
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.errors import UsageError
from gradtrack.support.interrupts import Changes
from tests.backends.history import rows_of
from tests.backends.stores import empty_store, moved_trackio

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers

from gradtrack.integrations.transformers import GradtrackCallback

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def tiny_model() -> Any:
    """Return a GPT-2 of two layers."""
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def tokens(count: int = 48) -> list[dict[str, Any]]:
    """Return sequences of tokens."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(0, 32, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in found]


def train(
    callback: GradtrackCallback | None,
    directory: Path,
    *,
    resume: str | None = None,
    model: Any = None,
    kind: Any = transformers.Trainer,
    **arguments: Any,
) -> Any:
    """Train for some steps and return the Trainer."""
    defaults: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(**{**defaults, **arguments})
    trainer = kind(
        model=model or tiny_model(),
        args=args,
        train_dataset=tokens(),
        callbacks=[] if callback is None else [callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def own_norms(trainer: Any) -> dict[int, float]:
    """Return the norms that the Trainer itself logged, by step."""
    return {row["step"]: row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row}


def norms(callback: GradtrackCallback) -> dict[int, float | None]:
    """Return our norms by step."""
    return {report.step: report.clipping.norm_before for report in callback.reports}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Keep the Trainer's prints off."""
    transformers.logging.set_verbosity_error()


class Watched(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that keeps torch's own norm of each step, from before any clipping."""

    torch_own: ClassVar[dict[int, float]] = {}

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Measure after each micro-batch; the last one of a step stays."""
        loss = super().training_step(*arguments, **keywords)
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        self.torch_own[self.state.global_step + 1] = float(torch.nn.utils.get_total_norm(grads))
        return loss


class Chooser(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that gives probabilities to a loss that expects logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the loss of a batch."""
        probabilities = model(inputs["input_ids"]).logits.softmax(-1)
        return torch.nn.functional.cross_entropy(probabilities.flatten(0, 1), inputs["labels"].flatten())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_mistake_in_the_loss_is_named(accumulation: int, tmp_path: Path) -> None:
    """The graph of the loss is there as in a loop of one's own."""
    callback = GradtrackCallback(analyzers=["loss_graph"], backends=[])
    train(callback, tmp_path, kind=Chooser, gradient_accumulation_steps=accumulation)
    assert [issue.issue_type.value for issue in callback.manager.diagnose()] == ["ACTIVATED_TWICE"]


@pytest.mark.parametrize("limit", [0.1, 100.0, 0.0])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_norm_is_the_trainers_and_torchs(limit: float, accumulation: int, bf16: bool, tmp_path: Path) -> None:
    """`train/grad_norm` is theirs step by step to 1e-5, with and without clipping, accumulation and bf16 autocast."""
    callback = GradtrackCallback(grad_log_every_n_steps=1, backends=["memory"], enable_gradient_clipping=False)
    options: dict[str, Any] = {"max_grad_norm": limit, "gradient_accumulation_steps": accumulation, "bf16": bf16}
    trainer = train(callback, tmp_path, kind=Watched, **options)
    memory = callback.manager.backend("memory")
    shown = {record.step: record.metrics["train/grad_norm"] for record in memory.records}  # type: ignore[attr-defined]
    assert shown == pytest.approx(own_norms(trainer), rel=1e-5)
    assert shown == pytest.approx(trainer.torch_own, rel=1e-5)
    assert list(shown) == [1, 2, 3, 4, 5, 6]
    assert ("the Trainer clips" in str(callback.reports[0].notes)) == (limit > 0)
    assert not any(report.notes for report in callback.reports[1:])


class Direct(transformers.Trainer):  # type: ignore[misc]
    """Runs the backward pass without a word to accelerate."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return the loss of a micro-batch."""
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()


class Twice(transformers.Trainer):  # type: ignore[misc]
    """Adds up two losses by a backward pass of each."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return the sum of both."""
        losses = []
        for weight in (0.25, 0.75):
            losses.append(weight * self.compute_loss(model, self._prepare_inputs(inputs)))
            self.accelerator.backward(losses[-1])
        return sum(loss.detach() for loss in losses)


class PairOptimizers(transformers.Trainer):  # type: ignore[misc]
    """Steps by itself, so that the Trainer's own step finds nothing to do."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return the loss of a step that is made."""
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("kind", [Direct, Twice])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_of_other_kinds_of_trainers(kind: Any, accumulation: int, tmp_path: Path) -> None:
    """Whatever runs backward in a step, and how often: one report with the Trainer's own norm, clipped once."""
    callback, ours = GradtrackCallback(), GradtrackCallback(max_grad_norm=0.2)
    options: dict[str, Any] = {"kind": kind, "gradient_accumulation_steps": accumulation}
    trainer = train(callback, tmp_path / "a", max_grad_norm=0.2, **options)
    assert norms(callback) == pytest.approx(own_norms(trainer), rel=1e-5)
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]
    clipped = train(ours, tmp_path / "b", max_grad_norm=0, **options)
    assert norms(ours) == pytest.approx(norms(callback), rel=1e-3)
    for one, two in zip(clipped.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_a_step_within_the_trainers_is_looked_at_before(tmp_path: Path) -> None:
    """Where a Trainer's step makes the optimizer's itself, that is what is measured and clipped."""
    callback = GradtrackCallback(max_grad_norm=0.2)
    trainer = train(callback, tmp_path, kind=PairOptimizers, max_grad_norm=0)
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]
    assert all(report.clipping.clipped for report in callback.reports)
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks


def test_parts_that_are_set_free_are_seen_before_the_clipping(tmp_path: Path) -> None:
    """A training that begins with a part of the model and goes on with the rest has every step's norm."""

    class SetFree(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **keywords: Any) -> None:
            for name, param in model.named_parameters():
                param.requires_grad = ("ln_f" in name) == (state.global_step < 3)

    class Gradual(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *, callbacks: Any, **keywords: Any) -> None:
            super().__init__(callbacks=[*callbacks, SetFree()], **keywords)

        def create_optimizer(self, *arguments: Any, **keywords: Any) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    model, callback = tiny_model(), GradtrackCallback()
    for name, param in model.named_parameters():
        param.requires_grad = "ln_f" in name
    trainer = train(callback, tmp_path, model=model, kind=Gradual, max_grad_norm=0.01)
    assert norms(callback) == pytest.approx(own_norms(trainer), rel=1e-5)
    assert not any("only" in note for report in callback.reports[1:] for note in report.notes)


SMOOTHED: dict[str, Any] = {"label_smoothing_factor": 0.1, "bf16": True, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("limit", [0.0, 0.2])
def test_adapters_with_smoothed_labels(limit: float, tmp_path: Path) -> None:
    """A model of which little is trained, accumulated under bf16: the norm is the Trainer's, under either clipping."""
    model = tiny_model()
    for name, param in model.named_parameters():
        param.requires_grad = "ln_f" in name or "h.1.mlp" in name
    callback = GradtrackCallback(max_grad_norm=0.1)
    trainer = train(callback, tmp_path, model=model, max_grad_norm=limit, **SMOOTHED)
    reports = {report.step: report.clipping for report in callback.reports}
    assert norms(callback) == pytest.approx(own_norms(trainer), rel=1e-5)
    assert any(one.clipped for one in reports.values()) == (limit == 0)


def test_fp16_without_a_scaler(tmp_path: Path) -> None:
    """On the CPU fp16 is autocast alone, and the norm is the Trainer's."""
    callback = GradtrackCallback()
    trainer = train(callback, tmp_path, fp16=True)
    assert norms(callback) == pytest.approx(own_norms(trainer), rel=1e-5)


@pytest.mark.slow
def test_a_smaller_batch_after_a_lack_of_memory(tmp_path: Path) -> None:
    """Where the Trainer begins anew with a smaller batch, so do the reports, and nothing stays hooked twice."""

    class Tight(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *arguments, **keywords)

    callback = GradtrackCallback()
    trainer = train(callback, tmp_path, kind=Tight, auto_find_batch_size=True)
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]
    assert norms(callback) == pytest.approx(dict(list(own_norms(trainer).items())[-6:]), rel=1e-5)


def test_limits_without_an_effect_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit that is given to the callback while the Trainer clips is named, with who clips."""
    with caplog.at_level(logging.WARNING, logger="gradtrack"):
        train(GradtrackCallback(max_grad_norm=0.3), tmp_path / "a", max_grad_norm=0.5)
        train(GradtrackCallback(max_grad_norm=0.3), tmp_path / "b", max_grad_norm=0)
        train(GradtrackCallback(max_grad_norm=1.0), tmp_path / "c", max_grad_norm=1.0)
    (record,) = caplog.records
    assert record.getMessage() == "max_grad_norm=0.3 has no effect: the Trainer clips at max_grad_norm 0.5"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_one_backward_pass(reentrant: bool, tmp_path: Path) -> None:
    """Where only checkpointed blocks are trained, the passes within the pass are not taken for steps."""
    model = tiny_model()
    for name, param in model.named_parameters():
        param.requires_grad = ".h." in name
    model.enable_input_require_grads()
    kinds: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    callback = GradtrackCallback()
    trainer = train(callback, tmp_path, model=model, gradient_checkpointing=True, **kinds)
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]
    assert norms(callback) == pytest.approx(own_norms(trainer), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_is_the_trainers_own(accumulation: int, tmp_path: Path) -> None:
    """A report carries the loss that the Trainer logs for the step, over all of its micro-batches."""
    callback = GradtrackCallback()
    trainer = train(callback, tmp_path, gradient_accumulation_steps=accumulation)
    theirs = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    ours = {report.step: report.loss for report in callback.reports}
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert list(ours) == [1, 2, 3, 4, 5, 6]


def test_nothing_stays_hooked(tmp_path: Path) -> None:
    """After the training, and after one that an issue has ended, model and accelerator are as they were."""

    def stop(issue: Any, report: Any) -> None:
        raise ZeroDivisionError

    broken, callback = tiny_model(), GradtrackCallback(on_issue=stop, backends=["memory"])
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(ZeroDivisionError):
        train(callback, tmp_path, model=broken)
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    trainer = train(GradtrackCallback(), tmp_path)
    assert "backward" not in vars(trainer.accelerator)
    for model in (broken, trainer.model):
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


PARTS = ["training_step", "get_batch_samples", "_maybe_log_save_evaluate"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_a_crash_leaves_nothing_behind(part: str, kind: type[BaseException], tmp_path: Path) -> None:
    """Wherever the training ends, it ends as failed, and later gradients of the model are the user's own."""
    kept: list[Any] = []

    def crash(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        if trainer.state.global_step == 2:
            kept.append(trainer)
            raise kind
        return getattr(transformers.Trainer, part)(trainer, *arguments, **keywords)

    crashing = type("Crashing", (transformers.Trainer,), {part: crash})
    callback, model = GradtrackCallback(max_grad_norm=1e-3, backends=["memory"]), tiny_model()
    with pytest.raises(kind):
        train(callback, tmp_path, model=model, kind=crashing, max_grad_norm=0)
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    assert [report.step for report in callback.reports] == [1, 2]
    assert not {*PARTS, "_run_epoch", "_evaluate", "_finalize_training"} & vars(kept[0]).keys()
    assert "backward" not in vars(kept[0].accelerator)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


class BrokenStart(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises where a training begins."""

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        """Raise."""
        raise ZeroDivisionError


@pytest.mark.parametrize("again", [False, True])
def test_hooks_are_inert_where_another_callback_breaks_the_start(again: bool, tmp_path: Path) -> None:
    """Gradients of the user's own stay as they are, and a later training works, with us or without."""
    kept: list[Any] = []

    class Kept(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *, callbacks: Any, **keywords: Any) -> None:
            super().__init__(callbacks=[*callbacks, BrokenStart()], **keywords)
            kept.append(self)

    callback = GradtrackCallback(max_grad_norm=1e-3, backends=["memory"])
    with pytest.raises(ZeroDivisionError):
        train(callback, tmp_path, kind=Kept, max_grad_norm=0)
    [trainer] = kept
    trainer.accelerator.backward(1e4 * trainer.model.lm_head.weight.sum())
    assert float(trainer.model.lm_head.weight.grad.max()) == 1e4
    assert callback.reports == []
    trainer.model.zero_grad()
    trainer.remove_callback(BrokenStart)
    if not again:
        trainer.remove_callback(GradtrackCallback)
    trainer.train()
    assert [report.step for report in callback.reports] == ([1, 2, 3, 4, 5, 6] if again else [])
    assert "backward" not in vars(trainer.accelerator)
    assert not any(param._post_accumulate_grad_hooks for param in trainer.model.parameters())


def test_backward_passes_between_the_steps_are_the_users_own(tmp_path: Path) -> None:
    """What another callback runs backward is no step, and keeps its gradients as they are."""
    found: list[float] = []

    class Curious(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, model: Any, **keywords: Any) -> None:
            (1e4 * model.lm_head.weight.sum()).backward()
            found.append(float(model.lm_head.weight.grad.max()))
            model.zero_grad()

    class Asked(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *, callbacks: Any, **keywords: Any) -> None:
            super().__init__(callbacks=[*callbacks, Curious()], **keywords)

    callback = GradtrackCallback(max_grad_norm=1e-3)
    train(callback, tmp_path, kind=Asked, max_grad_norm=0)
    assert found == [1e4] * 6
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]


def test_watching_changes_nothing(tmp_path: Path) -> None:
    """The weights after a training that was watched are bitwise those of one that was not."""
    watched = train(GradtrackCallback(analyzers="auto"), tmp_path / "a", max_grad_norm=0.5).model
    plain = train(None, tmp_path / "b", max_grad_norm=0.5).model
    assert all(torch.equal(one, two) for one, two in zip(watched.parameters(), plain.parameters(), strict=True))


def test_where_nobody_clips_the_callback_does_not_either(tmp_path: Path) -> None:
    """With max_grad_norm=0 and no clipping setting of ours the weights are those of a training without the callback."""
    callback = GradtrackCallback(grad_log_every_n_steps=1)
    watched = train(callback, tmp_path / "a", max_grad_norm=0).model
    plain = train(None, tmp_path / "b", max_grad_norm=0).model
    assert any(norm is not None and norm > 1.0 for norm in norms(callback).values())
    assert all(torch.equal(one, two) for one, two in zip(watched.parameters(), plain.parameters(), strict=True))


def test_gradtrack_clips_where_the_trainer_does_not(tmp_path: Path) -> None:
    """With max_grad_norm=0 our clipping gives the weights and the `grad_norm` that the Trainer's clipping gives."""
    callback = GradtrackCallback(max_grad_norm=0.2)
    ours = train(callback, tmp_path / "a", max_grad_norm=0)
    theirs = train(None, tmp_path / "b", max_grad_norm=0.2)
    assert all(report.clipping.clipped for report in callback.reports)
    assert norms(callback) == own_norms(ours)
    assert own_norms(ours) == pytest.approx(own_norms(theirs), rel=1e-3)
    for one, two in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_bad_batch_is_skipped_where_gradtrack_clips(accumulation: int, tmp_path: Path) -> None:
    """The step with NaN is a no-op, the Trainer counts it and logs its norm, and the training goes on."""

    class Bad(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            return loss * float("nan") if self.state.global_step == 2 else loss

    callback = GradtrackCallback(max_grad_norm=1.0)
    options: dict[str, Any] = {"max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation}
    trainer = train(callback, tmp_path, kind=Bad, **options)
    assert [report.skipped for report in callback.reports] == [False, False, True, False, False, False]
    assert trainer.state.global_step == callback.reports[-1].step == 6
    assert own_norms(trainer) == pytest.approx(norms(callback), rel=1e-5, nan_ok=True)
    assert all(param.isfinite().all() for param in trainer.model.parameters())


def test_resume_goes_on_without_gap_or_overlap(tmp_path: Path) -> None:
    """A training that was resumed from a checkpoint reports the steps and windows of an uninterrupted one."""
    whole, first, second = (GradtrackCallback(max_gradient_history=50) for _ in range(3))
    train(whole, tmp_path / "a")
    train(first, tmp_path / "b", save_strategy="steps", save_steps=3)
    train(second, tmp_path / "b", resume=str(tmp_path / "b" / "checkpoint-3"))
    assert list(norms(second)) == [4, 5, 6]
    assert norms(second) == pytest.approx({step: norms(whole)[step] for step in (4, 5, 6)}, rel=1e-4)
    assert second.manager.get_training_summary().total_steps == 6


def test_resume_from_a_checkpoint_without_our_state(tmp_path: Path) -> None:
    """A training that began without gradtrack can be resumed and saved with it; the steps go on."""
    train(None, tmp_path, save_strategy="steps", save_steps=3)
    callback = GradtrackCallback()
    train(callback, tmp_path, resume=str(tmp_path / "checkpoint-3"), save_strategy="steps", save_steps=3)
    assert list(norms(callback)) == [4, 5, 6]


def test_tensorboard_has_one_run_and_one_norm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Our metrics join the Trainer's run; the norm is there once, with the Trainer's values on the Trainer's steps."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with caplog.at_level(logging.WARNING, logger="gradtrack"):
        callback = GradtrackCallback(grad_log_every_n_steps=1)
        trainer = train(callback, tmp_path, report_to=["tensorboard"])
    (directory,) = {path.parent for path in tmp_path.rglob("*tfevents*") if path.parent.name != "gradtrack"}
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/grad_norm")}
    assert shown == pytest.approx(own_norms(trainer), rel=1e-5)
    for name in {name for report in callback.reports for name in report.metrics()}:
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4, 5, 6], name
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == pytest.approx({row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row})
    assert sum("ours is left out there" in record.message for record in caplog.records) == 1


def test_mlflow_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our metrics are in the run that the Trainer opened, each at the Trainer's step."""
    pytest.importorskip("mlflow")
    import mlflow
    from mlflow import MlflowClient

    shutil.copy(empty_store(), tmp_path / "store.db")
    uri = f"sqlite:///{tmp_path}/store.db"
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("trainer")
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "0")
    callback = GradtrackCallback(grad_log_every_n_steps=1, close_timeout_seconds=90)
    trainer = train(callback, tmp_path / "out", report_to=["mlflow"])
    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments)

    def curve(name: str) -> dict[int, float]:
        return {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}

    assert curve("train/grad_norm") == pytest.approx(curve("grad_norm"), rel=1e-5)
    for name in {name for report in callback.reports for name in report.metrics()}:
        assert list(curve(name)) == [1, 2, 3, 4, 5, 6], name
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert curve("loss") == pytest.approx(logged)


def test_case_04_wandb_has_one_run_and_one_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: the user's rows and ours are in one run, and the norm is the Trainer's."""
    wandb = pytest.importorskip("wandb")
    from gradtrack.backends.wandb.columns import metric_name

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        callback = GradtrackCallback(grad_log_every_n_steps=1)
        trainer = train(callback, tmp_path / "out", report_to=["wandb"])
    finally:
        directory = Path(wandb.run.dir).parent
        wandb.run.finish()
    rows = rows_of(directory)
    shown = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert shown == pytest.approx(list(own_norms(trainer).values()), rel=1e-5)
    assert [row["gradtrack/step"] for row in rows if "gradtrack/step" in row] == [1, 2, 3, 4, 5, 6]
    ours = {metric_name(name) for report in callback.reports for name in report.metrics()}
    for name in ours - {"train/grad_norm"}:
        assert [row["gradtrack/step"] for row in rows if name in row] == [1, 2, 3, 4, 5, 6], name
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(logged)


def test_trackio_has_one_run_and_one_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine: the user's rows and ours are in one run, and the norm is the Trainer's."""
    trackio: Any = pytest.importorskip("trackio")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with moved_trackio(tmp_path / "trackio"):
        callback = GradtrackCallback(grad_log_every_n_steps=1)
        trainer = train(callback, tmp_path / "out", report_to=["trackio"])
        store = trackio.sqlite_storage.SQLiteStorage
        (project,) = store.get_projects()
        (run,) = store.get_run_records(project)
        rows = store.get_logs(project, run_id=run["id"])
    shown = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert shown == pytest.approx(list(own_norms(trainer).values()), rel=1e-5)
    ours = {name for report in callback.reports for name in report.metrics()} - {"train/grad_norm"}
    for name in ours:
        assert [row["step"] for row in rows if name in row] == [1, 2, 3, 4, 5, 6], name


def test_an_issue_can_stop_the_training(tmp_path: Path) -> None:
    """What `on_issue` raises comes out of trainer.train()."""

    def stop(issue: Any, report: Any) -> None:
        raise KeyboardInterrupt

    model = tiny_model()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    callback = GradtrackCallback(on_issue=stop)
    with pytest.raises(KeyboardInterrupt):
        train(callback, tmp_path, model=model)
    assert callback.reports[-1].nan_inf.nan_count > 0


def test_a_callback_is_pickled_and_copied_after_its_training(tmp_path: Path) -> None:
    """A copy has no manager, and watches a training of its own."""
    callback = GradtrackCallback()
    train(callback, tmp_path)
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.reports == []
        train(copied, tmp_path)
        assert [report.step for report in copied.reports] == [1, 2, 3, 4, 5, 6]
    assert len(callback.reports) == 6


@pytest.mark.parametrize("analyzers", [[], "auto"])
def test_adafactor_that_finds_its_own_rate(analyzers: Any) -> None:
    """Its rate is None by default: the reports have none, and analyzers look all the same."""
    model, batch = tiny_model(), torch.stack([row["input_ids"] for row in tokens(4)])
    optimizer = transformers.Adafactor(model.parameters())
    with GradientManager(analyzers=analyzers) as manager:
        for _ in range(20):
            optimizer.zero_grad()
            report = manager.step(model, optimizer, model(batch, labels=batch).loss)
            optimizer.step()
            assert report.lr == {}
            assert not any("failed" in note for note in report.notes)
        assert any(one.analyzers for one in manager.reports) == bool(analyzers)


def test_loss_scaling_is_undone_before_the_look() -> None:
    """Where a scaler is used, the norm is that of the unscaled gradients, right after the Trainer has unscaled them."""
    from gradtrack.integrations.transformers import _after_unscaling

    model, seen = torch.nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    manager = GradientManager(enable_gradient_clipping=False)
    changes = Changes()
    look = partial(manager.step, model, optimizer, None, False, scaler=scaler)
    _after_unscaling(changes, scaler, lambda: seen.append(look().clipping.norm_before))
    loss = model(torch.ones(2, 3)).sum()
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    assert seen == [pytest.approx((3 * 4 + 4) ** 0.5)]
    changes.undo()
    assert "unscale_" not in vars(scaler)


def test_the_manager_begins_with_the_training() -> None:
    """Before the training there are no reports, and the error says when there will be a manager."""
    callback = GradtrackCallback()
    assert callback.reports == []
    with pytest.raises(UsageError, match=r"expected a training that has begun\. Read it during or after"):
        _ = callback.manager
