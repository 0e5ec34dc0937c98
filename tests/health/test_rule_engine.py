"""Steps on which nothing can open are judged together later, which nobody notices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradtrack import GradientConfig, GradientMonitor
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, empty_row
from gradtrack.health.rule import MOST_WAITING, TENFOLD, Band, CalmStep, Evidence, Rule
from gradtrack.health.rule_engine import RULES, Health
from gradtrack.health.rules.spike import SpikeRule
from gradtrack.protection.clipping import coefficient_for
from gradtrack.reports import Issue, IssueSeverity, IssueType, StepReport
from gradtrack.step.data import Outcome, StepFacts
from gradtrack.step.judge import Judgement

LAYOUT = Layout(["a"], [], [4], np.zeros(1, dtype=np.int64), ["all"], [])
Run = list[tuple[float, float | None]]
"""The norm and the loss of each step."""

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 1.0},
    {"max_grad_norm": 0.02},
    {"max_grad_norm": 1e-4, "clip_type": "value"},
    {"max_grad_norm": 0.02, "clip_type": "agc"},
    {"vanishing_threshold": 1e-2},
    {"exploding_threshold": 30.0},
    {"mute": ["EXPLODING"]},
]


class EachAtOnce(Judgement):
    """A judgement for which no step may wait."""

    def _is_calm(self, norm: float, facts: StepFacts) -> bool:
        return False


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A norm that is quiet at first, then wanders, jumps, climbs or falls, with a loss that is known or not."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    log_norm, found = draw(st.sampled_from((0.0, -20.0, 3.0))), list[tuple[float, float | None]]()
    for number in range(draw(st.integers(1, 6))):
        noise = draw(st.sampled_from((0.0, 0.05, 0.7, 1.5, 4.0))) if number else 0.05
        slope = draw(st.sampled_from((0.0, 0.0, -0.2, 0.2, 1.0, 2.0, -2.0))) if number else 0.0
        jump = draw(st.sampled_from((0.0, 0.0, -9.3, 1.4, 2.2, 2.4, 4.0, math.nan, -math.inf))) if number else 0.0
        level = draw(st.sampled_from((None, 1.0, 0.05, math.nan)))
        for index in range(draw(st.sampled_from((1, 5, 20, 40))) if number else 40):
            at = log_norm + noise * random.standard_normal() + (jump if not index else 0.0)
            log_norm += slope if index < 5 else 0.0
            loss = None if level is None else level * (1 + 0.3 * random.standard_normal())
            found.append((math.nan if math.isnan(at) else math.exp(at), loss))
        log_norm += draw(st.sampled_from((0.0, jump if math.isfinite(jump) else 0.0)))
    return found


def outcome_of(step: int, norm: float, loss: float | None, config: GradientConfig) -> tuple[Moments, Outcome]:
    """Return a step with this norm, measured and protected."""
    row = empty_row()
    row[1 if math.isfinite(norm) else 5] = norm * norm if math.isfinite(norm) else 1.0
    rows = np.array([row])
    moments, facts = Moments(rows, rows, list(row)), StepFacts(LAYOUT, {})
    facts.loss, facts.nan_inf = loss, {"action": "none" if moments.finite else "skip"}
    if moments.finite:  # of single elements far less is clipped
        limit = config.max_grad_norm * (1.0 if config.clip_type == "norm" else 200.0)
        facts.clipping = {**coefficient_for(moments.norm, limit, 1e-6), "threshold": config.max_grad_norm}
    outcome = Outcome(facts)
    outcome.report = StepReport.deferred(dict, step=step)
    return moments, outcome


def verdicts(
    kind: type[Judgement], run: Run, chosen: dict[str, Any], changes: Mapping[int, tuple[str, Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Return what each step was found to be, and what is remembered in the end.

    After some steps a setting is changed, or a checkpoint is made.
    """
    config = GradientConfig(**chosen)
    made, found = kind(config, GradientMonitor(config)), []
    for step, (norm, loss) in enumerate(run, 1):
        moments, outcome = outcome_of(step, norm, loss, config)
        made.judge(moments, outcome, critical=False)
        found.append((outcome.event, list(outcome.issues), list(outcome.opened), outcome.facts.health))
        if step in changes and changes[step][0]:
            setattr(config, *changes[step])
        elif step in changes:
            made.state_dict()
    return found, made.state_dict()


