"""The shares that a format would lose, against torch's own casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientManager, PrecisionAnalyzer
from gradtrack.analyzers.base import Snapshot
from gradtrack.analyzers.precision import PrecisionReport, counts
from gradtrack.analyzers.precision.counts import FLOAT16
from tests.training import batch_loss, optimizer_of, small_model

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCALED_TYPES = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
EDGES = [
    math.ldexp(1 + offset, power)
    for power in (-149, -134, -133, -126, -25, -24, -17, -14, -10, 0, 15, 16, 127)
    for offset in (-(2.0**-20), 0.0, 2.0**-20)
] + [65504.0, 65519.0, 65520.0, 65521.0, 3.3961e38, 3.3962e38, math.inf, math.nan, 0.0]
numbers = st.one_of(
    st.sampled_from(EDGES),
    st.floats(allow_nan=False, width=32),
    st.builds(math.ldexp, st.floats(1, 2), st.integers(-40, 20)),
)
vectors = st.lists(st.builds(math.copysign, numbers, st.sampled_from([1.0, -1.0])), min_size=1, max_size=30)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def looked(**gradients: Tensor) -> PrecisionReport:
    """Return the report on gradients, each of them a group of its own."""
    snapshot = Snapshot(step=4, model=nn.Identity(), gradients=gradients, groups={name: name for name in gradients})
    report = PrecisionAnalyzer().inspect(snapshot)
    assert report is not None
    return report


def wide(gradient: Tensor) -> Tensor:
    """Return the finite elements other than zero with enough digits: a cast from float64 to 16 bits rounds once."""
    values = gradient if gradient.dtype is torch.float64 else gradient.float()
    return values[values.isfinite() & (values != 0)]


def share(lost: Tensor) -> float | None:
    """Return the share of what is lost, None of nothing."""
    return lost.sum().item() / len(lost) if len(lost) else None


@given(vectors, dtypes)
@example([65519.0, -65520.0, 65521.0, 2.0**-25, 1.0], torch.float32)
@example([2.0**128 - 2.0**119, 2.0**128 - 2.0**120, 2.0**-134, 2.0**-133], torch.float64)
def test_shares_are_those_of_a_cast(values: list[float], dtype: torch.dtype) -> None:
    """What torch's cast makes zero or infinite is counted, to the last number at the edge of a format."""
    gradient = torch.tensor(values, dtype=torch.float64).to(dtype)
    report, kept = looked(weight=gradient), wide(gradient)
    for name, narrow in TYPES.items():
        cast = _narrow(kept, narrow)
        assert report[f"{name}_underflow"] == share(cast == 0)
        assert report[f"{name}_overflow"] == share(cast.isinf())
    assert report.num_nonzero == len(kept)
    assert report.groups.keys() == ({"weight"} if len(kept) else set())


def _narrow(kept: Tensor, narrow: torch.dtype) -> Tensor:
    """Round once, to the nearest: torch rounds a float64 to a float32 first, which may land on an edge."""
    once = kept.float()
    return once.to(narrow) if torch.equal(once.double(), kept.double()) else _rounded(kept, narrow)


def _rounded(kept: Tensor, narrow: torch.dtype) -> Tensor:
    info = torch.finfo(narrow)
    spacing = torch.exp2(torch.floor(torch.log2(kept.abs())).clamp_min(math.log2(info.smallest_normal))) * info.eps
    rounded = torch.round(kept / spacing) * spacing  # torch.round takes ties to even
    return torch.where(rounded.abs() > info.max, rounded.sign() * math.inf, rounded)


@given(vectors, dtypes)
def test_the_best_loss_scale_is_the_largest_without_overflow(values: list[float], dtype: torch.dtype) -> None:
    """Under it nothing is infinite, under twice as much something would be; what becomes zero even so is counted."""
    gradient = torch.tensor(values, dtype=torch.float64).to(dtype)
    report, kept = looked(weight=gradient), wide(gradient).double()
    if not len(kept):
        assert report.float16_scale is None is report.float16_scaled_underflow
        return
    scale, largest = report.float16_scale, kept.abs().max().item()
    assert scale is not None
    assert math.frexp(scale)[0] == 0.5
    if 2.0**-100 < scale < 2.0**100:
        assert largest * scale <= FLOAT16.largest < 2 * largest * scale
    assert report.float16_scaled_underflow == share((kept * scale).abs() <= 2.0**-25)


