"""A webhook: each issue as JSON in a POST request, in the form that Slack takes or with all fields."""

from __future__ import annotations

import base64
import html
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final, Literal, final

from gradtrack.alerts.base import Alert, Message
from gradtrack.errors import BackendError, PermanentBackendError, UsageError
from gradtrack.support.redact import HIDDEN, redact

_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
_AGAIN: Final = frozenset({408, 425, 429})
"""The refusals (4xx) that are no last word."""
_MOST_CHARACTERS: Final = 8000
"""The length of a text for Slack, which refuses more than 40,000 characters."""


@final
class WebhookAlert(Alert):
    """An alert that posts to a webhook of Slack, or of any server that takes JSON.

    `url` is the address, which is a secret in itself, or `$NAME` for an environment variable that holds it. The body is
    `{"text": ...}`, which Slack, Mattermost and Rocket.Chat take; with `body: json` it also has the run, the step, the
    pair and every field of the issue. A user and a password in the address go to the server as a header. Redirects are
    not followed, and nothing that a server says is repeated.
    """

    def __init__(
        self,
        url: str = "$GRADTRACK_WEBHOOK_URL",
        body: Literal["slack", "json"] = "slack",
        timeout_seconds: float = 10.0,
    ) -> None:
        if body not in ("slack", "json"):
            raise UsageError(f"alert 'webhook': body = {body!r}: expected 'slack' or 'json'.")
        self._secret, self._body, self._timeout = _resolve(url), body, timeout_seconds
        parts = urllib.parse.urlsplit(self._secret)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urllib.parse.urlunsplit(parts._replace(netloc=host))
        self._headers = {"Content-Type": "application/json", "User-Agent": "gradtrack"}
        if user:  # which urllib would take for a part of the host, and show in its faults
            basic = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
            self._headers["Authorization"] = f"Basic {basic}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    def send(self, message: Message) -> None:
        text = html.escape(message.text, quote=False)  # or Slack reads names of layers as links and mentions
        plain = message.to_plain() if self._body == "json" else {"text": text[:_MOST_CHARACTERS]}
        request = urllib.request.Request(
            self._url,
            data=json.dumps(plain, default=str).encode(),
            headers=self._headers,
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=self._timeout):
                pass
        except urllib.error.HTTPError as fault:
            fault.close()
            kind = BackendError if fault.code >= 500 or fault.code in _AGAIN else PermanentBackendError
            raise kind(
                f"the server answered {fault.code} {http.client.responses.get(fault.code, '')}".strip()
            ) from None
        except http.client.HTTPException as fault:
            raise BackendError(f"the server's answer is no HTTP ({type(fault).__name__})") from None
        except OSError as fault:
            raise BackendError(self.hide(str(getattr(fault, "reason", None) or fault))) from None

    def hide(self, text: str) -> str:
        """Hide the address, whose path is the key to the channel."""
        parts = urllib.parse.urlsplit(self._secret)
        for secret in (self._secret, self._url, parts.path.strip("/"), parts.query, parts.password, parts.username):
            text = text.replace(secret, HIDDEN) if secret else text
        return redact(text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: what is posted, and the key in the address, are for one server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Leave the answer as the error that it is."""


def _resolve(url: str) -> str:
    """Return an address, or the one in the environment variable that stands for it, once it can be posted to."""
    named = _VARIABLE.fullmatch(str(url))
    if named is not None:
        url = os.environ.get(named[1], "")
        if not url:
            raise UsageError(
                f"alert 'webhook': expected its address in the environment variable {named[1]}, which is empty. "
                "Set it, or pass url."
            )
    try:
        parts = urllib.parse.urlsplit(url)
        usable = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0 and url.isprintable()
        )
    except (ValueError, AttributeError, TypeError):
        usable = False
    if not usable or any(letter.isspace() for letter in url):
        raise UsageError(f"alert 'webhook': url {HIDDEN}: expected an address that begins with https:// or http://.")
    return url
