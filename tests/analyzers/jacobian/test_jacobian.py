"""The Jacobians of blocks: golden values, blocks of every kind, and nothing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from gradtrack import GradientManager, JacobianAnalyzer
from gradtrack.analyzers.jacobian.report import JacobianReport
from gradtrack.analyzers.tools.spectra import effective_rank, participation_ratio
from gradtrack.errors import UsageError
from tests.training import optimizer_of


def linear(matrix: Tensor) -> nn.Linear:
    """Return a layer with a given matrix."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return layer


def batch(*shape: int) -> Tensor:
    """Return a random batch."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def only(report: JacobianReport) -> Any:
    """Return the one block of a report."""
    (block,) = report.blocks.values()
    return block


def test_a_diagonal_matrix() -> None:
    """J1: diag(3, 1, 0.1) has the largest singular value 3 and the condition 30."""
    layer = linear(torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64).diag())
    found = only(JacobianAnalyzer().analyze(lambda: batch(2, 3), blocks=layer))
    assert found.sigma_max == pytest.approx(3, abs=1e-6)
    assert found.sigma_min == pytest.approx(0.1, abs=1e-6)
    assert found.condition == pytest.approx(30, abs=1e-6)
    assert found.log10_condition == pytest.approx(math.log10(30), abs=1e-6)
    assert found.spectral_radius == pytest.approx(3, abs=1e-6)
    assert found.mean_square_gain == pytest.approx((9 + 1 + 0.01) / 3)


@pytest.mark.parametrize(
    ("values", "rank", "ratio"),
    [([1.0] * 7, 7.0, 7.0), ([2.0, 0.0, 0.0], 1.0, 1.0), ([1.0, 0.5], 1.8898816, 1.4705882)],
)
def test_effective_ranks(values: list[float], rank: float, ratio: float) -> None:
    """J2: the effective rank of the identity, of rank one and of (1, 0.5), and the participation ratio."""
    matrix = torch.tensor(values, dtype=torch.float64).diag()
    found = only(JacobianAnalyzer().analyze(lambda: batch(1, len(values)), blocks=linear(matrix)))
    assert found.effective_rank == pytest.approx(rank, abs=1e-6)
    assert effective_rank(torch.tensor(values, dtype=torch.float64)) == pytest.approx(rank, abs=1e-6)
    assert participation_ratio(torch.tensor(values, dtype=torch.float64)) == pytest.approx(ratio, abs=1e-6)


def test_a_stack_of_orthogonal_layers_is_perfectly_conditioned() -> None:
    """G1: a stack of 1.1 times orthogonal layers has the condition one, to 1e-12."""
    layers = [linear(1.1 * torch.linalg.qr(batch(9, 9) + index)[0]) for index in range(6)]
    found = only(JacobianAnalyzer().analyze(lambda: batch(1, 9), blocks=nn.Sequential(*layers)))
    assert found.condition == pytest.approx(1.0, abs=1e-12)
    assert found.mean_square_gain == pytest.approx(1.1**12)


def test_a_dead_half_of_a_relu_has_an_infinite_condition() -> None:
    """What a ReLU cuts off is lost: an infinite condition, reported as such and capped in its logarithm."""
    found = only(JacobianAnalyzer().analyze(lambda: torch.tensor([[-1.0, 1.0, 2.0]]), blocks=nn.ReLU()))
    assert (found.condition, found.log10_condition, found.sigma_min) == (math.inf, 16.0, 0.0)
    report = JacobianAnalyzer().analyze(lambda: torch.tensor([[-1.0, 1.0, 2.0]]), blocks=nn.ReLU())
    assert JacobianReport.model_validate_json(report.model_dump_json()) == report


def test_only_square_matrices_have_a_spectral_radius() -> None:
    """The spectral radius is None where the sides differ, and that of the rotation where they do not."""
    wide = only(JacobianAnalyzer().analyze(lambda: batch(1, 5), blocks=linear(batch(3, 5))))
    assert wide.spectral_radius is None
    assert (wide.num_inputs, wide.num_outputs) == (5, 3)
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]]) * 0.9
    rotation = only(JacobianAnalyzer().analyze(lambda: batch(1, 2), blocks=linear(turn)))
    assert rotation.spectral_radius == pytest.approx(0.9, abs=1e-6)


def test_large_blocks_are_measured_without_their_matrix() -> None:
    """Beyond the limit what would need the matrix is None, and the rest agrees with it."""
    matrix = batch(30, 40)
    exact = only(JacobianAnalyzer().analyze(lambda: batch(1, 40), blocks=linear(matrix)))
    free = only(JacobianAnalyzer(exact_limit=10).analyze(lambda: batch(1, 40), blocks=linear(matrix)))
    assert (exact.exact, free.exact) == (True, False)
    assert (free.sigma_min, free.condition, free.log10_condition) == (None, None, None)
    assert free.sigma_max == pytest.approx(exact.sigma_max, rel=1e-3)
    assert free.effective_rank == pytest.approx(exact.effective_rank, rel=1e-6)
    assert "n/a" in str(JacobianAnalyzer(exact_limit=10).analyze(lambda: batch(1, 40), blocks=linear(matrix)))


def test_large_square_blocks_have_a_spectral_radius() -> None:
    """Beyond the limit Arnoldi's method finds it for a random matrix and for complex pairs."""
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64) * 0.9
    for matrix in (batch(200, 200), torch.kron(torch.eye(100, dtype=torch.float64), turn)):
        inputs = batch(1, len(matrix))
        free = only(JacobianAnalyzer(exact_limit=10).analyze(inputs.clone, blocks=linear(matrix)))
        assert not free.exact
        expected = float(torch.linalg.eigvals(matrix).abs().max())
        assert free.spectral_radius == pytest.approx(expected, rel=1e-2)


