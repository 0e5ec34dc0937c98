"""The native engine agrees with float64 arithmetic and with torch, whatever the memory holds."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from gradtrack.gradients.collected import Gradients, find_deviations
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.native import threads

native = pytest.importorskip("gradtrack.gradients.native.engine", reason="numba is not installed")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EDGES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 100_003)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-310, 6e-8, 3e4, -3e38, 1e-30, 1e300)
INTEGER_TWIN = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ENGINE = native.NativeEngine()
Row = np.ndarray[Any, np.dtype[np.float64]]


@st.composite
def gradients(draw: st.DrawFn, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A flat gradient: a normal distribution or raw bits, with special values strewn in."""
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    size = draw(st.sampled_from(EDGES) | st.integers(0, 9000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        scale, offset = (
            draw(st.sampled_from((0.0, 1e-30, 1e-6, 1.0, 1e15, 1e30))),
            draw(st.sampled_from((0, 1, 100))),
        )
        grad = ((torch.randn(size, generator=generator, dtype=torch.float64) + offset) * scale).to(dtype)
    else:
        words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
        grad = words.to(INTEGER_TWIN[dtype.itemsize]).view(dtype)
        if dtype == torch.float64:
            grad = torch.where(grad.abs() < 1e140, grad, grad * 1e-200)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        if size and (dtype != torch.float64 or not 1e140 < abs(value) < np.inf):
            places = torch.randint(size, (1 + size // 50,), generator=generator)
            grad[places] = torch.tensor(value, dtype=torch.float64).to(dtype)
    return grad


def oracle(grad: torch.Tensor, exponent: int = 0) -> Row:
    """The eight columns, from float64 numbers and numpy alone."""
    values = grad.detach().to(torch.float64).numpy().ravel()
    finite = np.ldexp(values[np.isfinite(values)], -exponent)
    low, high = (finite.min(), finite.max()) if finite.size else (np.inf, -np.inf)
    counts = (values == 0).sum(), np.isnan(values).sum(), (values == np.inf).sum(), (values == -np.inf).sum()
    return np.array([finite.sum(), np.square(finite).sum(), low, high, *counts])


def assert_same(row: Row, grad: torch.Tensor, exponent: int = 0) -> None:
    """Compare a row with the oracle: sums closely, everything else exactly."""
    expected = oracle(grad, exponent)
    np.testing.assert_array_equal(row[2:], expected[2:])
    np.testing.assert_allclose(row[1], expected[1], rtol=1e-6)
    values = grad.to(torch.float64)
    magnitude = np.ldexp(values[values.isfinite()].abs().sum().item(), -exponent)
    assert abs(row[0] - expected[0]) <= 1e-6 * magnitude


def merged(rows: Row) -> Row:
    """Merge rows column by column."""
    return np.array([*rows[:, :2].sum(0), rows[:, 2].min(), rows[:, 3].max(), *rows[:, 4:].sum(0)])


def measure(*grads: torch.Tensor, exponent: int = 0) -> tuple[Row, Row, list[float]]:
    """Measure gradients that alternate between two groups."""
    found = native.Plan(grads).measure(np.arange(len(grads)) % 2, 2, exponent=exponent)
    return found.rows, found.group_rows, found.total


def scale(*grads: torch.Tensor, by: float) -> None:
    """Multiply gradients in place."""
    native.Plan(grads).scale(by)


@pytest.fixture(params=["team", "alone"])
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch use two threads, whatever it used before: they work as a team, or the calling one does alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if request.param == "team" and threads.team() is None:
        pytest.skip("this torch was built without an OpenMP that runs work for others")
    if request.param == "alone":
        monkeypatch.setattr(native, "team", lambda: None)
    yield
    torch.set_num_threads(before)


@settings(max_examples=100, deadline=None)
@given(st.lists(gradients(), max_size=4), st.integers(0, 3))
def test_a_plan_measures_later_gradients_as_one_of_their_own(grads: list[torch.Tensor], turn: int) -> None:
    """To the bit, or it says that the gradients are others."""
    later, group_of = grads[turn:] + grads[:turn], np.arange(len(grads)) % 2
    plan = native.Plan(grads)
    for _ in range(2):
        taken = plan.take(later)
        assert taken == ([(one.dtype, one.numel()) for one in later] == [(one.dtype, one.numel()) for one in grads])
        if taken:
            found, expected = plan.measure(group_of, 2), native.Plan(later).measure(group_of, 2)
            np.testing.assert_array_equal(found.rows, expected.rows)
            np.testing.assert_array_equal(found.group_rows, expected.group_rows)
            assert (found.total, found.may_hide) == (expected.total, expected.may_hide)


@pytest.mark.parametrize(
    "other", [torch.Tensor.double, lambda one: one.t(), lambda one: one[:2], torch.Tensor.to_sparse]
)
def test_a_plan_leaves_other_gradients_alone(other: Any) -> None:
    """It never reads memory of which it does not know how it is filled."""
    grads = [torch.randn(4, 3), torch.randn(5)]
    assert not native.Plan(grads).take([other(grads[0]), grads[1]])


@settings(max_examples=150, deadline=None)
@given(st.lists(gradients(), max_size=5))
@example([])
@example([torch.tensor(2.5), torch.empty(0, 3), torch.full((4096,), -0.0)])
def test_rows_groups_and_total_equal_the_float64_oracle(grads: list[torch.Tensor]) -> None:
    """Each tensor has its row; groups and total merge the rows; dtypes may be mixed."""
    rows, groups, total = measure(*grads)
    for row, grad in zip(rows, grads, strict=True):
        assert_same(row, grad)
    for group in range(2):
        empty = np.array([[0, 0, np.inf, -np.inf, 0, 0, 0, 0]])
        np.testing.assert_allclose(groups[group], merged(np.concatenate([empty, rows[group::2]])), rtol=1e-12)
    np.testing.assert_allclose(total, merged(groups), rtol=1e-12)
    assert [type(value) for value in total] == [float] * 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", EDGES[1:])
def test_every_block_edge_is_measured_once(dtype: torch.dtype, size: int) -> None:
    """Ones add up to their number at each size around the edges of vectors, blocks and items."""
    rows, _, _ = measure(torch.ones(size, dtype=dtype))
    assert rows[0].tolist() == [size, size, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_tensors_are_split_without_a_gap(two_threads: None, dtype: torch.dtype) -> None:
    """Tensors that span many items, at odd sizes, give the oracle's rows on two threads."""
    grads = [torch.randn(size, dtype=torch.float64).to(dtype) for size in (900_001, 7, 0, 700_000, 131_072)]
    grads[0][-1], grads[3][0] = np.nan, np.inf
    rows, _, total = measure(*grads)
    for row, grad in zip(rows, grads, strict=True):
        assert_same(row, grad)
    np.testing.assert_allclose(total, merged(rows), rtol=1e-12)


def test_the_result_does_not_depend_on_the_number_of_threads(two_threads: None) -> None:
    """One and two threads give the same bits."""
    grads = [torch.randn(size) for size in (900_000, 3, 400_000)]
    rows, _, total = measure(*grads)
    torch.set_num_threads(1)
    rows_alone, _, total_alone = measure(*grads)
    np.testing.assert_array_equal(rows, rows_alone)
    assert total == total_alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mean", "std"), [(0, 1), (1, 1), (10, 1), (1000, 1), (5, 0)])
def test_the_variance_survives_a_large_mean(dtype: torch.dtype, mean: float, std: float) -> None:
    """The variance from the two sums equals torch's in float64, down to rounding of the squared mean."""
    grad = (torch.randn(50_000, dtype=torch.float64) * std + mean).to(dtype)
    total, squares = measure(grad)[0][0, :2]
    variance = (squares - total**2 / grad.numel()) / (grad.numel() - 1)
    expected = grad.double().var().item()
    assert abs(variance - expected) <= 1e-6 * max(expected, 1e-8 * mean**2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_many_elements_is_right(dtype: torch.dtype) -> None:
    """Six million elements keep seven digits, where float32 sums lose them."""
    grad = torch.rand(6_000_003, dtype=torch.float64).to(dtype)
    norm = measure(grad)[0][0, 1] ** 0.5
    assert norm == pytest.approx(grad.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("largest", [1e-38, 1e-20, 1e-13, 1e15, 1e17, 1e19, 3e38])
def test_magnitudes_whose_squares_leave_float32_are_summed_in_float64(largest: float) -> None:
    """A full block of huge or tiny numbers neither overflows nor underflows."""
    grad = torch.full((20_000,), largest)
    assert measure(grad)[0][0, 1] == pytest.approx(20_000 * grad[0].double().item() ** 2, rel=1e-7)


@pytest.mark.parametrize(("scale", "exponent"), [(1e300, 997), (1.7e308, 1024), (1e-300, -996), (5e-324, -1074)])
def test_an_exponent_brings_float64_squares_back_into_range(scale: float, exponent: int) -> None:
    """Measured times a power of two, sums of squares of extreme float64 gradients are finite and right."""
    grad = torch.linspace(-1, 1, 9999, dtype=torch.float64) * scale
    assert_same(measure(grad, exponent=exponent)[0][0], grad, exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exponent_applies_to_every_dtype(dtype: torch.dtype) -> None:
    """Rows of all dtypes stay comparable when one of them needs an exponent."""
    grad = torch.randn(5000, dtype=torch.float64).to(dtype)
    assert_same(measure(grad, exponent=7)[0][0], grad, 7)


def test_subnormals_count_as_nonzero_in_a_flushing_process() -> None:
    """Zeros are judged by bits, so `set_flush_denormal` hides no subnormal."""
    torch.set_flush_denormal(True)
    try:
        grads = [torch.ones(100, dtype=torch.int16).view(dtype) for dtype in (torch.bfloat16, torch.float16)]
        rows, _, _ = measure(*grads, torch.ones(100, dtype=torch.int32).view(torch.float32))
    finally:
        torch.set_flush_denormal(False)
    assert rows[:, 4].tolist() == [0, 0, 0]
    assert rows[1, 2] == 2.0**-24


def bits(grad: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with every NaN alike."""
    words = grad.view(INTEGER_TWIN[grad.dtype.itemsize])
    return torch.where(grad.isnan(), -1, words)


@settings(max_examples=150, deadline=None)
@given(gradients(), st.floats(0, 2) | st.sampled_from((1e-6, 1e30, 3e-40, float("nan"), float("inf"))))
def test_scaling_equals_mul_to_the_bit(grad: torch.Tensor, coefficient: float) -> None:
    """Every element becomes what `mul_` makes of it, in every dtype."""
    expected = grad.clone().mul_(coefficient)
    scale(grad, by=coefficient)
    assert torch.equal(bits(grad), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coefficient", [1.0, 0.3, 1 / 3, 1e-3, 7.7])
def test_every_16_bit_number_is_scaled_as_mul_does(dtype: torch.dtype, coefficient: float) -> None:
    """All 65,536 bit patterns are rounded as torch rounds them."""
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = grad.clone().mul_(coefficient)
    scale(grad, by=coefficient)
    assert torch.equal(bits(grad), bits(expected))


def test_scaling_large_mixed_gradients_touches_each_element_once(two_threads: None) -> None:
    """Two threads scale tensors of every dtype, none of it twice and none of it not."""
    grads = [torch.randn(1_300_001 + index, dtype=torch.float64).to(dtype) for index, dtype in enumerate(DTYPES)]
    expected = [grad.clone().mul_(0.7) for grad in grads]
    scale(*grads, by=0.7)
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("begin", "end"), [(13, 777), (13, 778), (14, 777), (14, 778), (13, 14), (14, 15)])
def test_neighbouring_memory_is_left_alone(dtype: torch.dtype, begin: int, end: int) -> None:
    """Scaling a slice, wherever in a word it begins and ends, changes all of it and nothing beside it."""
    buffer = torch.ones(1000, dtype=dtype)
    scale(buffer[begin:end], by=0.0)
    assert not buffer[begin:end].any()
    assert buffer.sum(dtype=torch.float64) == 1000 - (end - begin)


LAYOUTS = {
    "transposed": torch.randn(30, 50).t(),
    "channels_last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(1, 2, 0),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "size one dimensions": torch.randn(6, 1, 4).transpose(0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_layouts_are_covered_and_measured(name: str) -> None:
    """Any order of dimensions will do, so long as the memory has no gaps."""
    assert ENGINE.covers(LAYOUTS[name])
    assert_same(measure(LAYOUTS[name])[0][0], LAYOUTS[name])


NOT_COVERED = {
    "strided": torch.randn(10)[::2],
    "expanded": torch.ones(1).expand(5),
    "overlapping": torch.randn(10).as_strided((3, 3), (1, 1)),
    "integer": torch.ones(3, dtype=torch.int32),
    "complex": torch.ones(3, dtype=torch.complex64),
    "sparse": torch.eye(3).to_sparse(),
    "mkldnn": torch.ones(3).to_mkldnn(),
    "meta": torch.ones(3, device="meta"),
    "negative view": torch._neg_view(torch.ones(3)),
    "no storage": torch._efficientzerotensor(3),
    "subclass": torch.ones(3).as_subclass(type("Subclass", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_other_tensors_are_not_covered(name: str) -> None:
    """Gaps, overlaps, other types, devices and subclasses are left to the torch engine."""
    assert not ENGINE.covers(NOT_COVERED[name])


def test_a_parameter_is_covered() -> None:
    """Parameters are plain tensors."""
    assert ENGINE.covers(torch.nn.Parameter(torch.ones(2)))


ITEM = native.kernels.ITEM_ELEMENTS


@pytest.mark.parametrize("num_threads", [2, 7, 24])
@pytest.mark.parametrize(
    "sizes",
    [(4 * ITEM + 1,), (16 * ITEM,), (16 * ITEM + 1,), (3, 0, 5 * ITEM - 7, 0, 64, 2 * ITEM, 1), (40 * ITEM + 5, 9)],
)
def test_each_element_is_measured_and_scaled_once(sizes: tuple[int, ...], num_threads: int) -> None:
    """However many threads there are, lines that caches may hold and longer ones have every element taken once."""
    grads = [torch.arange(size, dtype=torch.float64).remainder_(1013) for size in sizes]
    expected = [grad.clone() for grad in grads]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        rows = measure(*grads)[0]
        scale(*grads, by=3.0)
    finally:
        torch.set_num_threads(before)
    for row, grad, whole in zip(rows, grads, expected, strict=True):
        assert row[0] == whole.sum()
        assert torch.equal(grad, 3 * whole)


def test_freed_storage_is_refused() -> None:
    """A tensor whose storage was freed is an error, not a crash."""
    grad = torch.ones(10)
    grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory: expected storage that is allocated"):
        measure(grad)


def test_threads_may_measure_and_scale_at_once(two_threads: None) -> None:
    """Four Python threads that measure at once get the same answers as one alone."""
    grads = [torch.randn(600_000) for _ in range(3)]
    expected = measure(*grads)[2]
    totals: list[list[float]] = []

    def work() -> None:
        mine = [grad.clone() for grad in grads]
        for _ in range(20):
            totals.append(measure(*mine)[2])
            scale(*mine, by=1.0)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert totals == [expected] * 80


def test_a_forked_child_can_measure_and_scale(two_threads: None) -> None:
    """A child of a process whose threads have helped gets its own (torch’s would hang there)."""
    grads = [torch.ones(2_000_000)]
    measure(*grads)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        scale(*grads, by=0.5)
        sender.send(measure(*grads)[2][:2])

    child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    child.start()
    try:
        assert receiver.poll(30)
        assert receiver.recv() == [1e6, 0.5e6]
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()


def _run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process that imports the same package."""
    environment = os.environ | {"PYTHONPATH": str(Path(native.__file__).parents[3])} | variables
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def _measure_in_a_new_process(cache: Path, *, before: str = "") -> None:
    program = f"""
import torch
{before}
from gradtrack.gradients.native.engine import Plan
torch.set_num_threads(2)
grads = [torch.ones(2 * 10**6)]
print(Plan(grads).measure([0], 1).total[0])
"""
    done = _run(program, NUMBA_CACHE_DIR=str(cache))
    assert done.stdout == "2000000.0\n", done.stderr


def test_torchs_own_threads_help() -> None:
    """Beside torch's threads, which are awake in a training, no others are started."""
    done = _run("""
import threading, torch
from gradtrack.gradients.native.engine import Plan
torch.set_num_threads(2)
grads = [torch.ones(10**7)]
plan = Plan(grads)
plan.measure([0], 1), plan.scale(0.5)
print(threading.active_count())
""")
    assert done.stdout == "1\n", done.stderr


@pytest.mark.slow
def test_the_kernels_are_kept_on_disk_and_survive_damage_there(tmp_path: Path) -> None:
    """A process loads what an earlier one compiled; a file that cannot be read is compiled anew."""
    _measure_in_a_new_process(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("kernels.look*.nb?")}
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for path in tmp_path.rglob("kernels.scale*.nb?"):
        path.write_bytes(b"damaged")
    _measure_in_a_new_process(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_the_kernels_need_no_place_to_be_kept(tmp_path: Path) -> None:
    """Where no directory can be written, they are compiled in memory."""
    nowhere = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []"
    _measure_in_a_new_process(tmp_path, before=nowhere)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_the_engine_is_missing() -> None:
    """Where numba is told not to compile, the import fails as if numba were not there."""
    done = _run("import gradtrack.gradients.native.engine", NUMBA_DISABLE_JIT="1")
    assert "ImportError: NUMBA_DISABLE_JIT is set" in done.stderr


class TestLook:
    """A look measures and clips in one call, what can be told from one call."""

    @staticmethod
    def plan(grads: list[torch.Tensor], group_of: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Return a plan that has measured gradients of these sizes."""
        plan = native.Plan(grads)
        plan.measure(group_of, int(group_of.max()) + 1)
        return plan

    @settings(max_examples=60, deadline=None)
    @given(st.lists(gradients(torch.float32), min_size=1, max_size=5), st.floats(1e-3, 2.0), st.integers(0, 2**32))
    def test_it_agrees_with_the_engine(self, grads: list[torch.Tensor], share: float, seed: int) -> None:
        """Sums, norm and clipped gradients are those of the calls one by one, or nothing is changed."""
        group_of = np.random.default_rng(seed).integers(0, 2, len(grads))
        group_of[0] = 1
        plan = self.plan([torch.ones_like(grad) for grad in grads], group_of)
        expected = native.Plan(grads).measure(group_of, 2).total
        norm = math.sqrt(expected[1])
        limit = max(share * norm, 1e-30)
        plan.limit(limit, 1e-6)
        before = [grad.clone() for grad in grads]
        found = plan.look(grads, 0, -math.inf, math.inf)
        if sum(not grad.numel() for grad in grads) > 1:  # which lie at the same place
            assert found == -1.0
            return
        assert found == norm or math.isnan(found)
        assert math.isnan(found) or not sum(expected[5:])
        np.testing.assert_array_equal(plan.results[0][-1], expected)
        coefficient = limit / (norm + 1e-6) if found == norm else 1.0
        for grad, old in zip(grads, before, strict=True):
            np.testing.assert_array_equal(grad, old * coefficient if coefficient < 1 else old)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from((0, 1, 2, 5, 300)), min_size=1, max_size=5), st.integers(0, 2**32))
    def test_it_leaves_alone_what_takes_a_second_look(self, sizes: list[int], seed: int) -> None:
        """That are gradients whose variance is lost in the mean, of tensors, groups or everything."""
        random = np.random.default_rng(seed)
        grads = [
            torch.from_numpy(
                random.choice((1.0, -1.0, 3.0)) + random.choice((0.0, 1e-5, 1.0)) * random.normal(size=size)
            )
            for size in sizes
        ]
        group_of = np.sort(random.integers(0, 3, len(sizes)))
        names = [str(index) for index in range(len(sizes))]
        layout = Layout(names, [], sizes, group_of, ["a", "b", "c"], [])
        moments = Measurer("native").measure(grads, group_of, 3)
        plan = native.Plan(grads)
        plan.measure(group_of, 3)
        hidden = find_deviations(Gradients(grads, layout, {}), moments) is not None
        assert math.isnan(plan.look(grads, 0, -math.inf, math.inf)) == (hidden or not moments.total[1])

    @pytest.mark.parametrize(("low", "high"), [(5.0, 9.0), (-9.0, -5.0)])
    def test_it_keeps_to_its_bounds(self, low: float, high: float) -> None:
        """A norm that is not between them is measured, and nothing is clipped."""
        grads = [torch.tensor([3.0, -4.0])]
        plan = self.plan(grads, np.zeros(1, np.int64))
        plan.limit(1.0, 0.0)
        assert math.isnan(plan.look(grads, 0, low, high))
        assert grads[0].tolist() == [3.0, -4.0]
        assert plan.look(grads, 0, math.log(4.9), math.log(5.1)) == 5.0
        assert grads[0].tolist() == pytest.approx([0.6, -0.8])

    def test_others_than_planned(self) -> None:
        """A plan refuses gradients of other sizes, types and places, and missing, shared and sparse ones."""
        plan = self.plan([torch.ones(4), -torch.ones(4)], np.zeros(2, np.int64))
        plan.limit(1.0, 0.0)
        one, sparse = torch.ones(4), torch.eye(2).to_sparse()
        plain, rest = nn.Parameter(torch.randn(4)), torch.randn(4)
        others = [one[:3], one.double(), one.view(2, 2).t(), None, sparse, one.to("meta"), plain]
        found = [plan.look([other, rest], 0, -math.inf, math.inf) for other in others]
        assert found[:2] + found[3:6] == [-1.0] * 5
        assert found[6] > 0
        assert plan.look([one, one], 0, -math.inf, math.inf) == -1.0

    @pytest.mark.usefixtures("two_threads")
    def test_lines_for_a_team(self) -> None:
        """A line that is worth several threads is measured and clipped alike."""
        grads = [torch.randn(size) for size in (900_000, 70_001, 1_300_000)]
        plan = self.plan(grads, np.zeros(3, np.int64))
        expected, before = plan.measure(np.zeros(3, np.int64), 1), [grad.clone() for grad in grads]
        plan.limit(7.0, 1e-6)
        norm = plan.look(grads, 0, -math.inf, math.inf)
        assert norm == expected.norm
        for grad, old in zip(grads, before, strict=True):
            assert torch.equal(grad, old * (7.0 / (norm + 1e-6)))


def test_looks_write_into_their_slots_only() -> None:
    """A slot that is not there is refused by the kernel, and no memory beside the results is touched."""
    grads = [torch.ones(5), torch.ones(3)]
    plan = native.Plan(grads)
    plan.measure(np.zeros(2, dtype=np.int64), 1)
    before = plan.results.copy()
    for slot in (-1, len(plan.results) + 1, 2**40):
        assert plan.look(grads, slot, -math.inf, math.inf) == -1.0
    assert np.array_equal(plan.results, before, equal_nan=True)


@pytest.mark.parametrize("group", [-1, 1, 2**40])
def test_group_without_a_row_is_refused(group: int) -> None:
    """A tensor of a group that has no row is not measured, and nothing is written for it."""
    with pytest.raises(IndexError, match="do not fit"):
        native.Plan([torch.ones(5), torch.ones(3)]).measure(np.array([0, group]), 1)


@pytest.mark.slow
def test_kernels_keep_to_their_arrays(tmp_path: Path) -> None:
    """Every test of the engine passes where the compiler checks each index."""
    checked = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    chosen = ["-q", "-p", "no:cacheprovider", "-m", "not slow", __file__]
    subprocess.run([sys.executable, "-m", "pytest", *chosen], env=checked, check=True, timeout=900)
