"""Destinations of a replay: which server the header of a journal may name by itself, and which only the user can."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from gradtrack import registry
from gradtrack.errors import UsageError
from gradtrack.support.redact import redact
from gradtrack.support.text import one_line

_LOOPBACK: Final = re.compile(r"https?://(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?(?:/[\w\-./]*)?")
"""Strict, since what is read differently here and by the client of a tracker could name another host."""
_LOOPBACK_HOST: Final = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|::1)(?::\d{1,5})?")
_SERVER_NAME: Final = re.compile(r"(?i)(?:^|_)(?:ur[il]|host|hostname|endpoint|server)$")
_FILES: Final = re.compile(r"sqlite:///|file:/(?!/)|file:///")
_SHOWN_CHARACTERS: Final = 300


def settle_servers(name: str, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a journal's header with the user's over them, every server among them one to send to.

    A server is on this machine, or the environment names it, or the user has `given` it; credentials are the user's, so
    any other raises. Where the environment names the same server, its address is used, with the credentials in it.
    """
    settled = dict(options)
    configured = _configured(name)
    for option, value in options.items():
        if option in given:
            continue
        if isinstance(value, str) and option in configured and _bare(value) == _bare(str(configured[option])):
            settled[option] = configured[option]
            continue
        for text in _texts(value):
            if not _is_local(option, text):
                raise UsageError(
                    f"{name}: the journal names the server {shown(text)!r} as {shown(option)}: expected one on this "
                    f"machine or one that you have chosen, since your credentials go there. {_remedy(option, text)}"
                )
    return {**settled, **given}


def describe_destination(name: str, options: Mapping[str, Any], run_dir: str) -> str:
    """Say on one line where the rows for a backend go."""
    places = {**_configured(name), **options}
    told = [f"{shown(option)} {shown(str(value))}" for option, value in places.items() if value not in ("", None, [])]
    return f"{shown(name)}: sending to {', '.join(told) or f'files in {shown(run_dir)}'}"


def shown(text: str) -> str:
    """Return a text of a journal as a terminal may have it: on one line, without secrets, and not too long."""
    return one_line(redact(text))[:_SHOWN_CHARACTERS]


def _configured(name: str) -> dict[str, Any]:
    """Return the options of a backend that the environment of this process names."""
    try:
        return dict(registry.backends.load(name).configured())
    except Exception:  # a backend that cannot be loaded is reported when it is made
        return {}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)


def _is_local(option: str, text: str) -> bool:
    """Say whether an option names no server, or one on this machine."""
    if _FILES.match(text):
        return True
    if "://" in text:
        return _LOOPBACK.fullmatch(text) is not None
    if not _SERVER_NAME.search(option):
        return True
    is_path = text.startswith((".", "/", "~")) and not text.startswith("//")
    return not text or is_path or _LOOPBACK_HOST.fullmatch(text) is not None


def _remedy(option: str, text: str) -> str:
    if option == "tracking_uri":
        return f"If you trust it: --tracking-uri {shown(text)}"
    return f"If you trust it, pass {shown(option)} yourself, as in replay(run_dir, options={{...}})."


def _bare(address: str) -> str:
    """Return an address without what does not tell servers apart."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return address
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2].lower(), parts.path.rstrip("/"), "", ""))
