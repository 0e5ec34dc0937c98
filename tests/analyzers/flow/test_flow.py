"""The flow analyzer: what it finds in small runs, offline and live, and that looking changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientFlowAnalyzer, GradientManager, Issue, IssueType, StepReport
from gradtrack.analyzers.base import often


def network(act: Callable[[], nn.Module] = nn.ReLU, depth: int = 3, gain: float = 1.4) -> nn.Sequential:
    """Return a perceptron whose hidden layers have a gain."""
    torch.manual_seed(0)
    sizes = [16, *[32] * depth, 4]
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layer = nn.Linear(before, after)
        nn.init.normal_(layer.weight, std=gain / before**0.5)
        nn.init.zeros_(layer.bias)
        parts += [layer, act()]
    return nn.Sequential(*parts[:-1])


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels that a linear model can tell apart."""
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(-1)


def train(
    model: nn.Module,
    optimizer: Any = None,
    *,
    steps: int = 40,
    analyzers: Any = ("flow",),
    zero: bool = True,
    before: Callable[[int], object] = lambda _: None,
    scale: float = 1.0,
) -> list[Issue]:
    """Train under a manager and return its diagnosis."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    with GradientManager(analyzers=list(analyzers), enable_gradient_clipping=False) as manager:
        for step in range(steps):
            before(step)
            if zero:
                optimizer.zero_grad()
            x, y = batch(step)
            manager.step(model, optimizer, scale * F.cross_entropy(model(x), y))
            optimizer.step()
        return manager.diagnose()


def found(issues: list[Issue]) -> set[tuple[str, str]]:
    """Return the types and layers of issues."""
    return {(issue.issue_type.value, issue.layer) for issue in issues}


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU])
def test_healthy_is_silent(act: type[nn.Module]) -> None:
    """A well initialised network opens nothing."""
    assert train(network(act)) == []


def test_vanishing_with_depth() -> None:
    """Layers that each halve the gradient starve the first one, which is named."""
    issues = train(network(nn.Tanh, 16, 0.5), steps=12)
    assert ("VANISHING", "0") in found(issues)


def test_exploding_with_depth() -> None:
    """Layers that each double the gradient are named with their gain."""
    model = network(nn.ReLU, 12, 3.0)
    issues = train(model, torch.optim.SGD(model.parameters(), 1e-9), steps=12)
    assert issues[0].issue_type.value == "EXPLODING"
    assert "Initialise for a gain near 1" in issues[0].recommendation


@pytest.mark.parametrize("late", [0, 28])
def test_dead_layer(late: int) -> None:
    """A layer whose units are all off is found at its place, also where it dies near the end of a short run."""
    model = network()

    def kill(step: int) -> None:
        if step == late:
            nn.init.constant_(model[2].bias, -50.0)  # type: ignore[arg-type]

    assert found(train(model, before=kill)) == {("DEAD", "2")}


def test_dead_without_activation_modules() -> None:
    """Activations that are called as functions are seen as well."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
            nn.init.constant_(self.first.bias, -50.0)

        def forward(self, x: Tensor) -> Any:
            return self.second(torch.relu(self.first(x)))

    assert ("DEAD", "first") in found(train(Functional()))


def test_few_units_off_by_luck() -> None:
    """Four units behind a nearly constant input are off or on by the luck of their weights: no fault."""

    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.head = nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 4)
            self.down.bias.data = torch.tensor([-0.5, -0.5, -0.5, 0.5])

        def forward(self, x: Tensor) -> Any:
            return self.head(x * torch.sigmoid(self.up(torch.relu(self.down(0.01 * x)))))

    torch.manual_seed(0)
    assert train(Squeeze()) == []


def test_saturation() -> None:
    """A stretched tanh layer is named."""
    model = network(nn.Tanh, gain=1.0)
    with torch.no_grad():
        model[2].weight.mul_(40)  # type: ignore[operator]
    assert ("SATURATION", "2") in found(train(model))


