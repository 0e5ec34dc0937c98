"""The pages of the documentation and what they hold: blocks of code, links and names in code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_FENCE: Final = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", flags=re.S | re.M)
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code on a page; `shows_output` says that it is what the block right above it prints."""

    language: str
    text: str
    line: int
    shows_output: bool = False


def name_of(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text, end = page.read_text(encoding="utf-8"), -1
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        language = match["language"].strip()
        follows = bool(found) and not text[end : match.start()].strip()
        found.append(
            Block(
                language=language,
                text=match["text"],
                line=text.count("\n", 0, match.start()) + 1,
                shows_output=language == "text" and follows,
            )
        )
        end = match.end()
    return found


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return where the links and pictures of a page lead."""
    return [first or second for first, second in _LINK.findall(prose(page))]


def spans(page: Path) -> Iterator[str]:
    """Return what stands between single backticks in the prose of a page."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MkDocs make them."""
    found = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title)).strip().lower().replace(" ", "-") for title in found}
