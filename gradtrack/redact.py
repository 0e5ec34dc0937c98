"""Secrets taken out of everything that is written, logged or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
_SECRET_NAME: Final = re.compile(r"(?i)passw|passphrase|secret|token|api_?key|credential|private_?key|authorization")
_USER: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)\S*@")
_QUERY: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://[^\s?#]*)[?]\S*")
_FRAGMENT: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://[^\s#]*)#\S*=\S*")
_PATH_QUERY: Final = re.compile(r"(/[^\s?]*)[?][^\s=]+=\S*")
_HEADER: Final = re.compile(r"(?i)(\bbearer\s+|\bauthorization[\"']?\s*[=:]\s*[\"']?(?:(?:basic|bearer)\s+)?)\S+")
_ASSIGNED: Final = re.compile(
    r"(?i)((?:passw\w*|secret\w*|\w*token|\w*api[_-]?key|credential\w*)[\"']?\s*[=:]\s*)[^\s,;&]+"
)
_SHORTEST_SECRET: Final = 8


def redact(text: str) -> str:
    """Hide users, passwords, queries and tokens in any text, rather too much than too little."""
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
        text = _QUERY.sub(rf"\1?{HIDDEN}", text)
        text = _FRAGMENT.sub(rf"\1#{HIDDEN}", text)
    text = _PATH_QUERY.sub(rf"\1?{HIDDEN}", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redact_values(value: Any) -> Any:
    """Return plain data without its secrets: those inside texts, and whatever a key calls secret."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            redact(str(key)): HIDDEN if entry and _SECRET_NAME.search(str(key)) else redact_values(entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_values(entry) for entry in value]
    return value


def is_hidden(value: object) -> bool:
    """Say whether something was taken out of a value."""
    return isinstance(value, str) and HIDDEN in value


def _environment_secrets() -> list[str]:
    return [value for name, value in os.environ.items() if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name)]
