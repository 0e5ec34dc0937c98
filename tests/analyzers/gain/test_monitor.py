"""The gain monitor: what it reads from any chain of blocks, and what it leaves behind, which is nothing."""

from __future__ import annotations

import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrack import GradientGainMonitor
from gradtrack.analyzers.gain.profile import SampleSpread
from gradtrack.errors import InputTypeError, SecondBackwardError, UsageError
from tests.training import Scaled


def linears(count: int = 4, size: int = 6, seed: int = 0) -> Any:
    """Make a chain of linear blocks."""
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(size, size).double() for _ in range(count))


def run(blocks: Any, size: int = 6) -> Any:
    """Run blocks one after the other on a fixed batch, and sum up what comes out."""
    h = torch.linspace(-1, 1, 3 * size, dtype=torch.float64).reshape(3, size)
    for block in blocks:
        h = block(h)
    return h.square().sum()


def oracle(blocks: Any, size: int = 6) -> list[Tensor]:
    """Return the gradients at the outputs, by autograd alone."""
    h = torch.linspace(-1, 1, 3 * size, dtype=torch.float64).reshape(3, size)
    outputs = []
    for block in blocks:
        h = block(h)
        outputs.append(h)
    return list(torch.autograd.grad(h.square().sum(), outputs))


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": lambda gradient: gradient.square().sum().sqrt(),
    "l1": lambda gradient: gradient.abs().sum(),
    "linf": lambda gradient: gradient.abs().max(),
    "mean": lambda gradient: gradient.abs().mean(),
}


SIZES = {torch.float64: (1e-100, 1.0, 1e100), torch.float32: (1e-20, 1.0, 1e20), torch.bfloat16: (1e-20, 1.0, 1e20)}


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float16, 1e-3), (torch.float16, 1e3), *((dtype, scale) for dtype in SIZES for scale in SIZES[dtype])],
)
@pytest.mark.parametrize("norm_type", sorted(NORMS))
def test_norms_and_spread_in_every_precision(norm_type: Any, dtype: torch.dtype, scale: float) -> None:
    """Where squares leave the precision of the gradients, the numbers are still those of Python's floats."""
    torch.manual_seed(0)
    blocks, h, outputs = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)).to(dtype), torch.randn(4, 5).to(dtype), []
    with GradientGainMonitor(blocks, norm_type=norm_type, eps=0.0) as monitor:
        for block in blocks:
            h = block(h)
            h.retain_grad()
            outputs.append(h)
        torch.autograd.backward((h * torch.randn(4, 5).to(dtype)).sum() * scale)
    norms = []
    for output, found in zip(outputs, monitor.sample_spread(), strict=True):
        assert output.grad is not None
        rows = [[abs(value) for value in row] for row in output.grad.tolist()]
        norms.append(by_hand(norm_type, [value for row in rows for value in row]))
        samples = sorted(by_hand(norm_type, row) for row in rows)
        assert found is not None
        assert (found.min, found.max) == pytest.approx((samples[0], samples[-1]), rel=1e-9)
        assert found.median == pytest.approx((samples[1] + samples[2]) / 2, rel=1e-9)
    assert monitor.norms() == pytest.approx(norms, rel=1e-9)
    assert monitor.gains() == pytest.approx([norms[0] / norms[1], norms[1] / norms[2]], rel=1e-9)


def by_hand(norm_type: str, values: list[float]) -> float:
    """Return a norm of absolute values."""
    if norm_type == "l2":
        return math.hypot(*values)
    return max(values) if norm_type == "linf" else math.fsum(values) / (len(values) if norm_type == "mean" else 1)


@pytest.mark.parametrize("norm_type", sorted(NORMS))
def test_the_norms_are_those_of_autograd(norm_type: Any) -> None:
    """Each of the four norms equals its formula on the gradient that autograd gives."""
    blocks = linears()
    expected = [float(NORMS[norm_type](gradient)) for gradient in oracle(blocks)]
    with GradientGainMonitor(blocks, norm_type=norm_type) as monitor:
        run(blocks).backward()
    assert monitor.norms() == pytest.approx(expected, rel=1e-12)
    ratios = [early / late for early, late in itertools.pairwise(expected)]
    assert monitor.gains() == pytest.approx(ratios, rel=1e-12)
    assert monitor.log_gains() == pytest.approx([math.log(ratio) for ratio in ratios], rel=1e-10)


