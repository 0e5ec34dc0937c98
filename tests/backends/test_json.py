"""The JSON files have exactly the layout that the document on statistics promises."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gradtrack.backends import json as module
from gradtrack.backends.json import JsonBackend
from gradtrack.errors import BackendError
from gradtrack.records import Record, RunInfo

NAMES = ("norm", "variance", "mean", "max", "min")


def row(step: int, *, groups: tuple[str, ...] = ("W_in", "W_rec"), tail: str = "", **parts: Any) -> Record:
    """Make a record with every statistic of the whole and of some groups."""
    metrics = {f"train/grad_{name}{tail}": step + at / 10 for at, name in enumerate(NAMES)}
    for group in groups:
        metrics |= {f"train/grad_{name}{tail}/{group}": float(step) for name in ("norm", "variance", "mean")}
    return Record(step=step, time=1.0, metrics=metrics, **parts)


def written(directory: Path, records: list[Record]) -> dict[str, Any]:
    """Write records through a backend and read every file back."""
    backend = JsonBackend(directory)
    backend.write(records)
    backend.close()
    return {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def test_global_file_has_seven_lists_of_equal_length(tmp_path: Path) -> None:
    """The keys, their order and their values are the document's; an epoch that was never passed is 0."""
    found = written(tmp_path, [row(100), row(200, epoch=3)])["gradient_statistics.json"]
    assert list(found) == ["step", "epoch", "grad_variance", "grad_mean", "grad_norm", "grad_max", "grad_min"]
    assert found == {
        "step": [100, 200],
        "epoch": [0, 3],
        "grad_variance": [100.1, 200.1],
        "grad_mean": [100.2, 200.2],
        "grad_norm": [100.0, 200.0],
        "grad_max": [100.3, 200.3],
        "grad_min": [100.4, 200.4],
    }


def test_matrix_file_has_four_lists_per_group(tmp_path: Path) -> None:
    """Each group of weights has its own step, variance, norm and mean."""
    found = written(tmp_path, [row(1), row(2, groups=("W_in", "biases"))])["gradient_statistics_weight_matrices.json"]
    assert list(found) == ["W_in", "W_rec", "biases"]
    assert list(found["W_in"]) == ["step", "variance", "norm", "mean"]
    assert [found[group]["step"] for group in found] == [[1, 2], [1], [2]]
    assert found["W_in"]["norm"] == [1.0, 2.0]


def test_no_groups_make_no_matrix_file(tmp_path: Path) -> None:
    """With groups switched off there is one file only."""
    assert list(written(tmp_path, [row(1, groups=())])) == ["gradient_statistics.json"]


def test_numbers_that_are_not_finite_are_read_by_python(tmp_path: Path) -> None:
    """NaN and Infinity are written as the document's own script reads them; a missing statistic is NaN."""
    record = Record(step=1, time=1.0, metrics={"train/grad_norm": math.inf, "train/grad_mean": math.nan})
    found = written(tmp_path, [record])["gradient_statistics.json"]
    assert found["grad_norm"] == [math.inf]
    assert math.isnan(found["grad_mean"][0])
    assert math.isnan(found["grad_max"][0])


def test_rows_without_statistics_have_no_place(tmp_path: Path) -> None:
    """A row that only an analyzer wrote to leaves the lists alone, and a replay does not bring it again."""
    record = Record(step=1, time=1.0, metrics={"rnn/spectral_radius": 0.9})
    backend = JsonBackend(tmp_path)
    backend.write([record])
    backend.close()
    assert list(tmp_path.iterdir()) == []
    assert JsonBackend(tmp_path).present([record]) == {("", 1)}


def test_pair_with_a_name_has_files_of_its_own(tmp_path: Path) -> None:
    """The layout of the files stays the same for every pair; a name never becomes a path."""
    records = [row(1), row(1, tail="/critic", source="critic"), row(2, tail="/../x", source="../x")]
    found = written(tmp_path / "run", records)
    assert found["gradient_statistics.json"]["step"] == [1]
    assert found["gradient_statistics.critic.json"]["grad_norm"] == [1.0]
    assert list(found["gradient_statistics_weight_matrices.critic.json"]) == ["W_in", "W_rec"]
    assert len(found) == 6
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run"]


def test_directory_is_the_runs_unless_named(tmp_path: Path) -> None:
    """The first record says where the run's files go; without it and without the option it is unknown."""
    backend = JsonBackend()
    backend.write([row(1, run=RunInfo(run_id="r", run_dir=str(tmp_path / "run")))])
    backend.close()
    assert (tmp_path / "run" / "gradient_statistics.json").exists()
    with pytest.raises(BackendError, match="no directory is known"):
        JsonBackend().write([row(1)])


