"""The README: its table of costs is that of the benchmarks, and what it shows can be loaded."""

import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.timing import Row
from gradtrack import GradientConfig
from tests.docs.pages import DOCS, ROOT, blocks, links

README = ROOT / "README.md"


def test_table_of_costs_is_that_of_the_benchmarks() -> None:
    """Each figure of the README is the one in docs/benchmarks.md, and none of those is left out."""
    section = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("## Reading\n")[1].split("\n## ")[0]
    figures = dict(re.findall(r"^\| (.+?) \| added to a step / by clip_grad_norm_ \| (\S+) \|", section, flags=re.M))
    written = README.read_text(encoding="utf-8").split(tables.BEGIN)[1].split(tables.END)[0]
    assert len(figures) >= 9
    assert written.strip() == tables.summary(figures).strip()


def test_summary_has_a_row_per_model() -> None:
    """Cases are laid out by their model and what is done, and a case that was not measured is an empty cell."""
    table = tables.summary({"a, unread": "1x", "a, health read": "2x", "b, unread": "**3x**"})
    assert table.splitlines() == [
        "| model | unread | health read |",
        "| --- | ---: | ---: |",
        "| a | 1x | 2x |",
        "| b | **3x** |  |",
    ]


def test_writing_the_benchmarks_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command brings the page of the benchmarks and the README up to date, and keeps the rest of the README."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCS", tmp_path / "docs")
    (tmp_path / "README.md").write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    rows = [Row(benchmark=name, case="a, b", what="c", ratio=0.25, bar=0.2) for name in ("step (native)", "reading")]
    written = [path.relative_to(tmp_path).as_posix() for path in tables.write(rows)]
    assert written == ["docs/benchmarks.md", "docs/images/step_cost.png", "README.md"]
    before, table, after = re.split(
        f"{tables.BEGIN}|{tables.END}", (tmp_path / "README.md").read_text(encoding="utf-8")
    )
    assert "| a | **0.25x** |" in table
    assert README.read_text(encoding="utf-8").startswith(before)
    assert README.read_text(encoding="utf-8").endswith(after)


def test_two_pictures_are_shown() -> None:
    """The README shows the report and a tracker."""
    pictures = [link for link in links(README) if link.endswith(".png")]
    assert pictures == ["docs/images/report-desktop.png", "docs/images/tensorboard.png"]


def test_configuration_is_what_the_loop_reads() -> None:
    """The YAML that is shown has the limit that it says."""
    (shown,) = [block for block in blocks(README) if block.language == "yaml"]
    assert shown.text.startswith("# gradtrack.yaml\n")
    with open("gradtrack.yaml", "w", encoding="utf-8") as file:
        file.write(shown.text)
    assert GradientConfig.load("gradtrack.yaml").max_grad_norm == 1.0


def test_what_was_not_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running one benchmark replaces its own table and no other."""
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    for name, ratio in (("memory", 1.0), ("growth", 2.0), ("memory", 3.0)):
        tables.write([Row(benchmark=name, case="case", what="what", ratio=ratio)])
    written = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert written.count("## ") == 2
    assert written.index("3.00x") < written.index("2.00x")
    assert "1.00x" not in written


@pytest.mark.parametrize("page", [README, DOCS / "getting-started.md"], ids=lambda page: page.name)
def test_installing_takes_the_versions_that_are_known_to_work(page: Path) -> None:
    """What a reader copies to install from a clone names the constraints, which are there."""
    commands = re.findall(r'^pip install .*"\.\[.*$', page.read_text(encoding="utf-8"), flags=re.M)
    assert commands
    assert all("-c constraints.txt " in command for command in commands)
    assert (ROOT / "constraints.txt").is_file()
