"""Destinations of a replay: which server or directory the header of a journal may name, and which only the user can."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from gradtrack import registry
from gradtrack.errors import UsageError
from gradtrack.support.names import one_line
from gradtrack.support.redact import redact
from gradtrack.support.regular_files import is_inside, open_regular

_LOOPBACK: Final = re.compile(r"https?://(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?(?:/[\w\-./]*)?")
"""Strict, since what is read differently here and by the client of a tracker could name another host."""
_LOOPBACK_HOST: Final = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|::1)(?::\d{1,5})?")
_SERVER_NAME: Final = re.compile(r"(?i)(?:^|_)(?:ur[il]|host|hostname|endpoint|server)$")
_FILES: Final = re.compile(r"sqlite:///|file:/(?!/)|file:///")
_FILE_NAME: Final = re.compile(r"(?i)(?:^|_)(?:dir|directory|path|file|folder|root)$")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What controls a terminal or turns round the direction of writing, and halves of letters."""
_BESIDE_SQLITE: Final = ("-journal", "-wal", "-shm")
_SQLITE_JOURNAL: Final = bytes.fromhex("d9d505f920a163d7")
"""What a journal begins with, and ends with where it names another file."""
_MOST_ENTRIES: Final = 200_000
_SHOWN_CHARACTERS: Final = 300


def settle(
    name: str, options: Mapping[str, Any], given: Mapping[str, Any], *, run_dir: Path, allowed: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the options of a journal's header with the user's over them; a place that only the header chooses raises.

    A server is on this machine, or the environment names it, or the user has `given` it: credentials are the user's.
    Where the environment names the same server, its address is used, with the credentials in it. A file is written
    below the run's directory or one of those `allowed`, and through no link out of them: elsewhere it would take the
    place of another one. Code is run where the user has `given` it.
    """
    settled, places = dict(options), [str(run_dir / name), str(run_dir / f".{name}")]
    configured, roots, code = _configured(name), (run_dir, *allowed), _declared(name, "code_options")
    for option, value in options.items():
        if option in given:
            continue
        if any(_CONTROL.search(unquote(text)) for text in (option, *_texts(value))):
            raise UsageError(
                f"{name}: the journal names {shown(str(value))!r} as {shown(option)}: expected a text without control "
                f"characters, since the tracker may print it. If you trust it{_pass_it(option)}"
            )
        if option in code:
            raise UsageError(
                f"{name}: the journal names the code {shown(str(value))!r} as {shown(option)}: expected code that you "
                f"have chosen, since it is run. If you trust it: --{shown(option)} {shown(str(value))}"
            )
        if isinstance(value, str) and option in configured and _bare(value) == _bare(str(configured[option])):
            settled[option] = configured[option]
            continue
        for text in _texts(value):
            by_hand = f": --tracking-uri {_word(text)}" if option == "tracking_uri" else _pass_it(option)
            if not _is_local(option, text):
                raise UsageError(
                    f"{name}: the journal names the server {shown(text)!r} as {shown(option)}: expected one on this "
                    f"machine or one that you have chosen, since your credentials go there. If you trust it{by_hand}"
                )
            found = _files_of(option, text)
            outside = [path for path in found if not any(is_inside(path, root) for root in roots)]
            if outside:
                allow = "".join(f" --allow {_word(path)}" for path in outside)
                raise UsageError(
                    f"{name}: the journal names {shown(text)!r} as {shown(option)}: expected a place inside of the "
                    f"run's directory, since files are written there. If you trust it"
                    f"{by_hand if any(map(_is_root, outside)) else f':{allow}'}"
                )
            places += [path if is_inside(path, run_dir) else str(run_dir) for path in found if _meet(path, run_dir)]
    for option, value in configured.items():  # what a tracker takes by itself may lie in the run's directory as well
        if option not in given and settled.get(option, value) == value:
            places += [path for path in _files_of(option, str(value)) if is_inside(path, run_dir)]
    for place in places:
        _check_sqlite_journal(f"{os.path.realpath(place)}-journal", name)
    check_links(places, run_dir, allowed=allowed, own=_declared(name, "own_links"), what=name)
    return {**settled, **given}


def consent(backends: Sequence[Mapping[str, Any]], run_dir: Path) -> list[str]:
    """Return the options of `gradtrack replay` by which a user allows the places that a journal's header names."""
    found: dict[tuple[str, str], None] = {}
    for backend in backends:
        configured, code = _configured(backend["name"]), _declared(backend["name"], "code_options")
        for option, value in backend["options"].items():
            if option in code:
                found[f"--{option}", str(value)] = None
                continue
            for text in _texts(value):
                outside = [path for path in _files_of(option, text) if not is_inside(path, run_dir)]
                if outside and not any(map(_is_root, outside)):
                    found |= {("--allow", path): None for path in outside}
                    continue
                is_chosen = _bare(text) == _bare(str(configured.get(option, "")))
                if option == "tracking_uri" and not is_chosen and (outside or not _is_local(option, text)):
                    found["--tracking-uri", _bare(text)] = None
    return [word for pair in found for word in pair]


def check_links(
    places: Sequence[str], run_dir: Path, *, allowed: Sequence[Path] = (), own: Collection[str] = (), what: str
) -> None:
    """Raise where a link at or below a place in the run's directory leads out of it, and not to one of those `allowed`.

    A pipe or a device there raises as well. Links that stay inside are looked behind. Those of the names `own`, which
    the tracker's package makes, may lead out.
    """
    real = [os.path.realpath(place) for place in places]
    beside = [f"{path}{ending}" for path in real for ending in _BESIDE_SQLITE]
    links, left = [path for path in (*places, *beside) if os.path.islink(path)], [*real]
    known, budget = set[str](), _MOST_ENTRIES
    while links or left:
        left += [_inner_target(link, run_dir, allowed, what) for link in links]
        directory = left.pop()
        links = []
        if directory in known or not is_inside(directory, run_dir):
            continue
        known.add(directory)
        entries = _scan(directory, budget, what)
        budget -= len(entries)
        links = [entry.path for entry in entries if entry.is_symlink() and entry.name not in own]
        left += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _inner_target(link: str, run_dir: Path, allowed: Sequence[Path], what: str) -> str:
    """Return where a link leads; one out of the run's directory raises."""
    target = os.path.realpath(link)
    if not any(is_inside(target, root) for root in (run_dir, *allowed)):
        remedy = "" if _is_root(target) else f" If you trust it: --allow {_word(target)}"
        raise UsageError(
            f"{what}: {shown(link)!r} is a link out of the run's directory, to {shown(target)!r}: expected files and "
            f"directories, since a tracker writes there. Remove it.{remedy}"
        )
    return target


def _scan(directory: str, most: int, what: str) -> list[os.DirEntry[str]]:
    """Return what a directory holds; a file, or what is not there, holds nothing."""
    try:
        with os.scandir(directory) as entries:
            found = list(itertools.islice(entries, most + 1))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as fault:
        raise UsageError(
            f"{what}: {shown(directory)!r} cannot be looked into ({fault.strerror}): expected a directory without "
            "links to elsewhere, since a tracker writes there. Give yourself the right to read it, or remove it."
        ) from None
    if len(found) > most:
        raise UsageError(
            f"{what}: {shown(directory)!r} and what a tracker writes beside it hold more than {_MOST_ENTRIES:,} files: "
            "expected fewer, since each may be a link to elsewhere. Remove what is not of the run."
        )
    for entry in found:
        if not (entry.is_symlink() or entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            raise UsageError(
                f"{what}: {shown(entry.path)!r} is a pipe, a socket or a device: expected files and directories, since "
                "a tracker that opens it may wait forever. Remove it."
            )
    return found


def _check_sqlite_journal(path: str, what: str) -> None:
    """Raise where the journal of a store of SQLite names another file: going on after a crash, SQLite removes that.

    It writes such a name at the end only where it changes several stores at once, which no tracker does.
    """
    if not os.path.isfile(path) or os.path.islink(path):
        return
    with open_regular(path) as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - len(_SQLITE_JOURNAL), 0))
        if stream.read() == _SQLITE_JOURNAL:
            raise UsageError(
                f"{what}: {shown(path)!r} names a file that SQLite would remove: expected the journal of one store. "
                "Remove it if the store is not your own."
            )


