"""Divergence, rotation, coherence and sharpness: golden values, games, and nothing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientManager, VectorAnalyzer
from gradtrack.analyzers.tools.spectra import effective_rank
from gradtrack.analyzers.vector import VectorReport
from gradtrack.analyzers.vector.noise import GradientNoise
from gradtrack.errors import InputTypeError, UsageError
from tests.analyzers.vector.fields import DISCOUNT, network_gradient, saddle, temporal_difference
from tests.training import batch_loss, optimizer_of, small_model


def random_matrix(size: int, seed: int = 0) -> Tensor:
    """Return a random matrix."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Quadratic(nn.Module):
    """The loss ½ θᵀAθ."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix
        self.theta = nn.Parameter(torch.linspace(-1, 1, len(matrix), dtype=torch.float64))

    def forward(self, scale: Tensor) -> Tensor:
        """Return the loss."""
        return scale * self.theta @ self.matrix @ self.theta / 2


ONE = torch.ones((), dtype=torch.float64)


def of_quadratic(matrix: Tensor, **options: Any) -> VectorReport:
    """Analyze a quadratic loss."""
    return VectorAnalyzer(Quadratic(matrix), **options).analyze(lambda: ONE, lambda loss: loss, steps=1)


def test_the_divergence_of_a_quadratic_is_the_trace() -> None:
    """V1: probes give the trace within four standard errors; a diagonal matrix needs one; small ones are exact."""
    matrix = random_matrix(100) + random_matrix(100).T
    found = of_quadratic(matrix, num_probes=64)
    assert not found.exact
    assert abs((found.divergence or 0) - float(matrix.trace())) < 4 * (found.divergence_standard_error or 0)
    diagonal = torch.linspace(-1, 3, 100, dtype=torch.float64).diag()
    assert of_quadratic(diagonal, num_probes=1).divergence == pytest.approx(float(diagonal.trace()), rel=1e-12)
    small = of_quadratic(matrix[:5, :5])
    assert small.exact
    assert small.divergence == pytest.approx(float(matrix[:5, :5].trace()), rel=1e-12)
    assert small.divergence_standard_error == 0.0


def test_the_gradient_of_one_loss_does_not_rotate() -> None:
    """V2: for one loss the rotation is exactly 0; computed for the same field it is under 1e-20."""
    model = small_model(dtype=torch.float64)
    found = VectorAnalyzer(model).analyze(
        lambda: torch.ones(4, 6, dtype=torch.float64), lambda out: out.square().mean()
    )
    assert (found.rotation, found.antisymmetric_norm) == (0.0, 0.0)
    field, at = network_gradient()
    computed = VectorAnalyzer().analyze_field(field, at)
    assert computed.rotation is not None
    assert computed.rotation < 1e-20


def test_a_bilinear_game_is_pure_rotation() -> None:
    """V3: min_x max_y xy has rotation 1, an antisymmetric norm of root 2 and no divergence."""
    found = VectorAnalyzer().analyze_game(saddle())
    assert found.rotation == pytest.approx(1.0, abs=1e-9)
    assert found.antisymmetric_norm == pytest.approx(math.sqrt(2), abs=1e-9)
    assert found.symmetric_norm == pytest.approx(0.0, abs=1e-9)
    assert found.divergence == pytest.approx(0.0, abs=1e-9)


def test_simultaneous_descent_on_a_bilinear_game_spirals_out() -> None:
    """V3: along the field the radius grows by the root of 1 + η² per step, as pure rotation must."""
    game, rate = saddle(), 0.1
    (x,), (y,) = game["min"][0], game["max"][0]
    start = float(torch.hypot(x, y).detach())
    for _ in range(50):
        slopes = [torch.autograd.grad(loss(), params)[0] for params, loss in game.values()]
        with torch.no_grad():
            x.sub_(rate * slopes[0])
            y.sub_(rate * slopes[1])
    assert float(torch.hypot(x, y).detach()) == pytest.approx(start * (1 + rate**2) ** 25, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "expected"), [(0.5, 0.8), (2.0, 0.2)])
def test_a_damped_game_rotates_less(epsilon: float, expected: float) -> None:
    """V4: with ε/2 (x² - y²) the rotation is 1/(1 + ε²)."""
    assert VectorAnalyzer().analyze_game(saddle(epsilon)).rotation == pytest.approx(expected, abs=1e-12)


def test_temporal_differences_rotate() -> None:
    """V5: TD(0) on the uniform cycle of three states has the rotation (γ²/2)/(1 + γ²)."""
    found = VectorAnalyzer().analyze_field(temporal_difference, torch.zeros(3, dtype=torch.float64))
    assert found.rotation == pytest.approx((DISCOUNT**2 / 2) / (1 + DISCOUNT**2), abs=1e-9)
    assert found.rotation == pytest.approx(0.223757, abs=0.02)


@pytest.mark.parametrize("num_probes", [32])
def test_probes_agree_with_the_matrix(num_probes: int) -> None:
    """In many dimensions divergence and rotation lie within four standard errors of those of the matrix."""
    matrix = random_matrix(80) + 2 * random_matrix(80, 1).T
    found = VectorAnalyzer(num_probes=num_probes).analyze_field(lambda x: matrix @ x, torch.zeros(80).double())
    turning = float(((matrix - matrix.T) / 2).square().sum() / matrix.square().sum())
    assert (found.exact, found.num_probes) == (False, num_probes)
    assert found.rotation is not None
    assert abs(found.rotation - turning) < 4 * (found.rotation_standard_error or 0)
    assert abs((found.divergence or 0) - float(matrix.trace())) < 4 * (found.divergence_standard_error or 0)


def test_a_preconditioned_gradient_rotates() -> None:
    """The field D∇L of an adaptive optimizer rotates for one loss too."""
    matrix = random_matrix(6) + random_matrix(6).T
    scale = torch.linspace(0.1, 2, 6, dtype=torch.float64)
    found = VectorAnalyzer().analyze_field(lambda x: scale * (matrix @ x), torch.zeros(6, dtype=torch.float64))
    expected = scale.diag() @ matrix
    turning = float(((expected - expected.T) / 2).square().sum() / expected.square().sum())
    assert found.rotation == pytest.approx(turning)
    assert turning > 0.05


def test_dropout_does_not_pass_for_rotation() -> None:
    """A random gradient field has no rotation: both products see the same mask, and both players the same noise."""
    weight = torch.randn(70, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(theta: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full((70,), 0.5, dtype=torch.float64))
        return ((mask * theta).sum() * (weight * theta).sum()) ** 2

    found = VectorAnalyzer().analyze_field(torch.func.grad(loss, argnums=0), weight.clone())
    assert found.rotation is None or found.rotation < 1e-20
    first, second = (torch.ones(40, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def shared() -> Tensor:
        return (torch.randn(40, dtype=torch.float64) * first * second).sum()

    game = VectorAnalyzer().analyze_game({"a": ([first], shared), "b": ([second], shared)})
    assert game.rotation is not None
    assert game.rotation < 1e-20


def test_a_constant_field_has_no_rotation_to_speak_of() -> None:
    """Where the Jacobian is zero the rotation is undefined, not 0."""
    found = VectorAnalyzer().analyze_field(lambda x: 0 * x + 1, torch.zeros(3))
    assert (found.rotation, found.divergence) == (None, 0.0)


class TestNoise:
    """Coherence and noise scale."""

    def test_equal_and_orthogonal_gradients(self) -> None:
        """V6: eight equal gradients have the coherence 1, eight orthogonal ones 1/8."""
        assert GradientNoise([torch.ones(5)] * 8).coherence == pytest.approx(1.0, abs=1e-6)
        assert GradientNoise(torch.eye(8)).coherence == pytest.approx(0.125, abs=1e-6)

    def test_the_noise_scale_of_gaussian_gradients(self) -> None:
        """V6: for N(μ, I) in 50 dimensions with ‖μ‖ = 2 the noise scale is 12.5."""
        generator = torch.Generator().manual_seed(0)
        mean = torch.full((50,), 2 / math.sqrt(50), dtype=torch.float64)
        draws = mean + torch.randn(20_000, 50, generator=generator, dtype=torch.float64)
        assert GradientNoise(draws).noise_scale == pytest.approx(12.5, abs=0.5)

    @given(st.integers(2, 10), st.integers(1, 6), st.integers(0, 99), st.sampled_from([1e-6, 1e6]))
    def test_the_bounds_and_the_scale(self, count: int, size: int, seed: int, scale: float) -> None:
        """F1: coherence lies between 1/m times nothing and one, and no scale of the loss changes either number."""
        draws = 3 + torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        plain, scaled = GradientNoise(draws), GradientNoise(scale * draws)
        assert plain.coherence is not None
        assert 0 <= plain.coherence <= 1 + 1e-12
        assert scaled.coherence == pytest.approx(plain.coherence, abs=1e-12)
        assert scaled.temporal == pytest.approx(plain.temporal, abs=1e-12)
        if plain.noise_scale is not None and plain.coherence > 0.5:
            assert scaled.noise_scale == pytest.approx(plain.noise_scale, rel=1e-6)

    def test_what_one_gradient_cannot_tell(self) -> None:
        """A single gradient has neither; where the mean is lost in noise the scale is undefined."""
        one = GradientNoise([torch.ones(3)])
        assert (one.coherence, one.noise_scale, one.temporal) == (None, None, None)
        assert GradientNoise([torch.ones(3), -torch.ones(3)]).noise_scale is None

    @given(st.integers(2, 9), st.integers(0, 99), st.sampled_from([1e-30, 1.0, 1e30]))
    def test_equal_gradients_have_no_noise(self, count: int, seed: int, scale: float) -> None:
        """Rounding makes neither a noise scale below zero nor a coherence above one."""
        one = scale * torch.randn(7, generator=torch.Generator().manual_seed(seed))
        found = GradientNoise([one] * count)
        assert found.coherence is not None
        assert found.noise_scale is not None
        assert 1 - 1e-12 <= found.coherence <= 1
        assert 0 <= found.noise_scale <= 1e-12

    def test_gradients_of_zero_have_no_numbers(self) -> None:
        """Where nothing flows nothing agrees and nothing is noise."""
        zero = GradientNoise([torch.zeros(3)] * 4)
        assert (zero.coherence, zero.noise_scale, zero.temporal) == (None, None, None)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_gradients_that_are_not_finite_have_no_numbers(self, bad: float) -> None:
        """An overflow is not perfect agreement."""
        broken = GradientNoise([torch.ones(3), torch.tensor([bad, 1.0, 1.0])])
        assert (broken.coherence, broken.noise_scale, broken.temporal) == (None, None, None)

    def test_batches_at_fixed_weights(self) -> None:
        """Offline the batches of `input_fn` are the samples: the report has what their gradients give."""
        model = nn.Linear(3, 1, bias=False).double()
        batches = list(2 + torch.randn(6, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        given = iter(batches)
        found = VectorAnalyzer(model).analyze(lambda: next(given), lambda out: out.sum(), steps=6)
        expected = GradientNoise(batches)
        assert found.coherence == pytest.approx(expected.coherence, rel=1e-12)
        assert found.noise_scale == pytest.approx(expected.noise_scale, rel=1e-12)
        assert found.temporal_coherence == pytest.approx(expected.temporal, rel=1e-12)


class TestSharpness:
    """The curvature along the gradient and along the step."""

    def test_gradient_descent_just_above_stability(self) -> None:
        """F5: at the rate 2.02/λ the sharpness along the step is 2.02, and that along the gradient is λ."""
        curvature = 7.0
        model = Quadratic(torch.full((1, 1), curvature, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.02 / curvature)
        found = VectorAnalyzer(model).analyze(lambda: ONE, lambda loss: loss, steps=3, optimizer=optimizer)
        assert found.step_sharpness == pytest.approx(2.02, abs=1e-3)
        assert found.directional_sharpness == pytest.approx(curvature, abs=1e-9)
        assert found.temporal_coherence == pytest.approx(-1.0)
        assert (found.coherence, found.noise_scale) == (None, None)

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
    def test_above_two_a_step_raises_a_quadratic(self, kind: Any) -> None:
        """For any optimizer the loss of a quadratic changes by slope · (1 - sharpness/2)."""
        model = Quadratic(torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
        optimizer = kind(model.parameters(), lr=0.3)
        before, start = float(model(ONE).detach()), model.theta.detach().clone()
        found = VectorAnalyzer(model).analyze(lambda: ONE, lambda loss: loss, steps=1, optimizer=optimizer)
        slope = float((model.matrix @ start) @ (model.theta.detach() - start))
        assert found.step_sharpness is not None
        expected = slope * (1 - found.step_sharpness / 2)
        assert float(model(ONE).detach()) - before == pytest.approx(expected, rel=1e-9)

    def test_dropout_is_the_same_on_both_sides_of_a_step(self) -> None:
        """The gradient after the step is of the same batch and the same mask."""
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 1, bias=False)).double()
        batch = torch.ones(1, 200, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = VectorAnalyzer(model).analyze(
            lambda: batch, lambda out: out.square().sum(), steps=1, optimizer=optimizer
        )
        assert found.step_sharpness == pytest.approx(1e-3 * (found.directional_sharpness or 0), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_loss_changes_no_ratio(scale: float) -> None:
    """F1: rotation and coherence stay; divergence and sharpness scale with the loss."""

    def analyze(factor: float) -> VectorReport:
        inputs = iter(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        analyzer = VectorAnalyzer(small_model(dtype=torch.float64))
        return analyzer.analyze(lambda: next(inputs), lambda out: factor * out.square().mean(), steps=4)

    one, other = analyze(1.0), analyze(scale)
    assert other.coherence == pytest.approx(one.coherence, abs=1e-12)
    assert other.temporal_coherence == pytest.approx(one.temporal_coherence, abs=1e-12)
    assert other.noise_scale == pytest.approx(one.noise_scale, rel=1e-9)
    assert other.divergence == pytest.approx(scale * (one.divergence or 0), rel=1e-9)
    assert other.directional_sharpness == pytest.approx(scale * (one.directional_sharpness or 0), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e30])
def test_the_scale_of_a_game_changes_no_share(scale: float) -> None:
    """F1: every player's loss times a constant has the same rotation, from the matrix and from probes alike."""
    expected = VectorAnalyzer().analyze_game(saddle(0.5)).rotation
    scaled = {name: (params, lambda loss=loss: scale * loss()) for name, (params, loss) in saddle(0.5).items()}
    assert VectorAnalyzer().analyze_game(scaled).rotation == pytest.approx(expected, abs=1e-12)
    matrix, at = random_matrix(100), torch.zeros(100, dtype=torch.float64)
    one = VectorAnalyzer().analyze_field(lambda x: matrix @ x, at)
    other = VectorAnalyzer().analyze_field(lambda x: scale * (matrix @ x), at)
    assert not one.exact
    assert other.rotation == pytest.approx(one.rotation, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_squares_of_a_gradient_may_leave_their_precision(scale: float, dtype: torch.dtype) -> None:
    """F1 at the ends of float32: curvature, noise and the sharpness of a step with lr/scale are as at one."""

    def analyze(factor: float, *, steps: bool) -> VectorReport:
        inputs = iter(torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=dtype))
        model = small_model(dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / factor) if steps else None
        analyzer = VectorAnalyzer(model)
        return analyzer.analyze(
            lambda: next(inputs), lambda out: out.square().mean() * factor, steps=3, optimizer=optimizer
        )

    one, other = analyze(1.0, steps=False), analyze(scale, steps=False)
    assert other.directional_sharpness == pytest.approx(scale * (one.directional_sharpness or 0), rel=1e-3)
    assert other.divergence == pytest.approx(scale * (one.divergence or 0), rel=1e-3)
    assert other.noise_scale == pytest.approx(one.noise_scale, rel=1e-3)
    one, other = analyze(1.0, steps=True), analyze(scale, steps=True)
    assert one.step_sharpness is not None
    assert other.step_sharpness == pytest.approx(one.step_sharpness, rel=1e-3)


