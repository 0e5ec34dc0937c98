"""Names in the prose of the pages: commands, options, extras and settings are those that there are."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gradtrack import GradientConfig, registry
from gradtrack.cli import app
from tests.docs.pages import PAGES, ROOT, name_of, spans

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OF_OTHERS = {"--samples_per_plugin", "--run-dir", "--write", "--half", "--help"}
OF_OTHERS |= {"--multi_gpu", "--num_processes", "--use_fsdp", "--web.enable-otlp-receiver"}
"""Options of TensorBoard, Accelerate, Prometheus, the examples and the benchmarks, and the one of every command."""


def words_of(command: str) -> list[str]:
    """Return the words of a command without the places of its arguments."""
    return [word for word in command.split() if not word.startswith("[")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """`gradtrack ...` in the prose names a command, with options that it has."""
    for span in spans(page):
        if not re.match(r"gradtrack [a-z]", span):
            continue
        _, name, *rest = words_of(span)
        assert name in COMMANDS, span
        options = {option for param in COMMANDS[name].params for option in param.opts}
        assert {word for word in rest if word.startswith("-")} <= options, span


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_exist(page: Path) -> None:
    """An option that stands alone is one of some command, or of another tool in the table above."""
    known = OF_OTHERS | {option for command in COMMANDS.values() for param in command.params for option in param.opts}
    shown = {re.split(r"[= ]", span)[0] for span in spans(page) if span.startswith("--")}
    assert shown <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_extras_exist(page: Path) -> None:
    """`gradtrack[...]` names extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = {
        extra
        for text in spans(page)
        for names in re.findall(r"gradtrack\[([a-z0-9,]+)\]", text)
        for extra in names.split(",")
    }
    assert shown <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_exist(page: Path) -> None:
    """`name: value` in the prose is a setting, or an option of a backend or an analyzer."""
    known = {*GradientConfig.model_fields}
    for plugins in (registry.backends, registry.analyzers):
        for name in plugins.builtin():
            known |= set(inspect.signature(plugins.load(name)).parameters)
    shown = {match[1] for span in spans(page) if (match := re.match(r"([a-z_]+): \S", span))}
    assert shown <= known