class Named(NamedTuple):
    """An output with names."""

    hidden: Tensor
    mask: Tensor


@dataclass
class Held:
    """An output that is a dataclass."""

    count: int
    hidden: Tensor


WRAPPED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda h: h, lambda output: output),
    "tuple": (lambda h: (h, None), lambda output: output[0]),
    "integer first": (lambda h: (torch.ones(2, dtype=torch.long), h), lambda output: output[1]),
    "list": (lambda h: [h], lambda output: output[0]),
    "dict": (lambda h: {"mask": torch.ones(3), "hidden": h}, lambda output: output["hidden"]),
    "named tuple": (lambda h: Named(h, torch.ones(1)), lambda output: output.hidden),
    "dataclass": (lambda h: Held(1, h), lambda output: output.hidden),
    "nested": (lambda h: {"layers": [(h, 1)]}, lambda output: output["layers"][0][0]),
}


class Wrapping(nn.Module):
    """A block that takes and returns its tensor in a wrapper."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, (self.wrap, self.unwrap) = nn.Linear(6, 6).double(), WRAPPED[kind]

    def forward(self, x: Any) -> Any:
        """Return a wrapped output."""
        return self.wrap(self.linear(x if isinstance(x, Tensor) else self.unwrap(x)))


@pytest.mark.parametrize("kind", sorted(WRAPPED))
def test_outputs_of_every_kind_are_handled_alike(kind: str) -> None:
    """The same blocks give the same gains, whatever their outputs are wrapped in."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Wrapping(kind) for _ in range(3))
    plain = [block.linear for block in blocks if isinstance(block, Wrapping)]
    with GradientGainMonitor(plain) as expected:
        run(plain).backward()
    with GradientGainMonitor(blocks) as monitor:
        h: Any = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)
        for block in blocks:
            h = block(h)
        torch.autograd.backward(WRAPPED[kind][1](h).square().sum())
    assert monitor.gains() == expected.gains()
    assert None not in monitor.gains()


def test_a_selector_picks_the_tensor() -> None:
    """With `select` the gradient is that of the tensor it returns."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Return two tensors."""
            return x * 2, x * 3

    leaf = torch.ones(2, 2, requires_grad=True)
    block = Two()
    with GradientGainMonitor([block], select=lambda output: output[1]) as monitor:
        first, second = block(leaf)
        torch.autograd.backward(first.sum() + 5 * second.sum())
    assert monitor.norms() == [10.0]


def test_strict_raises_at_a_second_backward_and_says_what_to_do() -> None:
    """A second gradient without a reset raises in the backward pass; after a reset all is well."""
    blocks = linears()
    monitor = GradientGainMonitor(blocks)
    run(blocks).backward()
    monitor.reset()
    loss = run(blocks)
    loss.backward(retain_graph=True)
    with pytest.raises(SecondBackwardError, match=r"Call reset\(\)"):
        loss.backward(retain_graph=True)
    monitor.reset()
    run(blocks).backward()
    with pytest.raises(RuntimeError, match="strict_single_backward=False"):
        run(blocks).backward()
    monitor.close()
    run(blocks).backward()


def test_permissive_keeps_the_later_backward() -> None:
    """Without strictness the norms are those of the last backward pass."""
    blocks = linears()
    with GradientGainMonitor(blocks, strict_single_backward=False) as monitor:
        run(blocks).backward()
        first = monitor.norms()
        (3 * run(blocks)).backward()
    assert monitor.norms() == pytest.approx([3 * (norm or 0) for norm in first])


def test_evaluation_in_between_changes_nothing() -> None:
    """Forward passes without a backward pass, with or without a graph, leave the recorded norms alone."""
    blocks = linears()
    with GradientGainMonitor(blocks) as monitor:
        run(blocks).backward()
        before = monitor.norms()
        run(blocks)
        with torch.no_grad():
            run(blocks)
        assert monitor.norms() == before


def test_a_monitor_that_was_entered_too_late_says_so() -> None:
    """The report names the forward pass that was missed; the statistics are NaN, not an error."""
    blocks = linears()
    loss = run(blocks)
    with GradientGainMonitor(blocks) as monitor:
        loss.backward()
        assert "saw no forward pass" in monitor.report()
        stats = monitor.summary_stats()
    assert math.isnan(stats["mean_gain"])
    assert stats["num_missing"] == 3
    with GradientGainMonitor(blocks) as monitor:
        run(blocks)
    assert "saw 4 forward passes" in monitor.report()


