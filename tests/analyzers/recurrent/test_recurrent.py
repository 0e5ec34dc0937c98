"""The recurrent analyzer offline and beside a training: what it reports, finds wrong, and leaves alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reservoirpy import observables
from reservoirpy.nodes import Reservoir
from scipy import sparse
from scipy.sparse import linalg
from torch import Tensor, nn

from gradtrack import GradientManager, Issue, IssueSeverity, IssueType, RecurrentAnalyzer, StepReport
from gradtrack.analyzers.base import Snapshot, always
from gradtrack.analyzers.recurrent import measure
from gradtrack.analyzers.recurrent.cells import function_cell
from gradtrack.analyzers.recurrent.measure import LookOptions
from gradtrack.analyzers.recurrent.report import RecurrentReport
from gradtrack.analyzers.recurrent.trajectories import follow
from gradtrack.errors import InputTypeError, UsageError
from tests.analyzers.recurrent.recurrent_goldens import analyzed, gate, normal, orthogonal, zeroed

Kind = type[nn.RNN] | type[nn.LSTM] | type[nn.GRU]
FUSED: list[Kind] = [nn.RNN, nn.LSTM, nn.GRU]


class Tagger(nn.Module):
    """An embedding, a recurrent network with dropout, and a batch normalisation: all that can move."""

    def __init__(self, kind: Kind = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.norm = nn.BatchNorm1d(8 * (2 if self.rnn.bidirectional else 1))
        self.read = nn.Linear(self.norm.num_features, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read the last output."""
        return self.read(self.norm(self.rnn(self.embed(tokens))[0][:, -1]))  # type: ignore[no-any-return]


def tokens() -> Tensor:
    """Draw a batch of tokens."""
    return torch.randint(0, 11, (4, 12))


def cross_entropy(output: Tensor) -> Tensor:
    """Return the loss of a batch whose labels are drawn."""
    return nn.functional.cross_entropy(output, torch.randint(0, 3, (output.shape[0],)))


def look(model: nn.Module, steps: int = 2, **options: Any) -> tuple[list[Issue], RecurrentReport]:
    """Analyze a tagger."""
    return RecurrentAnalyzer(model, **options).analyze(tokens, cross_entropy, steps=steps)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Copy everything that an analysis might change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if param.grad is None else param.grad.clone() for param in model.parameters()],
        "identities": [id(param.grad) for param in model.parameters()],
        "wanted": [param.requires_grad for param in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "random": torch.get_rng_state(),
        "hooks": [len(module._forward_hooks) for module in model.modules()],
    }


def assert_same(one: Any, other: Any) -> None:
    """Compare nested values bit by bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def test_the_example_of_the_flow_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Constructor, analysis, attributes and summary are called as the document calls them."""
    model = Tagger()
    analyzer = RecurrentAnalyzer(
        model,
        enable_jacobian=True,
        enable_vector_analysis=False,
        optimal_radius=0.9,
        critical_band=0.15,
        track_hidden_states=True,
    )
    issues, dynamics = analyzer.analyze(tokens, cross_entropy, steps=20)
    analyzer.print_summary(issues, dynamics)
    assert issues == []
    assert 0.3 < dynamics.spectral_radius < 0.9  # type: ignore[operator]
    assert dynamics.criticality in ("SUBCRITICAL", "CRITICAL", "SUPERCRITICAL")
    assert dynamics.effective_memory_length > 0  # type: ignore[operator]
    assert 0 < dynamics.temporal_decay_rate < 1  # type: ignore[operator]
    assert "spectral radius" in capsys.readouterr().out


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.3}, {"bidirectional": True}])
def test_default_initialisations_are_healthy(kind: Kind, options: dict[str, Any]) -> None:
    """What torch starts from is no fault, although its radius is below the band and its memory below ten steps."""
    issues, dynamics = look(Tagger(kind, **options))
    assert issues == []
    assert dynamics.criticality == "SUBCRITICAL"
    assert dynamics.effective_memory_length < 10  # type: ignore[operator]


def test_the_issues_of_the_gradient_flow_come_along() -> None:
    """A dead layer behind the recurrent one is in the issues, which the dynamics alone cannot know."""
    model = Tagger()
    model.read = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))  # type: ignore[assignment]
    nn.init.constant_(model.get_parameter("read.0.bias"), -50.0)
    issues, dynamics = RecurrentAnalyzer(model).analyze(lambda: torch.randint(0, 11, (32, 12)), cross_entropy, steps=5)
    assert [(issue.issue_type.value, issue.layer) for issue in issues] == [("DEAD", "read.0")]
    assert dynamics.issues == []


@pytest.mark.parametrize("trains", [True, False])
def test_analysis_leaves_the_model_as_it_was(trains: bool) -> None:
    """Weights, buffers, gradients, modes, hooks and the random state come back bit by bit."""
    model = Tagger(nn.GRU, num_layers=2, dropout=0.5)
    torch.autograd.backward(cross_entropy(model(tokens())))
    model.read.bias.requires_grad_(False)
    model.train(trains)
    model.embed.eval()
    before = state_of(model)
    look(model, steps=3, enable_vector_analysis=True)
    assert_same(state_of(model), before)


