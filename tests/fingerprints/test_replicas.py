"""Replicas that drift apart, over processes of their own; and a capture on each of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradtrack.capture.replay import replay_step
from gradtrack.fingerprints import first_difference
from tests.capture.test_replay import make
from tests.processes import torchrun


def header_of(path: Path) -> dict[str, Any]:
    """Return the first line of fingerprints."""
    found: dict[str, Any] = json.loads(path.read_bytes().split(b"\n")[1])
    return found


def train(run_dir: Path, num_ranks: int, bad_rank: int, *, breaks: bool = False) -> list[list[Any]]:
    """Train replicas, and return the issues that rank 0 has found."""
    ended = torchrun(num_ranks, "-m", "tests.fingerprints.replicas", str(run_dir), str(bad_rank), str(breaks))
    assert ended.returncode == 0, ended.stderr
    found: list[list[Any]] = json.loads((run_dir / "found-0.json").read_text())
    return found


@pytest.mark.parametrize(("num_ranks", "bad_rank"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_a_rank_that_differs_by_one_bit_is_named(tmp_path: Path, num_ranks: int, bad_rank: int) -> None:
    """While the training runs, by an issue; and afterwards between its ranks, and beside a run that is right."""
    assert train(tmp_path / "right", num_ranks, -1) == []
    assert first_difference(tmp_path / "right")[0] is None
    issues = train(tmp_path / "drifts", num_ranks, bad_rank)
    assert [issue[:3] for issue in issues] == [["REPLICA_DRIFT", "head.last.weight", 37]]
    assert f"Rank {bad_rank} no longer has the numbers of the first rank" in issues[0][3]
    for others in ((), (tmp_path / "right",)):
        found, count = first_difference(tmp_path / "drifts", *others)
        assert found is not None
        assert (found.step, found.parameter, found.rank) == (37, "head.last.weight", bad_rank)
        assert (found.cause, found.num_parameters) == ("update", 1)
        assert count > 37


def test_a_second_training_leaves_the_files_of_the_first_alone(tmp_path: Path) -> None:
    """All of its ranks go to the directory of its own that rank 0 has taken, and are compared there."""
    train(tmp_path, 2, -1)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("fingerprints-*")}
    assert sorted(before) == ["fingerprints-000.jsonl", "fingerprints-001.jsonl"]
    assert [issue[0] for issue in train(tmp_path, 2, 1)] == ["REPLICA_DRIFT"]
    assert {path.name: path.read_bytes() for path in tmp_path.glob("fingerprints-*")} == before
    inside = list(tmp_path.glob("*/fingerprints-*"))
    assert sorted(path.name for path in inside) == sorted(before)
    assert len({path.parent for path in inside}) == 1
    assert len({header_of(path)["run_id"] for path in inside}) == 1


def test_every_rank_keeps_its_own_capture(tmp_path: Path) -> None:
    """The gradients of all ranks break; the rank whose batch did it is found by replaying each."""
    train(tmp_path, 2, 1, breaks=True)
    assert sorted(path.name for path in tmp_path.glob("capture-*")) == ["capture-00037", "capture-00037-rank1"]
    right = replay_step(tmp_path / "capture-00037", make)
    assert right.origin is None
    assert right.same_loss
    assert "as that of another of the 2 ranks may be" in right.notes[0]
    wrong = replay_step(tmp_path / "capture-00037-rank1", make)
    assert wrong.origin is not None
    assert wrong.same_loss