def test_last_function_may_saturate() -> None:
    """The function next to the loss may be as certain as it likes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4), nn.Tanh())
    with torch.no_grad():
        model[2].weight.mul_(100)  # type: ignore[operator]
    assert train(model) == []


def test_bottleneck() -> None:
    """A layer of one unit between wide ones is the neck; an autoencoder's narrow code is not."""
    torch.manual_seed(0)
    widths = (16, 64, 1, 64, 12)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    neck = nn.Sequential(*layers[:-1])
    analyzer = GradientFlowAnalyzer(neck)
    issues = analyzer.analyze(lambda: torch.randn(64, 16), lambda out: F.cross_entropy(out, torch.arange(64) % 12))
    assert ("BOTTLENECK", "2") in found(issues)
    coder = nn.Sequential(
        nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2), nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 16)
    )
    target = torch.randn(64, 16)
    assert GradientFlowAnalyzer(coder).analyze(lambda: target, lambda out: F.mse_loss(out, target)) == []


def test_stale_gradients() -> None:
    """A forgotten zero_grad is found; accumulation without a step in between is not."""
    model = network(nn.Tanh)
    assert ("STALE_GRAD", "") in found(train(model, torch.optim.SGD(model.parameters(), 0.01), zero=False))


def test_a_pass_through_another_model_is_legal() -> None:
    """A generator's pass adds to what the discriminator's last step has used, until that clears it before its own."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    maker_steps, judge_steps = (torch.optim.SGD(one.parameters(), 1e-3) for one in (maker, judge))
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        for model, optimizer, name in ((maker, maker_steps, "maker"), (judge, judge_steps, "judge")):
            manager.attach(model, optimizer, name=name)
        for _ in range(20):
            fake = maker(torch.randn(16, 4))
            judge_steps.zero_grad()
            manager.step(judge, judge_steps, F.softplus(judge(fake.detach()) - judge(torch.randn(16, 2))).mean())
            judge_steps.step()
            maker_steps.zero_grad()
            manager.step(maker, maker_steps, F.softplus(-judge(fake)).mean())
            maker_steps.step()
        assert "STALE_GRAD" not in {kind for kind, _ in found(manager.diagnose())}


def test_accumulation_is_legal() -> None:
    """Micro-batches that add up before one step open nothing."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        for step in range(40):
            optimizer.zero_grad()
            for part in range(2):
                x, y = batch(2 * step + part)
                manager.step(model, optimizer, F.cross_entropy(model(x), y) / 2, accumulate=part == 0)
            optimizer.step()
        assert manager.diagnose() == []


class Cut(nn.Module):
    """A backbone and a head, with or without a way back between them."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head, self.cut = network(), nn.Linear(4, 4), cut

    def forward(self, x: Tensor) -> Any:
        """Run both."""
        z = self.backbone(x)
        return self.head(z.detach() if self.cut else z)


def test_disconnected() -> None:
    """Layers behind a detach never get a gradient."""
    assert found(train(Cut(True))) == {("DISCONNECTED", "backbone")}


def test_unchanged() -> None:
    """Layers that no optimizer has get gradients and never change."""
    model = Cut(False)
    assert found(train(model, torch.optim.Adam(model.head.parameters(), 1e-3))) == {("UNCHANGED", "backbone")}


def test_frozen_is_no_fault() -> None:
    """A frozen backbone is a choice."""
    model = Cut(False)
    model.backbone.requires_grad_(False)
    assert train(model, torch.optim.Adam(model.head.parameters(), 1e-3)) == []


@pytest.mark.parametrize(("rate", "kind"), [(60.0, "LR_TOO_HIGH"), (1e-9, "LR_TOO_LOW")])
def test_learning_rates(rate: float, kind: str) -> None:
    """A rate that moves the weights far too much or not at all is named with a better one."""
    model = network(nn.Tanh)
    issues = train(model, torch.optim.SGD(model.parameters(), rate))
    named = [issue for issue in issues if issue.issue_type.value == kind]
    assert named
    assert "lr" in named[0].recommendation


def test_warm_up_is_no_low_rate() -> None:
    """A tiny rate that is rising opens nothing."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def warm(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-9 * (step + 1)

    assert train(model, optimizer, before=warm) == []


def test_oscillation() -> None:
    """A rate just past 2/curvature turns the gradient round at every step."""
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 4
    model = nn.Linear(8, 1, bias=False)
    curvature = float(torch.linalg.eigvalsh(2 * x.T @ x / 200)[-1])
    optimizer = torch.optim.SGD(model.parameters(), 2.04 / curvature)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        for _ in range(40):
            optimizer.zero_grad()
            manager.step(model, optimizer, (model(x) - x.sum(1, keepdim=True)).pow(2).mean())
            optimizer.step()
        assert {issue.issue_type.value for issue in manager.diagnose()} & {"UNSTABLE", "LR_TOO_HIGH"}


