"""The documentation runs: every block of every page, in the order in which a reader meets it."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from gradtrack import GradientConfig, GradientManager
from tests.backends.stores import moved_trackio
from tests.docs import console
from tests.docs.pages import PAGES, ROOT, Block, blocks, name_of
from tests.docs.placeholders import placeholders

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
Names = dict[str, Any]


def _run_python(block: Block, names: Names) -> None:
    exec(compile(block.text, f"line {block.line}", "exec", dont_inherit=True), names)


def _load_yaml(block: Block, _: Names) -> None:
    GradientConfig.load(_save_yaml(block))


def _save_yaml(block: Block) -> Path:
    """Write a configuration to the file that its first line names."""
    first = block.text.split("\n")[0]
    path = Path(first.removeprefix("# ") if first.startswith("# ") else "shown.yaml")
    path.write_text(block.text, encoding="utf-8")
    return path


def _run_console(block: Block, _: Names) -> None:
    for command in console.commands(block.text):
        print(console.run(command), end="")


def _show_text(block: Block, _: Names) -> None:
    """Do nothing: what no code prints is read by people."""


HANDLERS: Final[dict[str, Callable[[Block, Names], None]]] = {
    "python": _run_python,
    "yaml": _load_yaml,
    "toml": lambda block, _: print(tomllib.loads(block.text)),
    "json": lambda block, _: print(json.loads(block.text)),
    "sh": _run_console,
    "text": _show_text,
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trackers write to the test's directory and to no server, and let the examples be imported."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "custom_backend"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every block runs after those above it, and prints what the page says."""
    if page.stem == "trackio":
        pytest.importorskip("trackio")
        moved = contextlib.ExitStack()
        request.addfinalizer(moved.close)
        moved.enter_context(moved_trackio(tmp_path / "trackio"))
    names, printed = placeholders(name_of(page)), ""
    for block in blocks(page):
        if block.language == "yaml":  # a reader has the file that a page shows after its loop
            _save_yaml(block)
    for block in blocks(page):
        if block.shows_output:
            _compare(block, printed)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            HANDLERS[block.language](block, names)
        printed = stream.getvalue()
    for value in names.values():
        if isinstance(value, GradientManager):
            value.close()


def _compare(block: Block, printed: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    matches = doctest.OutputChecker().check_output(block.text, printed, flags)
    assert matches, f"line {block.line} shows\n{block.text}but it is\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_left_out(page: Path) -> None:
    """Every block has a language that is run or checked, and none hides behind an indentation."""
    text = page.read_text(encoding="utf-8")
    assert {block.language for block in blocks(page)} <= HANDLERS.keys()
    assert text.count("```") == 2 * len(blocks(page))
    assert "~~~" not in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_do_something(page: Path) -> None:
    """A block of Python has a statement in it, so that none passes by being a comment."""
    assert [block.line for block in blocks(page) if block.language == "python" and not ast.parse(block.text).body] == []