def path_readings(path: str) -> list[str]:
    """Return what a path in an address may mean: SQLAlchemy since 2.1 and MLflow's files decode it, others do not."""
    return list(dict.fromkeys(os.path.abspath(found) for found in (unquote(path), path)))


def _files_of(option: str, text: str) -> list[str]:
    """Return the paths that an option may mean, or none where it names no file; what cannot be told is a root."""
    match = _FILES.match(text)
    if match is not None:
        path = text[match.end() :] if text.startswith("sqlite") else f"/{text[match.end() :]}"
        cut = set("?\0") if text.startswith("sqlite") else set("?#\0")
        return path_readings(path) if not cut & set(unquote(path)) else [os.sep]
    if not text or "://" in text or option == "withhold":
        return []
    is_server = _SERVER_NAME.search(option) is not None
    looks_so = text.startswith(("~", "/", "\\")) or os.path.isabs(text) or os.pardir in re.split(r"[/\\]", text)
    if looks_so or _FILE_NAME.search(option) or (is_server and text.startswith(".")):
        at_home = os.path.abspath(os.path.expanduser(text))
        return list(dict.fromkeys([at_home, *(path_readings(text) if is_server else [os.path.abspath(text)])]))
    return []


def _meet(path: str, run_dir: Path) -> bool:
    """Say whether one of two directories lies in the other."""
    return is_inside(path, run_dir) or is_inside(run_dir, path)


def _is_root(path: str) -> bool:
    """Say whether to allow a path would allow everything."""
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(path)


def _pass_it(option: str) -> str:
    return f", pass {shown(option)} yourself, as in replay(run_dir, options={{...}})."


def _word(text: str) -> str:
    """Return a text of a journal as one word of a command."""
    return shlex.quote(shown(text))


def describe_destination(name: str, options: Mapping[str, Any], run_dir: str) -> str:
    """Say on one line where the rows for a backend go."""
    servers = {option: value for option, value in _configured(name).items() if _SERVER_NAME.search(option)}
    places = {**servers, **options}
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


def _declared(name: str, attribute: str) -> frozenset[str]:
    """Return what the class of a backend declares of its options or its files."""
    try:
        return getattr(registry.backends.load(name), attribute)  # type: ignore[no-any-return]
    except Exception:  # a backend that cannot be loaded is reported when it is made, and one of others may lack it
        return frozenset()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
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


def _bare(address: str) -> str:
    """Return an address without what does not tell servers apart."""
    if _FILES.match(address):
        return address.partition("?")[0].rstrip("/")
    try:
        parts = urlsplit(address)
    except ValueError:
        return address
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2].lower(), parts.path.rstrip("/"), "", ""))
