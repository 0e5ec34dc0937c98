"""Who clips where a framework trains, and what is told of the settings that this switches off."""

from __future__ import annotations

import pytest

from gradtrack.config import GradientConfig
from gradtrack.integrations.callback import clipping_if_asked


@pytest.mark.parametrize("rank", [0, 1])
def test_settings_of_an_idle_clipping_are_told_once(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone tells of them, always in the same order; no rank keeps them."""
    monkeypatch.setenv("RANK", str(rank))
    config = GradientConfig(zscore_alpha=0.5, agc_clip_factor=0.5, max_grad_norm=0.5)
    found = clipping_if_asked(config, clips="the framework clips")
    names = ["max_grad_norm", "agc_clip_factor", "zscore_alpha"] if rank == 0 else []
    assert caplog.messages == [f"{name}=0.5 has no effect: the framework clips" for name in names]
    assert found.model_fields_set == {"enable_gradient_clipping", "nonfinite_action"}
