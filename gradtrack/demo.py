"""A short training of a small recurrent network with several time constants, watched by gradtrack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack import registry
from gradtrack.cli.plugins import missing_packages
from gradtrack.config import GradientConfig
from gradtrack.delivery.run_files import new_run_id
from gradtrack.loop import safe_backward
from gradtrack.manager import GradientManager
from gradtrack.pages.paths import listing, quoted, ways_to_open
from gradtrack.reports import TrainingSummary
from gradtrack.support.progress import counted

TIME_CONSTANTS: Final = (2.0, 8.0, 32.0)
_BACKENDS: Final = ("json", "tensorboard")


class LeakyCell(nn.Module):
    """Leaky units: each moves towards its input at the speed of its own time constant.

    With the step `dt = 1`, `h' = (1 - a) * h + a * tanh(W_in x + W_rec h)` where `a = 1 / time_constant`.
    """

    rate: Tensor

    def __init__(self, input_size: int, hidden_size: int, time_constants: Sequence[float]) -> None:
        super().__init__()
        self.W_in = nn.Linear(input_size, hidden_size, bias=False)
        self.W_rec = nn.Linear(hidden_size, hidden_size)
        constants = torch.tensor(time_constants).repeat(hidden_size // len(time_constants) + 1)[:hidden_size]
        self.register_buffer("rate", 1.0 / constants.sort().values)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the next state."""
        return hidden + self.rate * (torch.tanh(self.W_in(x) + self.W_rec(hidden)) - hidden)


class MultiTimescaleRNN(nn.Module):
    """A leaky recurrent network: an encoder of the initial state, units of several time constants, and a readout."""

    def __init__(
        self,
        input_size: int = 2,
        hidden_size: int = 48,
        output_size: int = 6,
        *,
        time_constants: Sequence[float] = TIME_CONSTANTS,
    ) -> None:
        super().__init__()
        self.W_h_init = nn.Linear(output_size, hidden_size)
        self.cell = LeakyCell(input_size, hidden_size, time_constants)
        self.W_out = nn.Linear(hidden_size, output_size)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        """Return the outputs of every time step; `context` is what the state starts from."""
        hidden = torch.tanh(self.W_h_init(context))
        states = []
        for x in inputs.unbind(1):
            hidden = self.cell(x, hidden)
            states.append(hidden)
        outputs: Tensor = self.W_out(torch.stack(states, 1))
        return outputs


def running_averages(
    *, batch_size: int = 32, length: int = 40, time_constants: Sequence[float] = TIME_CONSTANTS, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Generate batches of noise, where each average starts, and the averages: two signals at every time constant."""
    generator = torch.Generator().manual_seed(seed)
    rates = (1.0 / torch.tensor(time_constants)).repeat_interleave(2)
    while True:
        inputs = torch.randn(batch_size, length, 2, generator=generator)
        average = context = torch.randn(batch_size, len(rates), generator=generator) * 0.5
        targets = []
        for x in inputs.unbind(1):
            average = average + rates * (x.repeat(1, len(time_constants)) - average)
            targets.append(average)
        yield inputs, context, torch.stack(targets, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The settings of the demo's training; the names are the keys of its YAML file."""

    hidden_size: int = 48
    time_constants: Sequence[float] = TIME_CONSTANTS
    sequence_length: int = 40
    batch_size: int = 32
    learning_rate: float = 3e-3
    steps: int = 300
    seed: int = 0
    bad_batch_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a training: losses, summary, issues, skipped steps and where its files are."""

    run_dir: Path | None
    losses: list[float]
    summary: TrainingSummary
    issues: list[str]
    skipped: list[int]

    def describe(self) -> str:
        """Return the findings, the files and how to open each, as text."""
        steps, norms = self.summary.total_steps, self.summary.gradient_statistics.gradient_norms
        first, last = _mean(self.losses[: steps // 10]), _mean(self.losses[-(steps // 10) :])
        lines = [
            f"Trained for {steps} steps: the loss went from {first:.4f} to {last:.4f}.",
            f"Gradient norm {norms.mean:.3f} on average, {norms.min:.3f} to {norms.max:.3f}; "
            f"{self.summary.clipping_summary.clip_rate:.0%} of the steps were clipped.",
            *(f"Step {step} was skipped: its gradients were not finite." for step in self.skipped),
            "Issues that opened:" if self.issues else "No issue opened.",
            *(f"  {issue}" for issue in self.issues),
        ]
        if self.run_dir is not None:
            lines += ["", f"Files in {quoted(self.run_dir)}:"]
            lines += [f"  {line}" for line in listing(self.run_dir)]
            lines += ["", f"See it in the terminal: gradtrack show {quoted(self.run_dir)}"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        files = [] if self.run_dir is None else ways_to_open(self.run_dir)
        return {
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "skipped_steps": self.skipped,
            "issues": self.issues,
            "summary": self.summary.model_dump(mode="json"),
            "files": [str(path) for path, _ in files],
        }


def run(run_dir: Path | None = None, *, steps: int = 300) -> Finding:
    """Train for a short while, with one bad batch two thirds of the way."""
    directory = run_dir if run_dir is not None else Path("gradtrack_runs") / f"demo-{new_run_id()}"
    return train(TrainingSettings(steps=steps, bad_batch_at=steps * 2 // 3), demo_config(directory))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def train(settings: TrainingSettings, config: GradientConfig | Mapping[str, Any]) -> Finding:
    """Train the network on running averages, with a progress bar where a person is looking."""
    threads = torch.get_num_threads()
    # For tensors this small, more threads cost more than they bring, most of all on a machine that is busy.
    torch.set_num_threads(1)
    try:
        return _train(settings, config)
    finally:
        torch.set_num_threads(threads)


def _train(settings: TrainingSettings, config: GradientConfig | Mapping[str, Any]) -> Finding:
    torch.manual_seed(settings.seed)
    constants = settings.time_constants
    model = MultiTimescaleRNN(2, settings.hidden_size, 2 * len(constants), time_constants=constants)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    batches = running_averages(
        batch_size=settings.batch_size, length=settings.sequence_length, time_constants=constants, seed=settings.seed
    )
    losses: list[float] = []
    issues: list[str] = []
    with GradientManager(config) as manager:
        manager.on_issue(lambda issue, report: issues.append(f"step {report.step}: {issue}"))
        manager.attach(model, optimizer, horizon=settings.sequence_length)
        for step in counted(range(1, settings.steps + 1), "Training", total=settings.steps):
            inputs, context, targets = next(batches)
            if step == settings.bad_batch_at:
                inputs[0, 0, 0] = torch.inf
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs, context), targets)
            safe_backward(loss, model, optimizer, manager)
            optimizer.step()
            losses.append(float(loss.detach()))
        if manager.run_dir is not None:
            manager.save_training_log(manager.run_dir / "training_log.json")
        skipped = [report.step for report in manager.reports if report.skipped]
        summary = manager.get_training_summary()
    return Finding(run_dir=manager.run_dir, losses=losses, summary=summary, issues=issues, skipped=skipped)


def demo_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of the demo: local backends that can run here, and analyzers that suit the network."""
    backends = registry.backends.names()
    return {
        "run_dir": run_dir,
        "backends": [name for name in _BACKENDS if name in backends and not missing_packages(name)],
        "analyzers": "auto",
        # The native engine is faster, but compiles itself for half a minute when it is used for the first time.
        "engine": "torch",
        "grad_log_every_n_steps": 1,
        "max_grad_norm": 0.1,
        "save_html_report": True,
    }
