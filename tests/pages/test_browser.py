"""The page of a run in a real browser, without a network."""

from __future__ import annotations

import http.server
import json
import math
import re
import shutil
import socketserver
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gradtrack.pages.html import write_html_report
from tests.pages.pages import Page
from tests.pages.runs import HOSTILE, gather, issue, row
from tests.pages.test_html import ended, parameter

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


class _Recording(http.server.BaseHTTPRequestHandler):
    """A server that writes down what it is asked for."""

    def __init__(self, asked_for: list[str], *arguments: Any) -> None:
        self._asked_for = asked_for
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Write down the address."""
        self._asked_for.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *_: Any) -> None:
        """Say nothing."""


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
    labels = [str(picture["aria-label"]) for picture in pictures]
    assert len(labels) == len(found.charts)
    assert all(label.startswith(f"{chart['title']}: ") for label, chart in zip(labels, found.charts, strict=True))
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


ASK = """<script>setTimeout(() => {
  const seen = {};
  const key = (node, name) => node.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const svg = document.querySelector(".chart svg[role=img]"), tip = svg.parentElement.querySelector(".tip");
  key(svg, "Home"); seen.first = tip.querySelector("b").textContent;
  key(svg, "ArrowRight"); seen.second = tip.querySelector("b").textContent;
  const told = tip.getBoundingClientRect(), box = svg.getBoundingClientRect();
  seen.near = told.left > box.left && told.right < box.right && told.top > box.top - 1;
  const steps = () => [...svg.querySelectorAll("text")].map((one) => Number(one.textContent)).filter((n) => n > 40);
  const all = Math.max(...steps());
  key(svg, "+"); seen.zoomed = Math.max(...steps()) < all;
  key(svg, "Escape"); seen.whole = Math.max(...steps()) === all;
  svg.dispatchEvent(new FocusEvent("blur")); seen.left = tip.hidden;
  const input = document.querySelector("input[data-table]");
  if (input) {
    const start = performance.now();
    input.value = "layer7 weight"; input.dispatchEvent(new Event("input"));
    seen.milliseconds = performance.now() - start;
    seen.found = document.querySelectorAll(`#${input.dataset.table} tbody tr:not([hidden])`).length;
    seen.told = input.nextElementSibling.textContent;
    const head = document.querySelectorAll(`#${input.dataset.table} thead button`)[2];
    head.click();
    seen.top = document.querySelector(`#${input.dataset.table} tbody tr:not([hidden]) td:nth-child(3)`).textContent;
    seen.sorted = head.parentElement.getAttribute("aria-sort");
  }
  const focusable = [...document.querySelectorAll("button, input, a, [tabindex]")];
  seen.unnamed = focusable.filter((one) => !(one.ariaLabel || one.textContent.trim() || one.placeholder)).length;
  seen.links = [...document.querySelectorAll("nav a")].every((one) => document.querySelector(one.getAttribute("href")));
  document.title = JSON.stringify(seen);
}, 500);</script></body>"""


def asked(page: Path, profile: Path, script: str = ASK) -> dict[str, Any]:
    """Run a script at the end of a page, and return what it leaves in the title."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", browse(page, profile, "--dump-dom"))
    assert title is not None
    found: dict[str, Any] = json.loads(title[1])
    return found


def test_page_is_used_without_a_mouse(tmp_path: Path) -> None:
    """Keys read a chart point by point beside its curve, zoom in and out; all that takes the focus has a name."""
    seen = asked(
        write_html_report(gather(*(row(step) for step in range(1, 101))), tmp_path / "keys.html"), tmp_path / "p"
    )
    assert (seen["first"], seen["second"]) == ("step 1", "step 2")
    assert all(seen[name] for name in ("near", "zoomed", "whole", "left", "links"))
    assert seen["unnamed"] == 0


def test_a_line_does_not_pass_over_nan(tmp_path: Path) -> None:
    """Where the loss was no number the curve has a gap, and a value between two gaps is still to be seen."""
    losses = [1.0, 0.9, math.nan, 0.8, math.nan, 0.7, 0.6]
    run = gather(*(row(step, loss=loss) for step, loss in enumerate(losses, 1)))
    shown = browse(write_html_report(run, tmp_path / "report.html"), tmp_path / "profile", "--dump-dom")
    path = re.search(r'aria-label="Loss:.*?<path d="([^"]*)"', shown, re.DOTALL)
    assert path is not None
    assert [part.count("h0") for part in path[1].split("M")[1:]] == [2, 1, 2]


def test_a_mark_leads_to_its_card(tmp_path: Path) -> None:
    """The number of an issue in a chart is a link to the issue's card, and the headings of plugins are capitalised."""
    script = """<script>setTimeout(() => {
      const mark = document.querySelector(".chart a"), card = document.querySelector(mark.getAttribute("href"));
      const heads = [...document.querySelectorAll("#charts h2")].map((one) => one.textContent);
      document.title = JSON.stringify({ card: card.className, mark: mark.textContent, heads });
    }, 500);</script></body>"""
    run = gather(row(1, metrics={"rnn/radius": 1.0, "flow/gain": 1.0}), row(2, issues=[issue("encoder")]))
    seen = asked(write_html_report(run, tmp_path / "marks.html"), tmp_path / "p", script)
    assert (seen["card"], seen["mark"]) == ("issue high", "1")
    assert seen["heads"] == ["Training", "RNN", "Flow"]


