"""What the optimizer did: measured from the weights, and recorded under the step that it belongs to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientManager, UpdatesAnalyzer
from gradtrack.analyzers.base import always
from gradtrack.analyzers.updates import UpdatesReport, sums
from gradtrack.analyzers.updates.sums import WeightSample
from gradtrack.errors import UsageError
from tests.training import batch_loss, optimizer_of, small_model

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "weight decay": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.5}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    "foreach": (torch.optim.Adam, {"lr": 1e-3, "foreach": True, "weight_decay": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
}


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the analyzer look at every step."""
    monkeypatch.setattr(UpdatesAnalyzer, "schedule", staticmethod(always))


def flat(tensors: Any) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def train(
    model: nn.Module, optimizer: Any, steps: int, **settings: Any
) -> tuple[GradientManager, list[dict[str, Any]]]:
    """Train, and keep weights and gradients around every step."""
    manager = GradientManager(analyzers=["updates"], backends=["memory"], **settings)
    kept = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, batch_loss(model, step))
        params = dict(model.named_parameters())
        before = {name: param.detach().clone() for name, param in params.items()}
        gradients = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
        optimizer.step()
        kept.append({"report": report, "before": before, "gradients": gradients, "after": dict(params)})
        kept[-1]["after"] = {name: param.detach().clone() for name, param in params.items()}
    return manager, kept


def found_in(kept: list[dict[str, Any]], step: int) -> UpdatesReport:
    """Return the report on a step, which the next step's report carries."""
    report = kept[step]["report"].analyzers["updates"]
    assert isinstance(report, UpdatesReport)
    assert report.step == step
    return report


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_the_ratio_is_what_the_optimizer_did(kind: str, every_step: None) -> None:
    """For every optimizer the ratio is that of the weights before and after the step, whole and by group."""
    model = small_model()
    factory, options = OPTIMIZERS[kind]
    _, kept = train(model, factory(model.parameters(), **options), 4)
    for step in range(1, 4):
        state, report = kept[step - 1], found_in(kept, step)
        before, after = flat(state["before"].values()), flat(state["after"].values())
        assert report.ratio == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
        names = ["0.weight", "0.bias"]
        before, after = (flat([state[when][name] for name in names]) for when in ("before", "after"))
        assert report.groups["0"].ratio == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
        assert report.num_elements == report.num_sampled == 53


def test_the_gradient_cosine_is_that_of_consecutive_steps(every_step: None) -> None:
    """It is between the gradient of the step and the one that came next."""
    model = small_model()
    _, kept = train(model, optimizer_of(model), 3, enable_gradient_clipping=False)
    first, second = (flat(kept[step]["gradients"].values()) for step in (0, 1))
    expected = float(torch.cosine_similarity(first, second, dim=0))
    assert found_in(kept, 1).gradient_cosine == pytest.approx(expected, rel=1e-9)


def test_moments_of_the_optimizer(every_step: None) -> None:
    """Under Adam the first moment's direction and its size over the second's are reported; plain SGD has neither."""
    model = small_model()
    optimizer = optimizer_of(model, torch.optim.Adam, lr=1e-3)
    _, kept = train(model, optimizer, 2)
    report = found_in(kept, 1)
    assert report.momentum_cosine == pytest.approx(1.0)
    assert report.moment_ratio == pytest.approx(1.0, rel=1e-4)
    _, kept = train(model, optimizer, 6)
    report = found_in(kept, 5)
    gradient = flat(kept[4]["gradients"].values())
    assert report.moment_ratio is not None
    assert 0 < report.moment_ratio <= 1.2
    assert -1 <= (report.momentum_cosine or 0) <= 1
    assert float(gradient.norm()) > 0
    plain = small_model()
    _, kept = train(plain, optimizer_of(plain), 2)
    assert (found_in(kept, 1).momentum_cosine, found_in(kept, 1).moment_ratio) == (None, None)


def test_noise_has_a_small_moment_ratio(every_step: None) -> None:
    """Where gradients change their sign at random the first moment is small against the root of the second."""
    model = nn.Linear(100, 1, bias=False)
    optimizer = optimizer_of(model, torch.optim.Adam, lr=1e-3)
    manager = GradientManager(analyzers=["updates"])
    generator = torch.Generator().manual_seed(0)
    report: Any = None
    for _ in range(60):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.randn(1, 100, generator=generator)).sum())
        optimizer.step()
    assert report.analyzers["updates"].moment_ratio == pytest.approx(math.sqrt(0.1 / 1.9), rel=0.3)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 0.0), (torch.bfloat16, 1.0)])
