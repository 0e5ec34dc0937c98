"""Gradients that are not spread evenly, or not at all, on two processes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.distributed import edges
from tests.processes import torchrun

pytestmark = pytest.mark.slow
Found = dict[str, Any]
SQUARES = 91.0
"""The sum of the squares of 1 to 6, which all the parameters hold."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Return what the two processes report of each case."""
    out = tmp_path_factory.mktemp("edges") / "found.json"
    result = torchrun(2, "-m", edges.__name__, str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_reports_the_same(ranks: list[Found]) -> None:
    """Whatever a rank holds, its report is that of the other; a diagnosis is its own."""
    both = [{name: value for name, value in found.items() if name != "own"} for found in ranks]
    assert both[0] == both[1]


def test_gradient_on_one_rank_only(ranks: list[Found]) -> None:
    """An empty shard and a replica without a gradient are in the report as on the rank that has them."""
    found = ranks[0]["only_one_rank"]
    assert found["parameters"]["whole"]["norm"] == pytest.approx(math.sqrt(SQUARES))
    assert found["statistics"]["element_count"] == 7
    assert found["statistics"]["missing"] == []


def test_some_of_the_parameters(ranks: list[Found]) -> None:
    """Where one of several optimizers is to step, the gradients of the others are left out on every rank."""
    names, rows, num_tensors = ranks[0]["some"]
    assert names == ["one"]
    assert rows == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    assert num_tensors == 1


def test_pending_sums_are_made_first(ranks: list[Found]) -> None:
    """A partial gradient counts as the sum that it stands for, whether its parameter is whole or in shards."""
    for case in ("partial", "partial_of_shards"):
        assert ranks[0][case]["statistics"]["total_norm"] == pytest.approx(3.0 * math.sqrt(SQUARES))


def test_sums_made_together_are_those_of_each(ranks: list[Found]) -> None:
    """Of any type, shape and mesh; what is small and a sum goes together, the rest as torch lays it out."""
    for rank in ranks:
        assert rank["pending"] == [True] * 9


def test_squares_beyond_the_range(ranks: list[Found]) -> None:
    """All ranks measure again with the same scale where the squares overflow."""
    assert ranks[0]["huge"]["statistics"]["total_norm"] == pytest.approx(1e200 * math.sqrt(SQUARES))


def test_all_parameters_are_in_the_root(ranks: list[Found]) -> None:
    """A model that FSDP2 has just made whole is known by its shards once the backward pass is over."""
    assert ranks[0]["root_only"]["statistics"]["element_count"] == 15
    assert ranks[0]["root_only"]["statistics"]["missing"] == []


def test_plain_shards_of_a_group(ranks: list[Found]) -> None:
    """With an explicit group plain tensors count once each, and are clipped by the norm of all of them."""
    found = ranks[0]["groups"]["shards"]
    assert found["statistics"]["total_norm"] == pytest.approx(math.sqrt(SQUARES))
    assert (found["statistics"]["element_count"], found["statistics"]["max"]) == (6, 6.0)
    assert found["clipping"]["coefficient"] == pytest.approx(1 / math.sqrt(SQUARES), rel=1e-6)
    assert found["groups"]["weight"]["weight_norm"] == pytest.approx(math.sqrt(6))


def test_units_of_plain_shards_are_refused(ranks: list[Found]) -> None:
    """Nothing tells where a unit of a plain shard begins, so that clipping by unit says what to use."""
    refusal = ranks[0]["groups"]["shards_refused"]
    assert "shards that are plain tensors" in refusal
    assert "'norm'" in refusal


def test_every_scaler_leaves_out_what_one_rank_found(ranks: list[Found]) -> None:
    """A scaler looks at its own shard only; told of the others it backs off like theirs, and nothing moves."""
    for rank in ranks:
        found = rank["groups"]
        assert (found["scale"], found["unmoved"]) == (2.0, True)
        assert (found["scaled"]["skipped"], found["scaled"]["nan_inf"]["action"]) == (True, "scaler")


def test_replicas_of_a_group_are_not_counted_twice(ranks: list[Found]) -> None:
    """Under DDP an explicit group adds nothing up, and shows that the ranks agree."""
    found = ranks[0]["groups"]["replicas"]
    assert found["statistics"]["total_norm"] == pytest.approx(math.sqrt(8))
    assert found["statistics"]["element_count"] == 8
    assert (found["ranks"]["norm_std"], found["ranks"]["num_ranks"]) == (0.0, 2)
    assert found["ranks"]["norm_min"] == pytest.approx(math.sqrt(8), rel=1e-9)


def test_analyzers_see_local_parts_and_say_so(ranks: list[Found]) -> None:
    """Those that suit the model report on it, in two collectives, and notes tell once what they saw and who rests."""
    found = ranks[0]["analyzed"]
    assert {"flow", "gain", "transformer", "updates", "vector"} <= set(found["names"])
    assert found["calls"] == [2] * 5
    told = [any("parts that this rank holds" in note for note in notes) for notes in found["notes"]]
    assert told == [True] + [False] * 4
    assert any("jacobian and recurrent: left out" in note for note in found["notes"][0])


def test_verdict_on_a_part_is_no_verdict_of_all(ranks: list[Found]) -> None:
    """What the analyzers of one rank in two find opens no issue: a callback would stop that rank only."""
    for found in ranks:
        assert found["dead"][0] == {"healthy": [True] * 14, "opened": []}


def test_verdict_of_most_ranks_opens_an_issue_on_all(ranks: list[Found]) -> None:
    """What the analyzers of more than half of the ranks find is open on each of them from the same step on."""
    for found in ranks:
        healthy, opened = found["dead"][1]["healthy"], found["dead"][1]["opened"]
        assert opened
        kinds = [kind for kind, message, step in opened if message.startswith("Found on 2 of 2 ranks")]
        assert "DEAD" in kinds
        assert (healthy[2], healthy[-1]) == (True, False)
        assert found["own"][1] == ["0"]
    assert ranks[0]["dead"][1] == ranks[1]["dead"][1]


def test_micro_batches_that_are_not_reduced(ranks: list[Found]) -> None:
    """Under no_sync nothing is measured, and the report is of all micro-batches of all ranks."""
    found = ranks[0]["accumulated"]
    assert found["norm"] == pytest.approx(found["expected"], rel=1e-9)
