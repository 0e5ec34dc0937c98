"""What a W&B run is shown with when it ends, read back from its files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

wandb: Any = pytest.importorskip("wandb")

from gradtrack.backends.wandb import WandbBackend  # noqa: E402
from gradtrack.backends.wandb.charts import Charts  # noqa: E402
from gradtrack.delivery.run_files import note_files  # noqa: E402
from gradtrack.records import Histogram, Panel, Record  # noqa: E402
from gradtrack.reports.panels import CORE_PANELS  # noqa: E402
from tests.backends.history import messages_of, rows_of  # noqa: E402
from tests.backends.rows import PICTURE, finished_run  # noqa: E402
from tests.backends.wandb_runs import (  # noqa: E402, F401
    expected,
    file_in,
    file_of,
    offline,
    open_run,
    ours,
    run_program,
)

CHART = "gradtrack gradients/Gradient norm before and after clipping"


def media_of(directory: Path) -> dict[str, list[int]]:
    """Return the W&B steps of the rows in which each file or chart was logged."""
    found: dict[str, list[int]] = {}
    for message in messages_of(directory):
        for name in dict.fromkeys(item.nested_key[0] for item in message.history.item if len(item.nested_key) > 1):
            found.setdefault(name, []).append(message.history.step.num)
    return found


def charts_of(directory: Path) -> dict[str, list[list[Any]]]:
    """Return the rows of the tables of every chart that the run's configuration defines."""
    settings: dict[str, Any] = {}
    for message in messages_of(directory):
        for update in message.config.update:
            if list(update.nested_key[:2]) == ["_wandb", "visualize"]:
                settings[update.nested_key[2]] = json.loads(update.value_json)
    found = {}
    for name, chart in settings.items():
        assert chart["panel_config"]["panelDefId"] == "wandb/lineseries/v0"
        tables = directory.glob(f"files/media/table/Custom Chart Tables/{name}_table_*.table.json")
        (table,) = [json.loads(path.read_text()) for path in tables]
        assert table["columns"] == ["step", "lineKey", "lineVal"]
        found[name] = table["data"]
    return found


def test_own_run_is_shown_with_its_files_and_charts(tmp_path: Path) -> None:
    """A run of ours holds the picture, the report and a chart of several lines, once and with what was recorded."""
    records = finished_run(tmp_path / "run")
    backend = WandbBackend()
    backend.write(records)
    backend.close()
    directory = file_of(backend.run)
    media = media_of(directory)
    assert {"gradtrack/training_curves", "gradtrack/report", f"Custom Chart Tables/{CHART}_table"} <= set(media)
    assert all(len(steps) == 1 for steps in media.values())
    (page,) = directory.glob("files/media/html/gradtrack/report_*.html")
    assert page.read_text() == "<p>the report</p>"
    (picture,) = directory.glob("files/media/images/gradtrack/training_curves_*.png")
    assert picture.read_bytes() == PICTURE
    lines = charts_of(directory)[CHART]
    clipped = [(step, value) for step, name, value in lines if name == "train/grad_norm_clipped"]
    wanted = [(step, math.log10(value)) for step, value in expected(records, "train/grad_norm_clipped")]
    assert clipped == wanted
    assert ours(rows_of(directory)) == expected(records)


def test_chart_with_a_long_name_is_drawn(tmp_path: Path) -> None:
    """The panels of pairs with long names are charts as well, under names that W&B can keep and that differ."""
    panels = [
        Panel(title="Norm " * 20, section=f"gradients: pair.{number}", metrics=("a", "b"), kind="multi-line")
        for number in range(2)
    ]
    records = finished_run(tmp_path / "run")
    records = [dataclasses.replace(record, panels=(), metrics={"a": 1.0, "b": 2.0}) for record in records]
    backend = WandbBackend()
    backend.write([dataclasses.replace(records[0], panels=tuple(panels)), *records[1:]])
    backend.close()
    assert len(charts_of(file_of(backend.run))) == 2