CHANGES = [
    ("", None),
    ("max_grad_norm", 0.05),
    ("clip_type", "agc"),
    ("clip_type", "norm"),
    ("exploding_threshold", 2.0),
    ("vanishing_threshold", 1e-3),
]
QUIET: Run = [(1.0, 1.0)] * 50


@settings(max_examples=150, deadline=None)
@given(runs(), st.sampled_from(SETTINGS), st.dictionaries(st.integers(30, 120), st.sampled_from(CHANGES), max_size=3))
@example([*QUIET, (1.0, 1.0), (11.0, 1.0), *QUIET], {}, {})
@example([(2.0, 1.0)] * 80, {"max_grad_norm": 0.02}, {})
@example([*QUIET, *[(4.0, 1.0)] * 20], {"max_grad_norm": 0.02}, {})
@example([*QUIET[10:], *[(1.0, 0.05), (2e-4, 0.05)] * 8, *QUIET[:14]], {}, {})
@example([*QUIET, (5.0, 1.0), (22.0, 1.0), (90.0, 1.0)], {}, {})
@example([*QUIET, *[(0.15**step, 1.0) for step in range(1, 8)], *[(0.15**7, 1.0)] * 9], {}, {})
@example([(3.0 if step % 2 else 0.31, None) for step in range(120)], {}, {})
@example([*QUIET, *[(0.15, 1.0)] * 29, (0.6, 1.0), (3.4, 1.0), (3.4, 1.0)], {}, {65: ("", None)})
@example([(5.0, 1.0)] * 140, {"max_grad_norm": 0.01, "clip_type": "agc"}, {60: ("clip_type", "norm")})
def test_a_step_that_waits_is_judged_as_if_it_had_not(
    run: Run, chosen: dict[str, Any], changes: dict[int, tuple[str, Any]]
) -> None:
    """Every step has the same issues, events and health, and what the rules remember in the end is the same."""
    waiting, at_once = (verdicts(kind, run, chosen, changes) for kind in (Judgement, EachAtOnce))
    np.testing.assert_equal(waiting[0], at_once[0])
    np.testing.assert_equal(waiting[1], at_once[1])


@given(st.lists(st.floats(-9, 9), min_size=34, max_size=60), st.lists(st.floats(-99, -9), max_size=MOST_WAITING - 1))
def test_a_median_is_not_lowered_further_than_the_band_allows_for(window: list[float], lower: list[float]) -> None:
    """A norm within the band is no ten times it, however low the steps were that waited before."""
    rule, config = SpikeRule(), GradientConfig()
    for log_norm in window:
        rule.window.push(log_norm)
    rule.first_norms, rule.last = [0.0] * 8, window[-1]
    band = rule.calm(config)
    assert band is not None
    for log_norm in lower:
        rule.window.push(log_norm)
    assert band[1] < rule.window.median + TENFOLD


def test_what_an_analyzer_takes_back_is_an_event() -> None:
    """The step after it is judged at once, since an issue closes there."""
    config = GradientConfig()
    made = Judgement(config, GradientMonitor(config))
    for step in range(1, 60):
        made.judge(*outcome_of(step, 1.0, 1.0, config), critical=False)
    issue = Issue(issue_type=IssueType.DEAD, severity=IssueSeverity.HIGH, layer="a", message="")
    events = []
    for heard in ([issue], [], []):
        made.hear(heard)
        moments, outcome = outcome_of(60, 1.0, 1.0, config)
        made.judge(moments, outcome, critical=False)
        events.append((outcome.event, outcome.facts.health.healthy))
    assert events == [(True, False), (True, True), (False, True)]


