"""A tracker that is not installed is named with the command that installs it."""

from __future__ import annotations

import sys

import pytest

from gradtrack import GradientManager
from gradtrack.errors import MissingExtraError


@pytest.mark.parametrize("name", ["mlflow", "otel", "tensorboard", "trackio", "wandb"])
def test_missing_tracker_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes when the manager is made, and its text can be pasted into a shell."""
    package = {"otel": "opentelemetry"}.get(name, name)
    for module in [found for found in sys.modules if found == package or found.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        GradientManager(backends=[name])
    assert f'pip install "gradtrack[{name}]"' in str(caught.value)
