"""Files are read only where they are regular, lie below a directory and have a bearable size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradtrack.support.regular_files import open_regular, read_inside, read_regular


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
