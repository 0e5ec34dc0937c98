"""Compiled models: nothing is compiled again and no graph breaks, whichever analyzers run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

from gradtrack import GradientManager, watch
from gradtrack.analyzers.tools.hooks import EagerSteps
from gradtrack.analyzers.tools.modules import is_compiled

STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add what a layer makes of its inputs."""
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget what other tests have compiled, before and after."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def backward_compiled() -> Any:
    """Return the context in which backward passes are captured and compiled."""
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))


def train(
    manager: GradientManager | None, backend: str = "eager", *, compile_backward: bool = False
) -> tuple[dict[str, Any], list[Tensor]]:
    """Train a compiled model, and return what was compiled and the weights."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 2))
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = compiled(torch.full((4, 8), 0.1 * step)).square().mean()
        with backward_compiled() if compile_backward else nullcontext():
            if manager is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                manager.step(compiled, optimizer, loss)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: dict(counters[name]) for name in ("stats", "graph_break", "frames", "compiled_autograd")}
    return found, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("analyzers", [[], "auto"])
def test_as_much_is_compiled_as_without(backend: str, analyzers: Any) -> None:
    """One graph, no break and no frame more, with every analyzer that suits the model too."""
    alone, weights = train(None, backend)
    with GradientManager(analyzers=analyzers, max_grad_norm=1.0) as manager:
        watched, same = train(manager, backend)
    assert watched == alone
    assert alone["stats"]["unique_graphs"] == 1
    assert not alone["graph_break"]
    for one, other in zip(weights, same, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("analyzers", [[], ["gain"], ["flow"], ["vector"], "auto"])
def test_compiled_backward(analyzers: Any) -> None:
    """With compiled autograd the backward graph is captured as often as without gradtrack."""
    alone, weights = train(None, compile_backward=True)
    with GradientManager(analyzers=analyzers, max_grad_norm=1.0) as manager:
        watched, same = train(manager, compile_backward=True)
    assert alone["compiled_autograd"]["captures"] >= 1
    assert watched == alone
    for one, other in zip(weights, same, strict=True):
        torch.testing.assert_close(one, other)


def weights_after(how: str, analyzers: Any, *, whole: bool) -> tuple[list[Tensor], int, int]:
    """Train with a compiled optimizer step, or a loop compiled as a whole; count the reports and the operations."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"analyzers": analyzers, "enable_gradient_clipping": False}
    manager = watch(model, optimizer, **settings) if how == "watch" else GradientManager(settings)
    take = optimizer.step if whole else torch.compile(optimizer.step, backend="eager")

    def train_once(inputs: Tensor) -> None:
        loss = model(inputs).square().mean()
        if how == "step":
            manager.step(model, optimizer, loss)
        else:
            loss.backward()
        take()
        optimizer.zero_grad()

    run = torch.compile(train_once, backend="eager") if whole else train_once
    for step in range(6):
        run(torch.full((4, 8), 0.1 * step))
    manager.close()
    num_reports = len(manager.reports)
    return [param.detach().clone() for param in model.parameters()], num_reports, counters["stats"]["calls_captured"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("analyzers", [[], ["updates"]])
@pytest.mark.parametrize("how", ["step", "watch"])
def test_compiled_steps_and_loops(how: str, analyzers: Any, whole: bool) -> None:
    """A compiled optimizer step compiles no more than without gradtrack; a whole loop breaks where it is called."""
    alone, _, expected = weights_after("alone", [], whole=whole)
    weights, num_reports, num_captured = weights_after(how, analyzers, whole=whole)
    assert num_reports == 6
    assert whole or num_captured == expected
    for one, other in zip(weights, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", ["method", "function"])
def test_a_compiled_step_rests_where_it_is_skipped(way: str) -> None:
    """Neither weights nor state move, whether the method itself is compiled or what calls it, and the next step is."""
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take = torch.compile(optimizer.step if way == "method" else lambda: optimizer.step(), backend="eager")
    with GradientManager() as manager:
        for step in range(6):
            optimizer.zero_grad()
            before = [param.detach().clone() for param in model.parameters()]
            counts = [float(state["step"]) for state in optimizer.state.values()]
            bad = step in (2, 3)
            loss = model(torch.full((4, 8), 0.1 + step)).square().mean() * (math.inf if bad else 1.0)
            assert manager.step(model, optimizer, loss).skipped == bad
            take()
            assert all(map(torch.equal, before, model.parameters())) == bad
            assert (counts == [float(state["step"]) for state in optimizer.state.values()]) == bad


def test_sampled_steps_run_eagerly_and_say_so_once() -> None:
    """Analyzers that look inside see their steps of a compiled model, and one note tells that these ran eagerly."""
    with GradientManager(analyzers=["flow", "gain"]) as manager:
        train(manager)
        reports = manager.reports
    assert [report.step for report in reports if "gain" in report.analyzers] == [4, 8, 12]
    assert len([report for report in reports if "compiled" in str(report.notes)]) == 1
    assert not any("_orig_mod" in name for report in reports for name in report.groups)


def test_what_looks_at_no_module_needs_no_eager_step() -> None:
    """An analyzer without hooks leaves every step compiled."""
    with GradientManager(analyzers=["updates"]) as manager:
        train(manager)
        assert any(report.analyzers for report in manager.reports)
        assert not any("compiled" in str(report.notes) for report in manager.reports)


def test_closing_gives_the_compiler_back() -> None:
    """A manager that is closed before its sampled step leaves later code compiled."""
    model: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager(analyzers=["flow"])
    for _ in range(3):  # the fourth step would be sampled
        manager.step(model, optimizer, model(torch.ones(1, 2)).sum())
    manager.close()
    before = counters["frames"]["total"]
    torch.compile(nn.Linear(3, 3), backend="eager")(torch.ones(1, 3))
    assert counters["frames"]["total"] == before + 1


def test_what_is_compiled() -> None:
    """A model counts as compiled where any part of it is, in either of the two ways."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not any(map(is_compiled, model.modules()))
    assert is_compiled(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    model[1].compile(backend="eager")
    assert list(map(is_compiled, model.modules())) == [False, False, True]


def test_eager_steps_end_once() -> None:
    """Ending twice, or without a beginning, does nothing."""
    steps = EagerSteps()
    steps.end()
    steps.begin()
    steps.begin()
    steps.end()
    steps.end()
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert counters["frames"]["total"] == 1
