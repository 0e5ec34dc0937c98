"""The pictures of the documentation: there, small, and of what gradtrack draws today."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pictures import runs, screens
from pictures.__main__ import IMAGES, PLOTS, SCREENS, draw, photograph

NAMES = [*(name for names in PLOTS.values() for name in names), *SCREENS]


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_is_kept_and_small(name: str) -> None:
    """A picture is in the documentation, in a size that a page loads at once."""
    assert (IMAGES / name).stat().st_size < 200_000
    with Image.open(IMAGES / name) as picture:
        assert picture.width >= 500
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


@pytest.mark.parametrize("run", ["policy", "recurrent"])
def test_trainings_leave_their_pictures(tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of a few steps leaves each picture that it is there for."""
    whole = getattr(runs, run)
    monkeypatch.setattr(runs, run, lambda directory: whole(directory, 12))
    assert [path.name for path in draw(tmp_path, [run])] == list(PLOTS[run])
    assert all((tmp_path / name).is_file() for name in PLOTS[run])


@pytest.mark.slow
@pytest.mark.skipif(screens.find_browser() is None, reason="no Chromium is installed")
def test_pages_can_be_photographed(tmp_path: Path) -> None:
    """Every picture of a page and of the terminal is taken, without a path of this machine on it."""
    assert [path.name for path in photograph(tmp_path)] == list(SCREENS)
    assert all((tmp_path / name).stat().st_size < 200_000 for name in SCREENS)
