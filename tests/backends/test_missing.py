"""A tracker that is not installed is named with the command that installs it."""

from __future__ import annotations

import sys

import pytest

from gradtrack import GradientManager
from gradtrack.errors import MissingExtraError


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_missing_tracker_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes when the manager is made, and its text can be pasted into a shell."""
    for module in [found for found in sys.modules if found == name or found.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError) as caught:
        GradientManager(backends=[name])
    assert f'pip install "gradtrack[{name}]"' in str(caught.value)
