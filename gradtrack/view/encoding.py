"""Output for terminals and pipes whose encoding lacks the characters of curves and bars."""

from __future__ import annotations

import codecs
import sys
from typing import Final

_INSTEAD: Final = dict(zip("▁▂▃▄▅▆▇█–—…→×∞°²·└├│─━", "__.-=+*#--.>x8o2.`||--", strict=True))


def survive_poor_encodings() -> None:
    """Let standard output and error write what their encoding lacks in letters that every one has, as wide."""
    codecs.register_error("gradtrack.letters", _spell)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="gradtrack.letters")


def _spell(fault: UnicodeError) -> tuple[str, int]:
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    lacking = fault.object[fault.start : fault.end]
    return "".join(_INSTEAD.get(letter, "?") for letter in lacking), fault.end
