"""Frameworks that are not installed."""

import importlib
import sys

import pytest

from gradtrack.errors import MissingExtraError


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lightning", "lightning.pytorch.callbacks", "lightning"),
        ("transformers", "accelerate.state", "transformers"),
        ("stable_baselines3", "stable_baselines3.common.callbacks", "sb3"),
    ],
)
def test_a_missing_framework_names_its_command(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ends with the command that installs the framework."""
    monkeypatch.delitem(sys.modules, f"gradtrack.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf'not installed. Run: pip install "gradtrack\[{extra}\]"$'):
        importlib.import_module(f"gradtrack.integrations.{module}")
