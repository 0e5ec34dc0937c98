"""The commands that the documentation shows: gradtrack's own are run, the others are checked as the table says."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer.main
from typer.testing import CliRunner

from gradtrack.cli import app
from tests.docs.pages import ROOT

_NEEDS_A_SERVER: Final = re.compile(r"https?://")
"""Commands with an address in them are parsed and not run."""


def commands(text: str) -> Iterator[str]:
    """Return the commands of a block, one per line, without the comments."""
    for line in text.splitlines():
        command = line.split(" #")[0].strip()
        if command and not command.startswith("#"):
            yield command


def run(command: str) -> str:
    """Run or check a command, and return what it printed."""
    words = shlex.split(command)
    if words[0] == "gradtrack":
        return _parse(words[1:]) if _NEEDS_A_SERVER.search(command) else _gradtrack(words[1:])
    assert words[0] in CHECKED_OTHERWISE, f"{command!r}: expected a command of gradtrack or of this table"
    CHECKED_OTHERWISE[words[0]](words[1:])
    return ""


def _gradtrack(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, f"gradtrack {arguments}: {result.output}"
    return result.stdout


def _parse(arguments: list[str]) -> str:
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    group.commands[name].make_context(name, rest)
    return ""


def _extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments[0] == "install"
    for argument in arguments[1:]:
        if argument.endswith(".txt"):
            assert (ROOT / argument).is_file()
            continue
        match = re.fullmatch(r"(?:gradtrack|\.)\[(.+)\]", argument)
        if match:
            assert set(match[1].split(",")) <= project["optional-dependencies"].keys()
        else:
            assert argument.startswith("-") or (ROOT / argument).is_dir()


def _targets(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        assert "=" in argument or re.search(rf"^{argument}:", makefile, flags=re.M), f"make {argument}: no such target"


def _modules(arguments: list[str]) -> None:
    flag, *rest = arguments
    target = rest[0].replace(".", "/") if flag == "-m" else flag
    found = [ROOT / target, ROOT / f"{target}.py", ROOT / target / "__main__.py"]
    assert any(path.is_file() for path in found), f"python {' '.join(arguments)}: no such file"


def _scripts(arguments: list[str]) -> None:
    (script,) = [argument for argument in arguments if argument.endswith(".py")]
    assert (ROOT / script).is_file()


def _installed(name: str) -> Callable[[list[str]], None]:
    def check(_: list[str]) -> None:
        assert shutil.which(name, path=str(Path(sys.executable).parent)), f"{name} is not installed"

    return check


CHECKED_OTHERWISE: Final[dict[str, Callable[[list[str]], None]]] = {
    "pip": _extras,
    "make": _targets,
    "bash": lambda arguments: _require((ROOT / arguments[0]).is_file()),
    "python": _modules,
    "torchrun": _scripts,
    "accelerate": _scripts,
    "mlflow": _installed("mlflow"),
    "tensorboard": _installed("tensorboard"),
    "wandb": _installed("wandb"),
}


def _require(found: bool) -> None:
    assert found
