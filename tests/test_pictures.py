"""The pictures of the documentation: there, small, and of what gradtrack draws today."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from rich.text import Text

from pictures import runs, screens, trackers
from pictures.__main__ import IMAGES, PLOTS, SCREENS, draw, photograph

NAMES = [*(name for names in PLOTS.values() for name in names), *SCREENS, "wandb.png"]


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


@pytest.mark.slow
@pytest.mark.skipif(screens.find_browser() is None, reason="no Chromium is installed")
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux is installed")
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_terminal_view_of_wandb_shows_our_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own terminal view draws the rows of an offline run over our axis, and none that is not asked for."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    shown: list[str] = []
    look = trackers.in_a_terminal
    monkeypatch.setattr(trackers, "in_a_terminal", lambda *given, **more: _kept(shown, look(*given, **more)))
    picture = trackers.photograph_wandb(tmp_path)
    assert picture.stat().st_size < 200_000
    assert "train/grad_norm" in shown[0]
    assert "x: gradtrack/step" in shown[0]


def _kept(shown: list[str], screen: Text) -> Text:
    shown.append(screen.plain)
    return screen
