"""The words that the repository does not use are found, wherever they stand."""

from pathlib import Path

import pytest

from tests import words

USED = [
    "def f() -> None:\n    '''Give it to whoever asks.'''",
    "x = 1  # nobody reads it",
    "raise ValueError('somebody has removed it')",
    "Deliver what is there.",
    "It lets the clipper know of the step.",
    "class UsualSteps:",
    "The usual steps are taken in later.",
    "self._stretch = None",
    "from gradtrack.step.pairs import Roster",
    "self.gauge.read()",
    "a LateStep",
    "the last waiting step",
    "from gradtrack.delivery import doctor",
    "self._ledger = state['ledger']",
    "from gradtrack.delivery import leavings",
]
KEPT = [
    "Run `gradtrack doctor`.",
    "A direction that a block stretches.",
    "the usual case",
    "Let it go.",
    "later steps",
    'state["ledger"]',
    "`leavings.json` lists the files of a run.",
]


@pytest.mark.parametrize("text", USED)
def test_a_word_that_is_not_used_is_found(text: str) -> None:
    """Code, docstrings, comments, messages and prose are read alike."""
    assert list(words.find_in(text))


@pytest.mark.parametrize("text", KEPT)
def test_ordinary_words_are_left_alone(text: str) -> None:
    """A command, a term of the mathematics, an ordinary adjective and a name on disk are none of the old names."""
    assert not list(words.find_in(text))


def test_a_finding_names_its_place_and_the_remedy(tmp_path: Path) -> None:
    """A line says which file and line, which word, and what to write."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# Title\n\nNobody knows.\n")
    (line,) = words.check(tmp_path)
    assert line.startswith("docs/page.md:3: 'Nobody': name the actor")


def test_the_repository_is_clean() -> None:
    """No word stands anywhere."""
    assert words.check() == []
