"""Dead units are told of until they respond, or the loss has halved with them, and not now and then."""

from __future__ import annotations

import json

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from gradtrack import GradientManager, safe_backward

STEPS = 84


def told(levels: list[float], noise: list[float], saved: int = 0) -> list[bool]:
    """Return for each step whether DEAD was open: 18 of 32 units die at step 22, the loss goes by levels with noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    bias = model.get_parameter("0.bias")
    manager, found = GradientManager(analyzers=["flow"], enable_gradient_clipping=False), list[bool]()
    manager.attach(model, optimizer)
    for step in range(STEPS):
        if step == 22:
            nn.init.constant_(bias[:18], -50.0)
        if step == saved > 0:
            state = json.loads(json.dumps(manager.state_dict()))
            manager = GradientManager(analyzers=["flow"], enable_gradient_clipping=False)
            manager.attach(model, optimizer)
            manager.load_state_dict(state)
        optimizer.zero_grad()
        level = levels[step * len(levels) // STEPS] * (1 + noise[step % len(noise)])
        report = manager.step(model, optimizer, 1e-3 * model(torch.randn(32, 8)).square().mean() + level)
        optimizer.step()
        found.append(any(issue.key == "DEAD:0" for issue in report.health.issues))
    return found


def changes(found: list[bool]) -> list[int]:
    """Return the steps at which the issue opened or closed."""
    return [step for step in range(1, len(found)) if found[step] != found[step - 1]]


@example([1.0, 1.0, 0.55, 0.45, 0.55, 0.45], [0.0], 0).via("half of the first loss, more or less")
@example([2.0, 1.25, 1.0, 1.0], [0.0, -0.25], 0).via("a loss that is low at each look and high after it")
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(0.4, 2.0), min_size=1, max_size=10),
    st.lists(st.floats(-0.4, 0.4), min_size=1, max_size=9),
    st.sampled_from([0, 45, 90]),
)
def test_dead_units_do_not_come_and_go_with_the_loss(levels: list[float], noise: list[float], saved: int) -> None:
    """While the same units are dead the issue opens once at most, and closes once at most, across a checkpoint too."""
    found = told(levels, noise, saved)
    assert len(changes(found)) <= 2
    assert not any(found[:22])


def test_dead_units_stay_open_while_the_loss_comes_down_a_little() -> None:
    """The issue does not close as long as nothing has changed but the luck of the losses."""
    assert len(changes(told([1.0, 0.9, 0.7, 0.8, 0.6, 0.7], [0.1, -0.1, 0.2]))) == 1


def test_a_layer_that_dies_between_looks_is_told_of_soon() -> None:
    """The first row on which a group has no gradient any more makes the analyzers look."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with GradientManager(analyzers=["flow"], grad_log_every_n_steps=10, backends=["memory"]) as manager:
        for step in range(1, 241):
            if step == 145:
                nn.init.constant_(model.get_parameter("2.bias"), -50.0)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(32, 32)), torch.randint(4, (32,)))
            safe_backward(loss, model, optimizer, manager)
            optimizer.step()
    (step,) = {issue.step for issue in manager.diagnose() if issue.key == "DEAD:2"}
    assert 145 <= step <= 180
