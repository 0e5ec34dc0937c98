"""Pictures inside of a page, for what its charts do not show: it is not a course over the steps."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradtrack.view.files import way_to_open

_SHOWN: Final = ("gradient_gain", "recurrent_spectrum", "attention_entropy")
_BYTES: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture as part of a page: what it shows, in words, and its data."""

    about: str
    data: str


def embedded(paths: Iterable[Path]) -> list[Picture]:
    """Return the pictures among some files that no chart replaces, as many as keep a page small."""
    found, left = [], _BYTES
    for path in paths:
        if path.suffix == ".png" and path.name.partition(".")[0] in _SHOWN and path.is_file():
            content = path.read_bytes()
            left -= len(content)
            if left < 0:
                break
            about = way_to_open(path.name).removeprefix("image: ")
            pair = path.name.removesuffix(".png").partition(".")[2]
            title = f"{about[:1].upper()}{about[1:]}{f' ({pair})' if pair else ''}"
            found.append(Picture(about=title, data=b64encode(content).decode()))
    return found