def test_frozen_blocks_are_none() -> None:
    """A block whose output needs no gradient has no norm, and no gain on either side of it."""
    blocks = linears()
    for block in blocks[:2]:
        block.requires_grad_(False)
    with GradientGainMonitor(blocks) as monitor:
        run(blocks).backward()
    assert monitor.norms()[:2] == [None, None]
    assert monitor.gains()[:2] == [None, None]
    assert monitor.summary_stats()["num_missing"] == 2
    assert "no gradient" in monitor.report()


def test_an_activation_in_place_after_a_block_is_harmless() -> None:
    """The gradient is that of the block's own output, before the activation overwrote it."""
    torch.manual_seed(0)
    make = [nn.Linear(6, 6).double(), nn.ReLU(), nn.Linear(6, 6).double(), nn.ReLU(), nn.Linear(6, 6).double()]
    expected = oracle(make)
    for index in (1, 3):
        make[index] = nn.ReLU(inplace=True)
    with GradientGainMonitor([make[0], make[2], make[4]]) as monitor:
        run(make).backward()
    assert monitor.norms() == pytest.approx([float(expected[index].norm()) for index in (0, 2, 4)], rel=1e-12)
    assert None not in monitor.gains()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("segment", [1, 2])
def test_checkpointing_changes_nothing(reentrant: bool, strict: bool, segment: int) -> None:
    """Both kinds of checkpointing give the norms and gains of a plain run, in strict mode too."""
    blocks = linears(6)
    with GradientGainMonitor(blocks) as expected:
        run(blocks).backward()

    def part(start: int, h: Tensor) -> Tensor:
        for block in blocks[start : start + segment]:
            h = block(h)
        return h

    with GradientGainMonitor(blocks, strict_single_backward=strict) as monitor:
        h = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6).requires_grad_()
        for start in range(0, 6, segment):
            h = checkpoint(part, start, h, use_reentrant=reentrant)
        torch.autograd.backward(h.square().sum())
    assert monitor.norms() == pytest.approx(expected.norms(), rel=1e-12)
    assert monitor.gains() == pytest.approx(expected.gains(), rel=1e-12)


def test_sibling_heads_are_no_chain() -> None:
    """Blocks that share an input have norms but no gains, with a graph in front of them and without."""
    for trunk in (nn.Linear(6, 6).double(), nn.Identity()):
        heads = linears(3)
        with GradientGainMonitor(heads) as monitor:
            shared = trunk(torch.ones(2, 6, dtype=torch.float64))
            sum(head(shared).sum() * scale for head, scale in zip(heads, (1, 100, 1), strict=True)).backward()
        assert monitor.gains() == [None, None]
        assert None not in monitor.norms()
        assert "not connected" in monitor.report()


def test_gains_cross_whatever_lies_between_blocks() -> None:
    """Dropout, views, residuals, keyword arguments and normalisation between blocks keep them connected."""
    blocks = linears(4)
    norm = nn.LayerNorm(6).double()
    with GradientGainMonitor(blocks) as monitor:
        h = torch.ones(2, 6, dtype=torch.float64)
        h = blocks[0](h)
        h = blocks[1](input=norm(h).view(2, 6) + h)
        h = blocks[2](nn.functional.dropout(h, 0.1))
        blocks[3](h.t().t()).square().sum().backward()
    assert None not in monitor.gains()


def test_a_detached_block_is_not_connected() -> None:
    """Where the chain is cut with detach there is no gain."""
    blocks = linears(2)
    with GradientGainMonitor(blocks) as monitor:
        first = blocks[0](torch.ones(2, 6, dtype=torch.float64))
        (blocks[1](first.detach()).sum() + first.sum()).backward()
    assert monitor.gains() == [None]


def test_a_block_that_runs_twice_counts_at_its_last_output() -> None:
    """A block that one pass runs twice is no second backward, and its norm is that of its last output."""
    block = nn.Linear(6, 6).double()
    with GradientGainMonitor([block]) as monitor:
        first = block(torch.ones(2, 6, dtype=torch.float64))
        second = block(first)
        second.sum().backward()
    assert monitor.norms() == pytest.approx([math.sqrt(12)])


