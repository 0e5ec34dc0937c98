"""Files are read only where they are regular, lie below a directory and have a bearable size."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrack.support.regular_files import check_json, open_regular, read_inside, read_regular


def test_regular_file_is_read(tmp_path: Path) -> None:
    """By either way, in a directory below as well."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "a" / "file", most_bytes=7) == b"content"
    assert read_inside(tmp_path, tmp_path / "a" / "file", most_bytes=7) == b"content"


def test_link_is_refused(tmp_path: Path) -> None:
    """Be it the file or a directory on the way to it, and wherever it leads."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    (tmp_path / "way").symlink_to(tmp_path / "real")
    for path in (tmp_path / "link", tmp_path / "way" / "file"):
        with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
            read_inside(tmp_path, path, most_bytes=100)
    with pytest.raises(OSError, match="symbolic link"):
        read_regular(tmp_path / "link", most_bytes=100)


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/hosts"])
def test_path_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    """However it is spelled."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    with pytest.raises(OSError, match=r"outside of the directory"):
        read_inside(tmp_path / "run", tmp_path / "run" / name, most_bytes=2**20)


def test_second_name_of_a_file_is_refused(tmp_path: Path) -> None:
    """It may be the only name below the directory of a file that lies elsewhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    os.link(tmp_path / "secret", tmp_path / "run" / "picture.png")
    with pytest.raises(OSError, match="second name"):
        read_inside(tmp_path / "run", tmp_path / "run" / "picture.png", most_bytes=100)


def test_special_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe that no process writes to would be waited for, and a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_inside(tmp_path, tmp_path / "pipe", most_bytes=100)


def test_large_file_is_refused(tmp_path: Path) -> None:
    """Before a byte of it is read."""
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(50 * 2**30)
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_regular(tmp_path / "sparse", most_bytes=100)


SMALL: list[Any] = [[], {}, [[]], [1], {"": 1}, {"": []}, 1.5, 300, 10**30, "ab", "\u0101\u0102", "\U0001f600", None]
PLAIN = st.recursive(
    st.sampled_from(SMALL) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.booleans(), st.booleans())
def test_json_takes_no_more_memory_than_was_counted(value: Any, ascii_only: bool, named: bool) -> None:
    """Whatever it holds: what passes a bound stays below it, bytes and text included."""
    many: Any = {f"{place:x}": value for place in range(3000)} if named else [value] * 3000
    content = json.dumps(many, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    tracemalloc.start()
    json.loads(bytearray(content))
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with pytest.raises(ValueError, match="its values could take"):
        check_json(content, most_memory=taken)


@pytest.mark.parametrize("value", [[1.2345678901234567] * 2000, [{"mean": 0.5, "norm": 1.25e-7}] * 500])
def test_what_runs_write_is_not_counted_many_times(value: Any) -> None:
    """A column of numbers and a list of reports pass at a few times what they take."""
    content = json.dumps(value).encode()
    assert check_json(content, most_memory=32 * len(content)) is content
    assert len(content) > 2**13
