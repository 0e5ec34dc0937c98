"""`watch` on programs that clip by themselves: what is reported is before their clipping, or a note says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_

import gradtrack
from gradtrack import GradientManager
from gradtrack.pages.run_data import load_run

ORIGINAL = clip_grad._clip_grads_with_norm_


def a_model() -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return a loss whose gradients have a norm that differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    found: Tensor = 100 * (1 + step) * model(torch.randn(16, 4, generator=generator)).square().mean()
    return found


def like_nanogpt(model: nn.Module, optimizer: Any, step: int) -> list[float]:
    """Train for a step of two micro-batches with one clipping, and return the norm that it told."""
    for micro_batch in range(2):
        (loss_of(model, step + micro_batch) / 2).backward()  # type: ignore[no-untyped-call]
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [float(norm)]


def with_skips(model: nn.Module, optimizer: Any, step: int) -> list[float]:
    """Leave out steps with a large norm, as some programs do."""
    optimizer.zero_grad()
    loss_of(model, step).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
    if step % 3:
        optimizer.step()
    return [float(norm)]


def train(
    run: Callable[[nn.Module, Any, int], list[float]], settings: dict[str, Any] | None, steps: int = 9
) -> tuple[list[float], list[Tensor], GradientManager | None]:
    """Train with or without `watch`; return the norms that the program saw, and the weights."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = None if settings is None else gradtrack.watch(model, optimizer, **settings)
    norms = [norm for step in range(steps) for norm in run(model, optimizer, step)]
    if manager is not None:
        manager.close()
    return norms, [param.detach().clone() for param in model.parameters()], manager


@pytest.mark.parametrize("run", [like_nanogpt, with_skips])
def test_the_norm_is_that_before_the_programs_own_clipping(
    run: Callable[[nn.Module, Any, int], list[float]], tmp_path: Path
) -> None:
    """Each step is measured once, before it is clipped, and the training is the same to the bit."""
    before = clip_grad._clip_grads_with_norm_  # which the watch of another test may still hear
    plain_norms, plain_weights, _ = train(run, None)
    norms, weights, manager = train(
        run, {"run_dir": tmp_path, "save_gradient_plots": False, "backends": [], "grad_log_every_n_steps": 1}
    )
    assert manager is not None
    assert norms == plain_norms
    assert all(map(torch.equal, weights, plain_weights))
    assert [report.clipping.norm_before for report in manager.reports] == pytest.approx(norms)
    notes = [note for report in manager.reports for note in report.notes if "clips by itself" in note]
    limit = "1" if run is like_nanogpt else "0.5"
    assert notes == [f"the program clips by itself, at a norm of {limit}: what is reported is before its clipping."]
    assert load_run(tmp_path).caveats == []
    assert clip_grad._clip_grads_with_norm_ in (before, ORIGINAL)


def clips_each_micro_batch(model: nn.Module, optimizer: Any, step: int) -> list[float]:
    """Clip after each micro-batch: the last clipping only is of the whole gradient."""
    optimizer.zero_grad()
    for micro_batch in range(2):
        loss_of(model, step + micro_batch).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [1.0]


def with_scaler(scaler: Any) -> Callable[[nn.Module, Any, int], list[float]]:
    """Return steps with a loss scaler, which decides after the clipping whether there is a step."""

    def run(model: nn.Module, optimizer: Any, step: int) -> list[float]:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return [1.0]

    return run


def plainly(model: nn.Module, optimizer: Any, step: int) -> list[float]:
    """Clip, as most do."""
    optimizer.zero_grad()
    loss_of(model, step).backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [1.0]


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (clips_each_micro_batch, {}),
        (with_scaler(torch.amp.GradScaler("cpu", init_scale=4.0)), {}),
        (plainly, {"max_grad_norm": 5.0}),
        (plainly, {"nonfinite_action": "skip"}),
    ],
)
def test_what_is_measured_after_the_clipping_says_so(
    run: Callable[[nn.Module, Any, int], list[float]], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Where something else has to come after the clipping, the run tells everyone what its norms are."""
    _, plain_weights, _ = train(run, None)
    norms, weights, manager = train(
        run, {"run_dir": tmp_path, "save_gradient_plots": False, "backends": [], **settings}
    )
    assert manager is not None
    assert all(map(torch.equal, weights, plain_weights))
    assert [report.clipping.norm_before for report in manager.reports][1:] == pytest.approx(norms[1:], rel=1e-4)
    (caveat,) = load_run(tmp_path).caveats
    assert caveat.startswith("the program clips by itself, at a norm of 1, before gradients are measured")


class ActorCritic(nn.Module):
    """Two networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = a_model(), a_model()


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_are_measured_once_for_each_backward_pass(together: bool) -> None:
    """Both parts are clipped and stepped, after one backward pass or in turn."""
    model = ActorCritic()
    parts = (model.actor, model.critic)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-5) for part in parts]
    manager = gradtrack.watch(model, optimizers, backends=[])
    norms = []
    for step in range(6):
        for one in optimizers:
            one.zero_grad()
        if together:
            (loss_of(model.actor, step) + loss_of(model.critic, step + 1)).backward()  # type: ignore[no-untyped-call]
            norms.append(sum(float(clip_grad_norm_(part.parameters(), 1.0)) ** 2 for part in parts) ** 0.5)
            for one in optimizers:
                one.step()
            continue
        for part, one in zip(parts, optimizers, strict=True):
            loss_of(part, step).backward()  # type: ignore[no-untyped-call]
            norms.append(float(clip_grad_norm_(part.parameters(), 1.0)))
            one.step()
            one.zero_grad()
    manager.close()
    assert [report.clipping.norm_before for report in manager.reports] == pytest.approx(norms)


def test_the_clipping_of_other_models_is_not_heard() -> None:
    """The watch is on one model only."""
    model, other = a_model(), a_model()
    manager = gradtrack.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), backends=[])
    loss_of(other, 1).backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(other.parameters(), 1.0)
    manager.close()
    assert list(manager.reports) == []
