"""The callback for Lightning, in real trainings."""

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrack import GradientConfig, GradientManager
from gradtrack.capture.replay import replay_step
from gradtrack.errors import ConfigError, UsageError

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm

from gradtrack.integrations.lightning import GradientStatisticsCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


class Tagger(pl.LightningModule):  # type: ignore[misc]
    """A recurrent network that keeps Lightning's and torch's own norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.RNN(3, 8, batch_first=True)
        self.readout = nn.Linear(8, 2)
        self.own: dict[int, float] = {}
        self.torch_own: dict[int, float] = {}

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.readout(self.rnn(x)[0]), y)
        self.log("train/loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the norms that others measure here."""
        step = self.trainer.global_step + 1
        self.own.setdefault(step, float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        self.torch_own.setdefault(step, float(nn.utils.get_total_norm(grads)))

    def configure_optimizers(self) -> Any:
        """Return one optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Game(pl.LightningModule):  # type: ignore[misc]
    """Two networks, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch: Any, index: int) -> None:
        """Step both."""
        x = batch[0][:, 0]
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * self.discriminator(self.generator(x)).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """Return one optimizer for each network."""
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def loader() -> Any:
    """Return four batches."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 5, size, generator=generator) for size in (3, 2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def same_batches() -> Any:
    """Return four times the same batch, for trainings that begin in the middle of an epoch."""
    x, y = next(iter(loader()))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.repeat(4, 1, 1), y.repeat(4, 1, 1)), 4)


def fit(
    callback: Any, directory: Path, *, module: Any = None, ckpt_path: Any = None, data: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Train for some steps; return module and trainer."""
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
        "log_every_n_steps": 1,
        "callbacks": [] if callback is None else [callback],
    }
    trainer = pl.Trainer(**{**defaults, **options})
    module = module or Tagger()
    trainer.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return module, trainer


def norms(callback: Any) -> dict[int, float]:
    """Return our norms by step."""
    return {report.step: report.clipping.norm_before for report in callback.reports}


PLAIN: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2}]
CLIPPING: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
]
PRECISION: list[dict[str, Any]] = [{"precision": "bf16-mixed"}, {"precision": "64-true"}]


@pytest.mark.parametrize("options", [*PLAIN, *CLIPPING, *PRECISION])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_the_norm_is_lightnings_and_torchs(options: dict[str, Any], limit: float | None, tmp_path: Path) -> None:
    """`train/grad_norm` is what a module measures in its own hook, with any clipping, accumulation and precision."""
    settings: dict[str, Any] = {} if limit is None else {"max_grad_norm": limit}
    callback = GradientStatisticsCallback(1, backends=["memory"], save_gradient_plots=False, **settings)
    module, trainer = fit(callback, tmp_path, **options)
    memory = callback.manager.backend("memory")
    shown = {record.step: record.metrics["train/grad_norm"] for record in memory.records}  # type: ignore[attr-defined]
    assert shown == pytest.approx(module.own, rel=1e-5)
    assert shown == pytest.approx(module.torch_own, rel=1e-5)
    assert list(shown) == [1, 2, 3, 4, 5, 6]
    assert trainer.global_step == 6
    notes = [report.notes for report in callback.reports]
    assert ("the trainer clips at gradient_clip_val" in str(notes[0])) == ("gradient_clip_val" in options)
    assert not any(notes[1:])
    ours = limit is not None and "gradient_clip_val" not in options
    assert all(report.clipping.clipped == ours for report in callback.reports)


def test_the_norm_of_half_precision_is_that_of_its_elements(tmp_path: Path) -> None:
    """Where the gradients themselves are bfloat16, the norm is the true one of them, which Lightning's only nears."""

    class Half(Tagger):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            parts = [param.grad.double().square().sum() for param in self.parameters() if param.grad is not None]
            self.own[self.trainer.global_step + 1] = float(sum(parts) ** 0.5)

    callback = GradientStatisticsCallback()
    module, _ = fit(callback, tmp_path, module=Half(), precision="bf16-true")
    assert norms(callback) == pytest.approx(module.own, rel=1e-6)


