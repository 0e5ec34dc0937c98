"""`llms.txt`, the list of pages for agents, has each of them once, and no other."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS

TEXT = (DOCS / "llms.txt").read_text(encoding="utf-8")
LISTED = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", TEXT, flags=re.M)


def test_every_page_is_listed_once() -> None:
    """A page that is added is added here as well, with a few words on it."""
    pages = {path.relative_to(DOCS).as_posix() for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.schema.json")]}
    assert sorted(LISTED) == sorted(pages)


def test_it_has_the_form_that_readers_expect() -> None:
    """One title, a quotation that says what this is, then sections of links; short enough to be read whole."""
    assert re.match(r"# gradtrack\n\n> ", TEXT)
    assert re.findall(r"^# ", TEXT, flags=re.M) == ["# "]
    sections = re.split(r"^## ", TEXT, flags=re.M)[1:]
    assert all("\n- [" in section for section in sections)
    assert len(TEXT) < 8_000
