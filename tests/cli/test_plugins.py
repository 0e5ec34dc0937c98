"""What is told about plugins without importing them."""

from __future__ import annotations

from importlib import metadata

import pytest

from gradtrack import registry
from gradtrack.cli import plugins


def test_builtin_plugins_are_described_by_their_first_sentence() -> None:
    """The sentence about a plugin is that of its file, or of its package."""
    memory = next(plugin for plugin in plugins.describe_plugins(registry.backends) if plugin.name == "memory")
    assert memory.about == "Records kept in a list, for tests and notebooks."
    assert (memory.source, memory.missing, memory.remedy) == ("gradtrack", (), "")
    wandb = next(plugin for plugin in plugins.describe_plugins(registry.backends) if plugin.name == "wandb")
    assert wandb.about.startswith("Records as history rows")


def test_missing_packages_are_those_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is missing when the extra of the plugin's name asks for it and it is not installed."""
    required = [
        "torch>=2.6",
        "nowhere-to-be-found>=1; extra == 'mine'",
        "pydantic ; extra == 'mine'",
        "x; extra == 'other'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    assert plugins.missing_packages("mine") == ("nowhere-to-be-found",)
    plugin = plugins.PluginInfo(name="mine", about="", source="gradtrack", missing=plugins.missing_packages("mine"))
    assert plugin.remedy == 'pip install "gradtrack[mine]"'


def test_third_party_plugins_are_listed_without_loading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin of another package is listed though it cannot even be imported."""
    point = metadata.EntryPoint("theirs", "no_such_module:Backend", "gradtrack.backends")
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [point] if group == "gradtrack.backends" else [])
    found = [plugin for plugin in plugins.describe_plugins(registry.backends) if plugin.name == "theirs"]
    assert [plugin.source for plugin in found] == ["no_such_module:Backend"]
