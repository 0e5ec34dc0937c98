"""The judge of one pair's steps."""

import json
import math

import pytest
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


def judge(made: Judge, step: int, value: float, loss: float | None = None) -> StepData:
    """Judge a step whose only gradient is this number."""
    grads = ParameterTable(with_gradients([torch.tensor([value])])).gradients()
    data = StepData(grads.layout, {})
    data.step, data.loss, data.nan_inf = step, loss, {"action": "report"}
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


@pytest.mark.parametrize("kind", [IssueType.RANK_COLLAPSE, IssueType.ATTN_ENTROPY_COLLAPSE, IssueType.DEAD])
@pytest.mark.parametrize("falls", [True, False])
def test_a_collapse_from_which_the_run_never_recovered_stays_in_the_diagnosis(kind: IssueType, falls: bool) -> None:
    """It is closed when it is not found any more, and named while the loss has not come down since."""
    made = judge_of()
    for step in range(1, 81):
        if step in (33, 65):
            made.set_analyzer_issues(
                [issue("loud").model_copy(update={"issue_type": kind, "step": step})] * (step == 33)
            )
        judge(made, step, 1.0, loss=2.0 / step if falls else 2.0)
    restored = judge_of()
    restored.load_state_dict(json.loads(json.dumps(made.state_dict())))
    stays = kind is not IssueType.DEAD and not falls
    for one in (made, restored):
        assert one.health.healthy
        assert [found.issue_type for found in one.diagnose([])] == [kind] * stays


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
