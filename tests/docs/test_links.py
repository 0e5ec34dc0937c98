"""What the pages point to is there."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link, picture and anchor exists."""
    missing = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_every_picture_is_shown() -> None:
    """No picture lies in the documentation without a page that shows it."""
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page) if "://" not in link}
    assert [path.name for path in sorted((DOCS / "images").iterdir()) if path.resolve() not in shown] == []


def test_pages_stay_in_the_documentation() -> None:
    """A page of the site links to nothing outside of it, where the site has nothing."""
    outside = [
        f"{name_of(page)}: {link}"
        for page in PAGES
        if DOCS in page.parents
        for link in links(page)
        if "://" not in link and not (page.parent / link.split("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert outside == []
    assert ROOT / "README.md" in PAGES