def test_gradients_on_logits_have_one_rank_less() -> None:
    """F4: the rows of a cross-entropy's gradient sum to zero, so that k classes leave a rank of at most k - 1."""
    logits = torch.randn(40, 7, dtype=torch.float64, requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.arange(40) % 7)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.sum(dim=1).abs().max()) < 1e-12
    assert effective_rank(torch.linalg.svdvals(gradient)) <= 6


def test_an_analysis_changes_nothing() -> None:
    """Weights, buffers, gradients, modes and the random generator are as before, offline and for a game."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    model(torch.ones(3, 6)).sum().backward()
    model[1].eval()

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers()]
        gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        modes = [module.training for module in model.modules()]
        return [[tensor.detach().clone() for tensor in tensors], gradients, modes, torch.get_rng_state()]

    model[1].train()
    before = state()
    analyzer = VectorAnalyzer(model)
    analyzer.analyze(lambda: torch.randn(4, 6), lambda out: out.square().mean(), steps=2)
    params = list(model.parameters())
    analyzer.analyze_game({"one": (params, lambda: model(torch.randn(4, 6)).square().mean())}, steps=2)
    torch.testing.assert_close(state(), before, rtol=0.0, atol=0.0)


def test_mistakes_are_named() -> None:
    """Fields without a graph or of the wrong size, shared parameters and missing models are named."""
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(UsageError, match="create_graph=True"):
        VectorAnalyzer().analyze_field(lambda at: at.detach(), torch.ones(2))
    with pytest.raises(UsageError, match="returned 1 numbers at 2"):
        VectorAnalyzer().analyze_field(lambda at: at.sum(), torch.ones(2))
    with pytest.raises(UsageError, match="belongs to two players"):
        VectorAnalyzer().analyze_game({"a": ([x], x.sum), "b": ([x], x.sum)})
    with pytest.raises(UsageError, match=r"Construct VectorAnalyzer\(model\)"):
        VectorAnalyzer().analyze(lambda: x, lambda out: out)
    with pytest.raises(UsageError, match="loss_fn returned"):
        VectorAnalyzer().analyze_game({"a": ([x], lambda: torch.ones(2))})
    with pytest.raises(UsageError, match="num_probes 0"):
        VectorAnalyzer(num_probes=0)
    with pytest.raises(InputTypeError, match=r"field returned list: .* torch\.stack"):
        VectorAnalyzer().analyze_field(lambda at: list(at), torch.ones(2))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("players", "match"),
    [
        ({}, "expected a mapping"),
        ([("a", ())], "expected a mapping"),
        ({"a": ONE.sum}, r"player 'a' is builtin_function_or_method: expected \(parameters, loss_fn\)"),
        ({"a": (["theta"], ONE.sum)}, "player 'a': expected parameters"),
        ({"a": ([ONE], ONE.sum)}, "player 'a' has no parameter that requires a gradient"),
    ],
)
def test_what_is_no_game_is_named(players: Any, match: str) -> None:
    """Each player is parameters and a loss."""
    with pytest.raises((UsageError, InputTypeError), match=match):
        VectorAnalyzer().analyze_game(players)


class Player(nn.Module):
    """A player with batch statistics."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Play."""
        found: Tensor = self.norm(self.layer(x))
        return found


