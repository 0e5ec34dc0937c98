"""Where numbers that are not finite come from: one answer, in a diagnosis and in the issues of the run."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD

import gradtrack
from gradtrack import GradientManager, Issue, safe_backward
from gradtrack.pages.issues import Episode
from gradtrack.pages.run_data import load_run


def network() -> nn.Sequential:
    """Return a perceptron with a tanh."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def train(
    run: Path, *, bad: range, hot: range = range(0), steps: int = 160, batch: bool = False
) -> tuple[list[Issue], list[Episode]]:
    """Train with NaN in the inputs of some steps, and a rate that is far too high on some."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with GradientManager(run_dir=str(run), analyzers=["flow"], save_gradient_plots=False) as manager:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = 300.0 if step in hot else 0.1
            x = torch.randn(32, 8)
            if step in bad:
                x[3, 4] = math.nan
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x[:, :3].nan_to_num())
            safe_backward(loss, model, optimizer, manager, batch=x if batch else None)
            optimizer.step()
        found = manager.diagnose()
    return found, load_run(run).episodes


def test_nan_in_the_data_follows_from_nothing(tmp_path: Path) -> None:
    """A rate that was too high before explains no NaN in a batch; the NaN in the gradients follows from that one."""
    for batch in (False, True):
        found, episodes = train(tmp_path / str(batch), bad=range(60, 63), hot=range(20, 50), batch=batch)
        causes = [issue for issue in found if issue.issue_type.value == "NUMERICAL" and issue.explained_by is None]
        assert {issue.statistic for issue in causes} == {"nonfinite_batch" if batch else "nonfinite_input"}
        kinds = [[one.key for one in (episode.cause, *episode.effects)] for episode in episodes]
        (own,) = (keys for keys in kinds if "NUMERICAL:0" in keys)
        assert set(own) == {"NUMERICAL:0", "NUMERICAL"}


def test_an_origin_closes_with_a_sound_sample_and_stays_in_the_diagnosis(tmp_path: Path) -> None:
    """A batch of NaN at step 30 is no open issue a hundred steps later, and still the first thing to be told."""
    found, episodes = train(tmp_path, bad=range(30, 33))
    assert found[0].key == "NUMERICAL:0"
    assert "input 0 of the model has 1 NaN at [3, 4]" in found[0].message
    (episode,) = episodes
    assert not episode.is_open
    assert max(end or math.inf for one in (episode.cause, *episode.effects) for _, end in one.spans) < 50


def test_weights_that_are_nan_are_the_work_of_an_earlier_step(tmp_path: Path) -> None:
    """A loop that steps with NaN has NaN weights; the step that had them first is told first, everywhere."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager = gradtrack.watch(model, optimizer, analyzers=["flow"], run_dir=str(tmp_path), save_gradient_plots=False)
    for step in range(1, 61):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8)).square().mean()
        (loss * math.nan if step == 37 else loss).backward()
        optimizer.step()
    manager.close()
    first, *others = manager.diagnose()
    assert (first.key, first.step) == ("NUMERICAL", 37)
    assert all(issue.explained_by == "NUMERICAL" for issue in others)
    assert any("since 0.weight is already" in issue.message for issue in others)
    (episode,) = load_run(tmp_path).episodes
    assert (episode.cause.key, episode.cause.first_step) == ("NUMERICAL", 37)


def test_an_offline_analysis_tells_of_a_batch_in_the_middle() -> None:
    """Of batches that were looked at on purpose none is forgotten because later ones are sound."""
    model, number = network(), 0

    def batch() -> torch.Tensor:
        nonlocal number
        number += 1
        return torch.full((4, 8), math.nan if number == 5 else 1.0)

    analyzer = gradtrack.GradientFlowAnalyzer(model)
    found = analyzer.analyze(batch, lambda out: out.square().mean(), steps=12)
    assert [issue.key for issue in found if issue.issue_type.value == "NUMERICAL"] == ["NUMERICAL:0"]