def test_loss_scaling_of_the_precision_plugin(tmp_path: Path) -> None:
    """16-mixed with a scaler: norms are unscaled, an overflow is the scaler's to skip, and watching changes nothing."""

    def scaled() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        return MixedPrecision("16-mixed", device="cpu", scaler=scaler)

    callback = GradientStatisticsCallback()
    module, _ = fit(callback, tmp_path, plugins=[scaled()])
    plain, _ = fit(None, tmp_path, plugins=[scaled()])
    finite = {step: norm for step, norm in norms(callback).items() if math.isfinite(norm)}
    assert 0 < len(finite) < 6
    assert finite == pytest.approx({step: module.own[step] for step in finite}, rel=1e-5)
    assert [report.skipped for report in callback.reports] == [step not in finite for step in range(1, 7)]
    assert all(torch.equal(one, two) for one, two in zip(module.parameters(), plain.parameters(), strict=True))


class Chooser(Tagger):
    """A classifier that gives probabilities to a loss that expects logits."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(
            self.readout(self.rnn(x)[0]).softmax(-1).flatten(0, 1), y.argmax(-1).flatten()
        )


@pytest.mark.parametrize("options", PLAIN)
def test_a_mistake_in_the_loss_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    """The graph of the loss is there as in a loop of one's own."""
    callback = GradientStatisticsCallback(analyzers="auto", backends=[])
    fit(callback, tmp_path, module=Chooser(), **options)
    assert "ACTIVATED_TWICE:readout" in [issue.key for issue in callback.manager.diagnose()]


def test_files_are_those_of_the_document(tmp_path: Path) -> None:
    """Both JSON files and the picture with four panels lie in the trainer's directory, a row every N steps."""
    pytest.importorskip("matplotlib")
    module, _ = fit(GradientStatisticsCallback(grad_log_every_n_steps=2), tmp_path / "trainer")
    stats = json.loads((tmp_path / "trainer" / "gradient_statistics.json").read_text())
    assert list(stats) == ["step", "epoch", "grad_variance", "grad_mean", "grad_norm", "grad_max", "grad_min"]
    assert stats["step"] == [1, 2, 4, 6]
    assert stats["grad_norm"] == pytest.approx([module.torch_own[step] for step in (1, 2, 4, 6)], rel=1e-5)
    matrices = json.loads((tmp_path / "trainer" / "gradient_statistics_weight_matrices.json").read_text())
    assert set(matrices) == {"W_in", "W_rec", "W_out", "biases"}
    assert (tmp_path / "trainer" / "gradient_statistics.png").stat().st_size > 10_000


def test_without_weight_matrices_there_is_no_second_file(tmp_path: Path) -> None:
    """The switch leaves the groups out."""
    callback = GradientStatisticsCallback(2, grad_track_per_weight_matrix=False, save_gradient_plots=False)
    fit(callback, tmp_path)
    assert not (tmp_path / "gradient_statistics_weight_matrices.json").exists()
    assert callback.reports[-1].groups == {}


def test_gradtrack_clips_where_it_was_asked_to(tmp_path: Path) -> None:
    """Our clipping gives the weights of the trainer's clipping; without being asked we clip nothing."""
    theirs, _ = fit(None, tmp_path / "a", gradient_clip_val=0.05)
    ours, _ = fit(GradientStatisticsCallback(max_grad_norm=0.05), tmp_path / "b")
    plain, _ = fit(None, tmp_path / "c")
    watched, _ = fit(GradientStatisticsCallback(analyzers="auto"), tmp_path / "d")
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), watched.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{"max_grad_norm": 1.0}, {"nonfinite_action": "skip"}])
def test_a_bad_batch_is_skipped_where_it_was_asked_for(settings: dict[str, Any], tmp_path: Path) -> None:
    """The step with NaN is a no-op, the trainer counts it, and the training goes on."""

    class Bad(Tagger):
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = super().training_step(batch, index)
            return loss * float("nan") if self.trainer.global_step == 2 else loss

    callback = GradientStatisticsCallback(**settings)
    module, trainer = fit(callback, tmp_path, module=Bad())
    assert [step for step, norm in module.own.items() if math.isnan(norm)] == [3]
    assert [report.skipped for report in callback.reports] == [False, False, True, False, False, False]
    assert trainer.global_step == callback.reports[-1].step == 6
    assert all(param.isfinite().all() for param in module.parameters())


