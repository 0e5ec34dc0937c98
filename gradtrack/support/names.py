"""Names and texts: what trackers and files accept, modules of parameters, numbers, text without control characters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_MAPPED: Final = re.compile(r"-gt[0-9a-f]{12}$")
HASH_LENGTH: Final = 12
_LONGEST_PART: Final = 80
_RUN_ID: Final = re.compile(r"[\w-]{0,30}\d{8}T\d{6}Z-\d+-[0-9a-f]{8}", re.ASCII)


def digest_of(text: str) -> str:
    """Return a short fingerprint of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_LENGTH]


def valid_name(name: str, *, plain: Callable[[str], str | None], clean: Callable[[str], str], longest: int) -> str:
    """Return the plain form of a name where the tracker accepts one, else a cleaned name that ends in its fingerprint.

    Different names stay different as long as their plain forms do: a plain form that looks like a fingerprinted name
    is not used.
    """
    found = plain(name)
    if found is not None and not _MAPPED.search(found):
        return found
    suffix = f"-gt{digest_of(name)}"
    return f"{clean(name)[: longest - len(suffix)].rstrip('/ ') or 'unnamed'}{suffix}"


def file_part(source: str) -> str:
    """Turn the name of a pair into a part of a file name."""
    usual = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_PART}}}")
    return valid_name(
        source,
        plain=lambda name: name if usual.fullmatch(name) else None,
        clean=lambda name: re.sub(r"[^A-Za-z0-9_-]", "_", name),
        longest=_LONGEST_PART,
    )


def names_run(name: str) -> bool:
    """Say whether a name is, or ends with, that of a run: its time, its process and eight hexadecimal digits."""
    return _RUN_ID.fullmatch(name) is not None


def plural(count: int, noun: str) -> str:
    """Write a number of things, such as 1 step or 1,234 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_LISTED = 3


def listed(names: Sequence[str]) -> str:
    """Write the first names and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def number(value: object) -> str:
    """Format a number with a few digits, a count with all of them; what is no number stays as it is."""
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    is_whole = abs(value) < 1e6 and (abs(value) >= 1e4 or value == int(value))
    return f"{value:.0f}" if is_whole else f"{value:.4g}"


def module_of(parameter: str) -> str:
    """Return the module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def one_line(text: str) -> str:
    """Keep a text on one line, and out of it what controls a terminal or turns round the direction of writing."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def printable(text: str) -> str:
    """Keep out of a text what controls a terminal; its lines stay."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


class Printable:
    """Something that rich prints, without the control characters in its texts: only styles may become some."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for found in console.render(self._shown, options):
            yield found if found.control else Segment(printable(found.text), found.style)
