"""The registry: plugins by name, checked before they are used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrack import Backend, GradientManager, Record, registry
from gradtrack.errors import PluginError, UnknownPluginError
from gradtrack.registry import Registry
from tests.plugins import install


class Good(Backend):
    """A backend as a third party writes it."""

    def __init__(self, *, word: str = "") -> None:
        self.word = word
        self.seen: list[int] = []

    def write(self, records: Sequence[Record]) -> None:  # noqa: D102
        self.seen += [record.step for record in records]


def test_builtin_plugins_are_the_files() -> None:
    """Every file and every package beside the interface is a plugin."""
    directory = Path(registry.__file__).parent / "backends"
    files = {path.stem for path in directory.glob("*.py")} | {path.parent.name for path in directory.glob("*/*.py")}
    assert set(registry.backends.builtin()) == files - {"__init__", "base"}


def test_every_builtin_plugin_loads() -> None:
    """Each built-in class can be loaded by its name and is complete."""
    for known in (registry.backends, registry.analyzers):
        for name in known.builtin():
            found = known.load(name)
            assert known.name_of(object.__new__(found)) == name


def test_unknown_name() -> None:
    """The error names the nearest plugin."""
    with pytest.raises(UnknownPluginError, match="Did you mean 'memory'"):
        registry.backends.load("memori")


def test_entry_point_by_name_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's backend works by its name, with options."""
    install(monkeypatch, good=f"{__name__}:Good")
    with GradientManager(backends=[{"name": "good", "word": "hello"}]) as manager:
        assert manager.backend("good").word == "hello"  # type: ignore[attr-defined]


def test_case_25_entry_points_load_only_when_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken plugin that no configuration names does no harm."""
    install(monkeypatch, broken="no_such_module:Backend")
    GradientManager(backends=["memory"])
    with pytest.raises(PluginError, match=r"'broken' of no_such_module:Backend failed to load.*Repair or uninstall"):
        Registry("backends").load("broken")


def test_case_25_plugin_that_exits_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SystemExit on import is an error of the plugin."""
    (tmp_path / "quitter.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    install(monkeypatch, quitter="quitter:Backend")
    with pytest.raises(PluginError, match="SystemExit"):
        Registry("backends").load("quitter")


class Nothing:
    """A class without the hook."""


class Arity(Backend):
    """A backend whose hook takes the wrong arguments."""

    def write(self) -> None:  # type: ignore[override]
        """Take nothing."""


class Abstract(Backend):
    """A backend that does not define its hook."""


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (3, "expected a class"),
        (Nothing, "has no method 'write'"),
        (Arity, r"has write\(self\).*expected 1 argument after self"),
        (Abstract, "leaves write undefined"),
    ],
)
def test_faults_show_when_a_plugin_is_named(found: Any, text: str) -> None:
    """The error names the plugin, the hook, its signature and the fault."""
    with pytest.raises(PluginError, match=text):
        Registry("backends").validate("mine", found)


def test_instances_have_a_name() -> None:
    """An instance is known by its own name, or by that of its class."""
    named = Good()
    assert registry.backends.name_of(named) == "good"
    named.name = "other"  # type: ignore[attr-defined]
    assert registry.backends.name_of(named) == "other"
    assert GradientManager(backends=[named]).backend("other") is named