def test_resume_goes_on_without_gap_or_overlap(tmp_path: Path) -> None:
    """The callback's state is in the checkpoint, and the resumed training reports what an uninterrupted one does."""
    whole, first, second = (GradientStatisticsCallback() for _ in range(3))
    fit(whole, tmp_path / "a", max_steps=-1, max_epochs=2)
    _, trainer = fit(first, tmp_path / "b", max_steps=-1, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "at4.ckpt")
    fit(second, tmp_path / "c", max_steps=-1, max_epochs=2, ckpt_path=str(tmp_path / "at4.ckpt"))
    assert list(norms(second)) == [5, 6, 7, 8]
    assert norms(second) == pytest.approx({step: norms(whole)[step] for step in (5, 6, 7, 8)}, rel=1e-5)
    assert second.manager.get_training_summary() == whole.manager.get_training_summary()


def test_resume_within_an_epoch_goes_on_as_well(tmp_path: Path) -> None:
    """From a checkpoint in the middle of an epoch, with accumulation, steps and windows go on."""
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "accumulate_grad_batches": 2, "data": same_batches()}
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    whole, second = GradientStatisticsCallback(), GradientStatisticsCallback()
    fit(None, tmp_path / "a", callbacks=[whole, keep], enable_checkpointing=True, **options)
    _, trainer = fit(second, tmp_path / "b", ckpt_path=str(tmp_path / "step=3.ckpt"), **options)
    assert list(norms(second)) == [4, 5, 6]
    assert second.reports[-1].step == trainer.global_step
    assert norms(second) == pytest.approx({step: norms(whole)[step] for step in (4, 5, 6)}, rel=1e-5)
    assert [report.epoch for report in second.reports] == [report.epoch for report in whole.reports[3:]] == [1, 2, 2]
    assert second.manager.get_training_summary() == whole.manager.get_training_summary()


def test_several_optimizers_go_on_as_well(tmp_path: Path) -> None:
    """After a resume each pair counts on from its own step."""
    first, second = GradientStatisticsCallback(), GradientStatisticsCallback()
    _, trainer = fit(first, tmp_path, module=Game(), max_steps=6, data=same_batches())
    trainer.save_checkpoint(tmp_path / "at6.ckpt")
    fit(second, tmp_path, module=Game(), max_steps=12, data=same_batches(), ckpt_path=str(tmp_path / "at6.ckpt"))
    assert [(report.source, report.step) for report in second.reports] == [
        (name, step) for step in (4, 5, 6) for name in ("generator", "discriminator")
    ]


