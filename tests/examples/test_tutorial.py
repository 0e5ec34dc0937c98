"""The tutorial runs as it is printed, finds what it says it finds, and its pictures are those of its runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """Return what the script of the pictures defines."""
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(EXAMPLES / "tutorial_pictures.py"))


@pytest.fixture(scope="module")
def page(example: dict[str, Any]) -> dict[str, Any]:
    """Return what the blocks of the page leave behind."""
    names: dict[str, Any] = example["run_page"]()
    return names


@pytest.mark.parametrize(
    ("run", "cause", "layer"),
    [("dying", "LR_TOO_HIGH", ""), ("chaotic", "SUPERCRITICAL", "core.l0"), ("collapsed", "ENTROPY_COLLAPSE", "")],
)
def test_a_broken_run_is_named_by_its_cause(page: dict[str, Any], run: str, cause: str, layer: str) -> None:
    """The first issue is the one that the page prints, and nothing explains it."""
    issues = page[run].diagnose()
    assert (issues[0].issue_type.value, issues[0].layer) == (cause, layer)
    assert issues[0].explained_by is None
    assert all(issue.explained_by for issue in issues[1:])


@pytest.mark.parametrize("run", ["mended", "steady", "exploring"])
def test_a_mended_run_has_no_issue(page: dict[str, Any], run: str) -> None:
    """What the page does about it is enough."""
    assert page[run].diagnose() == []


def test_the_page_shows_what_it_prints(page: dict[str, Any]) -> None:
    """Every issue that a run prints is in the text of the page, by its type and layer."""
    text = (EXAMPLES.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for run in ("dying", "chaotic", "collapsed"):
        for issue in page[run].diagnose():
            assert f"] {issue.issue_type.value}{f' at {issue.layer}' if issue.layer else ''}: " in text


def test_the_pictures_are_drawn(example: dict[str, Any], page: dict[str, Any], tmp_path: Path) -> None:
    """Each picture that the page shows is drawn from its runs."""
    for name, broken, mended, *metrics in example["PICTURES"]:
        for run in (broken, mended):
            assert all(len(example["curve"](page[run], metric)[1]) > 2 for metric in metrics)
        example["draw"](tmp_path / f"{name}.png", page[broken], page[mended], metrics)
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        assert (EXAMPLES.parent / "docs" / "images" / f"tutorial_{name}.png").exists()