def test_everything_that_the_page_is_made_of_is_in_the_file(tmp_path: Path) -> None:
    """Each column has one definition by its exact name on its pair's hidden axis, each panel its lines, and the rest.

    The page itself needs W&B's server; it draws what the file says.
    """
    records = finished_run(tmp_path / "run", 5)
    buckets = Histogram(edges=(0.0, 1.0, 2.0), counts=(3.0, 4.0))
    odd = Record(step=5, time=9.0, source="a.b", metrics={"train/grad_norm/a.b": 2.0}, histograms={"h/a.b": buckets})
    backend = WandbBackend()
    backend.write([*records, odd])
    backend.close()
    directory = file_of(backend.run)
    messages = messages_of(directory)
    defined = [message.metric for message in messages if message.HasField("metric")]
    assert not any(metric.glob_name for metric in defined)
    axes = {metric.name: metric.step_metric for metric in defined if metric.step_metric}
    hidden = {metric.name for metric in defined if metric.options.hidden}
    assert hidden == {"gradtrack/step", "gradtrack/step/a:b"}
    rows = rows_of(directory)
    for row in rows:
        columns = {name for name in row if "/" in name and not name.startswith(("gradtrack", "Custom Chart"))}
        own = {name for name in columns if "._type" not in name and not name.startswith("h/")}
        axis = next((name for name in sorted(row, reverse=True) if name in hidden), None)
        assert all(axes[name] == axis for name in own), row
    assert axes["h/a:b"] == axes["train/grad_norm/a:b"] == "gradtrack/step/a:b"
    assert len(axes) + len(hidden) == len({metric.name for metric in defined}) == len(defined)
    summary = _last_summary(messages)
    assert summary["train/grad_norm_clipped"] == records[-1].metrics["train/grad_norm_clipped"]
    assert summary["gradtrack/step/a:b"] == 5
    config = _config(messages)["gradtrack"]
    assert config["run_id"] == "a-run"
    drawn = {name.partition("/")[2]: rows for name, rows in charts_of(directory).items()}
    there = {name for record in records for name in record.metrics}
    for panel in CORE_PANELS:
        lines = {name for name in panel.pick(there) if name in there}
        if len(lines) > 1:
            assert {name for _, name, _ in drawn[panel.title]} == lines


def _last_summary(messages: list[Any]) -> dict[str, Any]:
    """Return the newest value of each key of a run's summary."""
    items = (item for message in messages for item in message.summary.update)
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _config(messages: list[Any]) -> dict[str, Any]:
    """Return the configuration that a run was opened with."""
    found = [message.run.config.update for message in messages if message.HasField("run")]
    return {item.key: json.loads(item.value_json) for items in found for item in items}


def test_run_of_the_user_is_shown_after_the_last_step_of_the_user(tmp_path: Path) -> None:
    """Nothing is logged at our close; when the run ends, one row behind the user's last one has everything."""
    records = finished_run(tmp_path / "run")
    run = open_run()
    backend = WandbBackend()
    for index, record in enumerate(records):
        backend.write([record])
        run.log({"loss": float(index)}, step=index)
    backend.close()
    (tmp_path / "run" / "report.html").unlink()
    for index in range(30, 40):
        run.log({"loss": float(index)}, step=index)
    run.finish()
    rows = rows_of(file_of(run))
    assert [(row["_step"], row["loss"]) for row in rows if "loss" in row] == [(step, float(step)) for step in range(40)]
    assert ours(rows) == expected(records)
    assert not [row for row in rows if set(row) <= {"_step", "_runtime", "_timestamp"}]
    ((shown,),) = set(map(tuple, media_of(file_of(run)).values()))
    assert shown >= 40
    assert {"gradtrack/report", "gradtrack/training_curves"} <= set(media_of(file_of(run)))


