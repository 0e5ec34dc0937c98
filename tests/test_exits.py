"""The end of managers that nobody closes."""

import gc
import weakref
from typing import Any

import pytest
from torch import nn

import gradtrack
from gradtrack import GradientManager, safe_backward
from tests.training import batch_loss, optimizer_of, small_model

ANALYZERS = ["flow", "gain", "jacobian", "updates"]


def leave(*, watched: bool, analyzers: Any) -> tuple[nn.Module, list[weakref.ref[Any]]]:
    """Train for some steps and let go of manager and optimizer; return the model, and references to all three."""
    model = small_model()
    optimizer = optimizer_of(model)
    settings: dict[str, Any] = {"backends": ["memory"], "analyzers": analyzers}
    manager = gradtrack.watch(model, optimizer, **settings) if watched else GradientManager(**settings)
    for step in range(3):  # at the fourth the analyzers look, so that their hooks are there
        optimizer.zero_grad()
        if watched:
            batch_loss(model, step).backward()  # type: ignore[no-untyped-call]
        else:
            safe_backward(batch_loss(model, step), model, optimizer, manager)
        optimizer.step()
    return model, [weakref.ref(one) for one in (manager, optimizer, model)]


@pytest.mark.parametrize("analyzers", [[], ANALYZERS], ids=["plain", "analyzed"])
@pytest.mark.parametrize("watched", [False, True], ids=["safe_backward", "watch"])
def test_a_manager_that_is_let_go_of_is_collected(watched: bool, analyzers: Any) -> None:
    """What nobody holds is collected with its optimizer and leaves no hook on the model, which can then go as well."""
    model, (manager, optimizer, model_too) = leave(watched=watched, analyzers=analyzers)
    gc.collect()
    assert manager() is None
    assert optimizer() is None
    hooks = [getattr(one, name) for one in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    assert not any(hooks)
    del model
    gc.collect()
    assert model_too() is None