def test_parameters_come_in_any_form_for_several_steps() -> None:
    """A list of parameters, a generator of them or the module: the report is the same, with a frozen one left out."""
    first, second = Player(3, 4).double(), Player(4, 2).double()
    first.layer.bias.requires_grad_(False)

    def loss() -> Tensor:
        found: Tensor = second(first(torch.randn(8, 3, dtype=torch.float64))).pow(3).mean()
        return found

    forms: list[Any] = [lambda player: list(player.parameters()), nn.Module.parameters, lambda player: player]
    reports = []
    for form in forms:
        torch.manual_seed(0)
        game = {"first": (form(first), loss), "second": (form(second), lambda: -loss())}
        reports.append(VectorAnalyzer(nn.ModuleList([first, second])).analyze_game(game, steps=3))
    assert (reports[0].num_steps, reports[0].num_parameters) == (3, 12 + 8 + 10 + 4)
    assert reports[0].coherence is not None
    assert reports[1:] == reports[:1] * 2


def test_the_buffers_of_modules_that_play_are_put_back() -> None:
    """Without a model of the analyzer's own, batch statistics of the players are as before."""
    first, second = Player(3, 4), Player(4, 2)
    before = [buffer.clone() for buffer in (*first.buffers(), *second.buffers())]
    game = {
        "first": (first, lambda: second(first(torch.randn(8, 3))).pow(3).mean()),
        "second": (second, lambda: -second(first(torch.randn(8, 3))).pow(3).mean()),
    }
    VectorAnalyzer().analyze_game(game, steps=2)
    torch.testing.assert_close([*first.buffers(), *second.buffers()], before, rtol=0.0, atol=0.0)