def test_an_optimizer_trains_the_model() -> None:
    """With an optimizer the weights move and the looks are at different weights."""
    model = Tagger()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    RecurrentAnalyzer(model).analyze(tokens, cross_entropy, steps=3, optimizer=optimizer)
    assert not all(map(torch.equal, model.parameters(), before))


def test_the_same_analysis_gives_the_same_numbers() -> None:
    """Probes come from a generator of their own with a fixed seed."""
    model, batch = Tagger(), tokens()
    one, other = (
        RecurrentAnalyzer(model).analyze(lambda: batch, lambda output: output.sum(), steps=2)[1] for _ in range(2)
    )
    assert one == other


@settings(max_examples=15)
@given(st.integers(-60, 60))
def test_a_constant_factor_on_the_loss_changes_nothing(exponent: int) -> None:
    """Every number and every issue is invariant to the scale of the loss."""
    torch.manual_seed(0)
    model, batch = nn.LSTM(2, 4).double(), torch.randn(12, 3, 2, dtype=torch.float64)
    analyzer = RecurrentAnalyzer(model)
    _, plain = analyzer.analyze(lambda: batch, lambda output: output[0][-1].sum(), steps=1)
    _, scaled = analyzer.analyze(lambda: batch, lambda output: output[0][-1].sum() * 2.0**exponent, steps=1)
    assert scaled.model_dump(exclude={"cells"}) == plain.model_dump(exclude={"cells"})
    assert scaled.cells["l0"].gradient_profile == pytest.approx(plain.cells["l0"].gradient_profile, rel=1e-9)


def test_every_cell_is_reported_and_the_plain_numbers_are_the_largest() -> None:
    """Layers and directions are separate; the headline is the largest over them."""
    _, dynamics = look(Tagger(nn.RNN, num_layers=2, bidirectional=True))
    assert list(dynamics.cells) == ["rnn.l0", "rnn.l0_reverse", "rnn.l1", "rnn.l1_reverse"]
    for name in ("spectral_radius", "temporal_decay_rate", "effective_memory_length"):
        assert dynamics[name] == max(cell[name] for cell in dynamics.cells.values())
    assert {cell.module for cell in dynamics.cells.values()} == {"rnn"}


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_radius_is_the_median_over_every_state(sequences: int) -> None:
    """Without the replay: eig of diag(1 - h'^2) W at each state of a tanh RNN in a loop of its own."""
    model, batch = nn.RNN(2, 5).double(), normal(31, sequences, 2)
    inward, weight, *biases = (param.detach() for param in model.parameters())
    state, radii = torch.zeros(sequences, 5, dtype=torch.float64), []
    for inputs in batch:
        state = torch.tanh(inputs @ inward.T + state @ weight.T + sum(biases))
        radii += [float(torch.linalg.eigvals((1 - h**2).diag() @ weight).abs().max()) for h in state]
    found = RecurrentAnalyzer(model).analyze(lambda: batch, lambda output: output[0].sum(), steps=2)[1]
    assert found.spectral_radius == pytest.approx(float(np.median(radii)), abs=1e-12)
    assert found.cells["l0"].spectral_radius_range == pytest.approx((min(radii), max(radii)), abs=1e-12)


def test_the_radius_of_packed_sequences_is_over_all_of_their_steps() -> None:
    """The steps that only the longer sequences have count too."""
    model = nn.RNN(2, 3, batch_first=True).double()
    sequences = [normal(length, 2) for length in (9, 7, 6)]

    def cell_of(batch: Any) -> Any:
        analyzer = RecurrentAnalyzer(model)
        return analyzer.analyze(lambda: (batch,), lambda output: output[1].sum(), steps=1)[1].cells["l0"]

    found, alone = cell_of(nn.utils.rnn.pack_sequence(sequences)), [cell_of(one) for one in sequences]
    assert found.spectral_radius_count == 9 + 7 + 6
    lows, highs = zip(*(cell.spectral_radius_range for cell in alone), strict=True)
    assert found.spectral_radius_range == pytest.approx((min(lows), max(highs)), abs=1e-12)