def test_most_steps_of_a_quiet_run_wait() -> None:
    """Where the norm stays within a factor of ten from step to step, rules are asked about a few steps only."""
    random, asked = np.random.default_rng(0), list[int]()
    run: Run = [(float(np.exp(random.normal(-step / 100, 0.5))), 1.0) for step in range(300)]

    class Counting(GradientMonitor):
        def judge(self, evidence: Evidence) -> list[Issue]:
            asked.append(evidence.step)
            return super().judge(evidence)

    config = GradientConfig()
    made = Judgement(config, Counting(config))
    for step, (norm, loss) in enumerate(run, 1):
        made.judge(*outcome_of(step, norm, loss, config), critical=False)
    assert len(asked) < 100


def test_a_limit_that_is_set_on_the_way_counts_at_once() -> None:
    """The bounds keep to the absolute limits that there were, and are not used with others."""
    config = GradientConfig()
    made = Judgement(config, GradientMonitor(config))
    for step in range(1, 60):
        made.judge(*outcome_of(step, 1.0, 1.0, config), critical=False)
    config.exploding_threshold = 0.5
    moments, outcome = outcome_of(60, 1.0, 1.0, config)
    made.judge(moments, outcome, critical=False)
    assert [issue.threshold for issue in outcome.opened] == [0.5]


def test_a_monitor_that_is_asked_has_seen_every_step() -> None:
    """Gradients are judged against the steps that wait, too, which wait no more after that."""
    config = GradientConfig()
    monitor = GradientMonitor(config)
    made = Judgement(config, monitor)
    for step in range(1, 45):
        made.judge(*outcome_of(step, 1.0, 1.0, config), critical=False)
    monitor.check_gradient_health([torch.ones(2)])
    rule = monitor.health._rules["spike"]
    assert isinstance(rule, SpikeRule)
    assert len(rule.window) == 44
    assert monitor.state_dict()["health"]["spike"]["window"] == [0.0] * 44


def test_steps_that_wait_are_gone_with_a_state_that_is_loaded() -> None:
    """What a rule remembers is what was saved, and the bounds are found anew."""
    config = GradientConfig()
    saved, made = (Judgement(config, GradientMonitor(config)) for _ in range(2))
    for step in range(1, 45):
        saved.judge(*outcome_of(step, 7.0, 1.0, config), critical=False)
        made.judge(*outcome_of(step, 1.0, 1.0, config), critical=False)
    state = saved.state_dict()
    made.load_state_dict(state)
    np.testing.assert_equal(made.state_dict(), state)
    moments, outcome = outcome_of(45, 70.1, 1.0, config)
    made.judge(moments, outcome, critical=False)
    assert [issue.issue_type for issue in outcome.opened] == [IssueType.EXPLODING]


class Broken(Rule):
    """A rule that fails when it is asked which steps may wait."""

    def calm(self, config: GradientConfig) -> Band | None:
        """Fail."""
        raise ArithmeticError("no band")

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Find nothing."""
        return []


def test_a_rule_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with one warning, also where it fails while steps wait."""
    types = {**RULES, "broken": Broken}
    monkeypatch.setattr("gradtrack.health.rule_engine.RULES", types)
    config = GradientConfig()
    made = Judgement(config, GradientMonitor(config))
    for step in range(1, 120):
        made.judge(*outcome_of(step, 1.0, 1.0, config), critical=False)
    assert caplog.text.count("rule broken failed") == 1
    assert "broken" not in made.state_dict()["monitor"]["health"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_says_which_steps_may_wait(name: str) -> None:
    """One that never does would make every step of every training dearer."""
    health = Health()
    rule, config = health._rules[name], GradientConfig()
    for step in range(1, 60):
        moments, _ = outcome_of(step, 1.0, 1.0, config)
        rule.judge(Evidence(step=step, norm=1.0, moments=moments, layout=LAYOUT, loss=1.0), config)
    band = rule.calm(config)
    assert band is not None
    assert band[0] < 0.0 < band[1]
    rule.take_in([CalmStep(0.0, 1.0, None, False)] * MOST_WAITING)
    assert rule.calm(config) is not None