def test_a_single_tensor_is_the_parameters_of_a_player() -> None:
    """A tensor alone, even of no dimension, is one parameter and not its rows."""
    x, y = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.5, 0.25))
    found = VectorAnalyzer().analyze_game({"min": (x, lambda: x * y), "max": (y, lambda: -x * y)})
    assert found.rotation == 1.0
    assert found.antisymmetric_norm == pytest.approx(2**0.5)


def test_a_field_has_a_curvature_along_itself() -> None:
    """The sharpness of a field is that of the loss whose gradient it is, zero for pure rotation, None where v is 0."""
    matrix = random_matrix(5) + random_matrix(5).T
    theta = torch.linspace(-1, 1, 5, dtype=torch.float64)
    found = VectorAnalyzer().analyze_field(lambda at: matrix @ at, theta)
    assert found.directional_sharpness == pytest.approx(of_quadratic(matrix).directional_sharpness or 0, rel=1e-12)
    turning = VectorAnalyzer().analyze_field(lambda at: torch.stack([at[1], -at[0]]), torch.ones(2))
    assert turning.directional_sharpness == pytest.approx(0.0, abs=1e-7)
    assert VectorAnalyzer().analyze_field(lambda at: matrix @ at, 0 * theta).directional_sharpness is None


def test_a_field_may_be_asked_for_at_plain_numbers() -> None:
    """A list or whole numbers are a point as well."""
    found = VectorAnalyzer().analyze_field(lambda at: 3.0 * at, [1, 2])  # type: ignore[arg-type]
    assert (found.divergence, found.num_parameters) == (6.0, 2)


