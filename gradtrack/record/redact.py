"""Texts without the credentials that addresses and the environment put into them."""

from __future__ import annotations

import os
import re
from typing import Final

_HIDDEN: Final = "***"
_USER_INFO: Final = re.compile(r"(?<=://)[^/\s'\"<>]*@")
_QUERY: Final = re.compile(r"(://[^\s?'\"<>]*\?)[^\s'\"<>#]+")
_SECRET_NAME: Final = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
_SHORTEST: Final = 6


def redact(text: object) -> str:
    """Hide the user, the password and the query of every address, and every secret of the environment."""
    found = _USER_INFO.sub(f"{_HIDDEN}@", str(text))
    found = _QUERY.sub(rf"\1{_HIDDEN}", found)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            found = found.replace(value, _HIDDEN)
    return found
