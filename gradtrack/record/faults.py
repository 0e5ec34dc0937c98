"""What went wrong on the way to a backend: told once, counted always."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Final

from gradtrack.redact import redact

_logger = logging.getLogger("gradtrack")
_VARIES: Final = re.compile(r"0x[0-9a-f]+|\d+")
_LONGEST: Final = 500


def describe(fault: BaseException) -> str:
    """Return an exception's type and text on one line, without secrets."""
    text = " ".join(redact(str(fault)).split())
    return f"{type(fault).__name__}: {text[:_LONGEST]}" if text else type(fault).__name__


class Faults:
    """Failures of one backend; each kind is a warning when it first happens, and only a number after that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last: str | None = None
        self.counts: Counter[str] = Counter()

    def note(self, fault: BaseException | str, consequence: str) -> None:
        """Count a failure, and say once what follows from it."""
        text = fault if isinstance(fault, str) else describe(fault)
        kind = _VARIES.sub("#", text)
        self.last = text
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            _logger.warning("%s: %s; %s", self.name, text, consequence)