class TestLive:
    """Beside a training."""

    def test_the_cosine_of_consecutive_gradients(self) -> None:
        """On its steps the report has the cosine between the gradient of the step and the one before."""
        model, gradients = small_model(), []
        manager = GradientManager(analyzers=["vector"], backends=["memory"], enable_gradient_clipping=False)
        optimizer, reports = optimizer_of(model), []
        for step in range(1, 10):
            optimizer.zero_grad()
            reports.append(manager.step(model, optimizer, batch_loss(model, step)))
            gradients.append(
                torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
            )
            optimizer.step()
        assert [report.step for report in reports if report.analyzers] == [2, 8]
        for step in (2, 8):
            found: Any = reports[step - 1].analyzers["vector"]
            expected = torch.cosine_similarity(gradients[step - 1].double(), gradients[step - 2].double(), dim=0)
            assert found.temporal_coherence == pytest.approx(float(expected), rel=1e-6)
            assert (found.rotation, found.coherence) == (None, None)
        records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
        assert [record.step for record in records if "vector/temporal_coherence" in record.metrics] == [2, 8]

    def test_micro_batches_give_coherence(self) -> None:
        """Under accumulation coherence and noise scale are those of the micro-batches; the hooks go with the step."""
        model = small_model()
        manager = GradientManager(analyzers=["vector"])
        optimizer, parts = optimizer_of(model), []
        for step in range(1, 3):
            optimizer.zero_grad()
            for part in range(4):
                loss = batch_loss(model, 10 * step + part)
                if step == 2:
                    slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                    parts.append(torch.cat([slope.flatten() for slope in slopes]))
                report = manager.step(model, optimizer, loss, accumulate=part < 3)
            optimizer.step()
        expected, found = GradientNoise(parts), report.analyzers["vector"]
        assert isinstance(found, VectorReport)
        assert found.coherence == pytest.approx(expected.coherence, rel=1e-4)
        assert found.num_steps == 4
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())

    def test_an_observed_game_is_differentiated(self) -> None:
        """After `observe` the live report has the rotation, and training goes on as without it."""
        x, y = (nn.Parameter(torch.full((1,), value)) for value in (0.7, -0.3))
        model = nn.ParameterList([x, y])

        def value() -> Tensor:
            return (x * y + (x**2 - y**2) / 4).sum()

        game = {"min": (iter([x]), value), "max": (iter([y]), lambda: -value())}
        manager = GradientManager(analyzers=["vector"], backends=["memory"])
        analyzer = manager.analyzer("vector")
        assert isinstance(analyzer, VectorAnalyzer)
        analyzer.observe(game)
        optimizer = optimizer_of(model, lr=0.01)
        for _ in range(8):
            optimizer.zero_grad()
            report = manager.step(model, optimizer, (x * y).sum())
            kept = [param.grad.clone() for param in model.parameters() if param.grad is not None]
            optimizer.step()
        found: Any = report.analyzers["vector"]
        assert found.rotation == pytest.approx(0.8)
        assert len(kept) == 2
        records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
        assert records[-1].metrics["vector/rotation"] == pytest.approx(0.8)

    def test_an_observed_loss_gives_divergence_and_sharpness(self) -> None:
        """One loss gives the trace of its Hessian and the curvature along its gradient."""
        model = Quadratic(torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
        manager = GradientManager(analyzers=["vector"])
        analyzer: Any = manager.analyzer("vector")
        analyzer.observe(lambda: model(ONE))
        optimizer = optimizer_of(model)
        reports = [manager.step(model, optimizer, model(ONE)) for _ in range(2)]
        found: Any = reports[1].analyzers["vector"]
        assert found.divergence == pytest.approx(5.0)
        assert found.rotation == 0.0
        assert found.directional_sharpness is not None

    def test_a_sampled_tensor_counts_as_the_whole_of_it(self) -> None:
        """Of the large tensor a part is looked at, and yet the numbers are those of all elements.

        Its gradient is the same in every micro-batch and step, (8192 elements of 1), that of the small one, 64 elements
        of ±8, turns around: the cosine is (8192 - 4096)/(8192 + 4096), and the coherence 8192/(8192 + 4096).
        """
        model = nn.ParameterList([nn.Parameter(torch.zeros(8192)), nn.Parameter(torch.zeros(64))])
        optimizer = optimizer_of(model)

        def loss(sign: float) -> Tensor:
            found: Tensor = model[0].sum() + 8 * sign * model[1].sum()
            return found

        reports = []
        for micro_batches in (1, 2):
            manager = GradientManager(analyzers=["vector"])
            for step in range(2):
                optimizer.zero_grad()
                signs = [(-1.0) ** step] if micro_batches == 1 else [1.0, -1.0]
                for index, sign in enumerate(signs, start=1):
                    report = manager.step(model, optimizer, loss(sign), accumulate=index < micro_batches)
            reports.append(report.analyzers["vector"])
        alone, accumulated = reports
        assert isinstance(alone, VectorReport)
        assert isinstance(accumulated, VectorReport)
        assert alone.temporal_coherence == pytest.approx(1 / 3)
        assert accumulated.coherence == pytest.approx(2 / 3)