def test_what_does_not_move_in_low_precision(dtype: torch.dtype, expected: float, every_step: None) -> None:
    """An update under half a unit in the last place leaves a bfloat16 weight where it is, and a float32 one not."""
    model = nn.Linear(50, 20, bias=False)
    nn.init.ones_(model.weight)
    model = model.to(dtype)
    optimizer = optimizer_of(model, lr=1e-3)
    manager = GradientManager(analyzers=["updates"], enable_gradient_clipping=False)
    for _ in range(2):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.ones(1, 50, dtype=dtype)).sum())
        optimizer.step()
    assert report.analyzers["updates"]["unchanged_fraction"] == expected
    assert (report.analyzers["updates"]["ratio"] == 0.0) == bool(expected)


def test_elements_without_a_gradient_do_not_count_as_unmoved(every_step: None) -> None:
    """F3: the rows of an embedding that no token touched are not held against it, dense or sparse."""
    for sparse in (False, True):
        model = nn.Embedding(1000, 4, sparse=sparse)
        optimizer = optimizer_of(model)
        manager = GradientManager(analyzers=["updates"])
        for _ in range(2):
            optimizer.zero_grad()
            report = manager.step(model, optimizer, model(torch.tensor([3, 3, 7])).sum())
            optimizer.step()
        found = report.analyzers["updates"]
        assert found["unchanged_fraction"] == (None if sparse else 0.0)
        assert found["ratio"] > 0
        assert report.health.healthy


def test_sparse_gradients_with_momentum(every_step: None) -> None:
    """The momentum of sparse gradients is sparse itself, and is not compared; the length of the step is known."""
    torch.manual_seed(0)
    model = nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = GradientManager(analyzers=["updates"], enable_gradient_clipping=False)
    for step in range(4):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.arange(step, step + 5)).square().mean())
        before = model.weight.detach().clone()
        optimizer.step()
        if step == 2:
            moved = float((model.weight.detach() - before).norm() / before.norm())
    found = report.analyzers["updates"]
    assert found["ratio"] == pytest.approx(moved, rel=1e-5)
    assert found["momentum_cosine"] is None


@given(st.integers(0, 50))
def test_a_sample_estimates_the_whole(seed: int) -> None:
    """With fewer elements than there are the ratio is that of the whole, to the error of the sample."""
    torch.manual_seed(seed)
    model = nn.Linear(200, 200)
    inputs = torch.randn(16, 200)

    def analyze(most: int) -> UpdatesReport:
        with torch.no_grad():
            model.weight.copy_(weights)
        optimizer = optimizer_of(model, lr=0.1)
        analyzer = UpdatesAnalyzer(model, max_elements=most)
        return analyzer.analyze(lambda: inputs, lambda out: out.square().mean(), steps=1, optimizer=optimizer)

    weights = model.weight.detach().clone()
    whole, sampled = analyze(10**6), analyze(2000)
    assert sampled.num_sampled <= 2200 < whole.num_sampled
    assert sampled.num_elements == pytest.approx(whole.num_elements, rel=0.01)
    assert sampled.ratio == pytest.approx(whole.ratio, rel=0.15)


