"""Replicas that drift apart, over processes of their own; and a capture on each of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradtrack.capture.replay import replay_step
from gradtrack.errors import JournalError, UsageError
from gradtrack.fingerprints import Replicas, Row, first_difference
from gradtrack.support import checksums
from gradtrack.support.checksums import with_checksum
from tests.capture.test_replay import make
from tests.processes import torchrun


def header_of(path: Path) -> dict[str, Any]:
    """Return the first line of fingerprints."""
    found: dict[str, Any] = json.loads(path.read_bytes().split(b"\n")[1])
    return found


def row(step: int, weight: float) -> Row:
    """Return the fingerprints of a step whose one weight has the hash of its number."""
    return Row(step=step, weights=[(str(weight), weight)], gradients=[])


def write(path: Path, run_id: str, session: int, rows: list[Row]) -> None:
    """Write what another rank, or another run, does in a session."""
    begin = {"fingerprints": 1, "run_id": run_id, "source": "", "session": session}
    lines = [begin, {"names": "", "parameters": ["weight"]}, *(one.model_dump() for one in rows)]
    with path.open("ab") as stream:
        stream.writelines(with_checksum(f"{json.dumps(line)}\n".encode()) for line in lines)


def test_steps_that_are_made_again_are_compared_with_those_of_the_same_session(tmp_path: Path) -> None:
    """After a resume or a rollback another rank's old row of a step is no evidence; nor is an issue before it."""
    path = tmp_path / "fingerprints-001.jsonl"
    write(path, "before", 0, [row(1, 9.0), row(2, 9.0)])
    replicas = Replicas(tmp_path, 0, [0, 1], "now")
    replicas.compare(row(1, 1.0), ["weight"], 0)
    assert replicas.issues == []
    write(path, "now", 0, [row(1, 1.0), row(2, 9.0)])
    replicas.compare(row(2, 1.0), ["weight"], 0)
    assert [(one.step, "update" in one.message) for one in replicas.issues] == [(2, True)]
    replicas.compare(row(2, 1.0), ["weight"], 1)
    assert replicas.issues == []
    write(path, "now", 1, [row(2, 1.0), row(3, 9.0)])
    replicas.compare(row(3, 1.0), ["weight"], 1)
    assert [one.step for one in replicas.issues] == [3]
    write(path, "now", 1, [row(4, 1.0)])
    replicas.compare(row(4, 1.0), ["weight"], 1)
    assert replicas.issues == []


def test_a_rank_that_is_late_is_compared_with_what_was_before(tmp_path: Path) -> None:
    """The oldest row that is kept is no first one."""
    path = tmp_path / "fingerprints-001.jsonl"
    write(path, "now", 0, [row(1, 1.0), row(2, 1.0)])
    replicas = Replicas(tmp_path, 0, [0, 1], "now")
    for step in range(1, 10):
        replicas.compare(row(step, 1.0), ["weight"], 0)
    write(path, "now", 0, [row(3, 9.0)])
    replicas.compare(row(10, 1.0), ["weight"], 0)
    assert "Cause: update; the gradients of step 2 were the same" in replicas.issues[0].message


def test_runs_of_one_directory_are_kept_apart(tmp_path: Path) -> None:
    """Each row belongs to the run whose header is before it; a run is not compared with itself."""
    path = tmp_path / "fingerprints-000.jsonl"
    write(path, "one", 0, [row(1, 1.0), row(2, 1.0)])
    write(path, "two", 0, [row(1, 1.0), row(2, 2.0)])
    found, count = first_difference(tmp_path, tmp_path, run_ids=({"one"}, {"two"}))
    assert found is not None
    assert (found.step, count) == (2, 2)
    with pytest.raises(UsageError, match="is named twice: expected two runs"):
        first_difference(tmp_path, tmp_path)
    write(tmp_path / "fingerprints-001.jsonl", "one", 0, [row(3, 1.0)])
    with pytest.raises(UsageError, match=r"the ranks of '.*' have no step in common"):
        first_difference(tmp_path)


def test_a_file_with_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are kept in memory, and a file may hold rows of a few bytes."""
    monkeypatch.setattr(checksums, "_MOST_ROWS", 3)
    for rank in range(2):
        write(tmp_path / f"fingerprints-00{rank}.jsonl", "one", 0, [row(step, 1.0) for step in range(3 + rank)])
    with pytest.raises(JournalError, match="more than 3 steps"):
        first_difference(tmp_path)


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