def test_every_number_says_what_it_rests_on() -> None:
    """Looks, sequences, window and counts are in the report; the radius is over every state of every sequence."""
    _, dynamics = look(Tagger(), steps=3)
    cell = dynamics.cells["rnn.l0"]
    assert (dynamics.num_looks, cell.num_looks, cell.num_sequences, cell.window) == (3, 3, 4, 12)
    assert dynamics.spectral_radius_count == cell.spectral_radius_count
    assert cell.spectral_radius_count == 3 * 12 * 4
    assert cell.lyapunov_count == 3 * 10
    assert cell.lyapunov_error is not None
    assert len(cell.decay_profile) == 13
    assert len(cell.gradient_profile) == 12


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 256), st.integers(1, 512))
def test_states_of_a_live_radius_are_spread_over_time_and_sequences(lengths: list[int], least: int, size: int) -> None:
    """They are different ones, of every sequence as many, and of every stretch of time as many; else they are all."""
    path = follow(function_cell("any", lambda s, x: s, size), torch.zeros(len(lengths), size), torch.zeros(60, 1, 0))
    path.lengths = torch.tensor(lengths)
    chosen = LookOptions(radius_work=1.0, least_states=least).radius_states(path, path.window)
    assert len(set(chosen)) == len(chosen) <= max(least, sum(lengths))
    if sum(lengths) <= least:
        assert len(chosen) == sum(lengths)
        return
    assert len(chosen) % 2 == 1
    assert len(chosen) >= min(least, path.window * len(lengths)) - 1
    turns = Counter(sequence for _, sequence in chosen)
    assert max(turns.values()) - min(turns[index] for index in range(len(lengths))) <= 1
    expected = [(index + 0.5) * path.window / len(chosen) - 0.5 for index in range(len(chosen))]
    assert [back for back, _ in chosen] == pytest.approx(expected, abs=0.5 + 1e-9)


def test_a_live_radius_of_a_large_state_rests_on_three() -> None:
    """Where each takes Arnoldi's method, a look at the middle of each third of the window is what it may cost."""
    path = follow(function_cell("any", lambda s, x: s, 256), torch.zeros(2, 256), torch.zeros(60, 2, 0))
    options = LookOptions(radius_work=5e6, least_states=7, dense_limit=128)
    assert options.radius_states(path, path.window) == [(10, 0), (30, 1), (50, 0)]


@pytest.mark.parametrize(("size", "least"), [(32, 99), (64, 19), (128, 7)])
def test_the_live_radius_is_that_of_all_states_and_not_of_their_ends(size: int, least: int) -> None:
    """Pulses saturate the units at both ends of the sequence; the median over all states lies in its middle."""
    model = nn.RNN(2, size, batch_first=True)
    batch = torch.zeros(4, 40, 2)
    batch[:, :4], batch[:, -4:] = 40 * torch.randn(4, 4, 2), 40 * torch.randn(4, 4, 2)
    with GradientManager(analyzers=[{"name": "recurrent", "every": 1}], backends=["memory"]) as manager:
        optimizer = torch.optim.SGD(model.parameters())
        manager.attach(model, optimizer)
        report = manager.step(model, optimizer, model(batch)[0].square().mean())
    live: Any = report.analyzers["recurrent"]
    inward, weight, *biases = (param.detach().double() for param in model.parameters())
    states, radii = torch.zeros(4, size, dtype=torch.float64), []
    for inputs in batch.double().unbind(1):
        states = torch.tanh(inputs @ inward.T + states @ weight.T + sum(biases))
        radii += [float(torch.linalg.eigvals((1 - h**2).diag() @ weight).abs().max()) for h in states]
    low, high = np.quantile(radii, [0.3, 0.7])
    assert max(radii[:4] + radii[-4:]) < low <= live.spectral_radius <= high
    assert live.spectral_radius_count == live.cells["l0"].spectral_radius_count >= least


def test_the_gradient_profile_is_that_of_the_loss() -> None:
    """A loss on the last output gives a profile that falls with the distance from it; one on all outputs does not."""
    model, batch = zeroed(nn.RNN(1, 6), weight_hh_l0=0.5 * orthogonal(6)), torch.zeros(10, 1, 1, dtype=torch.float64)
    analyzer = RecurrentAnalyzer(model)
    last = analyzer.analyze(lambda: batch, lambda output: output[0][-1].sum(), steps=1)[1].cells["l0"]
    every = analyzer.analyze(lambda: batch, lambda output: output[0].sum(), steps=1)[1].cells["l0"]
    assert last.gradient_profile == pytest.approx([0.5**lag for lag in range(10)])
    assert last.first_step_share == pytest.approx(0.5**9)
    assert every.gradient_profile[-1] > 0.4


def test_switches_turn_their_parts_off() -> None:
    """Without the Jacobian or the hidden states their numbers are None; the vector part comes when it is asked for."""
    _, bare = look(Tagger(), enable_jacobian=False, track_hidden_states=False)
    cell = bare.cells["rnn.l0"]
    names = ("spectral_radius", "criticality", "effective_memory_length", "temporal_decay_rate", "effective_rank")
    assert [getattr(bare, name) for name in names] == [None] * 5
    assert cell.decay_profile == cell.lyapunov_exponents == []
    assert [cell.weight_gradient_rank, cell.cell_memory_length, cell.state_field] == [None] * 3
    assert cell.gates == {}
    _, full = look(Tagger(), enable_vector_analysis=True)
    assert full.cells["rnn.l0"].state_field is not None


