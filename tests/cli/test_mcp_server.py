"""The MCP server: spoken to by the SDK's own client on stdio, bounded, and closed to everything but its directories."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradtrack import GradientManager
from gradtrack.cli import app
from gradtrack.cli.mcp_server import make_server
from gradtrack.errors import MissingExtraError, UsageError
from gradtrack.pages.documents import MOST_BYTES
from tests.pages.runs import issue, row, write_run
from tests.processes import ROOT
from tests.training import train

mcp: Any = pytest.importorskip("mcp", reason='it is not installed: pip install "gradtrack[mcp]"')

Call = tuple[str, dict[str, Any]]


def record(directory: Path, steps: int = 6, **settings: Any) -> None:
    """Leave a run with one step that is not finite."""
    settings = {"grad_log_every_n_steps": 1, "save_gradient_plots": False, "engine": "torch", **settings}
    with GradientManager(run_dir=directory, **settings) as manager:
        train(manager, steps, change=lambda step, loss: loss * (math.nan if step == steps else 1.0))


async def _ask(target: Any, calls: Sequence[Call]) -> list[tuple[bool, str]]:
    async with mcp.Client(target) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["runs", "issues", "metric", "report", "explain"]
        answers = [await client.call_tool(name, given) for name, given in calls]
    return [(bool(answer.is_error), answer.content[0].text) for answer in answers]


def on_stdio(*calls: Call, place: Path) -> list[tuple[bool, str]]:
    """Start the command and call its tools with the client of the SDK."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "gradtrack", "mcp", "."], env=environment)
    server.cwd = str(place)
    return asyncio.run(_ask(mcp.stdio_client(server), calls))


def asked(directory: Path, *calls: Call) -> list[tuple[bool, str]]:
    """Call tools of a server in this process, through the protocol as well."""
    return asyncio.run(_ask(make_server([directory]), calls))


def test_an_agent_finds_what_is_wrong(tmp_path: Path) -> None:
    """On stdio, from the list of runs over the issues to their cause; every answer is JSON of 64 KB at most."""
    record(tmp_path / "runs" / "exp1")
    found = on_stdio(
        ("runs", {}),
        ("issues", {}),
        ("metric", {"name": "train/grad_norm", "run": "runs/exp1"}),
        ("metric", {"name": "loss"}),
        ("report", {}),
        ("explain", {"what": "numerical", "run": "runs/exp1"}),
        ("report", {"run": "/etc"}),
        place=tmp_path,
    )
    assert [is_error for is_error, _ in found] == [False] * 6 + [True]
    runs, issues, norm, loss, report, explained = (json.loads(text) for _, text in found[:6])
    assert all(len(text) <= MOST_BYTES for _, text in found)
    assert [Path(one["run"]).name for one in runs["runs"]] == ["exp1"]
    assert runs["runs"][0]["state"] == "ended"
    assert (issues["healthy"], issues["issues"][0]["issue_type"]) == (False, "NUMERICAL")
    assert [step for step, _ in norm["points"]] == [1, 2, 3, 4, 5, 6]
    assert (norm["points"][-1][1], norm["not_finite_at"]) == ("NaN", [6])
    assert norm["meaning"].startswith("L2 norm of all gradients")
    assert len(loss["points"]) == 6
    assert loss["meaning"].startswith("The loss of the optimizer step")
    assert report["run_id"] == runs["runs"][0]["run_id"]
    assert "EXPLODING" in explained["may_follow_from"]
    assert explained["in_this_run"][0]["recommendation"]


def test_nothing_but_protocol_is_on_standard_output(tmp_path: Path) -> None:
    """A second run in a directory, which commands tell of, is told by the list of runs."""
    for _ in range(2):
        record(tmp_path / "exp", steps=2)
    (_, text), (is_error, _) = on_stdio(("runs", {}), ("issues", {"run": "exp@2"}), place=tmp_path)
    assert len(json.loads(text)["runs"]) == 2
    assert not is_error


