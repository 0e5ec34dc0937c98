"""What is told of the delivery: each distinct failure once, and the last line of a run."""

from __future__ import annotations

import logging
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gradtrack.alerts.base import Message
from gradtrack.support.names import plural
from gradtrack.support.redact import redact

_logger = logging.getLogger("gradtrack")


def log_summary(
    run_id: str,
    status: Mapping[str, Mapping[str, Any]],
    journal: Mapping[str, Any] | None,
    directory: Path | None,
    *,
    consent: Sequence[str] = (),
) -> None:
    """Log one line on what each backend has taken; a warning where something is missing.

    The command that delivers the rest has the options by which the user allows the places of these rows.
    """
    parts = [_tell(name, found) for name, found in status.items()]
    short = any(found["acknowledged"] < found["accepted"] or found["unsettled"] for found in status.values())
    waiting = any(found["pending"] or found["refused"] or found["unsettled"] for found in status.values())
    if journal is not None and journal["failed"]:
        short = True
        parts.append(f"{journal['failed']} rows are not in the journal ({journal['fault']})")
    text = f"run {run_id}: {'; '.join(parts)}"
    if waiting and journal is not None and journal["path"] is not None:
        command = shlex.join(["gradtrack", "replay", str(directory), *consent])
        text += f". The rest is in {journal['path']}; deliver it with: {command}"
    _logger.log(logging.WARNING if short else logging.INFO, "%s", text)


def _tell(name: str, found: Mapping[str, Any]) -> str:
    verb = "took, but may not have kept," if found["unsettled"] and found["acknowledged"] else "has"
    text = f"{name} {verb} {found['acknowledged']} of {found['accepted']} rows"
    missing = [f"{found[what]} {what}" for what in ("pending", "refused", "lost") if found[what]]
    reason = found["unsettled"] or (found["why"] if missing else None)
    if missing or reason:
        text += f" ({': '.join(filter(None, [', '.join(missing), reason]))})"
    return text


def log_unposted(name: str, lost: int, accepted: int, first: Sequence[Message], fault: str | None) -> None:
    """Log one line on the issues that an alert has not posted, of which the first are named, and where they are."""
    named = [f"{one.issue.get('issue_type')} at step {one.step}" for one in first]
    more = [f"{lost - len(named)} more"] if lost > len(named) else []
    places = [shlex.join(["gradtrack", "show", one.run_dir]) for one in first if one.run_dir is not None]
    _logger.warning(
        "alert %s: %d of %s not posted (%s)%s. %s has them",
        name,
        lost,
        f"{plural(accepted, 'issue')} {'was' if accepted == 1 else 'were'}",
        ", ".join(named + more),
        f": {fault}" if fault else "",
        places[-1] if places else "manager.diagnose()",
    )


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
