"""The pages and schemas of docs/reference by file name, and where they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from gradtrack.pages.documents import DOCUMENTS, schema_of
from reference import commands, configuration, metrics, names, reports

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "docs" / "reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "metrics.md": metrics.page,
    "configuration.md": configuration.page,
    "commands.md": commands.page,
    "names.md": names.page,
    "reports.md": reports.page,
    **{f"{name}.schema.json": partial(schema_of, name) for name in DOCUMENTS},
}
_ORIGIN: Final = "<!-- Written from the code by `python -m reference`: change the code, not this page. -->\n\n"


def text_of(name: str) -> str:
    """Return the whole text of a page, or a schema."""
    return _ORIGIN * name.endswith(".md") + PAGES[name]()


def write() -> Iterator[Path]:
    """Write every page that is not up to date, and name it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        path, text = FOLDER / name, text_of(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            yield path