def test_only_its_directories_are_read(tmp_path: Path) -> None:
    """Neither a path elsewhere, nor one that leads out by dots or by a link, nor another run's identity."""
    record(tmp_path / "secret", steps=2)
    record(tmp_path / "open" / "exp", steps=2)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    (((_, text),)) = asked(tmp_path / "secret", ("runs", {}))
    secret = json.loads(text)["runs"][0]["run_id"]
    names = [
        str(tmp_path / "secret"),
        "../secret",
        "link",
        "exp/../../secret",
        secret,
        f"{tmp_path / 'secret'}@1",
        "\0",
    ]
    found = asked(tmp_path / "open", ("runs", {}), *(("report", {"run": name}) for name in names))
    assert len(json.loads(found[0][1])["runs"]) == 1
    assert [is_error for is_error, _ in found[1:]] == [True] * len(names)
    assert not [text for _, text in found[1:] if "NUMERICAL" in text]


def test_answers_are_bounded(tmp_path: Path) -> None:
    """A run of thousands of metrics and hundreds of issues, and hundreds of runs, fit into 64 KB."""
    groups = {f"train/grad_norm/block.{number}.weight": 1.0 for number in range(4000)}
    issues = [issue(f"layer{number}{'x' * 500}") for number in range(200)]
    write_run(tmp_path / "wide", *(row(step, metrics=groups, issues=issues) for step in range(1, 4)))
    for number in range(80):
        write_run(tmp_path / f"run{number:02}", row(1))
    calls: list[Call] = [
        ("runs", {}),
        ("issues", {"run": "wide"}),
        ("report", {"run": "wide"}),
        ("metric", {"run": "wide", "name": "x" * 100_000}),
        ("metric", {"run": "wide", "name": "train/grad_norm/block.7.weight", "points": 10**9}),
        ("explain", {"run": "wide", "what": "EXPLODING"}),
        ("explain", {"what": "y" * 100_000}),
        ("report", {"run": "z" * 100_000}),
    ]
    found = asked(tmp_path, *calls)
    assert [len(text) <= MOST_BYTES for _, text in found] == [True] * len(calls)
    assert json.loads(found[0][1])["left_out"] == 31
    assert json.loads(found[5][1])["left_out"] > 0


def test_a_long_course_keeps_its_spikes(tmp_path: Path) -> None:
    """Of many rows each point is the highest of its share, and a NaN is higher than any number."""
    norms = {500: 1e6, 700: math.nan}
    write_run(
        tmp_path / "long", *(row(step, metrics={"train/grad_norm": norms.get(step, 1.0)}) for step in range(1, 1001))
    )
    ((_, text),) = asked(tmp_path, ("metric", {"name": "train/grad_norm", "points": 20}))
    found = json.loads(text)
    assert (found["rows"], len(found["points"]), found["not_finite_at"]) == (1000, 20, [700])
    assert [500, 1e6] in found["points"]
    assert [700, "NaN"] in found["points"]
    ((_, text),) = asked(tmp_path, ("metric", {"name": "train/grad_norm", "points": 1}))
    assert json.loads(text)["points"] == [[700, "NaN"]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("metric", {"name": "train/grad_nrom"}), "Did you mean 'train/grad_norm'?"),
        (("metric", {"name": "loss", "pair": "critic"}), "pair 'critic': expected one of ''"),
        (("metric", {"name": "train/grad_norm", "points": -3}), "points -3: expected 1 or more"),
        (("explain", {"what": "vanishng"}), "Did you mean 'VANISHING'?"),
        (("report", {"run": "exp2"}), "expected one of those that the tool runs lists"),
        (("metric", {}), "name"),
    ],
)
def test_a_mistake_is_a_sentence_to_act_on(call: Call, text: str, tmp_path: Path) -> None:
    """The agent gets our own error with its remedy."""
    write_run(tmp_path / "exp", row(1))
    ((is_error, told),) = asked(tmp_path, call)
    assert is_error
    assert text in told


def test_no_run_is_no_crash(tmp_path: Path) -> None:
    """An empty directory has no runs, and a damaged one is left out."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "journal-000.jsonl").write_bytes(b"\xff{garbage")
    found = asked(tmp_path, ("runs", {}), ("issues", {}))
    assert json.loads(found[0][1]) == {"runs": [], "left_out": 0}
    assert found[1][0]
    assert "no run was found" in found[1][1]


def test_what_cannot_be_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is missing, and an SDK that is."""
    with pytest.raises(UsageError, match="expected a directory with runs"):
        make_server([tmp_path / "missing"])
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gradtrack\[mcp\]"'):
        make_server([tmp_path])
    assert CliRunner().invoke(app, ["mcp", "--help"]).exit_code == 0
