"""The site: it is built without a warning and read without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tests.pages.test_browser import BROWSER, browse

_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Assets(HTMLParser):
    """Collects what a browser loads to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down the address of what is loaded."""
        address = dict(attrs).get(_LOADED.get(tag, ""))
        if address:
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def test_every_page_is_built(site: Path) -> None:
    """There is a page for each file, and nothing else is left in the site."""
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert built == pages | {Path("404.html")}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    outside = []
    for page in site.rglob("*.html"):
        parser = Assets()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found
        outside += [f"{page.name}: {address}" for address in parser.found if re.match(r"(https?:)?//", address)]
    assert outside == []


def test_styles_load_nothing_from_elsewhere(site: Path) -> None:
    """No style sheet imports a font, a picture or another sheet from a server."""
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"@import\s+\S+", text)
        assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//[^)]*\)", text)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [500, 1400])
def test_a_page_from_disk_shows_no_search(site: Path, tmp_path: Path, width: int) -> None:
    """A browser cannot search a page that was opened from disk, so neither field nor icon is there."""
    page = site / "index.html"
    ask = """<script>setTimeout(() => {
      const search = [...document.querySelectorAll("label[for=__search], .md-search__form")];
      document.title = search.filter((one) => one.checkVisibility()).length;
    }, 500);</script></body>"""
    asked = page.with_name(f"asked{width}.html")
    asked.write_text(page.read_text(encoding="utf-8").replace("</body>", ask), encoding="utf-8")
    try:
        assert "<title>0</title>" in browse(asked, tmp_path, f"--window-size={width},900", "--dump-dom")
    finally:
        asked.unlink()


def test_make_docs_says_how_to_search() -> None:
    """What a page from disk cannot do, a served one can."""
    assert "http.server -d site" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    """A reader finds each page without knowing its name."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for path in DOCS.rglob("*.md") if (name := path.relative_to(DOCS).as_posix()) not in navigation] == []
    assert yaml.safe_load(navigation)["theme"]["font"] is False