def test_vanished_gradients_are_infinite_gains() -> None:
    """A norm at or under eps counts as zero: an infinite gain, apart from mean and extremes."""
    blocks = linears(3)
    with GradientGainMonitor(blocks, eps=1e-3) as monitor:
        h = torch.ones(1, 6, dtype=torch.float64)
        first = blocks[0](h)
        second = blocks[1](first)
        third = blocks[2](second)
        (first.sum() + 1e-9 * third.sum()).backward()
    assert monitor.gains()[0] == math.inf
    assert monitor.log_gains()[0] == math.inf
    stats = monitor.summary_stats()
    assert stats["num_vanishing"] == 2
    assert math.isnan(stats["max_gain"])
    assert "gamma=inf, log_gamma=inf [VANISHING]" in monitor.report()


def test_a_gradient_that_is_not_finite_is_labelled() -> None:
    """NaN gradients give NaN gains, which count as missing and not as healthy."""
    blocks = linears(2)
    with GradientGainMonitor(blocks) as monitor:
        (run(blocks) * math.nan).backward()
    assert math.isnan(monitor.gains()[0] or 0.0)
    assert "[NOT FINITE]" in monitor.report()
    assert monitor.summary_stats()["num_missing"] == 1


def measured(gains: Sequence[float], batch: int = 2, **options: Any) -> GradientGainMonitor:
    """Run a chain of scalings whose gains between outputs are those given."""
    blocks = [Scaled(1.0), *(Scaled(gain) for gain in gains)]
    with GradientGainMonitor(blocks, **options) as monitor:
        h = torch.ones(batch, 3, dtype=torch.float64, requires_grad=True)
        for block in blocks:
            h = block(h)
        torch.autograd.backward(h.sum())
    return monitor


def test_the_report_has_the_lines_of_the_document() -> None:
    """Transition and summary lines come out character by character."""
    text = measured([0.9542, 0.3421, 3.4512]).report()
    assert "Gradient Gains (ratio of consecutive norms):\n" in text
    assert "\n  Transition  0 to  1: gamma=0.9542, log_gamma=-0.0469 [Healthy]\n" in text
    assert "\n  Transition  1 to  2: gamma=0.3421, log_gamma=-1.0727 [DAMPING]\n" in text
    assert "\n  Transition  2 to  3: gamma=3.4512, log_gamma=1.2387 [AMPLIFYING]\n" in text
    assert "\nSummary Statistics:\n  Mean gain: 1.5825\n" in text
    for line in ("Max gain: 3.4512", "Healthy (0.5 <= gamma <= 2.0): 1", "Damping (gamma < 0.5): 1"):
        assert f"\n  {line}\n" in text
    assert "\n  Amplifying (gamma > 2.0): 1\n" in text
    assert "heuristic" in text
    order = [text.index(heading) for heading in ("Gradient Norms", "Gradient Gains", "Summary Statistics")]
    assert order == sorted(order)


def test_the_summary_has_the_keys_of_the_document() -> None:
    """The limits themselves are healthy."""
    stats = measured([0.5, 2.0, 0.49, 2.01]).summary_stats()
    assert list(stats) == [
        "mean_gain",
        "min_gain",
        "max_gain",
        "mean_log_gain",
        "num_amplifying",
        "num_damping",
        "num_healthy",
        "num_vanishing",
        "num_missing",
    ]
    assert (stats["num_healthy"], stats["num_damping"], stats["num_amplifying"]) == (2, 1, 1)
    assert stats["mean_gain"] == pytest.approx((0.5 + 2.0 + 0.49 + 2.01) / 4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12))
def test_the_gains_multiply_to_the_cumulative_gain(gains: list[float]) -> None:
    """The cumulative gain of a block is the product of the gains behind it, and the last block's is one."""
    monitor = measured(gains)
    assert monitor.gains() == pytest.approx(gains, rel=1e-10)
    expected = [math.prod(gains[index:]) for index in range(len(gains) + 1)]
    assert monitor.cumulative_gains() == pytest.approx(expected, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 3), st.integers(2, 30))
def test_one_gain_everywhere_is_the_gain_per_block(gain: float, depth: int) -> None:
    """A chain with the same gain at every transition has that gain per block, without error."""
    fit = measured([gain] * depth).gain_per_block()
    assert fit is not None
    assert fit.gain_per_block == pytest.approx(gain, rel=1e-9)
    assert fit.slope == pytest.approx(math.log(gain), abs=1e-9)
    assert fit.standard_error == pytest.approx(0.0, abs=1e-9)
    assert fit.num_blocks == depth + 1


