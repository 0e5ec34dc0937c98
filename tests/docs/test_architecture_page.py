"""The page on the architecture names files that exist, and numbers that were counted."""

import re
from pathlib import Path

import pytest

from benchmarks.step_modules import passed_modules

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = sorted(path.name for path in (ROOT / "gradtrack").iterdir() if path.is_dir() and path.name[0] != "_")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE))))
def test_a_file_that_is_named_exists(name: str) -> None:
    """A file or a folder in the text lies in the package or beside it."""
    assert (ROOT / "gradtrack" / name).exists() or (ROOT / name).exists()


def test_the_tree_has_every_folder_and_every_analyzer() -> None:
    """The tree shows what lies at the top, and the folders below."""
    tree = PAGE.split("```text")[1].split("```")[0]
    shown = set(re.findall(r"^ +(\w+)/ ", tree, flags=re.MULTILINE))
    folders = [path.parent for path in (ROOT / "gradtrack").rglob("__init__.py") if path.parent != ROOT / "gradtrack"]
    known = {*(path.name for path in (ROOT / "gradtrack" / "backends").iterdir())}
    missing = {path.name for path in folders if path.parent.parent.name != "analyzers"} - shown - known
    assert not missing
    assert not shown - {path.name for path in folders}


def test_the_numbers_of_modules_were_counted() -> None:
    """Each kind of step passes as many modules as the table says."""
    told = dict(re.findall(r"^\| (with.*?) \| (\d+) \|$", PAGE, flags=re.MULTILINE))
    counted = {kind: str(len(names)) for kind, names in passed_modules().items()}
    assert told == counted, "correct the table after `python -m benchmarks.step_modules`"


def test_the_picture_names_files_that_exist() -> None:
    """So does the picture of a step."""
    picture = (ROOT / "docs" / "images" / "data_flow.svg").read_text(encoding="utf-8")
    names = {name for line in re.findall(r'class="file[^>]*>([^<]*)<', picture) for name in re.split(r", ", line)}
    assert names
    assert all((ROOT / "gradtrack" / name.rstrip("*/")).exists() for name in names)
