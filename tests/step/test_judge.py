"""The judge of one pair's steps."""

import json
import math

import torch

from gradtrack import GradientConfig, GradientMonitor, Issue, IssueSeverity, IssueType
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.reports import HealthReport
from gradtrack.step.data import StepData
from gradtrack.step.judge import Judge
from tests.training import with_gradients


def judge_of(**settings: object) -> Judge:
    """Return a judge that has judged no step."""
    config = GradientConfig.load(None, **settings)
    return Judge(config, GradientMonitor(config))


def judge(made: Judge, step: int, value: float) -> StepData:
    """Judge a step whose only gradient is this number."""
    grads = ParameterTable(with_gradients([torch.tensor([value])])).gradients()
    data = StepData(grads.layout, {})
    data.step, data.nan_inf = step, {"action": "report"}
    made.judge(grads.measure(Measurer("torch")), data, critical=False)
    return data


def issue(layer: str) -> Issue:
    """Return an issue as an analyzer would give it."""
    return Issue(
        issue_type=IssueType.VANISHING, severity=IssueSeverity.HIGH, layer=layer, message="", recommendation=""
    )


def test_a_streak_of_nonfinite_steps_is_one_event() -> None:
    """The first non-finite step is an event of its own, and the harm is known after it is over."""
    made = judge_of()
    events = [judge(made, step, value).event for step, value in enumerate([1.0, math.nan, math.nan, math.nan], 1)]
    assert events == [False, True, False, False]
    for step in range(5, 200):
        judge(made, step, 1.0)
    assert made.health.healthy
    assert [found.issue_type for found in made.diagnose([])] == [IssueType.NUMERICAL]


def test_issues_of_analyzers_stay_until_they_are_set_again() -> None:
    """Issues of the analyzers open on the next step, once, unless their layer is muted."""
    made = judge_of(mute=["quiet"])
    made.set_analyzer_issues([issue("loud"), issue("quiet")])
    first, second = judge(made, 1, 1.0), judge(made, 2, 1.0)
    assert [found.layer for found in first.opened] == ["loud"]
    assert second.opened == []
    assert [found.layer for found in second.issues] == ["loud"]
    made.set_analyzer_issues([])
    assert judge(made, 3, 1.0).issues == []


def test_without_monitoring_nothing_is_judged() -> None:
    """With monitoring off a step is healthy whatever the analyzers said."""
    made = judge_of(enable_gradient_monitoring=False)
    made.set_analyzer_issues([issue("loud")])
    outcome = judge(made, 1, 1.0)
    assert outcome.health == HealthReport()
    assert not outcome.issues


def test_state_comes_back() -> None:
    """A restored judge knows the open issues, so that they do not open again."""
    made, later = judge_of(), judge_of()
    judge(made, 1, math.nan)
    later.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert later.health == made.health
    outcome = judge(later, 2, math.nan)
    assert (outcome.opened, outcome.event) == ([], False)