class Network(nn.Module):
    """Blocks that need everything: dropout, batch statistics, activations in place, a mask, tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Any:
        """Run the network."""
        h, mask = self.embed(tokens), torch.ones(tokens.shape[1], 1)
        for layer in self.layers:
            h, _ = layer(h, mask=mask)
        return self.head(h)


class Layer(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.mix = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, h: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        """Run the block."""
        attended, _ = self.attention(h, h, h, need_weights=False)
        mixed = torch.relu_(self.mix(self.norm((h + attended).transpose(1, 2)).transpose(1, 2)))
        return h + self.drop(mixed) * mask, None


def tokens() -> Tensor:
    """Return a batch of tokens."""
    return torch.arange(20).reshape(4, 5) % 11


def test_the_blocks_of_a_model_get_their_own_inputs() -> None:
    """Each block's Jacobian is that of torch at the input which the block got, as in evaluation."""
    model = Network().double()
    report = JacobianAnalyzer(model).analyze(tokens)
    assert list(report.blocks) == ["layers.0", "layers.1", "layers.2"]
    assert report.skipped == {}
    model.eval()
    h, mask = model.embed(tokens()[:1]), torch.ones(5, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for index, layer in enumerate(model.layers):
            h = h.detach().requires_grad_()
            output = layer(h, mask=mask)[0]
            rows = [torch.autograd.grad(one, h, retain_graph=True)[0].flatten() for one in output.flatten()]
            values = torch.linalg.svdvals(torch.stack(rows))
            assert report.blocks[f"layers.{index}"].sigma_max == pytest.approx(float(values[0]), rel=1e-8)
            h = output


def test_blocks_can_be_named_or_passed() -> None:
    """Names, a regular expression and the modules themselves choose the same block."""
    model = Network().double()
    analyzer = JacobianAnalyzer(model)
    by_name = analyzer.analyze(tokens, blocks=["layers.1"])
    assert analyzer.analyze(tokens, blocks=r"layers\.1") == by_name
    assert analyzer.analyze(tokens, blocks=model.layers[1]) == by_name
    assert list(by_name.blocks) == ["layers.1"]


def test_modules_without_a_model_are_run_one_after_the_other() -> None:
    """Each module of a list gets what the one before it returned."""
    first, second = linear(2 * torch.eye(3)), nn.Tanh()
    report = JacobianAnalyzer().analyze(lambda: torch.full((1, 3), 0.25, dtype=torch.float64), blocks=[first, second])
    assert list(report.blocks) == ["0.Linear", "1.Tanh"]
    assert report.blocks["1.Tanh"].sigma_max == pytest.approx(1 - math.tanh(0.5) ** 2)


def test_a_module_list_is_its_modules() -> None:
    """A ModuleList is run in its order, alone and as a part of a model."""
    blocks = nn.ModuleList([linear(2 * torch.eye(3)), nn.Tanh()])
    report = JacobianAnalyzer().analyze(lambda: torch.full((1, 3), 0.25, dtype=torch.float64), blocks=blocks)
    assert report.blocks["1.Tanh"].sigma_max == pytest.approx(1 - math.tanh(0.5) ** 2)
    model = Network().double()
    assert list(JacobianAnalyzer(model).analyze(tokens, blocks=model.layers).blocks) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_a_vector_is_one_sample() -> None:
    """A model that is called without a batch is differentiated by the whole vector."""
    matrix = torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64).diag()
    found = only(JacobianAnalyzer(linear(matrix)).analyze(lambda: torch.ones(3, dtype=torch.float64)))
    assert (found.num_inputs, found.num_outputs) == (3, 3)
    assert found.condition == pytest.approx(30)


