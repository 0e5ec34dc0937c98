"""The analyzers beside a training look at every step that they were made ready for, and leave nothing on the model."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.modules import module as modules

from gradtrack.analyzers.flow import GradientFlowAnalyzer
from gradtrack.analyzers.jacobian import JacobianAnalyzer
from gradtrack.analyzers.transformer import TransformerAnalyzer
from gradtrack.live import LiveAnalyzers


def num_hooks(model: nn.Module) -> int:
    """Count the hooks of a model and those that every module has."""
    own = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    return own + len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)


@pytest.mark.parametrize("step", [5, 8])
def test_hooks_for_a_step_that_does_not_come_are_removed(step: int) -> None:
    """Who counts steps anew while hooks wait for the next one has them on the model once, or not at all."""
    model = nn.TransformerEncoderLayer(8, 2, 16)
    live = LiveAnalyzers({"flow": GradientFlowAnalyzer(), "transformer": TransformerAnalyzer()})
    live.arm(model, 4)
    once = num_hooks(model)
    assert once > 0
    live.arm(model, step)
    assert num_hooks(model) == (once if step == 8 else 0)
    live.close()
    assert num_hooks(model) == 0


def test_an_alert_does_not_take_back_the_one_before() -> None:
    """What was made ready for a step looks at it, though something else has happened on that step."""
    live = LiveAnalyzers({"jacobian": JacobianAnalyzer()})
    live.alert(21)
    assert not live.due(20)
    live.alert(22)
    assert live.due(21)
    assert live.due(22)
    live.alert(40)
    live.alert(41)
    assert not live.due(21)
