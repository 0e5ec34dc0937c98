"""The data for scripts: every document fits its published schema and its bound, with what matters first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradtrack import GradientManager
from gradtrack.cli import app
from gradtrack.pages.documents import DOCUMENTS, MOST_BYTES, report_document, schema_of, show_document
from gradtrack.pages.run_data import RunData
from gradtrack.reports import IssueType
from tests.pages.runs import gather, issue, row
from tests.training import train

jsonschema: Any = pytest.importorskip("jsonschema")


def fits(name: str, document: object) -> None:
    """Hold a document against its schema, as it is published."""
    jsonschema.Draft202012Validator(json.loads(schema_of(name))).validate(document)


def plain_of(run: RunData) -> dict[str, Any]:
    """Return the data of a run as a script reads it."""
    text = json.dumps(show_document(run), allow_nan=False)
    found: dict[str, Any] = json.loads(text)
    fits("show", found)
    return found


def test_plain_data_is_json() -> None:
    """The data for scripts has every number, and is JSON even where a number is not finite."""
    run = gather(row(1), row(2, norm=math.inf, issues=[issue("encoder")]))
    found = plain_of(run)
    assert found["healthy"] is False
    assert found["last"][""]["train/grad_norm"] == "Infinity"
    assert found["last"][""]["train/grad_norm_clipped"] == 1.0
    assert found["issues"][0]["layer"] == "encoder"
    assert found["issues"][0]["spans"] == [[2, None]]
    assert (found["issues"][0]["episode"], found["issues"][0]["worst_step"]) == (1, 2)
    assert found["issues"][0]["first"] == found["issues"][0]["last"]


def test_data_for_scripts_end_as_the_run_ended() -> None:
    """A NaN is not left out in favour of an older number, a metric of an older row is kept, and none is missing."""
    metrics = {"train/grad_norm": math.nan, "train/grad_norm/head": 0.0, "train/grad_mean/head": math.nan}
    run = gather(row(1, metrics={**metrics, "rnn/radius": 0.9}), row(2, loss=math.nan, metrics=metrics))
    last = plain_of(run)["last"][""]
    assert (last["step"], last["loss"], last["rnn/radius"]) == (2, "NaN", 0.9)
    assert (last["train/grad_norm"], last["train/grad_norm/head"]) == ("NaN", "NaN")
    assert "rl/entropy" not in last


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_one(name: str) -> None:
    """It is of the draft that it names, and each field has a sentence."""
    schema = json.loads(schema_of(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = [field for part in (schema, *schema["$defs"].values()) for field in part["properties"].values()]
    assert all(field.get("description", "").endswith(".") for field in fields)


def test_what_is_open_comes_first() -> None:
    """An issue that has closed stands behind those that are open, whatever its severity."""
    old = issue("old", IssueType.DISCONNECTED)
    run = gather(row(1, issues=[old, issue("a")]), row(2, issues=[issue("b")]), row(3, issues=[issue("b"), issue("c")]))
    found = plain_of(run)["issues"]
    assert [one["open"] for one in found] == sorted((one["open"] for one in found), reverse=True)
    assert {one["layer"] for one in found if one["open"]} == {"b", "c"}
    assert len(found) == 4


def test_a_small_run_is_whole() -> None:
    """Nothing is left out where everything fits."""
    assert plain_of(gather(row(1, issues=[issue("a")]), row(2)))["left_out"] == {}


@settings(max_examples=20)
@given(
    groups=st.integers(0, 1500),
    issues=st.integers(0, 120),
    closed=st.integers(0, 120),
    letters=st.sampled_from([1, 40, 3000, 100_000]),
)
def test_the_bound_holds_whatever_a_run_has(groups: int, issues: int, closed: int, letters: int) -> None:
    """Never more than 64 KB, never other than the schema says, and what is left out is counted."""
    most = 20 if letters > 40 else 2000
    names = [f"train/grad_norm/{'g' * letters}{number}" for number in range(min(groups, most))]
    metrics = {"train/grad_norm": 1.0, "train/grad_healthy": 0.0, **dict.fromkeys(names, 1.0)}
    layers = [f"{number}{'x' * min(letters, 3000)}" for number in range(most)]
    before, now = ([issue(f"{name}{layer}") for layer in layers[:n]] for name, n in (("c", closed), ("o", issues)))
    run = gather(row(1, issues=before), row(2, issues=now, metrics=metrics), row(3, issues=now, metrics=metrics))
    text = json.dumps(show_document(run), indent=1)
    found = json.loads(text)
    fits("show", found)
    assert len(text) <= MOST_BYTES
    assert found["left_out"].get("issues", 0) + len(found["issues"]) == len(run.issues)
    assert found["left_out"].get("last", 0) + len(found["last"].get("", ())) >= len(metrics)
    if found["left_out"].get("issues", 0) > len(before):
        assert not any(not one["open"] for one in found["issues"])
    if len(now) < 20:
        assert sum(one["open"] for one in found["issues"]) == len(now)


def test_groups_go_before_issues_do() -> None:
    """A run of many groups keeps its verdict, its issues in full and the numbers of the whole."""
    groups = {f"train/grad_norm/blocks.{number}.attention.weight": float(number) for number in range(2000)}
    found = plain_of(gather(row(1, metrics={"rnn/radius": 0.5, **groups}, issues=[issue("a")])))
    assert 0 < found["left_out"]["last"] < 2000
    assert list(found["left_out"]) == ["last"]
    assert found["last"][""]["rnn/radius"] == 0.5
    assert found["issues"][0]["first"] is not None


def test_several_runs_share_the_bound(tmp_path: Path) -> None:
    """What the command prints for four runs fits as well, and each is there."""
    paths = []
    for number in range(4):
        settings: dict[str, Any] = {"track_parameters": True, "grad_log_every_n_steps": 1, "engine": "torch"}
        with GradientManager(run_dir=tmp_path / f"run{number}", save_gradient_plots=False, **settings) as manager:
            train(manager, 5, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
        paths.append(str(tmp_path / f"run{number}"))
    text = CliRunner().invoke(app, ["show", *paths, "--json"]).stdout
    assert len(text) <= MOST_BYTES + 2
    for found in json.loads(text):
        fits("show", found)
        assert (found["state"], [one["issue_type"] for one in found["issues"]]) == ("ended", ["NUMERICAL"])


def test_the_report_tells_the_verdict(tmp_path: Path) -> None:
    """`report --json` fits its schema: where the page is, whether the run is healthy, and what was wrong."""
    with GradientManager(run_dir=tmp_path / "run", save_gradient_plots=False, grad_log_every_n_steps=1) as manager:
        train(manager, 3, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
    text = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"]).stdout
    found = json.loads(text)
    fits("report", found)
    assert Path(found["report"]).is_file()
    assert (found["healthy"], found["issues"][0]["issue_type"], found["issues"][0]["open"]) == (
        False,
        "NUMERICAL",
        True,
    )


def test_a_journal_may_hold_anything() -> None:
    """Issues whose fields are of other types than ours fit the schema all the same."""
    strange: dict[str, Any] = {"issue_type": 3, "severity": None, "layer": ["x"], "value": "high", "threshold": "NaN"}
    run = gather(row(1))
    RunData.of(run.run, run.directory, [])
    from gradtrack.pages.issues import IssueLog
    from gradtrack.records import Record

    log = IssueLog()
    log.add(Record(step=1, time=1.0, metrics={"train/grad_healthy": 0.0}, issues=(strange,)))
    run.episodes = log.episodes()
    (found,) = plain_of(run)["issues"]
    assert (found["issue_type"], found["value"], found["threshold"], found["layer"]) == ("3", None, "NaN", "['x']")
    fits("report", json.loads(json.dumps(report_document(run, Path("r.html")))))
