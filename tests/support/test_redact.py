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


ENDS = st.sampled_from(["", ".", "]", "}", "|", "!", ",", ">", " today", "/path", "'", ")]}", "…"])


@given(SCHEMES, st.sampled_from(["host", "host.example", "[::1]", "[fe80::1%25eth0]", "höst"]), st.booleans(), ENDS)
def test_host_may_be_followed_by_anything(scheme: str, host: str, with_port: bool, end: str) -> None:
    """A sentence, a list or a mapping ends behind it."""
    for password in (f"my {SECRET}", f"{SECRET} x", f"a@b {SECRET}"):
        text = redact(f"[no answer of {scheme}://user:{password}@{host}{':5000' * with_port}{end}")
        assert SECRET not in text
        assert host in text


QUOTES = st.sampled_from(["'", '"', '\\"', "\\\\'"])
NAMED = st.sampled_from(
    [
        *("password", "DB_PASSWORD", "passwd", "passphrase", "ssh_passphrase", "private_key", "private-key", "pwd"),
        *("DB_PWD", "token", "hf_token", "api_key", "X-Api-Key", "client_secret", "credentials"),
        *("Authorization", "Proxy-Authorization", "Cookie", "Set-Cookie"),
    ]
)
RANDOM = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=8, max_size=60)


@given(NAMED, QUOTES, st.sampled_from(["", "b", "u", "rb"]), RANDOM, st.sampled_from(["=", ": ", " = ", ":"]))
def test_value_in_quotes_is_hidden(name: str, quote: str, kind: str, secret: str, equals: str) -> None:
    """Blanks, commas and lines within it are part of it; what follows stays."""
    secret = f"{secret}0x"
    for value in (
        f"my {secret}",
        f"{secret}, {secret}; {secret}",
        f"--BEGIN\n{secret}\n{secret}\n--END",
        f"a\\n {secret}",
    ):
        text = redact(f"{{{quote}{name}{quote}{equals}{kind}{quote}{value}{quote}, {quote}rows{quote}: 5}}")
        assert secret not in text
        assert f"{quote}rows{quote}: 5}}" in text
        assert redact(text) == text


@given(NAMED, RANDOM, st.sampled_from(["=", ": ", " = ", ":"]))
def test_value_without_quotes_is_hidden(name: str, secret: str, equals: str) -> None:
    """Up to the next blank."""
    secret = f"{secret}0x"
    text = redact(f"refused: {name}{equals}{secret}\nas before")
    assert secret not in text
    assert text.endswith("\nas before")
    assert redact(text) == text


@given(
    st.sampled_from(["Basic", "Bearer", "Token", "ApiKey", "Negotiate", "Digest", "AWS4-HMAC-SHA256", "Custom", ""]),
    st.sampled_from(
        ["Authorization: {}", "{{'Authorization': b'{}'}}", '{{"authorization": "{}"}}', "authorization={}"]
    ),
    RANDOM,
)
def test_authorization_of_any_scheme_is_hidden(scheme: str, form: str, secret: str) -> None:
    """Whatever the word before it is, also as bytes."""
    encoded = base64.b64encode(f"user:{secret}".encode()).decode()
    for value in (f"{scheme} {secret}0x", f"{scheme} {encoded}", f"{scheme} user=u, response={secret}0x"):
        if "," not in value or scheme in ("Digest", "AWS4-HMAC-SHA256", "Custom"):
            text = redact(form.format(value))
            assert f"{secret}0x" not in text
            assert encoded not in text


@given(RANDOM)
def test_cookies_are_hidden(secret: str) -> None:
    """All of them, and what is on the next line stays."""
    text = redact(f"> Cookie: theme=dark; session={secret}0x; c=d\n< Set-Cookie: id={secret}0x; Path=/\n< Date: today")
    assert f"{secret}0x" not in text
    assert text.endswith("\n< Date: today")


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


def test_working_directory_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is PWD in the environment; a value of that name in a configuration is a password."""
    monkeypatch.setenv("PWD", "/work/of/mine")
    assert redact("files in /work/of/mine") == "files in /work/of/mine"
    assert redact_values({"pwd": "x", "db_pwd": "x", "cookies": "x"}) == dict.fromkeys(
        ["pwd", "db_pwd", "cookies"], HIDDEN
    )


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a tracker's package prints by itself is recognised by its value."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert "0123456789abcdef" not in redact("invalid key 0123456789abcdef given")


@pytest.mark.parametrize(
    "part",
    [
        *("y", "http://", "/", "passw", "token", "authorization ", "secret  ", "a@b:", "://a:b @", "://a:@[", "cookie"),
        *(
            "pwd='",
            'pwd="a',
            "pwd='a\\",
            'pwd=\\"',
            "pwd=\\\\\\'x",
            "pwd='pwd=\"",
            "token=b'",
            "cookie: ***",
            "'\\",
            "pwd :",
        ),
        *("authorization: token ", "authorization='", "pwd='" + "x" * 19_000, "bearer ", "basic ", "authorization_a"),
    ],
)
def test_a_page_that_a_server_has_answered_with_is_soon_read(part: str) -> None:
    """A megabyte of one pattern is looked at once: its square would keep the interpreter for hours."""
    secret = "\n http://user:hunter2secret@host/"
    assert "hunter2secret" not in redact(part * (2**20 // len(part)) + secret)
