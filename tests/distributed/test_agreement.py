"""Ranks that were not set up alike are told so, and none waits for a collective that another does not enter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed import agreement
from tests.processes import torchrun

pytestmark = pytest.mark.slow
Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Return what the four processes have found in each case."""
    out = tmp_path_factory.mktemp("agreement") / "found.json"
    result = torchrun(4, "-m", agreement.__name__, str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(4)]


SETTINGS = (
    "check_frequency",
    "grad_log_every_n_steps",
    "log_histograms",
    "per_rank",
    "clip_type",
    "enable_gradient_monitoring",
    "max_grad_norm",
)


@pytest.mark.parametrize("name", [*SETTINGS, "step"])
def test_a_rank_that_is_set_up_otherwise_is_named_on_all_of_them(ranks: list[Found], name: str) -> None:
    """Every rank ends with an error that says which setting differs, a state that one alone has loaded included."""
    for rank, found in enumerate(ranks):
        error = found["unlike"][name]
        assert f"{name} " in error
        assert error.startswith(f"rank {rank} and rank {0 if rank == 2 else 2} differ")


def test_a_setting_may_change_on_all_ranks_at_once(ranks: list[Found]) -> None:
    """They go on; a rank that changes one alone says so, and that it waited for the others."""
    for found in ranks:
        assert len(found["changed"]["norms"]) == 4
        assert found["changed"]["norms"] == ranks[0]["changed"]["norms"]
    assert "rank 0, 2, 3 did not show its gradients within 2 seconds" in ranks[1]["changed"]["refused"]


def test_ranks_with_other_parameters(ranks: list[Found]) -> None:
    """A group of plain shards must have as many parameters everywhere."""
    assert all("parameters " in found["fewer"] for found in ranks)


def test_stages_of_a_pipeline_are_merged_each_by_itself(ranks: list[Found]) -> None:
    """Stages with different numbers of parameters share no mesh, and do not wait for each other."""
    norms = [found["stages"] for found in ranks]
    assert norms[0] == norms[1]
    assert norms[2] == norms[3]
    assert norms[0] != norms[2]


def test_groups_of_some_ranks(ranks: list[Found]) -> None:
    """Each group adds up its own shards."""
    assert [found["groups"] for found in ranks] == [2.0, 2.0, 4.0, 4.0]


def test_uneven_batches_under_join(ranks: list[Found]) -> None:
    """Under DDP no rank waits for a rank that is out of batches, and the norms are torch's own."""
    for rank, found in enumerate(ranks):
        ours, theirs = found["uneven"]
        assert len(ours) == 2 + rank
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_what_is_added_up_needs_every_rank(ranks: list[Found]) -> None:
    """Where one rank has no analyzer the others rest and say so; where one fails no rank reports, and none waits."""
    for rank, found in enumerate(ranks):
        missing, failing = found["updates"]
        assert missing["steps"] == failing["steps"] == []
        assert any("has to run on every rank" in note for note in missing["notes"]) == (rank != 3)
        assert not any("every rank" in note for note in failing["notes"])


def test_a_manager_on_one_rank_alone(ranks: list[Found]) -> None:
    """It says who is missing, and does not wait for ever."""
    assert "rank 3 did not show its gradients" in ranks[0]["alone"]