def test_more_samples_give_their_median() -> None:
    """With several samples each number is the median over them, and their count is reported."""
    inputs = torch.tensor([[0.1], [1.0], [3.0]], dtype=torch.float64)
    found = only(JacobianAnalyzer(num_samples=3).analyze(lambda: inputs, blocks=nn.Tanh()))
    assert found.num_samples == 3
    assert found.sigma_max == pytest.approx(1 - math.tanh(1) ** 2)


def test_what_is_no_batch_is_passed_whole_to_every_sample() -> None:
    """An argument whose first size is the number of samples, and not that of the batch, is the same for each sample."""

    class Mixed(nn.Module):
        def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
            return x @ mixing

    mixing = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    found = only(JacobianAnalyzer(num_samples=2).analyze(lambda: (batch(5, 2), mixing), blocks=Mixed()))
    assert found.num_samples == 2
    assert found.sigma_max == pytest.approx(float(torch.linalg.matrix_norm(mixing, 2)))


def test_a_block_that_cannot_be_measured_is_skipped_with_its_reason() -> None:
    """Blocks that are not called or take no floating tensor are named, and the others are measured."""
    model = Network().double()
    report = JacobianAnalyzer(model).analyze(
        tokens, blocks=["embed", "layers.0.drop", "head", "layers.0.attention.out_proj"]
    )
    assert list(report.blocks) == ["layers.0.drop", "head"]
    assert "takes no floating tensor" in report.skipped["embed"]
    assert report.skipped["layers.0.attention.out_proj"] == "it was not called"


def test_mistakes_are_named() -> None:
    """Without a model there must be modules; a number of samples must be positive."""
    with pytest.raises(UsageError, match=r"make JacobianAnalyzer\(model\)"):
        JacobianAnalyzer().analyze(tokens)
    with pytest.raises(UsageError, match="num_samples 0"):
        JacobianAnalyzer(num_samples=0)