@pytest.mark.parametrize("build", [network, lambda: network(nn.Tanh, 16, 0.5), lambda: network(nn.ReLU, 12, 3.0)])
def test_loss_scale_changes_nothing(build: Callable[[], nn.Module]) -> None:
    """The loss times a power of two, with Adam's eps to match, gives the same issues."""
    lists = []
    for scale in (2.0**-13, 1.0, 2.0**13):
        model = build()
        issues = train(model, torch.optim.Adam(model.parameters(), 1e-4, eps=1e-8 * scale), scale=scale)
        lists.append([(issue.key, issue.step, issue.severity) for issue in issues])
    assert lists[0] == lists[1] == lists[2]


@pytest.mark.parametrize("inplace", [False, True])
def test_observer_effect(inplace: bool) -> None:
    """Weights and random state after fifty steps are bitwise those of a training without the analyzer."""

    def run(analyzers: tuple[str, ...]) -> list[Tensor]:
        model = network(lambda: nn.ReLU(inplace))
        model.append(nn.Dropout(0.1))
        train(model, steps=50, analyzers=analyzers)
        return [*model.state_dict().values(), torch.get_rng_state()]

    for plain, watched in zip(run(()), run(("flow",)), strict=True):
        assert torch.equal(plain, watched)


def hooks(model: nn.Module) -> int:
    """Count the hooks on a model and its parameters."""
    counted = sum(len(module._forward_hooks) for module in model.modules())
    return counted + sum(len(param._backward_hooks or ()) for param in model.parameters())


def test_no_hooks_between_samples() -> None:
    """The model carries hooks on the sampled steps only, and none once the manager is closed."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    seen = []
    with GradientManager(analyzers=["flow"]) as manager:
        for step in range(1, 41):
            optimizer.zero_grad()
            x, y = batch(step)
            seen.append((step, hooks(model)))
            manager.step(model, optimizer, F.cross_entropy(model(x), y))
            optimizer.step()
    assert [step for step, count in seen if count] == [step for step in range(1, 41) if often(step)]
    assert hooks(model) == 0
    assert not optimizer._optimizer_step_pre_hooks


def note(opened: list[tuple[str, int]], issue: Issue, report: StepReport) -> None:
    """Remember an issue that has opened."""
    opened.append((issue.issue_type.value, report.step))


def test_issues_reach_callbacks_and_can_be_muted() -> None:
    """What the analyzers find opens as an issue of the step's health, unless it is muted."""
    for mute, expected in (([], {"DEAD"}), (["DEAD"], set())):
        model = network()
        nn.init.constant_(model[2].bias, -50.0)  # type: ignore[arg-type]
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        opened: list[tuple[str, int]] = []
        with GradientManager(analyzers=["flow"], mute=mute) as manager:
            manager.on_issue(partial(note, opened))
            for step in range(40):
                optimizer.zero_grad()
                x, y = batch(step)
                manager.step(model, optimizer, F.cross_entropy(model(x), y))
                optimizer.step()
        assert {kind for kind, _ in opened} == expected