def test_healthy_transitions_that_multiply_to_nothing_show_in_the_cumulative_gain() -> None:
    """23 gains of 0.6 are each healthy and leave 8e-6 of the gradient."""
    monitor = measured([0.6] * 23)
    assert monitor.summary_stats()["num_healthy"] == 23
    assert monitor.cumulative_gains()[0] == pytest.approx(7.9e-6, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.sampled_from([0.01, 50.0]))
def test_the_discontinuity_is_where_it_was_put(place: int, jump: float) -> None:
    """One transition that differs from all others is found."""
    gains = [1.1] * 10
    gains[place] = jump
    found = measured(gains).discontinuity()
    assert found is not None
    assert found.transition == place
    assert found.gain == pytest.approx(jump)
    assert found.deviation == pytest.approx(math.log(jump / 1.1))


def test_samples_that_fell_silent_show_in_the_spread() -> None:
    """Half of the batch without a gradient is a silent fraction of one half at each block."""
    blocks = linears(2)
    with GradientGainMonitor(blocks) as monitor:
        h = blocks[1](blocks[0](torch.ones(8, 6, dtype=torch.float64)))
        (h.sum(dim=1) * (torch.arange(8) < 4)).sum().backward()
    spread = monitor.sample_spread()[0]
    assert spread is not None
    assert (spread.silent_fraction, spread.num_samples, spread.min) == (0.5, 8, 0.0)
    assert "50% of the samples are silent" in monitor.report()


def test_rms_norms_do_not_depend_on_the_size() -> None:
    """Outputs of unlike shapes with equal elements have equal root mean squares."""

    class Widen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """Repeat."""
            return torch.cat([x, x], dim=1)

    blocks = [Scaled(1.0), Widen()]
    with GradientGainMonitor(blocks) as monitor:
        h = torch.ones(2, 4, requires_grad=True)
        blocks[1](blocks[0](h)).sum().backward()
    assert monitor.rms_norms() == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("scale", [1e-100, 1e-31, 1e-12, 1e12, 1e31, 1e100])