def state_of(model: nn.Module) -> list[Any]:
    """Return everything that an analysis must leave alone."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [tensor.detach().clone() for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
        [module.training for module in model.modules()],
        [None if param.grad is None else param.grad.clone() for param in model.parameters()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        torch.get_rng_state(),
    ]


def test_an_analysis_changes_nothing() -> None:
    """Weights, buffers, gradients, modes, flags, hooks and the random generator are as before."""
    model = Network()
    model.head.requires_grad_(False)
    model.layers[0].eval()
    torch.autograd.backward(model(tokens()).sum())
    before = state_of(model)
    JacobianAnalyzer(model).analyze(tokens)
    torch.testing.assert_close(state_of(model), before, rtol=0.0, atol=0.0)


def test_live_it_measures_the_blocks_at_the_inputs_of_the_step() -> None:
    """On its steps the report is that of an analysis at the same weights and inputs; in between there is no hook."""
    model = Network().double()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.drop.p = 0.0
    model.eval()
    manager = GradientManager(backends=["memory"], analyzers=["jacobian"])
    optimizer = optimizer_of(model, lr=0.0)
    reports = []
    for _ in range(3):
        reports.append(manager.step(model, optimizer, model(tokens()).square().mean()))
        assert any(module._forward_pre_hooks for module in model.modules()) == (len(reports) == 1)
    assert [list(report.analyzers) for report in reports] == [[], ["jacobian"], []]
    assert reports[1].analyzers["jacobian"] == JacobianAnalyzer(model).analyze(tokens)
    metrics = manager.backend("memory").records[-1].metrics  # type: ignore[attr-defined]
    assert {"jacobian/sigma_max", "jacobian/sigma_max/layers.1", "jacobian/gain_per_block"} <= set(metrics)
    for panel in JacobianAnalyzer.panels:
        for name in panel.metrics:
            assert any(metric.startswith(name.removesuffix("*")) for metric in metrics)


def test_a_model_without_a_chain_is_told_so() -> None:
    """A note says what to do."""
    model = nn.Linear(2, 2)
    manager = GradientManager(analyzers=["jacobian"])
    manager.attach(model)
    optimizer = optimizer_of(model)
    notes = [note for _ in range(8) for note in manager.step(model, optimizer, model(torch.ones(1, 2)).sum()).notes]
    assert len([note for note in notes if "no chain" in note]) == 1


def test_an_empty_batch_is_said_and_no_fault() -> None:
    """Where a block got no sample it is named with the reason."""
    report = JacobianAnalyzer().analyze(lambda: torch.zeros(0, 3), blocks=nn.Linear(3, 3))
    assert report.blocks == {}
    assert report.skipped == {"Linear": "module Linear got an empty batch: expected at least one sample."}


def test_a_cache_of_keys_and_values_is_left_alone() -> None:
    """Blocks that keep keys and values are measured as they ran, and add nothing to the cache of the user."""
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=3, n_head=2)
    model, cache = GPT2LMHeadModel(config), DynamicCache()
    tokens = torch.arange(12).reshape(2, 6)
    report = JacobianAnalyzer(model).analyze(lambda: {"input_ids": tokens, "past_key_values": cache})
    assert list(report.blocks) == [f"transformer.h.{index}" for index in range(3)]
    assert cache.get_seq_length() == 6
    alone = JacobianAnalyzer(model).analyze(lambda: {"input_ids": tokens, "use_cache": False})
    assert report.sigma_max == pytest.approx(alone.sigma_max)


def test_a_block_without_numbers_hides_no_other() -> None:
    """The extremes over blocks are those of the blocks that have them, in whatever order they come."""
    first, second = linear(2 * torch.eye(3)), linear(torch.eye(3))
    for bad in (first, second):
        bad.weight.data[0, 0] = math.nan
        report = JacobianAnalyzer().analyze(
            lambda: torch.zeros(1, 3, dtype=torch.float64), blocks=[first, nn.Identity(), second]
        )
        bad.weight.data = 3 * torch.eye(3, dtype=torch.float64)
        assert report.sigma_max == (1.0 if bad is first else 3.0)
        assert report.rank_share == pytest.approx(1.0)
        assert report.spectral_radius == report.sigma_max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exact_limit", [10, 512])
def test_half_precision_has_the_numbers_of_the_same_weights(dtype: torch.dtype, exact_limit: int) -> None:
    """Taken in full and by products, what a block in half precision stretches is near what its weights do in double."""
    matrix = (torch.randn(200, 200, generator=torch.Generator().manual_seed(0)) / 200**0.5).to(dtype)
    layer = nn.Linear(200, 200, bias=False, dtype=dtype)
    layer.weight.data = matrix
    found = only(JacobianAnalyzer(exact_limit=exact_limit).analyze(lambda: torch.ones(1, 200, dtype=dtype), layer))
    values, exact = torch.linalg.svdvals(matrix.double()), matrix.double()
    assert found.sigma_max == pytest.approx(float(values[0]), rel=0.01)
    assert found.spectral_radius == pytest.approx(float(torch.linalg.eigvals(exact).abs().max()), rel=0.01)
    assert found.mean_square_gain == pytest.approx(float(exact.square().sum()) / 200, rel=0.1)


def test_a_block_that_passes_nothing_on_takes_the_mean_with_it() -> None:
    """The geometric mean of gains of which one is zero is zero."""
    blocks = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    with torch.no_grad():
        for block, size in zip(blocks, (2.0, 0.5, 0.0), strict=True):
            nn.init.eye_(block.weight).mul_(size)  # type: ignore[arg-type]
    analyzer = JacobianAnalyzer()
    assert analyzer.analyze(lambda: torch.ones(1, 2), blocks=list(blocks)).gain_per_block == 0.0
    assert analyzer.analyze(lambda: torch.ones(1, 2), blocks=list(blocks)[:2]).gain_per_block == pytest.approx(1.0)
