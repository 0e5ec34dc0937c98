"""Settings without an effect, which are told once."""

import logging
import re
from typing import Any

import pytest
from torch import nn

from gradtrack import GradientConfig, GradientManager
from tests.training import batch_loss, optimizer_of, small_model, train

IDLE: list[tuple[dict[str, Any], str]] = [
    (
        {"enable_gradient_clipping": False, "max_grad_norm": 0.3},
        "max_grad_norm=0.3 .*: enable_gradient_clipping is off",
    ),
    ({"enable_gradient_clipping": False, "adaptive_clipping": True}, "adaptive_clipping=True has no effect"),
    ({"adaptive_clipping": True, "clip_type": "value"}, "clip_type='value' .*: adaptive_clipping wins over it"),
    ({"clip_type": "agc", "max_grad_norm": 0.3}, "max_grad_norm=0.3 .*: clip_type agc limits each unit"),
    ({"agc_clip_factor": 0.1}, "agc_clip_factor=0.1 .*: the gradients are clipped by norm"),
    ({"zscore_alpha": 0.5, "clip_type": "value"}, "zscore_alpha=0.5 .*: the gradients are clipped by value"),
    ({"adaptive_percentile": 90.0}, "adaptive_percentile=90.0 .*: the gradients are clipped by norm"),
    ({"nonfinite_action": "skip", "replace_nan_with": 0.5}, "replace_nan_with=0.5 .*: nonfinite_action is skip"),
    (
        {"enable_nan_inf_check": False, "nonfinite_action": "raise"},
        "nonfinite_action='raise' has no effect: enable_nan_inf_check is off",
    ),
    ({"enable_gradient_monitoring": False, "exploding_threshold": 9.0}, "exploding_threshold=9.0 has no effect"),
    (
        {"grad_track_per_weight_matrix": False, "groups": {"first": "^0"}},
        "groups=.* has no effect: grad_track_per_weight_matrix is off",
    ),
]
USEFUL: list[dict[str, Any]] = [
    {},
    {name: field.get_default(call_default_factory=True) for name, field in GradientConfig.model_fields.items()},
    {"enable_gradient_clipping": False, "max_grad_norm": 1.0, "clip_type": "norm"},
    {"adaptive_clipping": True, "clip_type": "norm", "max_grad_norm": 0.3, "adaptive_window_size": 50},
    {"clip_type": "zscore", "max_grad_norm": 0.3, "zscore_alpha": 0.9},
    {"clip_type": "value", "max_grad_norm": 0.3},
    {"clip_type": "agc", "agc_clip_factor": 0.1},
    {"replace_nan_with": 0.5},
    {"nonfinite_action": "report", "enable_gradient_clipping": False},
    {"mute": ["DEAD", "dead:0", "^0$", "2.weight", "tail", "DEAD:^$"], "groups": {"tail": "^2", "all": "weight"}},
]


def told(caplog: pytest.LogCaptureFixture, settings: dict[str, Any], model: nn.Module | None = None) -> list[str]:
    """Return the warnings of a short training."""
    with caplog.at_level(logging.WARNING, logger="gradtrack"), GradientManager({"backends": [], **settings}) as manager:
        train(manager, 5, model=model)
    return [text for text in caplog.messages if "the default" not in text]


@pytest.mark.parametrize(("settings", "text"), IDLE)
def test_what_is_switched_off_is_told_once(
    settings: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the setting, its value and what switches it off."""
    (line,) = told(caplog, settings)
    assert re.search(text, line)


@pytest.mark.parametrize("settings", USEFUL)
def test_settings_with_an_effect_are_not_mentioned(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Neither are those that only repeat a default."""
    assert told(caplog, settings) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"mute": ["saturaton"]},
            "mute 'saturaton' silences nothing: it is no type of issue and no layer. Did you mean 'SATURATION'?",
        ),
        (
            {"mute": ["DEAD:core.l7"]},
            "mute 'DEAD:core.l7' silences nothing: it is no type of issue and no layer. Did you mean 'core.l1'?",
        ),
        (
            {"groups": {"recurrent": "coer"}},
            "group 'recurrent' is empty: 'coer' is found in the name of no parameter.",
        ),
    ],
)
def test_a_name_that_nothing_has_is_told(settings: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    """The nearest type or layer is named with it; levels of recurrent layers are layers."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.RNN(6, 5, num_layers=2, batch_first=True)
            self.readout = nn.Linear(5, 1)

        def forward(self, x: Any) -> Any:
            return self.readout(self.core(x.unsqueeze(1))[0][:, -1])

    fitting = {"mute": ["DEAD:core.l1", "readout"], "groups": {"core": "^core"}}
    assert told(caplog, fitting, Tagger()) == []
    assert told(caplog, settings, Tagger()) == [line]


def test_names_may_be_those_of_any_model(caplog: pytest.LogCaptureFixture) -> None:
    """A pattern for the second model of a game is as good as one for the first."""
    first, second = nn.Sequential(), nn.Sequential()
    first.add_module("generator", small_model())
    second.add_module("critic", small_model())
    with (
        caplog.at_level(logging.WARNING, logger="gradtrack"),
        GradientManager(mute=["DEAD:critic"], max_grad_norm=1.0, backends=[]) as manager,
    ):
        pairs = [(model, optimizer_of(model)) for model in (first, second)]
        for name, (model, optimizer) in zip(("a", "b"), pairs, strict=True):
            manager.attach(model, optimizer, name=name)
        for _ in range(3):
            for model, optimizer in pairs:
                manager.step(model, optimizer, batch_loss(model))
    assert caplog.records == []