@given(vectors, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_float8_scales_each_tensor_to_its_range(values: list[float], dtype: torch.dtype) -> None:
    """The largest element of a tensor goes to the end of the range, whatever other tensors hold."""
    gradient = torch.tensor(values).to(dtype)
    report, kept = looked(weight=gradient, other=torch.full((3,), 1e30)), wide(gradient)
    if not len(kept):
        assert "weight" not in report.groups
        return
    largest = kept.abs().max().item()
    for name, narrow in SCALED_TYPES.items():
        cast = (kept * (torch.finfo(narrow).max / largest)).to(narrow)
        assert report.groups["weight"][f"{name}_underflow"] == share(cast.float() == 0)


@pytest.mark.parametrize("layout", ["rows", "columns", "channels last", "gaps", "sparse", "complex", "empty", "scalar"])
def test_every_layout_counts_each_element_once(layout: str) -> None:
    """Order and gaps in memory change nothing; a sparse gradient has the elements that it holds."""
    plain = torch.tensor([1.0, 1e-9, -1e-9, 0.0, 1e9, 2.0]).repeat(4).reshape(2, 3, 2, 2)
    made = {
        "rows": plain,
        "columns": plain.flatten(1).t(),
        "channels last": plain.contiguous(memory_format=torch.channels_last),
        "gaps": torch.stack([plain, torch.full_like(plain, 1e-9)], -1)[..., 0],
        "sparse": plain.reshape(8, 3).to_sparse(),
        "complex": torch.view_as_complex(plain.reshape(12, 2)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1e-9),
    }[layout]
    report = looked(weight=made, bias=torch.ones(2))
    found = {"empty": (0, 0, 2), "scalar": (1, 0, 3)}.get(layout, (8, 4, 22))
    assert (report.float16_underflow, report.float16_overflow) == (found[0] / found[2], found[1] / found[2])
    assert report.num_nonzero == found[2]


def test_a_large_gradient_is_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces add up, and share the scale of the whole tensor."""
    torch.manual_seed(0)
    gradient = torch.randn(1000) * torch.logspace(-12, 2, 1000)
    whole = looked(weight=gradient)
    monkeypatch.setattr(counts, "_PIECE", 7)
    assert looked(weight=gradient) == whole


def test_parts_of_ranks_add_up_to_the_whole() -> None:
    """Ranks that hold parts of the parameters report what the whole would, but for what needs a scale."""
    torch.manual_seed(0)
    gradients = {name: torch.randn(12) * 1e-7 for name in ("first", "second", "copied")}
    groups = {"first": "a", "second": "b", "copied": "b"}
    whole = PrecisionAnalyzer().inspect(Snapshot(step=4, model=nn.Identity(), gradients=gradients, groups=groups))
    analyzers, sums = [PrecisionAnalyzer() for _ in range(2)], []
    parts = []
    for rank, analyzer in enumerate(analyzers):
        held = {name: grad if name == "copied" else grad[6 * rank : 6 * rank + 6] for name, grad in gradients.items()}
        share = {name: 0.5 if name == "copied" else 1.0 for name in held}
        parts.append(Snapshot(step=4, model=nn.Identity(), gradients=held, groups=groups, counts_as=share))
        sums.append(analyzer.sums(parts[-1], ["a", "b"]))
        assert len(sums[-1]) == analyzer.num_sums(4, 2)
    total = [sum(column) for column in zip(*sums, strict=True)]
    assert whole is not None
    for analyzer, part in zip(analyzers, parts, strict=True):
        found = analyzer.inspect(Snapshot(**{name: getattr(part, name) for name in part.__slots__} | {"sums": total}))
        assert found is not None
        assert found.float16_scale is None is found.float8_e4m3_underflow
        for name in ("float16_underflow", "float16_overflow", "bfloat16_underflow", "num_nonzero"):
            assert found[name] == whole[name]
            assert {group: one[name] for group, one in found.groups.items()} == {
                group: one[name] for group, one in whole.groups.items()
            }


def test_metrics_reach_the_rows() -> None:
    """The shares are rows of the steps that were looked at, for the whole and for each group."""
    model = small_model()
    optimizer = optimizer_of(model)
    with GradientManager(analyzers=["precision"], backends=["memory"]) as manager:
        for step in range(1, 9):
            optimizer.zero_grad()
            manager.step(model, optimizer, batch_loss(model, step) * 1e-8)
            optimizer.step()
        rows = {record.step: record.metrics for record in manager.backend("memory").records}  # type: ignore[attr-defined]
    shares = {
        step: row["precision/float16_underflow"] for step, row in rows.items() if "precision/float16_underflow" in row
    }
    assert shares.keys() == {4, 8}
    assert all(0.5 < share <= 1 for share in shares.values())
    assert any(name.startswith("precision/float8_e4m3_underflow/") for name in rows[8])


def test_offline_analysis_leaves_the_model_alone() -> None:
    """One batch is enough, and its gradients are gone afterwards."""
    model = small_model()
    before = [param.detach().clone() for param in model.parameters()]
    report = PrecisionAnalyzer(model).analyze(lambda: torch.ones(4, _inputs(model)), lambda out: out.sum() * 1e-9)
    assert report.float16_underflow is not None
    assert report.float16_underflow > 0.5
    assert all(torch.equal(param, kept) for param, kept in zip(model.parameters(), before, strict=True))
    assert all(param.grad is None for param in model.parameters())


def _inputs(model: nn.Module) -> int:
    return next(module.in_features for module in model.modules() if isinstance(module, nn.Linear))