def test_a_run_of_one_step_is_drawn_in_the_middle(tmp_path: Path) -> None:
    """The only step is the only one that is named, and a zero has its place on the log axis named."""
    script = """<script>setTimeout(() => {
      const texts = [...document.querySelectorAll(".chart svg[role=img]")].map((svg) => (
        [...svg.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect().left])));
      const legends = [...document.querySelectorAll(".chart")].map((one) => one.querySelectorAll(".legend").length);
      document.title = JSON.stringify({ texts, legends, wide: innerWidth });
    }, 500);</script></body>"""
    run = gather(row(1, metrics={"train/grad_norm": 2.0, "train/grad_norm/a": 0.0, "train/grad_norm/b": 2.0}))
    seen = asked(write_html_report(run, tmp_path / "one.html"), tmp_path / "p", script)
    loss, norm, groups = (dict(texts) for texts in seen["texts"])
    assert "2" not in loss
    assert loss["step"] + 100 < loss["1"]
    assert "0" in groups
    assert "0" not in norm
    assert seen["legends"] == [0, 1, 1]


def test_a_chart_draws_eight_lines_and_the_others_on_request(tmp_path: Path) -> None:
    """The legend ends with how many more there are; a click on that draws them."""
    script = """<script>setTimeout(() => {
      const chart = [...document.querySelectorAll(".chart")].find((one) => one.querySelector(".more"));
      const seen = () => [chart.querySelectorAll(".legend button").length, chart.querySelectorAll("g path").length];
      const before = seen(), more = chart.querySelector(".more"), text = more.textContent;
      more.click();
      document.title = JSON.stringify({ before, text, after: seen() });
    }, 500);</script></body>"""
    rows = [row(step, metrics={f"train/grad_norm/g{index}": 1.0 + index for index in range(30)}) for step in (1, 2)]
    seen = asked(write_html_report(gather(*rows), tmp_path / "many.html"), tmp_path / "p", script)
    assert seen == {"before": [9, 8], "text": "16 more", "after": [24, 24]}


def test_what_differs_by_rounding_alone_is_a_flat_line(tmp_path: Path) -> None:
    """The axis beside it has short numbers around the value."""
    script = """<script>setTimeout(() => {
      const texts = [...document.querySelector(".chart svg[role=img]").querySelectorAll("text")];
      document.title = JSON.stringify({ texts: texts.map((one) => one.textContent) });
    }, 500);</script></body>"""
    run = gather(*(row(step, loss=1 - 1e-7 * (step % 3)) for step in range(1, 9)))
    seen = asked(write_html_report(run, tmp_path / "flat.html"), tmp_path / "p", script)
    assert {"0.95", "1", "1.05"} <= set(seen["texts"])


def test_the_axis_of_a_long_run_ends_with_the_run(tmp_path: Path) -> None:
    """Lines that are thinned out to buckets of steps do not shorten the axis."""
    script = """<script>setTimeout(() => {
      const texts = [...document.querySelector(".chart svg[role=img]").querySelectorAll("text")];
      document.title = JSON.stringify({ steps: texts.map((one) => one.textContent) });
    }, 500);</script></body>"""
    run = gather(*(row(step) for step in range(1, 5001)))
    seen = asked(write_html_report(run, tmp_path / "long.html"), tmp_path / "p", script)
    assert {"1000", "5000"} <= set(seen["steps"])


def test_a_large_table_is_searched_and_sorted(tmp_path: Path) -> None:
    """A thousand parameters are searched while one types, and the number of those that were found is told."""
    run = gather(*(row(step) for step in range(1, 4)))
    run.end = ended(**{f"layer{index}.weight": parameter(float(index)) for index in range(1000)})
    seen = asked(write_html_report(run, tmp_path / "table.html"), tmp_path / "p")
    assert (seen["found"], seen["told"]) == (111, "111 of 1000 rows")
    assert (seen["top"], seen["sorted"]) == ("799", "descending")


def test_page_asks_no_host_for_anything(tmp_path: Path) -> None:
    """A page that would load something is refused by its own policy, and a server that waits hears nothing."""
    asked_for: list[str] = []
    with socketserver.TCPServer(("127.0.0.1", 0), partial(_Recording, asked_for)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        load = f"""<script>const seen = {{}};
          document.addEventListener("securitypolicyviolation", (one) => {{ seen[one.effectiveDirective] = 1; }});
          fetch("{address}/fetch").catch(() => 0); new Image().src = "{address}/image";
          const script = document.createElement("script"); script.src = "{address}/script";
          document.body.append(script);
          setTimeout(() => {{ document.title = JSON.stringify(seen); }}, 500);</script></body>"""
        page = write_html_report(gather(row(1), row(2)), tmp_path / "page.html")
        seen = asked(page, tmp_path / "p", load)
        server.shutdown()
    assert {"connect-src", "img-src", "script-src-elem"} <= set(seen)
    assert asked_for == []


def test_page_can_be_photographed(page: Path, tmp_path: Path) -> None:
    """A screenshot shows more than an empty page."""
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", "--window-size=1280,1600", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000
