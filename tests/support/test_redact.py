"""Secrets never come through the redaction."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.support.redact import HIDDEN, is_hidden, redact, redact_values

SECRET = "s3cr3t-Zq9"
VISIBLE = st.characters(exclude_categories=("Z", "C"))
WORDS = st.text(VISIBLE, max_size=12)
SCHEMES = st.sampled_from(["http", "https", "postgresql+psycopg2", "mysql", "s3", "databricks"])
ANYTHING = st.text(max_size=40)


@given(SCHEMES, WORDS, WORDS, ANYTHING, ANYTHING)
def test_userinfo_is_hidden_in_any_text(scheme: str, before: str, after: str, left: str, right: str) -> None:
    """Whatever surrounds a URL and its password, the password is gone."""
    password = before + SECRET + after
    assert SECRET not in redact(f"{left} {scheme}://user:{password}@host:5000/path {right}")


@given(SCHEMES, st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=12), st.text(VISIBLE, max_size=8))
def test_password_with_blanks_is_hidden(scheme: str, before: str, after: str) -> None:
    """A user who pastes one does not encode it."""
    for password in (f"a {before}{SECRET}{after}", f"{SECRET} {after}", f"x@ {before} {SECRET}@{after} y"):
        assert SECRET not in redact(f"cannot reach {scheme}://user:{password}@host:5000/path today")


@pytest.mark.parametrize("user", ["user", "", "someone.else"])
@pytest.mark.parametrize("lead", ["Basic ", "basic  ", "'Basic: ", "Basic%20", "got header Basic "])
def test_credentials_that_a_server_echoes_are_hidden(user: str, lead: str) -> None:
    """Also without the name of the header in front."""
    encoded = base64.b64encode(f"{user}:{SECRET}".encode()).decode()
    text = redact(f"401: {lead}{encoded} is not valid")
    assert encoded.rstrip("=") not in text
    assert "is not valid" in text
    assert SECRET not in redact(f"403: {lead.lower().replace('basic', 'Bearer')}{SECRET}, denied")


@pytest.mark.parametrize("text", ["Basic authentication failed", "a basic Training", "BASIC-AUTH", "basic information"])
def test_ordinary_words_after_basic_stay(text: str) -> None:
    """They are no credentials."""
    assert redact(text) == text


@given(SCHEMES, WORDS, WORDS, ANYTHING)
def test_queries_are_hidden(scheme: str, name: str, after: str, left: str) -> None:
    """Nothing of a query string is kept, whatever its keys are called."""
    text = f"{left} {scheme}://host/path?{quote(name)}={SECRET}{after} end"
    assert SECRET not in redact(text)


@given(st.dictionaries(WORDS, WORDS, max_size=3), SCHEMES)
def test_nested_values_are_redacted(others: dict[str, str], scheme: str) -> None:
    """Data of any depth keeps its shape and loses its secrets."""
    values = {
        "others": others,
        "list": [{"uri": f"{scheme}://u:{SECRET}@h"}],
        "api_key": SECRET,
        "nested": {"WANDB_API_KEY": SECRET},
    }
    found = redact_values(values)
    assert SECRET not in json.dumps(found)
    assert found["list"][0]["uri"] == f"{scheme}://{HIDDEN}@h"


@given(st.text(st.characters(exclude_characters="?:@#="), max_size=60))
def test_texts_without_addresses_stay(text: str) -> None:
    """Ordinary sentences and paths come through untouched."""
    sentence = text.lower().replace("bearer", "")
    assert redact(sentence) == sentence


def test_redacting_twice_is_redacting_once() -> None:
    """A redacted text is stable."""
    once = redact(f"http://u:{SECRET}@h/p?token={SECRET} Authorization: Bearer {SECRET}")
    assert redact(once) == once
    assert SECRET not in once
    assert is_hidden(once)


@pytest.mark.parametrize(
    "text",
    [
        f"API request to http://user:{SECRET}@127.0.0.1:9/api/2.0/mlflow failed",
        f"Max retries exceeded with url: /api/2.0/runs/get?run_id=1&key={SECRET} (Caused by ...)",
        f"{{'Authorization': 'Bearer {SECRET}'}}",
        f"Authorization: Basic {SECRET}",
        f"MLFLOW_TRACKING_TOKEN={SECRET}",
        f"password: {SECRET}",
        f"http://host/#access_token={SECRET}",
        f"http://user:pa@ss/{SECRET}@host",
    ],
)
def test_messages_of_trackers_are_clean(text: str) -> None:
    """The forms in which trackers have been seen to print secrets are covered."""
    assert SECRET not in redact(text)


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a tracker's package prints by itself is recognised by its value."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert "0123456789abcdef" not in redact("invalid key 0123456789abcdef given")


@pytest.mark.parametrize("part", ["y", "http://", "/", "passw", "token", "authorization ", "secret  ", "a@b:"])
def test_a_page_that_a_server_has_answered_with_is_soon_read(part: str) -> None:
    """A megabyte of one pattern is looked at once: its square would keep the interpreter for hours."""
    secret = " http://user:hunter2secret@host/"
    assert "hunter2secret" not in redact(part * (2**20 // len(part)) + secret)