def test_the_row_is_that_of_its_own_step() -> None:
    """On the analyzer's cadence each update is recorded under the step that made it, and nowhere else."""
    model = small_model()
    manager, kept = train(model, optimizer_of(model), 70, grad_log_every_n_steps=1)
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    rows = {record.step: record.metrics for record in records if "updates/ratio" in record.metrics}
    assert list(rows) == [*range(4, 65, 4)]
    state = kept[3]
    before, after = flat(state["before"].values()), flat(state["after"].values())
    assert rows[4]["updates/ratio"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
    for panel in UpdatesAnalyzer.panels:
        for name in panel.metrics:
            if "moment" not in name:
                assert any(metric.startswith(name.removesuffix("*")) for metric in rows[4])


def test_a_skipped_step_has_no_update(every_step: None) -> None:
    """A step that was skipped for a non-finite gradient is not measured, and the next one is."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = GradientManager(analyzers=["updates"])
    reports = []
    for step in range(1, 5):
        optimizer.zero_grad()
        reports.append(manager.step(model, optimizer, batch_loss(model, step) * (math.nan if step == 2 else 1)))
        optimizer.step()
    steps = [found.analyzers["updates"]["step"] if found.analyzers else None for found in reports]
    assert steps == [None, 1, None, 3]


def test_offline_it_trains_and_gives_medians() -> None:
    """With an optimizer the analysis trains; it measures its last step too."""
    model, twin = small_model(), small_model()
    optimizer = optimizer_of(model, lr=0.1)
    batch = torch.linspace(-1, 1, 24).reshape(4, 6)
    report = UpdatesAnalyzer(model).analyze(lambda: batch, lambda out: out.square().mean(), 3, optimizer=optimizer)
    other, ratios = optimizer_of(twin, lr=0.1), []
    for _ in range(3):
        other.zero_grad()
        torch.autograd.backward(twin(batch).square().mean())
        before = flat(twin.parameters())
        other.step()
        ratios.append(float((flat(twin.parameters()) - before).norm() / before.norm()))
    assert report.ratio == pytest.approx(sorted(ratios)[1], rel=1e-6)
    assert (report.num_steps, report.step) == (3, 3)
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


def test_mistakes_are_named() -> None:
    """Without a model or an optimizer there is nothing to measure."""
    with pytest.raises(UsageError, match=r"Construct UpdatesAnalyzer\(model\)"):
        UpdatesAnalyzer().analyze(lambda: 1, lambda out: out)
    with pytest.raises(UsageError, match="Pass optimizer="):
        UpdatesAnalyzer(small_model()).analyze(lambda: 1, lambda out: out)
    with pytest.raises(UsageError, match="max_elements 0"):
        UpdatesAnalyzer(max_elements=0)


def test_the_scale_of_the_loss_changes_nothing(every_step: None) -> None:
    """F1: with the loss multiplied and the rate divided by a constant every number is the same."""
    found = []
    for scale in (1.0, 1024.0):
        model = small_model(dtype=torch.float64)
        optimizer = optimizer_of(model, lr=0.1 / scale)
        manager = GradientManager(analyzers=["updates"], enable_gradient_clipping=False)
        for step in range(3):
            optimizer.zero_grad()
            report = manager.step(model, optimizer, scale * batch_loss(model, step))
            optimizer.step()
        found.append(report.analyzers["updates"].metrics())  # type: ignore[union-attr]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


class Weights(nn.Module):
    """Parameters whose loss is the sum of them."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()})

    def forward(self, _: Tensor) -> Tensor:
        """Sum up."""
        return torch.stack([part.sum() for part in self.parts.values()]).sum()


def test_a_sampled_tensor_counts_as_the_whole_of_it(every_step: None) -> None:
    """Of 1,000 elements that stay and 10 that move, 1000/1010 are unmoved, however few of the 1,000 are looked at."""
    model = Weights(many=1000, few=10)
    rates = {"many": 0.0, "few": 0.1}
    groups = [{"params": [model.parts[name]], "lr": rate} for name, rate in rates.items()]
    found = UpdatesAnalyzer(model, max_elements=10).analyze(
        lambda: torch.ones(1), lambda loss: loss, steps=1, optimizer=torch.optim.SGD(groups)
    )
    assert found.num_sampled == 20
    assert found.unchanged_fraction == pytest.approx(1000 / 1010)


def test_many_large_tensors_share_the_elements_that_are_looked_at(every_step: None) -> None:
    """Where 4,096 of each are not more, a look takes 65,536 elements at most, and tells the ratio of the whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    before = torch.cat([param.detach().flatten() for param in model.parameters()])
    manager = GradientManager(analyzers=["updates"])
    optimizer = optimizer_of(model, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.ones(2, 256)).square().sum())
        if report.step == 1:
            optimizer.step()
    after = torch.cat([param.detach().flatten() for param in model.parameters()])
    found = report.analyzers["updates"]
    assert found["num_sampled"] <= 1 << 16 < found["num_elements"] == len(after)
    assert found["ratio"] == pytest.approx(float((after - before).norm() / before.norm()), rel=0.03)


def test_a_parameter_that_has_shrunk_since_counts_for_nothing(every_step: None) -> None:
    """What is not there any more has neither moved nor stayed."""
    model = Weights(shrinks=8, stays=8)
    names = [name for name, _ in model.named_parameters()]
    sample = WeightSample(model, {name: torch.ones(8) for name in names}, dict.fromkeys(names, "all"))
    model.parts["shrinks"].data = torch.zeros(4)
    found = sample.sums({}, [])["all"]
    assert (found.num_elements, found.ratio, found.unchanged_fraction) == (8.0, 0.0, 1.0)


def test_parts_of_many_parameters_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few parameters are worked out at once the sums are the same; what counts for nothing adds nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
    gradients = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for at_once in (1 << 18, 100, 1):
        monkeypatch.setattr(sums, "_AT_ONCE", at_once)
        found.append(WeightSample(model, gradients, dict.fromkeys(gradients, "all")))
    for name, param in model.named_parameters():
        param.grad = gradients[name]
    optimizer.step()
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] = math.inf
    counts_as = {name: float(name != "0.weight") for name in gradients}
    whole, *others = (one.sums(gradients, [optimizer], counts_as)["all"] for one in found)
    assert all(math.isfinite(number) for number in whole)
    for one in others:
        assert one == pytest.approx(whole, rel=1e-12)
