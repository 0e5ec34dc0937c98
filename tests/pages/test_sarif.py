"""The issues of a run as SARIF: the structure of version 2.1.0, whatever a run is called and whatever it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradtrack import GradientManager
from gradtrack.cli import app
from gradtrack.pages.sarif import to_sarif
from gradtrack.reports import IssueSeverity, IssueType
from tests.pages.runs import HOSTILE, gather, issue, row
from tests.training import train

jsonschema: Any = pytest.importorskip("jsonschema")

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LOCATION = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation"],
            "properties": {
                "artifactLocation": {"properties": {"uri": {"type": "string", "pattern": r"^[!-~]+$"}}},
                "region": {"properties": {"startLine": {"type": "integer", "minimum": 1}}},
            },
        },
        "logicalLocations": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"fullyQualifiedName": {"type": "string"}, "kind": {"type": "string"}},
            },
        },
    },
}
RESULT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["message"],
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": TEXT,
        "locations": {"type": "array", "items": LOCATION},
        "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
        "properties": {"type": "object"},
    },
}
RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id"],
    "properties": {"id": {"type": "string"}, "name": {"type": "string"}, "shortDescription": TEXT, "help": TEXT},
}
SARIF = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["tool"],
                "properties": {
                    "tool": {
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "required": ["name"],
                                "properties": {
                                    "name": {"type": "string"},
                                    "version": {"type": "string"},
                                    "rules": {"type": "array", "items": RULE, "uniqueItems": True},
                                },
                            }
                        },
                    },
                    "automationDetails": {"properties": {"id": {"type": "string"}}},
                    "invocations": {
                        "type": "array",
                        "items": {
                            "required": ["executionSuccessful"],
                            "properties": {"executionSuccessful": {"type": "boolean"}},
                        },
                    },
                    "results": {"type": "array", "items": RESULT},
                    "properties": {"type": "object"},
                },
            },
        },
    },
}
"""The parts of SARIF 2.1.0 that we write, with what the standard requires of each."""


def sarif_of(text: str) -> dict[str, Any]:
    """Return the only run of a file that has the structure of SARIF."""
    found = json.loads(text)
    jsonschema.Draft7Validator(SARIF).validate(found)
    (run,) = found["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in run["results"])
    return dict(run)


def test_issues_have_their_severity_and_their_layer() -> None:
    """What is open comes first, as an error or a warning; what has closed is a note."""
    light = issue("light").model_copy(update={"severity": IssueSeverity.MEDIUM})
    run = sarif_of(to_sarif(gather(row(1, issues=[issue("old", IssueType.DEAD)]), row(2, issues=[issue("a"), light]))))
    told = [
        (one["ruleId"], one["level"], one["locations"][0]["logicalLocations"][0]["fullyQualifiedName"])
        for one in run["results"]
    ]
    assert sorted(told[:2]) == [("EXPLODING", "error", "a"), ("EXPLODING", "warning", "light")]
    assert told[2:] == [("DEAD", "note", "old")]
    assert "Lower the learning rate." in run["results"][0]["message"]["text"]
    assert len({one["partialFingerprints"]["gradtrackIssue/v1"] for one in run["results"]}) == 3


@pytest.mark.parametrize("layer", ["", HOSTILE, "a" * 5000])
def test_hostile_names_and_missing_layers_keep_the_structure(layer: str) -> None:
    """A layer is a text, and an issue of the whole run has no logical place."""
    (result,) = sarif_of(to_sarif(gather(row(1, issues=[issue(layer)]))))["results"]
    assert ("logicalLocations" in result["locations"][0]) == bool(layer)


def test_a_healthy_run_has_no_result() -> None:
    """So a pipeline that counts them passes."""
    run = sarif_of(to_sarif(gather(row(1))))
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])


def test_the_command_writes_a_file_whose_places_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of an issue is the journal of its run: relative within the working directory, and whole elsewhere."""
    with GradientManager(run_dir="run of mine", grad_log_every_n_steps=1, save_gradient_plots=False) as manager:
        train(manager, 3, change=lambda step, loss: loss * (float("nan") if step == 3 else 1.0))
    found = CliRunner().invoke(app, ["export", "run of mine", "--format", "sarif"], catch_exceptions=False)
    path = Path(found.stdout.strip())
    (result,) = sarif_of(path.read_text())["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert (path.name, place) == ("issues.sarif", "run%20of%20mine/journal-000.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told = CliRunner().invoke(app, ["export", "../run of mine", "--format", "sarif", "--out", "-"])
    (result,) = sarif_of(told.stdout)["results"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == (tmp_path / "run of mine" / "journal-000.jsonl").as_uri()
    refused = CliRunner().invoke(app, ["export", "../run of mine", "--format", "sarif", "--out", "-", "--json"])
    assert "expected csv, jsonl or sarif" in str(refused.exception)
