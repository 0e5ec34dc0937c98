"""The names of metrics in MLflow."""

from __future__ import annotations

import posixpath
import re
from typing import Final

from gradtrack.record.naming import valid_name

_LONGEST_NAME: Final = 250


def metric_name(name: str) -> str:
    """Return the name of a metric in MLflow: itself, or where MLflow refuses it a readable one with a hash of it."""
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def _plain(name: str) -> str | None:
    usual = re.fullmatch(rf"[/\w.\- ]{{1,{_LONGEST_NAME}}}", name) is not None and name == name.strip()
    return name if usual and not _resolves_elsewhere(name) else None


def _clean(name: str) -> str:
    parts = (part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part not in ("", ".", ".."))
    return posixpath.normpath("/".join(parts)).strip()


def _resolves_elsewhere(name: str) -> bool:
    return posixpath.normpath(name) != name or name in (".", "..") or name.startswith(("/", "../"))
