"""Regular files opened without following links, and read up to a size: those of run directories, and configurations."""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import stat
import tomllib
from collections import UserList
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

from gradtrack.errors import ConfigError, InputTypeError
from gradtrack.support.redact import redact

MEBIBYTE: Final = 2**20
_MOST_OF_CONFIGURATION: Final = 16 * MEBIBYTE
MOST_MEMORY: Final = 512 * MEBIBYTE
"""What the values of one JSON text can take."""
_COSTS: Final = {b"[": 112, b"{": 200, b",": 40, b":": 216, b'"': 20}
"""The bytes of memory that each of these can cost in JSON: a container, or the value behind it with its name."""
_TAGS_OF_MESSAGES: Final = bytes(range(2, 256, 8))
"""The first bytes of every field of protobuf that can be a message."""
LONGEST_MESSAGE: Final = 16 * MEBIBYTE
"""A row with four values for each of 10,000 layers has 4 MB, and their histograms 10 MB."""
_HIGHEST_SHARE: Final = 8 + max(_COSTS.values())
_LIBRARIES: Final = ("omegaconf", "ml_collections")
"""Packages whose containers may be neither mappings nor lists for Python."""
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_DIRECTORY_FLAGS: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_DIRECTORY", 0)
_WALKS: Final = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


def open_regular(path: str | Path, *, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file to read; a link, a pipe, a device and a file of more than `most_bytes` raise OSError.

    The name is looked at before it is opened, since to open some devices changes them, and what was opened is looked at
    again, since the name may have been given to another file in between.
    """
    _check(os.lstat(path), path, most_bytes)
    return _checked(_open(path, None), path, most_bytes)


def read_regular(path: str | Path, *, most_bytes: int) -> bytes:
    """Return the content of a regular file, which `open_regular` takes."""
    with open_regular(path, most_bytes=most_bytes) as stream:
        return _read(stream, path, most_bytes)


def check_json(content: bytes, *, most_memory: int = MOST_MEMORY) -> bytes:
    """Return JSON as it is; where its values could take more than `most_memory` bytes it raises ValueError.

    Three bytes, those of an empty list, take a hundred in memory. What they can take is counted before they are parsed.
    """
    if len(content) > most_memory // _HIGHEST_SHARE:
        width = 2 if content.isascii() else 8  # one character beyond the ASCII ones makes a whole text wider
        memory = width * len(content) + sum(cost * content.count(byte) for byte, cost in _COSTS.items())
        if memory > most_memory:
            raise ValueError(f"its values could take {memory // MEBIBYTE} MB of memory")
    return content


def check_message(content: bytes, *, most_memory: int = MOST_MEMORY) -> bytes:
    """Return a message of protobuf as it is; where it could take more than `most_memory` bytes it raises ValueError.

    An empty message within it is two bytes, and a hundred in memory.
    """
    inner = len(content) - len(content.translate(None, _TAGS_OF_MESSAGES))
    if 16 * len(content) + 104 * inner > most_memory:
        raise ValueError(f"it could take {(16 * len(content) + 104 * inner) // MEBIBYTE} MB of memory")
    return content


def read_inside(root: str | Path, path: str | Path, *, most_bytes: int) -> bytes:
    """Return the content of a regular file below a directory; no part of the way from there to it may be a link.

    A file that has a second name is refused as well, since that may be a name outside of the directory.
    """
    with _open_inside(root, path, most_bytes) as stream:
        if os.fstat(stream.fileno()).st_nlink > 1:
            raise OSError(errno.EMLINK, "it has a second name, which may lie elsewhere", str(path))
        return _read(stream, path, most_bytes)


def read_settings(source: object) -> dict[str, Any]:
    """Return a mapping of any kind, or that in a YAML, TOML or JSON file, as a dictionary; of None an empty one."""
    if source is None:
        return {}
    source = plain(source)
    if isinstance(source, dict):
        return dict(source)
    if isinstance(source, (str, Path)):
        return _read_configuration(Path(source))
    shown = redact(repr(source)) if isinstance(source, (int, float, bytes, list, tuple)) else type(source).__name__
    raise InputTypeError(
        f"config {shown}: expected a GradientConfig, a mapping or the path of a YAML, TOML or JSON file. "
        "Model and optimizer go to safe_backward, watch or attach."
    )


def plain(value: Any) -> Any:
    """Return mappings of any kind as dictionaries and lists of configuration libraries as lists, at every depth.

    What holds no such container is returned itself, since an option may be a list that its owner keeps.
    """
    foreign = type(value).__module__.partition(".")[0] in _LIBRARIES
    if isinstance(value, Mapping) or (foreign and hasattr(value, "keys")):
        mapping = {name: plain(value[name]) for name in value}
        same = type(value) is dict and all(entry is value[name] for name, entry in mapping.items())
        return value if same else mapping
    if isinstance(value, (list, UserList)) or (foreign and isinstance(value, Iterable)):
        entries = [plain(entry) for entry in value]
        same = type(value) is list and all(map(operator.is_, entries, value))
        return value if same else entries
    return value


def is_regular(path: str | Path) -> bool:
    """Say whether there is a regular file at a path; a link to one is none."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):  # a name that no file can have
        return False


def is_inside(path: str | Path, root: str | Path) -> bool:
    """Say whether a path, with every link in it followed, is a directory or lies below it."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _open_inside(root: str | Path, path: str | Path, most_bytes: int) -> BinaryIO:
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    parts = Path(relative).parts
    if not parts or parts[0] in (os.pardir, os.sep) or os.path.isabs(relative):
        raise OSError(errno.EXDEV, "it lies outside of the directory", str(path))
    if not _WALKS:
        if not is_inside(path, root):
            raise OSError(errno.EXDEV, "it leads out of the directory", str(path))
        return open_regular(path, most_bytes=most_bytes)
    with contextlib.ExitStack() as stack:
        handle = os.open(root, _DIRECTORY_FLAGS)
        stack.callback(os.close, handle)
        for part in parts[:-1]:
            handle = _open(part, handle, _DIRECTORY_FLAGS | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
        _check(os.stat(parts[-1], dir_fd=handle, follow_symlinks=False), path, most_bytes)
        return _checked(_open(parts[-1], handle), path, most_bytes)


def _open(path: str | Path, directory: int | None, flags: int = _FLAGS) -> int:
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as fault:
        if fault.errno in (errno.ELOOP, errno.EMLINK):
            raise _link(path) from None
        raise


def _checked(handle: int, path: str | Path, most_bytes: int | None) -> BinaryIO:
    try:
        _check(os.fstat(handle), path, most_bytes)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check(found: os.stat_result, path: str | Path, most_bytes: int | None) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise _link(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if most_bytes is not None and found.st_size > most_bytes:
        raise _too_large(path, most_bytes)


def _read(stream: BinaryIO, path: str | Path, most_bytes: int) -> bytes:
    content = stream.read(most_bytes + 1)  # the file may have grown since it was looked at
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def _link(path: str | Path) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path))


def _too_large(path: str | Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))


def _configuration(path: Path) -> bytes:
    """Read a file; of what is not regular only a pipe that the shell has opened, since any other may never end."""
    if str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")):
        return path.read_bytes()
    return read_regular(os.path.realpath(path), most_bytes=_MOST_OF_CONFIGURATION)


def _read_configuration(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML, TOML or JSON file."""
    try:
        text = _configuration(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(
            f"configuration {str(path)!r} cannot be read ({fault}). Check the path and its mode."
        ) from None
    readers = {".toml": tomllib.loads, ".json": json.loads}
    try:
        values = readers.get(path.suffix.lower(), yaml.safe_load)(text)
    except (ValueError, yaml.YAMLError, RecursionError) as fault:
        raise ConfigError(
            f"configuration {str(path)!r} cannot be parsed: {redact(str(fault))}. Only plain data is accepted."
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration {str(path)!r} holds a {type(values).__name__}: expected a mapping of settings."
        )
    return values
