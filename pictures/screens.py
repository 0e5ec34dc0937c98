"""Pages and terminal output as pictures, taken by a browser without a window."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LARGE = 120_000
_OWN_BACKGROUND = f"background-color: #{bytes(MONOKAI.background_color).hex()}"
_BRAILLE = re.compile("[\u2800-\u28ff]")
"""Letters that few fonts of equal width have: each gets the width of the others."""
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; padding: 14px; background: #14181f; color: #e4e8ee; font: 14px/1.25 "DejaVu Sans Mono", monospace; }
pre { margin: 0; font: inherit; } i { display: inline-block; width: 1ch; height: 1.25em; font-style: normal;
overflow: hidden; vertical-align: top; }</style><pre>{code}</pre>"""


def find_browser() -> str | None:
    """Return a Chromium that is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def photograph(page: Path, picture: Path, *, width: int, height: int, dark: bool = False) -> Path:
    """Take a picture of a page that can reach no host, in few colours, so that it is small."""
    browser = find_browser()
    assert browser is not None, "pictures of pages need Chromium"
    with TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=3000"]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        command += [f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return shrink(picture)


def photograph_terminal(shown: RenderableType, picture: Path, *, columns: int = 100) -> Path:
    """Take a picture of what a console prints."""
    console = Console(record=True, width=columns, force_terminal=True, file=io.StringIO(), highlight=False)
    console.print(shown)
    lines = console.export_text(clear=False).count("\n") + 1
    with TemporaryDirectory() as directory:
        page = Path(directory) / "terminal.html"
        code = console.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")
        code = code.replace(_OWN_BACKGROUND, "")
        page.write_text(_TERMINAL.replace("{code}", _BRAILLE.sub(r"<i>\g<0></i>", code)), encoding="utf-8")
        return photograph(page, picture, width=round(columns * 8.43) + 28, height=round(lines * 17.5) + 28)


def shrink(picture: Path) -> Path:
    """Write a picture that is large again with 256 colours."""
    from PIL import Image

    if picture.stat().st_size > _LARGE:
        with Image.open(picture) as found:
            small = found.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        small.save(picture, optimize=True)
    return picture