def test_the_scale_of_the_loss_changes_no_gain(scale: float) -> None:
    """F1: with the loss multiplied by a constant every gain stays what it was."""
    blocks = linears()
    found = []
    for factor in (1.0, scale):
        with GradientGainMonitor(blocks) as monitor:
            (factor * run(blocks)).backward()
        found.append((monitor.gains(), monitor.cumulative_gains()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-12)


def test_nothing_stays_alive() -> None:
    """Neither the activations nor the graph outlive the caller's own references while the monitor is open."""
    blocks = linears()
    with GradientGainMonitor(blocks) as monitor:
        loss = run(blocks)
        seen = weakref.ref(loss)
        output = blocks[0](torch.ones(2, 6, dtype=torch.float64))
        held = weakref.ref(output)
        loss.backward()
        del loss, output
        gc.collect()
        assert seen() is None
        assert held() is None
        assert None not in monitor.norms()


def test_hooks_go_with_close_with_an_error_and_with_the_monitor() -> None:
    """No hook is left after close, after an exception, and after the last reference to the monitor is gone."""
    blocks = linears()
    monitor = GradientGainMonitor(blocks)
    loss = run(blocks)
    monitor.close()
    monitor.close()
    loss.backward()
    assert monitor.norms() == [None] * 4
    assert not any(block._forward_hooks for block in blocks)

    def fail() -> None:
        with GradientGainMonitor(blocks):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any(block._forward_hooks for block in blocks)
    dropped = GradientGainMonitor(blocks)
    del dropped
    gc.collect()
    assert not any(block._forward_hooks for block in blocks)


def test_blocks_can_be_pickled_while_they_are_watched() -> None:
    """A pickle of watched blocks works, and its copy is not watched."""
    blocks = linears()
    with GradientGainMonitor(blocks) as monitor:
        copy = pickle.loads(pickle.dumps(blocks))
        run(copy).backward()
        assert monitor.norms() == [None] * 4
        torch.testing.assert_close(run(copy), run(blocks))


def test_an_output_can_be_saved_while_it_waits(tmp_path: Any) -> None:
    """Saving a watched output neither fails nor warns."""
    blocks = linears()
    with GradientGainMonitor(blocks):
        torch.save(blocks[0](torch.ones(1, 6, dtype=torch.float64)), tmp_path / "output.pt")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("way", ["wrapped", "in place"])
@pytest.mark.parametrize("first", ["compiled", "watched"])
def test_compiled_blocks_are_watched(way: str, first: str) -> None:
    """Blocks that are compiled one by one give the gains of the plain ones, and stay compiled."""
    plain = linears(3)
    with GradientGainMonitor(plain) as expected:
        run(plain).backward()
    blocks: list[Any] = list(linears(3))
    if way == "wrapped":
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    else:
        for block in blocks:
            block.compile(backend="aot_eager")
    if first == "compiled":
        run(blocks).backward()
    with GradientGainMonitor(blocks) as monitor:
        run(blocks).backward()
    assert monitor.gains() == pytest.approx(expected.gains(), rel=1e-9)
    run(blocks).backward()
    assert "call" not in {getattr(block._compiled_call_impl, "__name__", "") for block in blocks}
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_model_that_is_compiled_as_a_whole_is_told_what_to_do() -> None:
    """Inside a compiled region no hook can wait; the report names the way out, and it works."""
    blocks = linears(3)
    model = torch.compile(nn.Sequential(*blocks), backend="aot_eager")
    batch = torch.ones(2, 6, dtype=torch.float64)
    with GradientGainMonitor(blocks) as monitor:
        model(batch).sum().backward()
        assert 'set_stance("force_eager")' in monitor.report()
        with torch.compiler.set_stance("force_eager"):
            model(batch).sum().backward()
    assert None not in monitor.gains()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("blocks", "options", "error", "text"),
    [
        ([], {}, UsageError, "blocks are empty"),
        ([1], {}, InputTypeError, "block 1: expected a torch.nn.Module"),
        (nn.Linear(1, 1), {}, InputTypeError, "expected a list, ModuleList or Sequential"),
        ([nn.ReLU()] * 2, {}, UsageError, "given twice"),
        ([nn.ReLU()], {"norm_type": "L2"}, UsageError, "norm_type 'L2': expected one of l2"),
        ([nn.ReLU()], {"eps": -1.0}, UsageError, "eps -1.0"),
    ],
)
def test_mistakes_are_named(blocks: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Arguments that cannot mean anything raise an error that says what was expected."""
    with pytest.raises(error, match=text):
        GradientGainMonitor(blocks, **options)


def test_arguments_may_be_positional() -> None:
    """The four arguments of the document have its order and its defaults."""
    monitor = GradientGainMonitor(nn.Sequential(nn.Linear(2, 2)), "linf", False, 1e-12)
    assert (monitor.norm_type, monitor.strict_single_backward, monitor.eps) == ("linf", False, 1e-12)
    monitor = GradientGainMonitor([nn.ReLU()])
    assert (monitor.norm_type, monitor.strict_single_backward, monitor.eps) == ("l2", True, 1e-30)


@pytest.mark.parametrize("norm_type", sorted(NORMS))
def test_complex_gradients_have_the_norms_of_their_absolute_values(norm_type: Any) -> None:
    """Each norm is its formula on |z|, which the real and the imaginary parts apart would not give."""
    block = nn.Linear(4, 3, dtype=torch.complex64)
    with GradientGainMonitor([block], norm_type=norm_type) as monitor:
        output = block(torch.randn(5, 4, dtype=torch.complex64))
        output.retain_grad()
        output.abs().pow(3).sum().backward()
    assert output.grad is not None
    sizes = output.grad.to(torch.complex128).abs()
    assert monitor.norms() == pytest.approx([float(NORMS[norm_type](sizes))], rel=1e-9)
    assert monitor.rms_norms() == pytest.approx([float(sizes.square().mean().sqrt())], rel=1e-9)


def test_the_spread_leaves_out_samples_that_are_not_finite() -> None:
    """One broken sample hides neither the others nor itself: it is counted, and no number is that of its place."""
    block = nn.Linear(2, 2)
    with GradientGainMonitor([block]) as monitor:
        output = block(torch.ones(4, 2))
        output.backward(torch.tensor([[1.0, 0.0], [math.nan, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    assert monitor.sample_spread() == [SampleSpread(0.0, 1.0, 5.0, 1 / 3, 4)]
    monitor.close()
    with GradientGainMonitor([block]) as monitor:
        block(torch.ones(2, 2)).backward(torch.full((2, 2), math.inf))
    (found,) = monitor.sample_spread()
    assert found is not None
    assert all(math.isnan(value) for value in found[:4])
    assert "silent" not in monitor.report()
