"""The words that this repository does not use, and what to write instead; `python -m tests.words` looks for them.

Code, docstrings, comments, messages and documentation are read alike, line by line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent

_NAME_THE_ACTOR: Final = "name the actor: the caller, the user, the worker, the rank, another thread"
_NAME_THE_CLASS: Final = "write the name that the class or the module has today"

REMEDIES: Final = {
    r"\b(whoever|somebody|nobody|anybody)\b": _NAME_THE_ACTOR,
    r"\bwhat is there\b": "name the things: the rows, the files, the gradients",
    r"\blet(s|ting)? ([\w`.]+ ){1,4}know\b": "say what happens: tell, apply, flush, report",
    r"\busual ?steps?\b": _NAME_THE_CLASS,
    r"(?-i:\bStretch\b)|\b_stretch\b|\bstretch(es)? of steps\b": _NAME_THE_CLASS,
    r"roster": _NAME_THE_CLASS,
    r"\bgauges?\b": _NAME_THE_CLASS,
    r"\bwaiting ?steps?\b": _NAME_THE_CLASS,
    r"\blate ?steps?\b": _NAME_THE_CLASS,
    r"\bledger": _NAME_THE_CLASS,
    r"\bdoctor\.py\b|\bimport doctor\b|\.doctor\b": "the module is `preflight`; only the command is called doctor",
    r"\bclaims\b": "the module is `locks`; in prose: say, promise, lock",
    r"\bleavings\b": "the module is `run_files`",
}
"""A pattern, read without regard to case, and its remedy."""

_ANY: Final = re.compile("|".join(REMEDIES).replace("(?-i:", "(?:"), re.IGNORECASE)
ON_DISK: Final = re.compile(r"\"ledger\"|\bleavings\.json\b|\b(_export|metric)\.[Gg]auge\b|\bOpenTelemetry gauges?\b")
"""Names in checkpoints and run directories, which cannot change since runs of earlier versions have them, and those of
OpenTelemetry."""

_READ: Final = frozenset({".css", ".html", ".j2", ".js", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ""})
_LEFT_OUT: Final = frozenset({"CHANGELOG.md", "tests/words.py", "tests/test_words.py"})
"""The history, and the files that have to name the words."""
_FOLDERS: Final = ("benchmarks", "docs", "examples", "gradtrack", "pictures", "reference", "tests", ".ci")


class Finding(NamedTuple):
    """A word that is not used, and where it stands."""

    path: str
    line: int
    word: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.remedy}."


def find_in(text: str, path: str = "") -> Iterator[Finding]:
    """Yield the words in a text."""
    if not _ANY.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, remedy in REMEDIES.items():
            for found in re.finditer(pattern, ON_DISK.sub("", line), re.IGNORECASE):
                yield Finding(path, number, found[0], remedy)


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files that are read: those at the top, and those below the folders of source and documentation."""
    yield from (path for path in sorted(root.iterdir()) if path.is_file() and path.suffix in _READ)
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in _READ and "__pycache__" not in path.parts:
                yield path


def check(root: Path = ROOT) -> list[str]:
    """Return the words that are used, a line each."""
    found = list[str]()
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name not in _LEFT_OUT:
            found += map(str, find_in(path.read_text(encoding="utf-8"), name))
    return found


if __name__ == "__main__":
    found = check()
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