@pytest.mark.parametrize("mode", ["row", "step"])
def test_other_step_modes_show_at_the_end_as_well(tmp_path: Path, mode: Any) -> None:
    """Also where our rows move the counter, what is shown comes behind everything of the user's."""
    run = open_run()
    backend = WandbBackend(step_mode=mode)
    backend.write(finished_run(tmp_path / "run", 5))
    backend.close()
    run.log({"loss": 1.0}, step=50)
    run.finish()
    ((shown,),) = set(map(tuple, media_of(file_of(run)).values()))
    assert shown > 50


def test_run_that_is_left_open_is_shown_at_exit(tmp_path: Path) -> None:
    """The interpreter's end is an end of the run as well."""
    program = """
        import sys, wandb
        from pathlib import Path
        from gradtrack.backends.wandb import WandbBackend
        from tests.backends.rows import finished_run
        run = wandb.init(project="tests")
        backend = WandbBackend()
        backend.write(finished_run(Path("run")))
        backend.close()
        print(run.dir)
    """
    assert "gradtrack/report" in media_of(file_in(run_program(program, cwd=tmp_path)))


def test_replay_does_not_show_again(tmp_path: Path) -> None:
    """A replay that adds rows to a run adds no second picture, and one that adds nothing opens no run."""
    records = finished_run(tmp_path / "run")
    first = WandbBackend(directory=str(tmp_path))
    first.write(records[:20])
    first.close()
    messages_of(file_of(first.run))
    again = WandbBackend(**first.address())
    there = again.present(records) or set()
    again.write([records[0], *[record for record in records if (record.source, record.step) not in there]])
    again.close()
    shown = media_of(file_of(again.run))
    assert not shown.keys() & media_of(file_of(first.run)).keys()
    third = WandbBackend(**first.address())
    third.present(records)
    third.close()
    assert third.run is None


def test_file_that_cannot_be_shown_costs_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A broken picture is told, and everything else is there."""
    records = finished_run(tmp_path / "run")
    (tmp_path / "run" / "broken.html").write_bytes(b"\xff\xfe\xff")
    note_files(tmp_path / "run", "a-run", [tmp_path / "run" / name for name in ("broken.html", "report.html")])
    backend = WandbBackend()
    backend.write(records)
    backend.close()
    assert "broken.html could not be shown" in caplog.text
    assert "gradtrack/report" in media_of(file_of(backend.run))
    assert ours(rows_of(file_of(backend.run))) == expected(records)


def test_run_without_rows_of_ours_is_not_shown() -> None:
    """A backend that never wrote leaves nothing in the user's run."""
    run = open_run()
    backend = WandbBackend()
    backend.close()
    run.log({"loss": 1.0})
    run.finish()
    assert media_of(file_of(run)) == {}


BAND = Panel(title="band", section="s", metrics=("a", "b", "c"), kind="band")


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=9000))
def test_curves_are_bounded_and_keep_their_extremes(values: list[float]) -> None:
    """However long a run is, a curve has at most as many points as a chart can hold, with its peaks among them."""
    charts = Charts()
    records = [
        Record(step=step, time=0.0, metrics={"a": value, "b": 0.0, "c": 1.0}) for step, value in enumerate(values)
    ]
    charts.take([dataclasses.replace(records[0], panels=(BAND,)), *records[1:]])
    charts.take(records[-10:])
    lines = charts._lines(BAND)["a"]
    assert len(lines) <= 1000
    assert {min(values), max(values)} <= set(lines.values())
    assert all(values[step] == value for step, value in lines.items())
    assert list(lines) == sorted(lines)


def test_nonfinite_values_are_not_drawn() -> None:
    """NaN and infinities have no place in a chart's table; a panel with one line left is W&B's own to draw."""
    charts = Charts()
    row = {"a": math.nan, "b": math.inf, "c": 1.0}
    charts.take([Record(step=1, time=0.0, metrics=row, panels=(BAND,))])
    assert charts.draw(wandb) == {}
