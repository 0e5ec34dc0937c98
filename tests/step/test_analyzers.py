"""Running analyzers see every step that their hooks were registered for, and leave no hook on the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from gradtrack import GradientManager, StepReport
from gradtrack.analyzers.base import Analyzer, Snapshot
from gradtrack.analyzers.flow import GradientFlowAnalyzer
from gradtrack.analyzers.jacobian import JacobianAnalyzer
from gradtrack.analyzers.transformer import TransformerAnalyzer
from gradtrack.errors import UsageError
from gradtrack.step.analyzers import RunningAnalyzers, build_analyzers


def num_hooks(model: nn.Module) -> int:
    """Count the hooks of a model and those that every module has."""
    own = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    return own + len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)


@pytest.mark.parametrize("step", [5, 8])
def test_hooks_for_a_step_that_does_not_come_are_removed(step: int) -> None:
    """Counting steps anew while hooks are registered for the next one leaves them on the model once, or not at all."""
    model = nn.TransformerEncoderLayer(8, 2, 16)
    live = RunningAnalyzers({"flow": GradientFlowAnalyzer(), "transformer": TransformerAnalyzer()})
    live.arm(model, 4)
    once = num_hooks(model)
    assert once > 0
    live.arm(model, step)
    assert num_hooks(model) == (once if step == 8 else 0)
    live.close()
    assert num_hooks(model) == 0


def test_an_alert_does_not_take_back_the_one_before() -> None:
    """An analyzer with hooks on a step runs on it, though another alert came on that step."""
    live = RunningAnalyzers({"jacobian": JacobianAnalyzer()})
    live.alert(21)
    assert not live.due(20)
    live.alert(22)
    assert live.due(21)
    assert live.due(22)
    live.alert(40)
    live.alert(41)
    assert not live.due(21)


class Block(nn.Module):
    """A block on which every analyzer has something to report."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.read = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        found: Tensor = x + self.read(self.rnn(x)[0]).tanh()
        return found


def looks(names: list[Any]) -> dict[str, Any]:
    """Train eight steps beside analyzers, in their order, and return the reports of the last."""
    return dict(train(names, 8)[-1].analyzers)


def train(names: list[Any], steps: int) -> list[StepReport]:
    """Train some steps beside analyzers, in their order, and return the reports."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block() for _ in range(3))), torch.randn(3, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=names) as manager:
        manager.attach(model, optimizer)
        if "vector" in names:
            observer: Any = manager.analyzer("vector")
            observer.observe(lambda: model(3 * batch).pow(4).sum())
        for _ in range(steps):
            optimizer.zero_grad()
            manager.step(model, optimizer, model(batch).square().mean())
            optimizer.step()
    return manager.reports


@pytest.mark.parametrize("name", ["flow", "gain", "jacobian", "recurrent", "transformer"])
def test_no_analyzer_hears_what_another_one_runs(name: str) -> None:
    """After one that runs the model again, or blocks of it, an analyzer reports what it reports alone."""
    others = [other for other in ("vector", "jacobian", "recurrent") if other != name]
    assert looks([*others, name])[name] == looks([name])[name]


@pytest.mark.parametrize("name", ["flow", "gain", "jacobian", "recurrent", "transformer", "updates", "vector"])
def test_every_is_the_cadence_of_an_analyzer(name: str) -> None:
    """Its reports are of every third step, wherever its own schedule has them."""
    of_steps = [
        getattr(report.analyzers[name], "step", None) or report.step
        for report in train([{"name": name, "every": 3}], 14)
        if name in report.analyzers
    ]
    found = sorted({step for step in of_steps if step > 1})  # flow looks at the very first step as well
    assert found == [3, 6, 9, 12]


def test_an_alert_makes_an_analyzer_look_whatever_its_cadence() -> None:
    """After a jump it looks at the next step; the cheap looks of the steps after that are those of schedules only."""
    live = RunningAnalyzers(build_analyzers([{"name": "gain", "every": 50}]))
    live.alert(101)
    assert [step for step in range(98, 151) if live.due(step)] == [100, 101, 150]


class Stretched(Analyzer):
    """An analyzer with an option of its own that is called every."""

    def __init__(self, every: str = "") -> None:
        self.every = every

    def inspect(self, snapshot: Snapshot) -> None:
        """Find nothing."""


def test_every_is_an_analyzers_own_option_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that takes the option gets it."""
    monkeypatch.setattr("gradtrack.registry.Registry._from_file", lambda *_: Stretched)
    monkeypatch.setattr("gradtrack.registry.analyzers._loaded", {})
    found: Any = build_analyzers([{"name": "flow", "every": "day"}])["flow"]
    assert (found.every, found.looks_every) == ("day", None)


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "10"])
def test_a_cadence_is_a_number_of_steps(every: Any) -> None:
    """Anything else is refused with what to write."""
    with pytest.raises(UsageError, match=r"analyzer 'gain': every = .*: expected a number of steps"):
        build_analyzers([{"name": "gain", "every": every}])


def test_a_misspelt_cadence_is_told() -> None:
    """The nearest option is named."""
    with pytest.raises(UsageError, match="Did you mean 'every'"):
        build_analyzers([{"name": "gain", "evry": 10}])