def test_moved_run_is_found_where_it_lies_now(tmp_path: Path) -> None:
    """The run's own directory is no address: a replay takes the one that it was called with."""
    backend = JsonBackend()
    backend.write([row(1, run=RunInfo(run_id="r", run_dir=str(tmp_path / "old")))])
    backend.close()
    assert backend.address() == {}
    (tmp_path / "old").rename(tmp_path / "new")
    again = JsonBackend()
    there = again.present([row(1, run=RunInfo(run_id="r", run_dir=str(tmp_path / "new"))), row(2)])
    assert there == {("", 1)}
    assert JsonBackend(tmp_path / "files").address() == {"directory": str(tmp_path / "files")}


def test_run_that_goes_on_keeps_its_columns(tmp_path: Path) -> None:
    """A second backend in the same directory adds to the rows of the first."""
    written(tmp_path, [row(1)])
    found = written(tmp_path, [row(2)])
    assert found["gradient_statistics.json"]["step"] == [1, 2]
    assert found["gradient_statistics_weight_matrices.json"]["W_in"]["step"] == [1, 2]


def test_run_that_repeats_steps_replaces_them(tmp_path: Path) -> None:
    """From the first step that is done again on, a resumed or repeated run leaves no row of the earlier one."""
    written(tmp_path, [row(step) for step in (100, 200, 300, 400)])
    found = written(tmp_path, [row(step, epoch=7) for step in (200, 250, 300)])
    assert found["gradient_statistics.json"]["step"] == [100, 200, 250, 300]
    assert found["gradient_statistics.json"]["epoch"] == [0, 7, 7, 7]
    assert found["gradient_statistics_weight_matrices.json"]["W_rec"]["step"] == [100, 200, 250, 300]
    assert len(found["gradient_statistics.json"]["grad_max"]) == 4


def test_next_run_leaves_the_files_of_the_last(tmp_path: Path) -> None:
    """A named directory that has files of another run is left to it, but a resumed run goes on in them."""
    for run_id, at in (("first", 0), ("second", 0), ("resumed", 1)):
        backend = JsonBackend(tmp_path)
        resumed = {"resumed_from": "first", "resumed_at": {"": at}} if at else {}
        backend.write([row(1 + at, run=RunInfo(run_id=run_id, **resumed))])  # type: ignore[arg-type]
        backend.close()
        assert backend.address() == {"directory": str(tmp_path / "second" if run_id == "second" else tmp_path)}
    assert json.loads((tmp_path / "gradient_statistics.json").read_text())["step"] == [1, 2]
    assert json.loads((tmp_path / "second" / "gradient_statistics.json").read_text())["step"] == [1]


@pytest.mark.parametrize("content", ["{", "[1]", '{"step": 3}', "null", '{"step": [[]]}', '{"a": {"step": 3}}'])
def test_file_that_cannot_be_read_is_moved_aside(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What another program wrote there is not lost, and is named."""
    (tmp_path / "gradient_statistics.json").write_text(content)
    assert written(tmp_path, [row(1)])["gradient_statistics.json"]["step"] == [1]
    (aside,) = tmp_path.glob("*.unreadable-*")
    assert aside.read_text() == content
    assert f"left aside as '{aside.name}'" in caplog.text


def test_what_a_replay_finds_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists within lists take a hundred times their bytes; a run that goes on reads the columns that it wrote."""
    monkeypatch.setattr(module, "MOST_MEMORY", 10**6)
    long = {"step": list(range(5000)), **{f"grad_{name}": [0.5] * 5000 for name in NAMES}, "epoch": [0] * 5000}
    for content, replayed, steps in ((long, False, 5001), (long, True, 1), ({"step": [[]] * 9000}, True, 1)):
        (tmp_path / "gradient_statistics.json").write_text(json.dumps(content))
        backend = JsonBackend(tmp_path)
        if replayed:
            backend.confine(tmp_path)
        backend.write([row(6000, groups=())])
        backend.close()
        found = json.loads((tmp_path / "gradient_statistics.json").read_text())
        assert {len(column) for column in found.values()} == {steps}
    assert len(list(tmp_path.glob("*.unreadable-*"))) == caplog.text.count("MB of memory) and is left aside") == 2


def test_rewriting_takes_a_bounded_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand quick rows are not ten thousand rewrites: the cost of one decides when the next may be."""
    now, writes = 0.0, 0

    def replace(path: Path, text: str, *, durable: bool) -> None:
        nonlocal now, writes
        now += 1.0
        writes += 1

    monkeypatch.setattr(module, "write_atomically", replace)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backend = JsonBackend(tmp_path)
    for step in range(10_000):
        now += 0.01
        backend.write([row(step, groups=())])
    assert 3 <= writes <= 7


def test_interrupted_rewrite_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is whole at every moment: what breaks half way leaves no trace."""
    written(tmp_path, [row(1)])

    def fail(*_: object) -> None:
        raise OSError("no space left")

    backend = JsonBackend(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        backend.write([row(2)])
    assert json.loads((tmp_path / "gradient_statistics.json").read_text())["step"] == [1]
    assert len(list(tmp_path.iterdir())) == 2
