"""The page of a run in a real browser, without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradtrack.view.html import write_html_report
from tests.view.pages import Page
from tests.view.runs import HOSTILE, gather, issue, row

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
SEEN = """<script>document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth - innerWidth, paths: document.querySelectorAll("svg path").length,
});</script></body>"""


def browse(page: Path, profile: Path, *options: str) -> str:
    """Open a page with no way to any host, and return what the browser prints."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000"]
    command += [*options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Write the page of a run with hostile names."""
    rows = [row(step, norm=2.0 + step % 7) for step in range(1, 500)]
    rows.append(row(500, issues=[issue(HOSTILE)], metrics={f"rnn/{HOSTILE}": 1.0, "train/grad_norm": 3.0}))
    return write_html_report(gather(*rows), tmp_path / "report.html")


def test_charts_are_drawn_and_names_are_text(page: Path, tmp_path: Path) -> None:
    """The script draws every chart, and a name that looks like a script is written and not run."""
    drawn = browse(page, tmp_path / "profile", "--dump-dom")
    found = Page(drawn)
    pictures = [attributes for tag, attributes in found.tags if tag == "svg" and attributes.get("role") == "img"]
    assert [picture["aria-label"] for picture in pictures] == [chart["title"] for chart in found.charts]
    assert [tag for tag, _ in found.tags].count("path") >= len(found.charts)
    assert "alert('x')" in found.text
    assert [tag for tag, _ in found.tags].count("script") == 2


@pytest.mark.parametrize("width", [1280, 500])
def test_page_fits_its_window(page: Path, tmp_path: Path, width: int) -> None:
    """On a wide and on a narrow window nothing reaches beyond the right edge."""
    text = page.read_text(encoding="utf-8").replace("</body>", SEEN)
    page.write_text(text, encoding="utf-8")
    drawn = browse(page, tmp_path / "profile", f"--window-size={width},900", "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", drawn)
    assert title is not None
    assert '"wide":0' in title[1]


def test_zoom_is_shared_and_heat_is_drawn(tmp_path: Path) -> None:
    """Dragging across one chart shows the same steps in all; groups over depth have a cell for each norm."""
    groups = {f"train/grad_norm/layer{index}": 0.5 for index in range(4)}
    page = write_html_report(gather(*(row(step, metrics=groups) for step in range(1, 101))), tmp_path / "zoom.html")
    drag = """<script>setTimeout(() => {
      const svg = document.querySelector(".chart svg[role=img]"), at = svg.getBoundingClientRect();
      const send = (kind, x) => svg.dispatchEvent(new PointerEvent(kind, { clientX: x, pointerType: "mouse" }));
      send("pointerdown", at.left + at.width * 0.6); send("pointerup", at.left + at.width * 0.8);
      const steps = [...document.querySelectorAll(".chart > svg")].map((one) => {
        const names = [...one.querySelectorAll("text")].map((text) => Number(text.textContent)).filter((n) => n > 20);
        return Math.min(...names) > 50;
      });
      const cells = document.querySelectorAll(".wide rect").length;
      document.title = JSON.stringify({ cells, steps: steps.every(Boolean) });
    }, 500);</script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", drag), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", browse(page, tmp_path / "profile", "--dump-dom"))
    assert title is not None
    assert '"steps":true' in title[1]
    cells = re.search(r'"cells":(\d+)', title[1])
    assert cells is not None
    assert 4 * 15 < int(cells[1]) < 4 * 40


def test_page_can_be_photographed(page: Path, tmp_path: Path) -> None:
    """A screenshot shows more than an empty page."""
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", "--window-size=1280,1600", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000
