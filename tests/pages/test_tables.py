"""A run as tables: what pandas, polars and files get of it."""

from __future__ import annotations

import csv
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import gradtrack
from gradtrack import GradientManager, cli
from gradtrack.errors import JournalError
from gradtrack.pages.tables import read_run, to_text, write_table
from gradtrack.records import Record
from tests.pages.runs import HOSTILE, issue, row, write_run
from tests.training import train


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run of two pairs, with what is missing, not a number and infinite."""
    opened = issue("encoder")
    late = Record(step=1, time=9.0, source="critic", metrics={"updates/ratio/critic": 0.5})
    return write_run(
        tmp_path / "run",
        row(1, norm=math.inf, epoch=3),
        row(1, source="critic"),
        late,
        row(2, norm=math.nan, issues=[opened], loss=math.nan),
        row(3, issues=[opened]),
        row(4),
        row(5, issues=[opened]),
    )


def test_a_row_for_each_step_of_each_pair(run: Path) -> None:
    """Metrics have the names that they have in every pair; what came later joins its step."""
    steps = gradtrack.read_run(str(run)).steps
    assert list(zip(steps["source"], steps["step"], strict=True)) == [
        *(("", step) for step in range(1, 6)),
        ("critic", 1),
    ]
    assert {len(column) for column in steps.values()} == {6}
    assert steps["epoch"] == [3, None, None, None, None, None]
    assert steps["train/grad_norm"][0] == math.inf
    assert steps["train/grad_norm"][-1] == 2.0
    assert steps["updates/ratio"] == [None, None, None, None, None, 0.5]
    assert "train/grad_norm/W_in" in steps
    assert not [name for name in steps if "critic" in name]


def test_what_is_no_number_is_not_what_is_missing(run: Path) -> None:
    """A NaN is one, and None stands for what was not recorded."""
    steps = read_run(run).steps
    assert math.isnan(steps["train/grad_norm"][1])
    assert math.isnan(steps["loss"][1])
    assert steps["loss"][0] == 1.0


def test_a_row_for_each_time_that_an_issue_was_open(run: Path) -> None:
    """The last one has no end, as the run ended before it did."""
    found = read_run(run)
    issues = found.issues
    assert list(zip(issues["opened"], issues["closed"], strict=True)) == [(2, 4), (5, None)]
    assert issues["issue_type"] == ["EXPLODING", "EXPLODING"]
    assert issues["value"] == [50.0, 50.0]
    assert (found.run.run_id, found.state) == ("a-run", "stopped without an end")


def test_the_columns_are_those_of_the_reports(tmp_path: Path) -> None:
    """What a training recorded comes back exactly."""
    with GradientManager(run_dir=tmp_path, grad_log_every_n_steps=2, engine="torch") as manager:
        reports = train(manager, 8)
    found = read_run(tmp_path)
    assert found.state == "ended"
    kept = dict(zip(found.steps["step"], found.steps["train/grad_norm"], strict=True))
    assert {step: kept[step] for step in (2, 4, 6, 8)} == {
        report.step: report.clipping.norm_before for report in reports if report.step % 2 == 0
    }


def test_pandas_takes_the_columns(run: Path) -> None:
    """Numbers are numbers there."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(read_run(run).steps)
    assert frame["train/grad_clip_rate"].dtype == "float64"
    assert frame["step"].tolist() == [1, 2, 3, 4, 5, 1]


def test_polars_takes_the_columns(run: Path) -> None:
    """Numbers are numbers there, and what is missing is null."""
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(read_run(run).steps)
    assert frame["updates/ratio"].null_count() == 5


def invoke(*words: str) -> Any:
    """Run the command line."""
    return CliRunner().invoke(cli.app, ["export", *words])


