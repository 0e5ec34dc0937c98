"""The rule engine: steps on which no issue can open are judged together later, with the same results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradtrack import GradientConfig, GradientMonitor
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, empty_row, log_norm
from gradtrack.health.rule import (
    LEAST_LEFT,
    MOST_TOGETHER,
    SLACK,
    TENFOLD,
    Band,
    CalmSteps,
    Evidence,
    Rule,
    has_chosen_limit,
)
from gradtrack.health.rule_engine import NEVER, RULES, Health
from gradtrack.health.rules.norm import SpikeRule
from gradtrack.protection.strategies import coefficient_for
from gradtrack.reports import HEALTHY, Issue, IssueSeverity, IssueType
from gradtrack.step.data import StepData
from gradtrack.step.judge import Judge

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


class Together:
    """Remembers steps of which the rules say that nothing can open together, as the fast path does."""

    def __init__(self, made: Judge, config: GradientConfig) -> None:
        self._made, self._config, self._steps = made, config, list[tuple[float, float | None, float | None, bool]]()
        self._low, self._high = self._band = NEVER
        self.num_remembered = 0

    def take(self, moments: Moments, data: StepData) -> bool:
        """Hold a step back to be judged later, unless it has to be judged at once."""
        clipping = data.clipping
        if not (
            len(self._steps) < MOST_TOGETHER
            and self._made.is_calm
            and self._low < log_norm(moments.norm) < self._high
            and clipping["coefficient"] > LEAST_LEFT
            and (data.loss is None or math.isfinite(data.loss))
        ):
            return False
        limit = clipping["threshold"] if has_chosen_limit(self._config) else None
        self._steps.append((log_norm(moments.norm), data.loss, limit, clipping["clipped"]))
        self._made.jumps(log_norm(moments.norm), data.loss)
        self._close_in(log_norm(moments.norm))
        return True

    def settle(self) -> None:
        """Update the rules with the steps that were held back."""
        if self._steps:
            self._made.remember(CalmSteps(*zip(*self._steps, strict=True)), LAYOUT.missing)
            self.num_remembered += len(self._steps)
        self._steps = []
        self._low, self._high = self._band = NEVER

    def go_on(self, health: Health) -> None:
        """Set the bounds of the norm between which the next steps may be held back."""
        self.settle()
        if math.isfinite(self._made.last_log_norm):
            self._band = health.band(self._config)
            self._close_in(self._made.last_log_norm)

    def _close_in(self, last: float) -> None:
        step = TENFOLD - SLACK
        self._low, self._high = max(self._band[0], last - step), min(self._band[1], last + step)


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


def step_of(step: int, norm: float, loss: float | None, config: GradientConfig) -> tuple[Moments, StepData]:
    """Return a step with this norm, measured and protected."""
    row = empty_row()
    row[1 if math.isfinite(norm) else 5] = norm * norm if math.isfinite(norm) else 1.0
    rows = np.array([row])
    moments, data = Moments(rows, rows, list(row)), StepData(LAYOUT, {})
    data.step, data.loss, data.nan_inf = step, loss, {"action": "none" if moments.finite else "skip"}
    if moments.finite:  # of single elements far less is clipped
        limit = config.max_grad_norm * (1.0 if config.clip_type == "norm" else 200.0)
        data.clipping = {**coefficient_for(moments.norm, limit, 1e-6), "threshold": config.max_grad_norm}
    return moments, data


def verdicts(
    run: Run, chosen: dict[str, Any], changes: Mapping[int, tuple[str, Any]], *, together: bool
) -> tuple[list[Any], dict[str, Any], int]:
    """Return what each step was found to be, what is remembered in the end, and how many were remembered together.

    After some steps a setting is changed, or a checkpoint is made.
    """
    config = GradientConfig(**chosen)
    monitor = GradientMonitor(config)
    made, found = Judge(config, monitor), list[Any]()
    held = Together(made, config)
    for step, (norm, loss) in enumerate(run, 1):
        moments, data = step_of(step, norm, loss, config)
        if together and math.isfinite(norm) and held.take(moments, data):
            found.append((False, [], [], HEALTHY))
        else:
            held.settle()
            made.judge(moments, data, critical=False)
            found.append((data.event, list(data.issues), list(data.opened), data.health))
            if together:
                held.go_on(monitor.health)
        if step in changes:
            held.settle()
            if changes[step][0]:
                setattr(config, *changes[step])
            else:
                made.state_dict()
    held.settle()
    return found, made.state_dict(), held.num_remembered


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
def test_steps_that_are_remembered_together_are_as_if_each_was_judged(
    run: Run, chosen: dict[str, Any], changes: dict[int, tuple[str, Any]]
) -> None:
    """Every step has the same issues, events and health, and what the rules remember in the end is the same."""
    together, each = (verdicts(run, chosen, changes, together=together) for together in (True, False))
    np.testing.assert_equal(together[0], each[0])
    np.testing.assert_equal(together[1], each[1])


@given(st.lists(st.floats(-9, 9), min_size=34, max_size=60), st.lists(st.floats(-99, -9), max_size=MOST_TOGETHER - 1))
def test_a_median_is_not_lowered_further_than_the_band_allows_for(window: list[float], lower: list[float]) -> None:
    """A norm within the band is no ten times it, however low the steps were that waited before."""
    rule, config = SpikeRule(), GradientConfig()
    for norm in window:
        rule.window.push(norm)
    rule.first_norms, rule.last = [0.0] * 8, window[-1]
    band = rule.calm(config)
    assert band is not None
    for norm in lower:
        rule.window.push(norm)
    assert band[1] < rule.window.median + TENFOLD


def test_what_an_analyzer_takes_back_is_an_event() -> None:
    """The step after it makes a row, since an issue closes there."""
    config = GradientConfig()
    made = Judge(config, GradientMonitor(config))
    for step in range(1, 60):
        made.judge(*step_of(step, 1.0, 1.0, config), critical=False)
    issue = Issue(issue_type=IssueType.DEAD, severity=IssueSeverity.HIGH, layer="a", message="")
    events = []
    for heard in ([issue], [], []):
        made.set_analyzer_issues(heard)
        moments, data = step_of(60, 1.0, 1.0, config)
        made.judge(moments, data, critical=False)
        events.append((data.event, data.health.healthy))
    assert events == [(True, False), (True, True), (False, True)]


def test_most_steps_of_a_quiet_run_are_remembered_together() -> None:
    """Where the norm stays within a factor of ten from step to step, rules judge a few steps only."""
    random = np.random.default_rng(0)
    run: Run = [(float(np.exp(random.normal(-step / 100, 0.5))), 1.0) for step in range(300)]
    assert verdicts(run, {}, {}, together=True)[2] > 200


def test_a_state_that_is_loaded_replaces_what_was_remembered() -> None:
    """What a rule remembers is what was saved, and the band is found anew."""
    config = GradientConfig()
    saved, made = (Judge(config, GradientMonitor(config)) for _ in range(2))
    for step in range(1, 45):
        saved.judge(*step_of(step, 7.0, 1.0, config), critical=False)
        made.judge(*step_of(step, 1.0, 1.0, config), critical=False)
    state = saved.state_dict()
    made.load_state_dict(state)
    np.testing.assert_equal(made.state_dict(), state)
    moments, data = step_of(45, 70.1, 1.0, config)
    made.judge(moments, data, critical=False)
    assert [issue.issue_type for issue in data.opened] == [IssueType.EXPLODING]


class Broken(Rule):
    """A rule that fails when it is asked which steps can open nothing."""

    kept_in_checkpoints = ()

    def calm(self, config: GradientConfig) -> Band | None:
        """Fail."""
        raise ArithmeticError("no band")

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Find nothing."""
        return []


def test_a_rule_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out with one warning, also where it fails while the band is found."""
    monkeypatch.setattr("gradtrack.health.rule_engine.RULES", {**RULES, "broken": Broken})
    config = GradientConfig()
    monitor = GradientMonitor(config)
    made = Judge(config, monitor)
    for step in range(1, 120):
        made.judge(*step_of(step, 1.0, 1.0, config), critical=False)
        monitor.health.band(config)
    assert caplog.text.count("rule broken failed") == 1
    assert "broken" not in made.state_dict()["monitor"]["health"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_says_which_steps_can_open_nothing(name: str) -> None:
    """One that never does would make every step of every training dearer."""
    rule, config = RULES[name](), GradientConfig()
    for step in range(1, 60):
        moments, _ = step_of(step, 1.0, 1.0, config)
        rule.judge(Evidence(step=step, norm=1.0, moments=moments, layout=LAYOUT, loss=1.0), config)
    band = rule.calm(config)
    assert band is not None
    assert band[0] < 0.0 < band[1]
    rule.remember(
        CalmSteps([0.0] * MOST_TOGETHER, [1.0] * MOST_TOGETHER, [None] * MOST_TOGETHER, [False] * MOST_TOGETHER)
    )
    assert rule.calm(config) is not None
