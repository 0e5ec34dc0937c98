"""Hides secrets (passwords, tokens, queries) in every text that is written, logged or shown."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
_SECRET_NAME: Final = re.compile(
    r"(?i)passw|passphrase|secret|token|api_?key|credential|private_?key|authorization|cookie|[_-]pwd|(?-i:^pwd$)"
)
"""PWD of the environment is the working directory."""
_WORD: Final = re.compile(r"\S+")
_SCHEME: Final = re.compile(r"[A-Za-z0-9+.\-]://")
_BLANKS: Final = re.compile(r"(://)[^\s/@:]*:(?:(?!://)[^\n]){0,256}@(?=[\w\[])")
"""A user and a password that may hold blanks; up to the last `@` that a host follows."""
_BASIC: Final = re.compile(r"(?i)(\bbasic(?:[\s:='\"]|%20)+)([a-z0-9+/_\-]{6,}={0,2})")
_PLAIN_WORD: Final = re.compile(r"[A-Z]?[a-z\-]+|[A-Z\-]+|[\d\-]+")
_BEARER: Final = re.compile(r"(?i)(\bbearer(?:[\s:='\"]|%20)+)\S+")
_EQUALS: Final = r"[\\\"']{0,4}\s*[=:]\s*"
_QUOTED: Final = r"[bru]{0,2}(?P<quote>\\{0,3}[\"'])(?s:(?!(?P=quote))(?:\\.|[^\\])){1,20000}(?P=quote)"
"""A text in quotes, also in those of a text within a text; the next quote ends it, so its time is linear."""
_HEADER: Final = re.compile(
    rf"(?i)((?:\bauthorization\w{{0,40}}|cookie){_EQUALS})"
    rf"(?:{_QUOTED}|\*{{3}}|(?:basic|bearer|token|api-?key|negotiate|ntlm|oauth)(?:\s|%20)+\S+|[^\r\n]+)"
)
"""A header's value: what is in quotes, or the word after a usual scheme, or else all of the line."""
_ASSIGNED: Final = re.compile(
    r"(?i)((?:(?:passw|passphrase|secret|credential|private[_-]?key)\w{0,40}|token|api[_-]?key|pwd)"
    rf"{_EQUALS})(?:{_QUOTED}|[^\s,;&]+)"
)
_SHORTEST_SECRET: Final = 8


def redact(text: str) -> str:
    """Hide users, passwords, queries and tokens in a text; in doubt it hides more.

    Its time is linear in the text, which may be a whole page that a server has answered with.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    if "://" in text:
        text = _BLANKS.sub(rf"\1{HIDDEN}@", text)
    if "/" in text:
        text = _WORD.sub(_without_parts, text)
    text = _BASIC.sub(_without_basic, _HEADER.sub(rf"\1{HIDDEN}", text))
    return _ASSIGNED.sub(rf"\1{HIDDEN}", _BEARER.sub(rf"\1{HIDDEN}", text))


def _without_basic(found: re.Match[str]) -> str:
    """Return what follows the word Basic without a user and a password in base64, and an ordinary word as it is."""
    word = found[2]
    if _PLAIN_WORD.fullmatch(word):
        with contextlib.suppress(ValueError):
            if b":" not in base64.b64decode(f"{word}{'=' * (-len(word) % 4)}", altchars=b"-_"):
                return found[0]
        if len(word) % 4 == 1:
            return found[0]
    return f"{found[1]}{HIDDEN}"


def _without_parts(found: re.Match[str]) -> str:
    """Return a word, which may hold an address or a path, without its user, query and fragment."""
    word = found[0]
    scheme = _SCHEME.search(word)
    if scheme is not None and (user_end := word.rfind("@", scheme.end())) >= 0:
        word = f"{word[: scheme.end()]}{HIDDEN}{word[user_end:]}"
    start = word.find("/")
    query = word.find("?", start) if start >= 0 else -1
    if query >= 0 and "=" in word[query + 2 :] and (scheme is None or query < scheme.start()):
        return f"{word[:query]}?{HIDDEN}"
    if scheme is None:
        return word
    query, fragment = word.find("?", scheme.end()), word.find("#", scheme.end())
    if fragment >= 0 and "=" in word[fragment:] and not 0 <= query < fragment:
        return f"{word[:fragment]}#{HIDDEN}"
    return word if query < 0 else f"{word[:query]}?{HIDDEN}"


def redact_values(value: Any) -> Any:
    """Return plain data without its secrets: those inside texts, and every value whose key names a secret."""
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
    """Whether a secret was hidden in a value."""
    return isinstance(value, str) and HIDDEN in value