def test_the_state_field_tells_rotation_from_decay() -> None:
    """A plain decay has a symmetric Jacobian and no rotation; a rotation has one."""
    inputs, state = torch.zeros(6, 1, 0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    analyzer = RecurrentAnalyzer(enable_vector_analysis=True)
    decay = analyzer.analyze_step(lambda s, x: 0.5 * s, state, inputs)[1].cells["step"].state_field
    rotation = analyzer.analyze_step(lambda s, x: s + s @ turn, state, inputs)[1].cells["step"].state_field
    assert decay is not None
    assert rotation is not None
    assert (decay.rotation, decay.divergence, decay.coherence) == pytest.approx((0.0, -1.0, 1.0))
    assert (rotation.rotation, rotation.divergence) == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize(("growth", "expected"), [(0.7, "SUBCRITICAL"), (0.9, "CRITICAL"), (1.1, "SUPERCRITICAL")])
def test_the_band_gives_a_label_and_no_issue(growth: float, expected: str) -> None:
    """Below, within and above 0.9 +- 0.15, over steps too few to matter, the label changes and nothing is wrong."""
    model = zeroed(nn.RNN(1, 6), weight_hh_l0=growth * orthogonal(6))
    found = analyzed(model, 20)
    assert (found.criticality, found.issues) == (expected, [])
    assert analyzed(model, 20, optimal_radius=growth, critical_band=0.01).criticality == "CRITICAL"


@pytest.mark.parametrize("kind", FUSED)
def test_short_memory_is_an_issue_only_against_a_horizon(kind: Kind) -> None:
    """The same network is healthy for short dependencies, unjudged without a horizon, and too short for long ones."""
    torch.manual_seed(0)
    model = Tagger(kind)
    assert look(model)[0] == []
    assert look(model, horizon=2)[0] == []
    issues, dynamics = look(model, horizon=60)
    assert [(issue.issue_type, issue.severity) for issue in issues] == [(IssueType.SHORT_MEMORY, IssueSeverity.MEDIUM)]
    assert issues[0].layer == "rnn"
    assert issues[0].confidence < 1.0
    assert dynamics.criticality == "SUBCRITICAL"
    assert any("declare a horizon" in note for note in look(model)[1].notes)


def test_a_chrono_lstm_keeps_its_horizon() -> None:
    """A forget bias of ln(T - 1) removes the issue that the default has, as its advice says."""
    bias = gate(torch.full((4,), math.log(59.0)), 1, 4)
    assert analyzed(nn.LSTM(1, 4).double(), 60, horizon=60).issues[0].issue_type is IssueType.SHORT_MEMORY
    assert "forget gate" in analyzed(nn.LSTM(1, 4).double(), 60, horizon=60).issues[0].recommendation
    assert analyzed(zeroed(nn.LSTM(1, 4), bias_ih_l0=bias), 60, horizon=60).issues == []


def test_exploding_states_are_supercritical() -> None:
    """A linear growth of 1.5 per step is an issue after 17 steps, with its place and its numbers."""
    model = zeroed(nn.RNN(1, 6, nonlinearity="relu"), weight_hh_l0=1.5 * torch.eye(6), bias_ih_l0=1.0)
    assert analyzed(model, 10).issues == []
    (issue,) = analyzed(model, 30).issues
    assert (issue.issue_type, issue.severity, issue.layer) == (IssueType.SUPERCRITICAL, IssueSeverity.HIGH, "l0")
    assert issue.value == pytest.approx(1.5**30)
    assert issue.threshold == 1e3
    assert analyzed(model, 10, horizon=30).issues[0].statistic == "lyapunov_exponent_times_steps"


def test_states_that_are_not_finite_are_an_issue_of_their_own() -> None:
    """An overflow is reported as such and breaks nothing."""
    model = zeroed(nn.RNN(1, 2, nonlinearity="relu"), weight_hh_l0=1e200 * torch.eye(2), bias_ih_l0=1.0)
    found = analyzed(model, 10)
    assert [(issue.issue_type, issue.layer) for issue in found.issues] == [(IssueType.NUMERICAL, "l0")]
    assert found.spectral_radius is None


def test_a_collapsed_state_has_low_rank() -> None:
    """Hidden states along one line, from inputs of many directions, are an issue of low severity."""
    weight = torch.zeros(40, 20, dtype=torch.float64)
    weight[:, 0] = 1.0
    model = zeroed(nn.RNN(20, 40), weight_ih_l0=weight)
    analyzer = RecurrentAnalyzer(model)
    issues, dynamics = analyzer.analyze(lambda: normal(30, 4, 20), lambda output: output[0].sum(), steps=1)
    assert [(issue.issue_type, issue.severity) for issue in issues] == [
        (IssueType.LOW_EFFECTIVE_RANK, IssueSeverity.LOW)
    ]
    assert dynamics.effective_rank == pytest.approx(1.0, abs=1e-6)
    narrow = RecurrentAnalyzer(zeroed(nn.RNN(1, 40), weight_ih_l0=1.0))
    assert narrow.analyze(lambda: normal(30, 4, 1), lambda output: output[0].sum(), steps=1)[0] == []


def test_a_model_without_recurrence_is_an_error() -> None:
    """The error says what was expected and how to help."""
    with pytest.raises(UsageError, match=r"model Linear ran no recurrent module: expected nn\.RNN.*step_functions"):
        RecurrentAnalyzer(nn.Linear(2, 2)).analyze(lambda: torch.ones(1, 2), lambda output: output.sum(), steps=1)
    with pytest.raises(UsageError, match="RecurrentAnalyzer has no model"):
        RecurrentAnalyzer().analyze(tokens, cross_entropy)


@pytest.mark.parametrize("horizon", [-4, 0, 2.5, "40", True])
def test_a_horizon_that_is_none_is_refused_at_once(horizon: Any) -> None:
    """Whether it comes by attach, by a configuration or by the constructor, before the first step; the rest stays."""
    fault = UsageError if type(horizon) is int else InputTypeError
    expected = rf"horizon {horizon!r}: expected a whole number of time steps, at least 1\. Pass"
    model = Tagger(nn.RNN)
    with pytest.raises(fault, match=expected):
        RecurrentAnalyzer(model, horizon=horizon)
    with pytest.raises(fault, match=expected):
        GradientManager(analyzers=[{"name": "recurrent", "horizon": horizon}], backends=["memory"])
    with GradientManager(analyzers=["recurrent"], backends=["memory"]) as manager:
        with pytest.raises(fault, match=expected):
            manager.attach(model, torch.optim.SGD(model.parameters()), horizon=horizon)
        whole: Any = np.int64(40)
        manager.attach(model, torch.optim.SGD(model.parameters()), horizon=whole)


@pytest.mark.parametrize("option", ["num_exponents", "max_sequences", "max_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "3"])
def test_numbers_of_things_are_checked(option: str, value: Any) -> None:
    """They are whole numbers from 1 on."""
    fault = UsageError if type(value) is int else InputTypeError
    with pytest.raises(fault, match=rf"{option} {value!r}: expected a whole number of .*, at least 1"):
        RecurrentAnalyzer(**{option: value})


@pytest.mark.parametrize(("options", "live", "offline"), [({}, 2, 4), ({"num_exponents": 6}, 6, 6)])
def test_there_are_as_many_exponents_as_asked_for(options: dict[str, Any], live: int, offline: int) -> None:
    """Those of a contraction by one factor for each dimension are its logarithms, largest first, both ways."""
    factors = torch.linspace(0.9, 0.2, 8, dtype=torch.float64)
    analyzer = RecurrentAnalyzer(**options)
    _, found = analyzer.analyze_step(lambda s, x: s * factors, torch.ones(2, 8).double(), torch.zeros(300, 2, 0))
    exponents = found.cells["step"].lyapunov_exponents
    assert exponents == pytest.approx(factors.log()[:offline].tolist(), abs=1e-3)
    model = nn.RNN(2, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters())
    with GradientManager(analyzers=[{"name": "recurrent", "every": 1, **options}], backends=["memory"]) as manager:
        manager.attach(model, optimizer)
        report = manager.step(model, optimizer, model(torch.randn(3, 20, 2))[0].square().mean())
    assert len(report.analyzers["recurrent"]["cells"]["l0"].lyapunov_exponents) == live


def test_reports_survive_json() -> None:
    """Infinities and every nested part come back as they were."""
    _, dynamics = look(Tagger(), enable_vector_analysis=True)
    assert RecurrentReport.model_validate_json(dynamics.model_dump_json()) == dynamics


def test_metrics_are_finite_and_belong_to_the_panels() -> None:
    """All names begin with rnn/, and every metric that a panel names is emitted."""
    _, dynamics = look(Tagger(num_layers=2), enable_vector_analysis=True)
    found = dynamics.metrics()
    assert all(name.startswith("rnn/") and math.isfinite(value) for name, value in found.items())
    for panel in RecurrentAnalyzer.panels:
        for metric in panel.metrics:
            assert any(name == metric or name.startswith(metric.rstrip("*")) for name in found), metric
    assert found["rnn/spectral_radius"] == dynamics.spectral_radius
    assert "rnn/spectral_radius/rnn.l1" in found


def test_automatic_choice_is_for_recurrent_models() -> None:
    """The reason names what was found; a model without recurrence is left to others."""
    assert RecurrentAnalyzer.suits(Tagger()) == "the model has 1 recurrent modules (LSTM)"
    assert RecurrentAnalyzer.suits(nn.Linear(2, 2)) is None


def train(model: nn.Module, analyzers: list[Any], steps: int = 50, **settings: Any) -> list[StepReport]:
    """Train a tagger and return the reports of its steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reports = []
    with GradientManager(analyzers=analyzers, backends=["memory"]) as manager:
        manager.attach(model, optimizer, **settings)
        for _ in range(steps):
            optimizer.zero_grad()
            reports.append(manager.step(model, optimizer, cross_entropy(model(tokens()))))
            optimizer.step()
    return reports


def test_training_is_bitwise_the_same_with_the_analyzer_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: after fifty steps weights, buffers and random state are those of a training without it."""
    monkeypatch.setattr(RecurrentAnalyzer, "schedule", staticmethod(always))
    states = []
    for analyzers in ([], [RecurrentAnalyzer(enable_vector_analysis=True)]):
        torch.manual_seed(0)
        model = Tagger(num_layers=2, dropout=0.3, bidirectional=True)
        reports = train(model, analyzers)
        states.append(state_of(model))
        assert len([report for report in reports if report.analyzers]) == (50 if analyzers else 0)
    assert_same(states[1]["values"], states[0]["values"])
    assert_same(states[1]["random"], states[0]["random"])


def test_live_reports_come_on_the_schedule_and_no_hook_stays_between() -> None:
    """Steps 2, 8 and 32 carry a report; between them the model has no hook."""
    model, hooked = Tagger(), []
    model.register_forward_pre_hook(lambda *_: hooked.append(len(model.rnn._forward_hooks)))
    reports = train(model, ["recurrent"], steps=33, horizon=5)
    due = [report.step for report in reports if "recurrent" in report.analyzers]
    assert due == [2, 8, 32]
    assert [step for step, count in enumerate(hooked, start=1) if count] == due
    found = reports[1].analyzers["recurrent"]
    assert isinstance(found, RecurrentReport)
    assert found.horizon == 5
    assert "rnn/spectral_radius" in reports[1].metrics()
    assert not model.rnn._forward_hooks


def test_the_manager_knows_the_issues_of_the_run() -> None:
    """What half of the looks or the last one showed is diagnosed, and survives a checkpoint of the analyzer."""
    model = Tagger(nn.RNN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientManager(analyzers=["recurrent"]) as manager:
        manager.attach(model, optimizer, horizon=60)
        for _ in range(2):
            optimizer.zero_grad()
            manager.step(model, optimizer, cross_entropy(model(tokens())))
        assert [issue.issue_type for issue in manager.diagnose()] == [IssueType.SHORT_MEMORY]
        restored = RecurrentAnalyzer()
        restored.load_state_dict(manager.analyzer("recurrent").state_dict())
        assert restored.issues() == manager.analyzer("recurrent").issues()


def test_live_and_offline_agree() -> None:
    """The same weights and batch give the same numbers both ways, but for how many probes they rest on."""
    model, batch = Tagger(nn.GRU), tokens()
    _, offline = RecurrentAnalyzer(model).analyze(lambda: batch, lambda output: output.sum(), steps=1)
    analyzer = RecurrentAnalyzer()
    analyzer.arm(model)
    model(batch).sum().backward()
    live = analyzer.inspect(Snapshot(step=1, model=model))
    analyzer.disarm()
    assert live is not None
    mine, theirs = live.cells["rnn.l0"], offline.cells["rnn.l0"]
    assert mine.gradient_profile == pytest.approx(theirs.gradient_profile)
    assert mine.effective_rank == pytest.approx(theirs.effective_rank)
    assert live.spectral_radius == pytest.approx(offline.spectral_radius)
    assert live.temporal_decay_rate == pytest.approx(offline.temporal_decay_rate, abs=0.05)


class LeakyCell(nn.Module):
    """A cell of one's own, which remembers for longer than the sequences here are."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 4)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Advance by one step."""
        return 0.95 * h + 0.05 * torch.tanh(self.mix(torch.cat([x, h], dim=-1)))


class Unrolled(nn.Module):
    """A loop over a cell, or over an equation of its own."""

    def __init__(self, cell: nn.Module | None = None) -> None:
        super().__init__()
        self.cell, self.mix = cell, nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last state."""
        state: Tensor = self.mix(nn.functional.pad(inputs[:, 0], (0, 4)))
        for x in inputs.unbind(1):
            state = self.cell(x, state) if self.cell else 0.5 * state + self.mix(torch.cat([x, state], -1)).tanh()
        return state


def train_unrolled(model: nn.Module, chosen: Any) -> list[StepReport]:
    """Train for eight steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=chosen) as manager:
        manager.attach(model, optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            manager.step(model, optimizer, model(torch.randn(3, 6, 1)).square().sum())
            optimizer.step()
    return list(manager.reports)


def test_a_cell_of_ones_own_is_picked_and_what_was_not_seen_of_its_memory_is_not_said() -> None:
    """`auto` knows a cell by its name and two arguments; a memory longer than the sequence is said to outlast it."""
    reports = train_unrolled(Unrolled(LeakyCell()), "auto")
    assert "analyzer recurrent was chosen: the model has 1 recurrent modules (LeakyCell)." in reports[0].notes
    found: Any = reports[1].analyzers["recurrent"]
    assert found.censored
    assert any("gradients outlast 5 steps, all that was seen" in note for note in reports[1].notes)


def test_a_model_without_a_recurrent_module_is_told_once_what_was_expected() -> None:
    """Beside a training nothing is reported, and the first look says how to name a state equation."""
    reports = train_unrolled(Unrolled(), ["recurrent"])
    assert not any(report.analyzers for report in reports)
    (note,) = [note for report in reports for note in report.notes if not note.startswith("clips at")]
    assert note.startswith("analyzer recurrent can do nothing here, because the step ran no recurrent module: expected")
    assert "step_functions" in note


def test_a_step_without_a_forward_has_no_report() -> None:
    """Armed too late or not at all, the analyzer says nothing."""
    analyzer, snapshot = RecurrentAnalyzer(), Snapshot(step=1, model=Tagger())
    assert analyzer.inspect(snapshot) is None
    analyzer.arm(snapshot.model)
    assert analyzer.inspect(snapshot) is None
    analyzer.disarm()
    analyzer.disarm()


def test_beyond_512_dimensions_eigenvalues_come_from_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The radius of 600 units is that of numpy to 1 %, and no Jacobian is built for it."""
    monkeypatch.setattr(measure, "step_spectrum", lambda *_: pytest.fail("a whole Jacobian was built"))
    weight = normal(600, 600) / 600**0.5
    found = analyzed(zeroed(nn.RNN(1, 600), weight_hh_l0=weight), 6)
    assert found.spectral_radius == pytest.approx(float(abs(np.linalg.eigvals(weight.numpy())).max()), rel=0.01)


@pytest.mark.parametrize("kind", FUSED)
def test_a_batch_of_nothing_is_passed_over(kind: Kind) -> None:
    """A pass over no sequence is no evidence: the one before it counts, and alone it is a usage error."""
    model, sizes = kind(3, 4, batch_first=True), itertools.cycle([2, 0])
    _, report = RecurrentAnalyzer(model).analyze(
        lambda: torch.randn(next(sizes), 5, 3), lambda output: output[0].sum(), steps=2
    )
    assert [cell.num_sequences for cell in report.cells.values()] == [2]
    with pytest.raises(UsageError, match="ran no recurrent module"):
        RecurrentAnalyzer(model).analyze(lambda: torch.randn(0, 5, 3), lambda output: output[0].sum(), steps=1)


@pytest.mark.parametrize(("batch", "length", "size"), [(1, 1, 1), (1, 2, 1), (2, 1, 4), (1, 3, 1)])
@pytest.mark.parametrize("kind", FUSED)
def test_single_states_and_steps_have_what_can_be_told(kind: Kind, batch: int, length: int, size: int) -> None:
    """One state, step or sequence gives a radius and an exponent, and from two steps on a memory, not before."""
    model = kind(3, size, batch_first=True)
    _, report = RecurrentAnalyzer(model).analyze(
        lambda: torch.randn(batch, length, 3), lambda output: output[0].sum(), steps=2
    )
    assert report.spectral_radius is not None
    assert report.lyapunov_exponent is not None
    assert (report.effective_memory_length is None) == (report.temporal_decay_rate is None) == (length == 1)
    assert RecurrentReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize("live", [False, True])
def test_of_a_large_state_the_outermost_eigenvalues_are_known(live: bool) -> None:
    """Each is near one of the Jacobian's own, among the largest, and the report says that they are not all."""
    size = 200 if live else 600
    weight = normal(size, size) / size**0.5
    model = zeroed(nn.RNN(1, size), weight_hh_l0=weight)
    if live:
        manager = GradientManager(analyzers=["recurrent"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            step = manager.step(model, optimizer, model(torch.zeros(6, 1, 1, dtype=torch.float64))[0].sum())
        report: Any = step.analyzers["recurrent"]
    else:
        batch = torch.zeros(6, 1, 1, dtype=torch.float64)
        report = RecurrentAnalyzer(model).analyze(lambda: batch, lambda output: output[0].sum(), steps=1)[1]
    (cell,) = report.cells.values()
    exact = np.linalg.eigvals(weight.numpy())
    found = np.array([complex(*value) for value in cell.eigenvalues])
    assert 1 <= len(found) < size
    assert not cell.has_all_eigenvalues
    assert np.abs(found[:, None] - exact).min(axis=1).max() < 0.02 * abs(exact).max()
    assert abs(found).min() > 0.5 * abs(exact).max()
    assert abs(found[0]) == pytest.approx(abs(exact).max(), rel=0.01)
    assert any(f"{len(found)} of {size}" in note for note in report.notes)


def test_of_a_small_state_every_eigenvalue_is_known() -> None:
    """Where the Jacobian is taken in full there are as many as the state has dimensions."""
    (cell,) = look(Tagger(nn.GRU))[1].cells.values()
    assert len(cell.eigenvalues) == cell.state_size == 8
    assert cell.has_all_eigenvalues


class OwnCell(nn.Module):
    """A cell of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.take = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.keep(h) + self.take(x))


class OwnNetwork(nn.Module):
    """A loop over a cell of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = OwnCell()

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state."""
        h = x.new_zeros(x.shape[0], 4)
        for inputs in x.unbind(1):
            h = self.cell(inputs, h)
        return h


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cells_in_half_precision_have_the_numbers_of_double(dtype: torch.dtype) -> None:
    """A cell of one's own in half precision has a radius, exponents and a memory, near those of the same weights."""
    torch.manual_seed(0)
    model, batch = OwnNetwork().to(dtype), torch.randn(3, 12, 3).to(dtype)
    numbers = []
    for precision in (dtype, torch.float64):
        model, batch = model.to(precision), batch.to(precision)
        _, report = RecurrentAnalyzer(model).analyze(lambda: batch, lambda output: output.float().sum(), steps=1)  # noqa: B023
        numbers.append([report.spectral_radius, report.temporal_decay_rate, report.effective_memory_length])
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1)


@pytest.mark.parametrize("size", [4, 600])
@pytest.mark.parametrize("scale", [1e-30, 1e-20])
def test_gradients_that_vanish_at_once_keep_their_size(size: int, scale: float) -> None:
    """With a recurrent matrix of this scale, m(lag) and the exponent are its powers and logarithm, not zero."""
    turn = scale * torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))[0]
    model = nn.RNN(1, size, batch_first=True)
    for param in model.parameters():
        nn.init.zeros_(param)
    model.weight_hh_l0.data = turn
    _, report = RecurrentAnalyzer(model).analyze(lambda: torch.zeros(1, 5, 1), lambda output: output[0].sum(), steps=1)
    (cell,) = report.cells.values()
    assert cell.decay_profile[:4] == pytest.approx([scale**lag for lag in range(4)], rel=1e-4)
    assert cell.lyapunov_exponents[0] == pytest.approx(math.log(scale), rel=1e-4)
    assert cell.spectral_radius == pytest.approx(scale, rel=1e-2)


@pytest.mark.parametrize("kind", FUSED)
def test_in_few_dimensions_the_decay_is_exact(kind: Kind) -> None:
    """m(lag) is the root mean square of what the product of Jacobians leaves of every unit vector of the output."""
    torch.manual_seed(0)
    module, batch = kind(3, 6, batch_first=True).double(), 2 * torch.randn(2, 9, 3, dtype=torch.float64)
    _, report = RecurrentAnalyzer(module).analyze(lambda: batch, lambda output: output[0].sum(), steps=1)
    (cell,) = report.cells.values()
    squares = [one_lag(module, batch, lag) for lag in range(1, 10)]
    assert cell.decay_profile[1:] == pytest.approx([math.sqrt(one) for one in squares], rel=1e-9)


def one_lag(module: nn.RNNBase, batch: Tensor, lag: int) -> float:
    """Return the mean square over sequences and outputs of the last output's gradient at a state, by torch's module."""
    found = []
    for sequence in batch:
        parts: Any = module(sequence[:-lag])[1] if lag < len(sequence) else None
        if parts is None:
            zeros = torch.zeros(1, 6, dtype=torch.float64)
            parts = (zeros, zeros.clone()) if isinstance(module, nn.LSTM) else zeros
        state = tuple(part.detach().requires_grad_() for part in (parts if isinstance(parts, tuple) else (parts,)))
        last = module(sequence[-lag:], state if isinstance(module, nn.LSTM) else state[0])[0][-1]
        rows = [torch.autograd.grad(one, state, retain_graph=True) for one in last]
        found.append(sum(float(part.square().sum()) for row in rows for part in row) / len(rows))
    return sum(found) / len(found)


def test_a_linear_reservoir_has_the_radius_of_its_matrix() -> None:
    """The radius of x' = W x + W_in u is that of a sparse W by scipy's Arnoldi method and by numpy."""
    matrix = sparse.random(120, 120, density=0.1, random_state=0, format="csr")
    expected = float(abs(linalg.eigs(matrix, k=1, which="LM", return_eigenvectors=False)[0]))
    weight = torch.tensor(matrix.toarray())
    _, found = RecurrentAnalyzer().analyze_step(lambda s, x: s @ weight.T + x, normal(2, 120), normal(9, 2, 120))
    assert found.spectral_radius == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("radius", [0.5, 0.9, 1.3])
def test_reservoirpy_agrees_on_its_own_reservoir(radius: float) -> None:
    """The radius of a linear reservoir is what ReservoirPy computes for its matrix, and what it was asked to make.

    It is given the matrix in full: of a sparse one it asks ARPACK, which may settle on the second of two near values.
    """
    reservoir = Reservoir(100, sr=radius, lr=1.0, activation="identity", seed=0)
    reservoir.initialize(np.ones((1, 2)))
    weight, inward = (torch.tensor(np.asarray(part.todense())) for part in (reservoir.W, reservoir.Win))
    _, found = RecurrentAnalyzer().analyze_step(
        lambda s, x: s @ weight.T + x @ inward.T, normal(2, 100), normal(9, 2, 2)
    )
    assert found.spectral_radius == pytest.approx(float(observables.spectral_radius(weight.numpy())), rel=1e-6)
    assert found.spectral_radius == pytest.approx(radius, rel=1e-6)


def test_a_gate_that_is_open_for_good_never_forgets() -> None:
    """At a bias where the forget gate is exactly one the memory of the cell is infinite, not minus that."""
    open_gate = zeroed(nn.LSTM(1, 4), bias_ih_l0=gate(torch.full((4,), 200.0, dtype=torch.float64), 1, 4))
    assert analyzed(open_gate, 8).cells["l0"].cell_memory_length == math.inf


def test_a_state_that_stays_where_it_is_fills_nothing() -> None:
    """At a fixed point the centred states are zero but for rounding, which has no rank."""
    bias = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)
    found = analyzed(zeroed(nn.RNN(1, 4), bias_ih_l0=bias), 33, max_steps=32)
    assert (found.cells["l0"].effective_rank, found.cells["l0"].participation_ratio) == (0.0, 0.0)