def test_a_fault_in_a_hook_never_reaches_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on where looking fails."""
    from gradtrack.analyzers.flow import probe

    def fail(*_: object) -> None:
        raise RuntimeError("no look")

    for place in ("take_output", "take_gradient"):
        monkeypatch.setattr(probe, place, fail)
        assert train(network(), steps=8) == []


def test_absolute_thresholds_act_only_when_passed() -> None:
    """The usual thresholds are shown, and judge only where they were given."""
    model = network()
    data = torch.randn(16, 16)
    plain = GradientFlowAnalyzer(model)
    assert (plain.vanishing_threshold, plain.exploding_threshold) == (1e-6, 10.0)
    assert (plain.dead_threshold, plain.unstable_cv_threshold) == (0.9, 3.0)
    assert plain.analyze(lambda: data, lambda out: 1e6 * out.pow(2).mean(), 5) == []
    strict = GradientFlowAnalyzer(model, exploding_threshold=10.0)
    issues = strict.analyze(lambda: data, lambda out: 1e6 * out.pow(2).mean(), 5)
    assert {issue.issue_type.value for issue in issues} == {"EXPLODING"}


def test_analyze_leaves_the_model_alone() -> None:
    """Offline analysis puts weights, gradients and random state back."""
    model = network()
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()
    GradientFlowAnalyzer(model).analyze(lambda: torch.randn(8, 16), lambda out: out.pow(2).mean(), 5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


SWITCHES = {
    "enable_rnn_analyzer": ["recurrent"],
    "enable_circular_flow_analyser": ["vector"],
    "enable_jacobian": ["jacobian", "recurrent"],
    "enable_vector_analysis": ["vector"],
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_runs_its_analyzer_along(switch: str) -> None:
    """What a switch adds is in the details and in the issues; of a recurrent model the Jacobian has its states too."""
    model = nn.Sequential(nn.RNN(3, 4, batch_first=True), First(), nn.Linear(4, 2))
    for on in (False, True):
        analyzer = GradientFlowAnalyzer(model, **{switch: on})
        analyzer.analyze(lambda: torch.randn(4, 6, 3), lambda out: out.square().mean(), 2)
        assert list(analyzer.details) == (SWITCHES[switch] if on else [])
        assert getattr(analyzer, switch) is on
    assert all(found.metrics() for found in analyzer.details.values())


def test_what_has_nothing_to_look_at_says_so() -> None:
    """Without a recurrent module its analyzer is left out with the reason, and the analysis goes on."""
    analyzer = GradientFlowAnalyzer(network(), enable_rnn_analyzer=True, enable_jacobian=True)
    assert analyzer.analyze(lambda: torch.randn(8, 16), lambda out: out.pow(2).mean(), 5) == []
    assert list(analyzer.details) == ["jacobian"]
    assert "ran no recurrent module" in analyzer.skipped["recurrent"]


class First(nn.Module):
    """Takes the last output of a recurrent network."""

    def forward(self, output: tuple[Tensor, Tensor]) -> Tensor:
        """Return it."""
        return output[0][:, -1]


def test_recurrent_models_are_looked_at_twice_and_not_three_times() -> None:
    """Beside its own look the flow asks for the dynamics only, whose analyzer would look at the flow again."""
    model = nn.Sequential(nn.RNN(3, 4, batch_first=True), First(), nn.Linear(4, 2))
    batches: list[torch.Tensor] = []

    def batch() -> torch.Tensor:
        batches.append(torch.randn(4, 6, 3))
        return batches[-1]

    analyzer = GradientFlowAnalyzer(model, enable_rnn_analyzer=True)
    analyzer.analyze(batch, lambda out: out.square().mean(), steps=5)
    assert set(analyzer.details) == {"recurrent"}
    assert len(batches) == 10


@pytest.mark.parametrize("seen", [True, False])
def test_a_loss_that_was_not_seen_is_not_spoken_of(seen: bool) -> None:
    """A rate that is too high is told with the loss only where the loop has passed it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 3.0)
    manager = GradientManager(analyzers=["flow"], enable_gradient_clipping=False)
    for _ in range(60):
        batch = torch.randn(32, 10)
        optimizer.zero_grad()
        loss = (model(batch) - batch[:, :1]).square().mean()
        torch.autograd.backward(loss)
        manager.step(model, optimizer, loss if seen else None, backward=False)
        optimizer.step()
    (found,) = [issue for issue in manager.diagnose() if issue.issue_type is IssueType.LR_TOO_HIGH]
    assert ("while the loss" in found.message) == seen
    manager.close()


class Alone(nn.Module):
    """A model whose parameters are its own, with no module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return F.linear(x, self.weight)


@pytest.mark.parametrize(("model", "compares"), [(Alone(), False), (nn.Linear(16, 4), False), (network(), True)])
def test_gains_are_told_where_there_are_layers_to_compare(model: nn.Module, compares: bool) -> None:
    """A layer alone would be measured by itself, and its gain 1 for good."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with GradientManager(analyzers=["flow"], backends=["memory"]) as manager:
        manager.attach(model, optimizer)
        for step in range(4):
            x, y = batch(step)
            report = manager.step(model, optimizer, F.cross_entropy(model(x), y))
    found = report.metrics()
    assert ("flow/gain_min" in found, "flow/gain_max" in found) == (compares, compares)