def test_fitting_on_counts_on(tmp_path: Path) -> None:
    """A second call of fit with the same callback and trainer goes on with the steps of the first."""
    callback = GradientStatisticsCallback()
    module, trainer = fit(callback, tmp_path, max_steps=-1, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert [report.step for report in callback.reports] == [5, 6, 7, 8]
    assert callback.manager.get_training_summary().total_steps == 8


def test_several_optimizers_have_names_of_their_own(tmp_path: Path) -> None:
    """Each pair counts its own steps and carries the name of the module that it steps."""
    callback = GradientStatisticsCallback(1, backends=["memory"])
    fit(callback, tmp_path, module=Game(), max_steps=6)
    memory = callback.manager.backend("memory")
    found = {(record.source, record.step) for record in memory.records}  # type: ignore[attr-defined]
    assert found == {(name, step) for name in ("generator", "discriminator") for step in (1, 2, 3)}


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0, "analyzers": "auto"}])
def test_a_module_without_an_optimizer_trains(automatic: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    """Where a module configures no optimizer there is nothing to report, and nothing breaks."""

    class Unstepped(Tagger):
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = super().training_step(batch, index)
            if not automatic:
                self.manual_backward(loss)
            return loss

        def configure_optimizers(self) -> None:
            """Return none."""

    callback, module = GradientStatisticsCallback(**settings), Unstepped()
    module.automatic_optimization = automatic
    fit(callback, tmp_path, module=module, max_steps=-1, max_epochs=1)
    assert callback.reports == []
    assert callback.manager.status()["closed"]


class Clipping(Game):
    """Clips each network by itself, the generator on every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[tuple[str, float]] = []

    def training_step(self, batch: Any, index: int) -> None:
        """Clip and step."""
        names = ("generator", "discriminator") if index % 2 else ("discriminator",)
        for name, optimizer in zip(("generator", "discriminator"), self.optimizers(), strict=True):
            if name in names:
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.discriminator(self.generator(batch[0][:, 0])).square().mean())
                grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
                self.own.append((name, float(nn.utils.get_total_norm(grads))))
                self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
                optimizer.step()
                assert float(nn.utils.get_total_norm(grads)) <= 1e-3
                self.untoggle_optimizer(optimizer)


def test_a_module_that_clips_by_itself_is_looked_at_before(tmp_path: Path) -> None:
    """In manual optimization the norm is the one before `clip_gradients`, once for each optimizer's step."""
    callback = GradientStatisticsCallback()
    module, trainer = fit(callback, tmp_path, module=Clipping(), max_steps=6)
    assert [report.source for report in callback.reports] == [name for name, _ in module.own]
    assert [report.clipping.norm_before for report in callback.reports] == pytest.approx(
        [norm for _, norm in module.own], rel=1e-5
    )
    assert "clip_gradients" not in vars(trainer.precision_plugin)


class Noisy(Clipping):
    """A module that adds noise to its gradients once they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Add it."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(1e-6)


def test_a_module_that_clips_by_itself_is_looked_at_once(tmp_path: Path) -> None:
    """Also where it changes the gradients later, and where gradtrack itself would skip or clip."""
    callback = GradientStatisticsCallback(nonfinite_action="skip")
    module, _ = fit(callback, tmp_path, module=Noisy(), max_steps=6)
    assert [report.source for report in callback.reports] == [name for name, _ in module.own]


class Gathering(Clipping):
    """A module that clips after each backward pass, of which two make a step; the last one of all is NaN."""

    def training_step(self, batch: Any, index: int) -> None:
        """Clip, and step at every second batch."""
        optimizer = self.optimizers()[0]
        loss = self.discriminator(self.generator(batch[0][:, 0])).square().mean()
        self.manual_backward(loss * math.nan if index == 3 else loss)
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_that_come_after_a_clipping_are_looked_at(tmp_path: Path) -> None:
    """Where a module clips without a step, what is added later is not let through unseen."""
    callback = GradientStatisticsCallback(nonfinite_action="skip")
    module, _ = fit(callback, tmp_path, module=Gathering(), max_steps=2)
    assert callback.reports[-1].nan_inf.action == "skip"
    assert all(param.isfinite().all() for param in module.parameters())


def test_a_fast_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """As Lightning promises for it: no files, unless a directory is named."""
    callback = GradientStatisticsCallback(1)
    fit(callback, tmp_path, fast_dev_run=3, logger=True)
    assert list(norms(callback)) == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []
    fit(GradientStatisticsCallback(1, run_dir=str(tmp_path / "named")), tmp_path, fast_dev_run=3)
    assert json.loads((tmp_path / "named" / "gradient_statistics.json").read_text())["step"] == [1, 2, 3]


def test_a_validation_alone_is_no_training(tmp_path: Path) -> None:
    """Nothing begins and nothing is written."""

    class Judged(Tagger):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val/loss", self.readout(self.rnn(batch[0])[0]).square().mean())

    callback = GradientStatisticsCallback(1)
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback], default_root_dir=str(tmp_path))
    trainer.validate(Judged(), loader(), verbose=False)
    assert callback.reports == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_training_ends_as_failed(tmp_path: Path) -> None:
    """Lightning makes an exit of an interrupt; what was recorded is delivered before."""

    class Interrupted(Tagger):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if self.trainer.global_step == 3:
                raise KeyboardInterrupt
            loss: Tensor = super().training_step(batch, index)
            return loss

    callback = GradientStatisticsCallback(1, backends=["memory", "json"])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(callback, tmp_path / "trainer", module=Interrupted())
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "trainer" / "gradient_statistics.json").read_text())["step"] == [1, 2, 3]


@pytest.mark.parametrize("limit", [None, 1e-4])
def test_limits_without_an_effect_are_told(
    limit: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit that is given to the callback while the trainer clips is named, with who clips."""
    fit(GradientStatisticsCallback(1, max_grad_norm=0.3), tmp_path, max_steps=1, gradient_clip_val=limit)
    told = [record.getMessage() for record in caplog.records if record.name == "gradtrack"]
    assert told == (
        [] if limit is None else ["max_grad_norm=0.3 has no effect: the trainer clips at gradient_clip_val 0.0001"]
    )


class Halves(Game):
    """One network whose weights and biases have optimizers of their own, beside another."""

    def configure_optimizers(self) -> Any:
        """Return two optimizers for the generator and one for the discriminator."""
        one, other = self.generator, self.discriminator
        parts = ([one.weight], [one.bias], other.parameters())
        return [torch.optim.SGD(part, lr=0.01) for part in parts]

    def training_step(self, batch: Any, index: int) -> None:
        """Step all."""
        self.manual_backward(self.discriminator(self.generator(batch[0][:, 0])).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_optimizers_of_one_module_have_names_of_their_own(tmp_path: Path) -> None:
    """Where a module's name is taken, the optimizer's number follows it, and a resume finds each pair again."""
    first, second = GradientStatisticsCallback(), GradientStatisticsCallback()
    _, trainer = fit(first, tmp_path, module=Halves(), max_steps=6, data=same_batches())
    trainer.save_checkpoint(tmp_path / "at6.ckpt")
    fit(second, tmp_path, module=Halves(), max_steps=12, data=same_batches(), ckpt_path=str(tmp_path / "at6.ckpt"))
    for callback, steps in ((first, (1, 2)), (second, (3, 4))):
        assert [(report.source, report.step) for report in callback.reports] == [
            (name, step) for step in steps for name in ("generator", "generator_1", "discriminator")
        ]
    sizes = [report.statistics.element_count for report in second.reports[:3] if report.statistics is not None]
    assert sizes == [param.numel() for param in Halves().generator.parameters()] + [
        sum(param.numel() for param in Halves().discriminator.parameters())
    ]


def test_lbfgs_has_one_report_per_step(tmp_path: Path) -> None:
    """A closure that is called several times is one step."""

    class Slow(Tagger):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    callback = GradientStatisticsCallback()
    fit(callback, tmp_path, module=Slow(), max_steps=3)
    assert [report.step for report in callback.reports] == [1, 2, 3]


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_the_loss_is_the_mean_over_the_accumulated_batches(batches: int, tmp_path: Path) -> None:
    """Reports carry the loss that the step's gradients belong to."""
    callback, twin = GradientStatisticsCallback(), Tagger()
    first = list(loader())[:batches]
    expected = sum(float(nn.functional.mse_loss(twin.readout(twin.rnn(x)[0]), y)) for x, y in first) / batches
    fit(callback, tmp_path, max_steps=1, accumulate_grad_batches=batches)
    assert callback.reports[0].loss == pytest.approx(expected, rel=1e-5)


def test_the_files_follow_the_csv_logger(tmp_path: Path) -> None:
    """A logger without a backend of ours gives the directory only."""
    logger = CSVLogger(str(tmp_path))
    fit(GradientStatisticsCallback(2, save_gradient_plots=False), tmp_path, logger=logger)
    assert (Path(logger.log_dir) / "gradient_statistics.json").exists()


def test_files_stay_out_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no logger has a directory for the run, it has one of gradtrack's, named by its id."""
    monkeypatch.chdir(tmp_path)
    first, second, third = (GradientStatisticsCallback(1, save_gradient_plots=False) for _ in range(3))
    _, trainer = fit(first, Path("."), max_steps=3)
    trainer.save_checkpoint(tmp_path / "at3.ckpt")
    fit(second, Path("."), max_steps=5, ckpt_path=str(tmp_path / "at3.ckpt"))
    fit(third, Path("."), max_steps=2)
    kept = first.manager.run_dir
    assert kept is not None
    assert kept == tmp_path / "gradtrack_runs" / str(first.manager.status()["run_id"]) == second.manager.run_dir
    assert {path.name for path in tmp_path.iterdir()} == {"gradtrack_runs", "at3.ckpt"}
    assert len(list((tmp_path / "gradtrack_runs").iterdir())) == 2
    assert json.loads((kept / "gradient_statistics.json").read_text())["step"] == [1, 2, 3, 4, 5]


def test_a_training_that_fails_ends_its_backends_as_failed(tmp_path: Path) -> None:
    """An exception in the training goes on its way."""

    class Broken(Tagger):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index == 2:
                raise ZeroDivisionError
            loss: Tensor = super().training_step(batch, index)
            return loss

    callback = GradientStatisticsCallback(backends=["memory"])
    with pytest.raises(ZeroDivisionError):
        fit(callback, tmp_path, module=Broken())
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]


@pytest.mark.parametrize("ours_first", [False, True])
def test_nothing_stays_hooked_where_another_callback_breaks_the_start(tmp_path: Path, ours_first: bool) -> None:
    """What was begun ends as failed, and the same callback and module train a second time."""

    class BrokenStart(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, *arguments: Any) -> None:
            raise ZeroDivisionError

    callback, module = GradientStatisticsCallback(backends=["memory"], analyzers=["flow"]), Tagger()
    callbacks = [callback, BrokenStart()] if ours_first else [BrokenStart(), callback]
    with pytest.raises(ZeroDivisionError):
        fit(callback, tmp_path, module=module, callbacks=callbacks)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
    if ours_first:
        assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    fit(callback, tmp_path, module=module, max_steps=2)
    assert [report.step for report in callback.reports] == [1, 2]


def test_the_manager_begins_with_the_training() -> None:
    """Before the training there are no reports, and the error says when there will be a manager."""
    callback = GradientStatisticsCallback()
    assert callback.reports == []
    with pytest.raises(UsageError, match=r"expected a training that has begun\. Read it during or after"):
        _ = callback.manager


def test_settings_come_from_the_training_configuration(tmp_path: Path) -> None:
    """A mapping or file gives the settings, and keywords win over it."""
    callback = GradientStatisticsCallback(config={"grad_log_every_n_steps": 3, "backends": ["memory"]}, run_dir=None)
    fit(callback, tmp_path)
    assert isinstance(callback.manager, GradientManager)
    memory = callback.manager.backend("memory")
    assert [record.step for record in memory.records] == [1, 2, 3, 6]  # type: ignore[attr-defined]


def test_the_configuration_comes_first(tmp_path: Path) -> None:
    """As with the other callbacks: a file, a mapping or a configuration; a number is the cadence of the rows."""
    (tmp_path / "gradtrack.yaml").write_text("{grad_log_every_n_steps: 7, max_grad_norm: 0.5}")
    chosen = {"grad_log_every_n_steps": 7, "max_grad_norm": 0.5}
    for first in (chosen, GradientConfig(**chosen), tmp_path / "gradtrack.yaml", str(tmp_path / "gradtrack.yaml")):
        config = GradientStatisticsCallback(first, mute=["DEAD"])._config
        assert (config.grad_log_every_n_steps, config.max_grad_norm, config.mute) == (7, 0.5, ["DEAD"])
    with pytest.raises(ConfigError, match="Did you mean 'max_grad_norm'"):
        GradientStatisticsCallback(max_grad_nrom=1.0)  # type: ignore[call-arg]
    config = GradientStatisticsCallback(7, False)._config
    assert (config.grad_log_every_n_steps, config.grad_track_per_weight_matrix) == (7, False)


@pytest.mark.parametrize("address", ["memory://bucket/runs", "s3://bucket/runs"])
def test_a_directory_elsewhere_becomes_no_local_folder(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of a run whose trainer keeps its own in other storage go where gradtrack's go by default."""
    monkeypatch.chdir(tmp_path)
    callback = GradientStatisticsCallback(1)
    fit(callback, tmp_path, default_root_dir=address)
    assert [path.name for path in tmp_path.iterdir()] == ["gradtrack_runs"]
    assert len(callback.reports) == 6
    assert f"the trainer's directory {address} is not on this machine" in caplog.text


def test_an_address_of_this_machine_is_a_directory(tmp_path: Path) -> None:
    """A `file://` address is the directory that it names."""
    fit(GradientStatisticsCallback(1), tmp_path, default_root_dir=(tmp_path / "root").as_uri())
    assert (tmp_path / "root" / "gradient_statistics.json").is_file()


def test_a_copy_is_no_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    """A rollback goes back to the step of the last checkpoint, though the callback was copied since."""

    class Spiking(Tagger):
        """A training whose sixteenth loss is far above the others."""

        def training_step(self, batch: Any, index: int) -> Tensor:
            """Copy the callback a few steps before."""
            if self.global_step == 12:
                copy.deepcopy(callback)
            return super().training_step(batch, index) * (1e4 if self.global_step == 15 else 1.0)

        def on_train_start(self) -> None:
            """Register what would load a checkpoint."""
            callback.manager.on_rollback(lambda step, report: calls.append(step))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Measure nothing, as the gradients of a step that is left out are gone."""

    callback, calls = GradientStatisticsCallback(spike_action="rollback", spike_window=8), list[int]()
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=10)
    callbacks = {"callbacks": [callback, saving], "enable_checkpointing": True}
    fit(None, tmp_path, module=Spiking(), data=same_batches(), max_steps=18, **callbacks)
    assert calls == [10]


def test_a_trainer_is_pickled_and_copied_after_its_training(tmp_path: Path) -> None:
    """A copy has no manager of its own, and its training goes on where that of the first one ended."""
    callback = GradientStatisticsCallback(1)
    _, trainer = fit(callback, tmp_path, max_steps=3)
    pickle.dumps(trainer)
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        (ours,) = (one for one in copied.callbacks if isinstance(one, GradientStatisticsCallback))
        assert ours.reports == []
        copied.fit_loop.epoch_loop.max_steps = 6
        copied.fit(copied.lightning_module, loader())
        assert [report.step for report in ours.reports][-1] == 6
    assert len(callback.reports) == 3


@pytest.mark.parametrize("automatic", [True, False])
def test_a_module_steps_on_after_its_training(automatic: bool, tmp_path: Path) -> None:
    """A step of Lightning's optimizer after `fit` reaches callbacks too, whose manager is closed by then."""
    callback = GradientStatisticsCallback(1)
    module, _ = fit(callback, tmp_path, module=Tagger() if automatic else Game())
    before, num_reports = [param.detach().clone() for param in module.parameters()], len(callback.reports)
    if automatic:
        x, _ = next(iter(loader()))
        module.readout(module.rnn(x)[0]).sum().backward()
        module.optimizers().step()
    else:
        module.training_step(next(iter(loader())), 0)
    assert not all(map(torch.equal, before, module.parameters()))
    assert len(callback.reports) == num_reports


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_bad_batch_is_captured_and_named(accumulated: int, tmp_path: Path) -> None:
    """A batch that a step is made from is looked at and kept; of several none is, since each would be all of them."""
    x, y = torch.randn(24, 5, 3), torch.zeros(24, 5, 2)
    y[4 * 4 + 2, 1, 0] = math.nan  # in the targets of the fifth batch, which the model never sees
    batches = DataLoader(TensorDataset(x, y), batch_size=4)
    callback = GradientStatisticsCallback(run_dir=str(tmp_path), capture="nonfinite", save_gradient_plots=False)
    fit(callback, tmp_path, data=batches, max_steps=-1, max_epochs=1, accumulate_grad_batches=accumulated)
    path = min(tmp_path.glob("capture-*"))
    found = [issue.message for report in callback.reports for issue in report.health.issues]
    assert any("batch[1] has 1 NaN at [2, 1, 0]" in text for text in found) == (accumulated == 1)
    if accumulated == 1:
        made = replay_step(path, lambda: (Unlogged(), lambda module, batch: module.training_step(batch, 0)))
        assert made.same_loss
        assert made.origin is not None
        assert "nan" in str(made.loss)


class Unlogged(Tagger):
    """The same without a trainer to log to."""

    def log(self, *given: Any, **options: Any) -> None:
        """Say nothing."""
