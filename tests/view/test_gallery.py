"""Which pictures a training leaves, and what is on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, RLPolicyAnalyzer, StepReport
from gradtrack.record.naming import file_part
from gradtrack.view import depth, panels
from gradtrack.view.gallery import flow_of, pictures_of
from tests.view.runs import issue, report, unhealthy
from tests.view.test_plots import GROUP

OWN = {"gradient_statistics.png", "gradient_stats.png", "gradient_flow.png"}


def train(model: nn.Module, analyzer: Any, inputs: Callable[[], torch.Tensor]) -> list[StepReport]:
    """Train for nine steps and return the reports."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = GradientManager(analyzers=[analyzer])
    manager.attach(model, optimizer, horizon=7)
    for _ in range(9):
        optimizer.zero_grad()
        output = model(inputs())
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(analyzer, RLPolicyAnalyzer):
            analyzer.observe(output, episode_return=3.0)
        manager.step(model, optimizer, output.square().mean())
        optimizer.step()
    return manager.reports


def drawn(reports: list[StepReport], name: str, plot: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a picture is drawn from."""
    calls: list[Any] = []

    def keep(*values: Any, **options: Any) -> Path:
        calls.append((*values, options))
        return Path()

    monkeypatch.setattr(panels if hasattr(panels, plot) else depth, plot, keep)
    pictures_of(reports, [])[name](Path("picture.png"))
    (call,) = calls
    return call


def test_the_flow_is_that_of_the_groups() -> None:
    """Each group has its norm at every step, none where nothing was finite, and an issue is marked at its group."""
    group = {name: {**GROUP, "norm": size} for name, size in (("encoder", 2.0), ("head", 3.0))}
    bad = {**group, "head": {**GROUP, "norm": 0.0, "element_count": 2, "nan_count": 2}}
    steps, norms, issues = flow_of(
        [report(1, groups=group), report(2, groups=bad, health=unhealthy(issue("encoder.weight")))]
    )
    assert norms == {"encoder": [2.0, 2.0], "head": [3.0, None]}
    assert (steps, issues) == ([1, 2], [(2, "encoder", "EXPLODING")])


def test_pairs_have_pictures_of_their_own(tmp_path: Path) -> None:
    """Pairs share their curves, and each has its statistics and flow in files named after it and no other."""
    reports = [report(step, source=name) for step in (1, 2, 3) for name in ("net/a", "net a", "critic")]
    pictures = pictures_of(reports, [])
    pairs = (file_part("net/a"), file_part("net a"), "critic")
    owned = {name.replace(".png", f".{pair}.png") for name in OWN for pair in pairs}
    assert set(pictures) == {"training_curves.png", *owned}
    assert len(owned) == 3 * len(OWN)
    assert all(draw(tmp_path / name).is_file() for name, draw in pictures.items())


def test_a_training_without_analyzers_has_the_usual_pictures() -> None:
    """Without analyzers there are the curves, the statistics and the flow."""
    assert set(pictures_of([report(1)], [])) == {"training_curves.png", *OWN}


def test_recurrent_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigenvalues are those of the state Jacobian: of the radius that is reported, around the decay it causes."""
    torch.manual_seed(0)
    reports = train(nn.RNN(2, 6, batch_first=True), "recurrent", lambda: torch.randn(3, 12, 2))
    values, _, options = drawn(reports, "recurrent_spectrum.png", "plot_recurrent_spectrum", monkeypatch)
    found = [one.analyzers["recurrent"] for one in reports if "recurrent" in one.analyzers][-1]
    (cell,) = found["cells"].values()
    low, high = cell.spectral_radius_range
    assert len(values) == 6
    assert low <= max(map(abs, values)) <= high
    assert options["horizon"] == 7
    assert options["decay"] == cell.decay_profile[1:]
    assert options["memory_length"] == cell.effective_memory_length
    assert options["state_size"] == 6


def test_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gains are drawn, named by their blocks without what all names begin with."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    reports = train(nn.ModuleDict({"body": blocks})["body"], "gain", lambda: torch.randn(5, 4))
    gains, _, options = drawn(reports, "gradient_gain.png", "plot_gain", monkeypatch)
    assert gains == [one.analyzers["gain"] for one in reports if "gain" in one.analyzers][-1]["gains"]
    assert options["names"] == ["0 to 1", "1 to 2"]


def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head of every layer has its entropy."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    reports = train(model, "transformer", lambda: torch.randn(2, 6, 8))
    entropy, _, options = drawn(reports, "attention_entropy.png", "plot_attention_entropy", monkeypatch)
    assert [len(heads) for heads in entropy] == [2, 2, 2]
    assert all(0.0 < value <= 1.0 for heads in entropy for value in heads)
    assert options["names"] == [f"layers.{index}.self_attn" for index in range(3)]


def test_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalized entropy of every look is drawn with the returns of that time and its floor."""
    actor = nn.Linear(3, 4)
    nn.init.zeros_(actor.weight)
    nn.init.zeros_(actor.bias)
    reports = train(actor, RLPolicyAnalyzer(actor), lambda: torch.randn(5, 3))
    steps, entropy, _, options = drawn(reports, "policy_entropy.png", "plot_policy", monkeypatch)
    assert steps == [step for step in range(1, 10) if "rl_policy" in reports[step - 1].analyzers]
    assert entropy[0] == pytest.approx(1.0)
    assert options["returns"] == [3.0] * len(steps)
    assert options["floor"] == 0.1
    assert math.isfinite(sum(entropy))
