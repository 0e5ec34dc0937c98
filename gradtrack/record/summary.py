"""What is said at the end of a run, and never more than what arrived."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_logger = logging.getLogger("gradtrack")


def log_summary(
    run_id: str, status: Mapping[str, Mapping[str, Any]], journal: Mapping[str, Any] | None, directory: Path | None
) -> None:
    """Log one line on what each backend has taken; a warning where something is missing."""
    parts = [_tell(name, found) for name, found in status.items()]
    short = any(found["acknowledged"] < found["accepted"] or found["unsettled"] for found in status.values())
    waiting = any(found["pending"] or found["refused"] or found["unsettled"] for found in status.values())
    if journal is not None and journal["failed"]:
        short = True
        parts.append(f"{journal['failed']} rows are not in the journal ({journal['fault']})")
    text = f"run {run_id}: {'; '.join(parts)}"
    if waiting and journal is not None and journal["path"] is not None:
        text += f". The rest is in {journal['path']}; deliver it with: gradtrack replay {shlex.quote(str(directory))}"
    _logger.log(logging.WARNING if short else logging.INFO, "%s", text)


def _tell(name: str, found: Mapping[str, Any]) -> str:
    verb = "took, but may not have kept," if found["unsettled"] and found["acknowledged"] else "has"
    text = f"{name} {verb} {found['acknowledged']} of {found['accepted']} rows"
    missing = [f"{found[what]} {what}" for what in ("pending", "refused", "lost") if found[what]]
    reason = found["unsettled"] or (found["why"] if missing else None)
    if missing or reason:
        text += f" ({': '.join(filter(None, [', '.join(missing), reason]))})"
    return text
