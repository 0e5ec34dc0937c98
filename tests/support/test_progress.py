"""Progress bars: there for a person who waits, silent for everybody else."""

from __future__ import annotations

import io

import pytest

from gradtrack.support import progress
from gradtrack.support.progress import Bar, counted


class Terminal(io.StringIO):
    """A stream that says whether a person looks at it."""

    def __init__(self, *, watched: bool) -> None:
        super().__init__()
        self._watched = watched

    def isatty(self) -> bool:
        """Say whether a person looks."""
        return self._watched


def shown(monkeypatch: pytest.MonkeyPatch, *, watched: bool, patience: float) -> str:
    """Count to three and return what was written to stderr."""
    stream = Terminal(watched=watched)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", patience)
    assert list(counted(iter("abc"), "Analyzing", total=3)) == ["a", "b", "c"]
    return stream.getvalue()


def test_a_person_who_waits_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar tells what is done and how much of it."""
    text = shown(monkeypatch, watched=True, patience=0.0)
    assert "Analyzing" in text
    assert "3/3" in text


def test_what_is_quick_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn before a second is over."""
    assert shown(monkeypatch, watched=True, patience=1000.0) == ""


def test_nobody_is_told_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a file gets not one character."""
    assert shown(monkeypatch, watched=False, patience=0.0) == ""


def raise_after(bar: Bar) -> None:
    """Do half of it and fail."""
    bar.advance(512)
    raise ZeroDivisionError


def test_a_bar_ends_with_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error takes the bar off the terminal, and goes on."""
    stream = Terminal(watched=True)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    bar = Bar("Reading", total=1024, unit="bytes")
    with pytest.raises(ZeroDivisionError), bar:
        raise_after(bar)
    assert "0.5/1.0 kB" in stream.getvalue()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"  # what a live display does to the cursor when it starts and stops
    assert shown in stream.getvalue().rpartition(hidden)[2]