def test_csv_comes_back(run: Path) -> None:
    """Each cell is a number that Python reads, or empty."""
    result = invoke(str(run))
    assert (result.exit_code, result.output.strip()) == (0, str(run / "steps.csv"))
    rows = list(csv.DictReader((run / "steps.csv").read_text().splitlines()))
    steps = read_run(run).steps
    for name in set(steps) - {"source"}:
        for cell, value in zip([line[name] for line in rows], steps[name], strict=True):
            assert (cell == "") if value is None else (float(cell) == value or (cell == "nan" and value != value))


def test_jsonl_spells_what_is_no_number(run: Path) -> None:
    """Every line is strict JSON; a key that is not there has no value."""
    assert invoke(str(run), "--format", "jsonl", "--out", str(run / "x.jsonl")).exit_code == 0
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (run / "x.jsonl").read_text().splitlines()]
    assert [row.get("train/grad_norm") for row in rows[:3]] == ["Infinity", "NaN", 2.0]
    assert "epoch" in rows[0]
    assert "epoch" not in rows[1]


def test_parquet_comes_back(run: Path) -> None:
    """Types and missing values are kept."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for table in ("steps", "issues"):
        found = invoke(str(run), "--format", "parquet", "--table", table, "--json")
        told = json.loads(found.output)
        read = parquet.read_table(told["file"])
        expected = getattr(read_run(run), table)
        assert (told["rows"], told["columns"]) == (read.num_rows, read.num_columns)
        assert str(read.to_pydict()) == str(expected)


def test_parquet_needs_a_package(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow polars writes it, and without both the error says what to install."""
    load = importlib.import_module
    frame = SimpleNamespace(write_parquet=lambda stream: stream.write(b"by polars"))
    polars = SimpleNamespace(DataFrame=lambda table, strict: frame)

    def without(*missing: str) -> Any:
        def found(name: str, *rest: Any) -> Any:
            if name.partition(".")[0] in missing:
                raise ImportError(name)
            return polars if name == "polars" else load(name, *rest)

        return found

    monkeypatch.setattr(importlib, "import_module", without("pyarrow"))
    write_table(read_run(run).steps, "parquet", run / "a.parquet")
    assert (run / "a.parquet").read_bytes() == b"by polars"
    monkeypatch.setattr(importlib, "import_module", without("pyarrow", "polars"))
    result = invoke(str(run), "--format", "parquet")
    assert "pyarrow or polars, and neither is installed" in str(result.exception)


def test_standard_output_gets_a_text(run: Path) -> None:
    """A dash is the place; a table of bytes has none there."""
    result = invoke(str(run), "--table", "issues", "--out", "-")
    assert result.output == to_text(read_run(run).issues, "csv")
    assert "Name a file with --out" in str(invoke(str(run), "--format", "parquet", "--out", "-").exception)


def test_names_and_texts_of_any_kind(tmp_path: Path) -> None:
    """What a layer is called, and what an issue of another version holds, breaks no table."""
    odd = {**issue(HOSTILE).model_dump(mode="json"), "value": "much", "window": 2**70, "more": [1]}
    usual = issue("b").model_dump(mode="json")
    record = row(1)
    metrics = {**record.metrics, f"train/grad_norm/{HOSTILE}": 1.0, "step": 7.0}
    write_run(tmp_path, Record(step=1, time=1.0, metrics=metrics, issues=(odd, usual)))
    found = read_run(tmp_path)
    assert found.steps["step"] == [1]
    assert found.issues["value"] == ["much", "50.0"] or found.issues["value"] == ["50.0", "much"]
    for kind in ("csv", "jsonl", "parquet"):
        for name in ("steps", "issues"):
            write_table(getattr(found, name), kind, tmp_path / f"{name}.{kind}")
    with (tmp_path / "steps.csv").open(newline="") as stream:
        assert len(list(csv.reader(stream))) == 2


def test_a_directory_without_a_run_is_told(tmp_path: Path) -> None:
    """As by every other reader."""
    with pytest.raises(JournalError):
        read_run(tmp_path)
