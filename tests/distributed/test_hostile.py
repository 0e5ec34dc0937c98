"""Frozen layers, micro-batches, other numbers of ranks and faults on one rank only: the numbers of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed import hostile
from tests.distributed.test_equality import differences
from tests.processes import torchrun

pytestmark = pytest.mark.slow
Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Return what the two processes have found in each case."""
    out = tmp_path_factory.mktemp("hostile") / "found.json"
    result = torchrun(2, "-m", hostile.__name__, str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]


def assert_twins(pairs: list[list[Found]]) -> None:
    """The report of the shards is that of one process."""
    for parts, whole in pairs:
        assert not differences(parts, whole)


@pytest.mark.parametrize("way", ["compiled", "checkpointed", "foreach", "fused", "watched"])
def test_ways_to_step_in_shards(ranks: list[Found], way: str) -> None:
    """A compiled model, checkpoints, gradients that are kept and an optimizer that is watched change no number."""
    for found in ranks:
        assert_twins(found["ways"][way])
        assert [pair[0]["step"] for pair in found["ways"][way]] == [1, 2, 3, 4]


def test_frozen_layers(ranks: list[Found]) -> None:
    """What is frozen has no place in the reports until it is set free, on every rank at the same step."""
    for found in ranks:
        assert_twins(found["frozen"])
        counts = [pair[0]["statistics"]["element_count"] for pair in found["frozen"]]
        assert counts == [43] * 3 + [73] * 3
        assert all(pair[0]["clipping"]["clipped"] for pair in found["frozen"])


def test_micro_batches_in_shards(ranks: list[Found]) -> None:
    """What FSDP2 has not reduced yet is not measured; the report is of all micro-batches of all ranks."""
    for found in ranks:
        assert_twins(found["accumulated"])


def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks: list[Found]) -> None:
    """One process continues what two have remembered and the other way round, and no limit jumps."""
    for found in ranks:
        assert_twins(found["continued"])
        assert [pair[0]["step"] for pair in found["continued"]] == list(range(16, 31))
        assert len({pair[0]["clipping"]["threshold"] for pair in found["continued"]}) > 5


@pytest.mark.parametrize("case", ["skip", "report", "replace", "replace-value", "replace-agc"])
def test_a_fault_in_one_shard(ranks: list[Found], case: str) -> None:
    """Both ranks do what one process does with the whole, and leave the same gradients, in two collectives."""
    for found in ranks:
        pair, (parts, whole), sizes = found[case]
        assert_twins([pair])
        assert not differences(parts, whole)
        assert pair[0]["nan_inf"]["action"] == case.split("-")[0]
        assert [entry["name"] for entry in pair[0]["nan_inf"]["parameters"]] == ["weight"]
        assert pair[0]["clipping"]["clipped"] == case.startswith("replace")
        assert len(sizes) == 2
    assert not differences(ranks[0][case][:2], ranks[1][case][:2])


def test_a_fault_in_one_replica(ranks: list[Found]) -> None:
    """As under tensor parallel: what one rank alone holds in its copy of a plain tensor is left out on both."""
    for found in ranks:
        report, sizes, left = found["replica"]
        assert (report["skipped"], report["nan_inf"]["action"]) == (True, "skip")
        assert [entry["name"] for entry in report["nan_inf"]["parameters"]] == ["whole"]
        assert report["nan_inf"]["nan_count"] == 1
        assert (len(sizes), left) == (2, False)


@pytest.mark.parametrize("case", ["near", "large", "one"])
def test_a_mean_that_hides_the_variance(ranks: list[Found], case: str) -> None:
    """Gradients in shards have the variance of the whole where the difference of two sums has none of its digits."""
    for found in ranks:
        parts, whole = found["far"][case]
        assert not differences(parts, whole, tolerance=1e-6)
        assert case == "one" or whole["parameters"]["weight"]["variance"] > 0


def test_the_share_of_gradients_that_float16_cannot_hold(ranks: list[Found]) -> None:
    """In shards of float16 weights it is told of the part of each rank."""
    for found in ranks:
        assert found["subnormal"] == pytest.approx([0.0, 1.0], abs=0.3)


def test_a_loss_scaler_of_dtensors(ranks: list[Found]) -> None:
    """The step that one rank's shard spoils is left out on both, and the next is unscaled by the new scale."""
    for found in ranks:
        first, second = found["scaled"]["reports"]
        assert found["scaled"]["scales"] == [2.0, 2.0]
        assert found["scaled"]["weights"][0] == [1.0] * 5
        assert found["scaled"]["weights"][1] == pytest.approx((1.0 - 0.2 * hostile.VALUES).tolist())
        assert (first["skipped"], first["nan_inf"]["action"]) == (True, "scaler")
        assert (second["skipped"], second["scaler"]["scale"]) == (False, 2.0)
        assert second["statistics"]["total_norm"] == pytest.approx(2.0 * float(hostile.VALUES.norm()))


@pytest.mark.parametrize("case", ["stepped_inside", "stepped_inside_value"])
def test_shards_that_are_stepped_inside_the_backward_pass(ranks: list[Found], case: str) -> None:
    """After a first step that finds nothing they are measured as they pass, and merged as others are."""
    for found in ranks:
        told = found[case]
        assert [any("inside the backward pass" in note for note in notes) for notes in told["notes"]] == [
            True,
            *[False] * 3,
        ]
        assert len(told["reports"][0][0]["statistics"]["missing"]) == 4
        for parts, whole in told["reports"][1:]:
            for group in (*parts["groups"].values(), *whole["groups"].values()):
                del group["weight_norm"]  # the optimizer has stepped before one of them is measured
            assert not differences(parts, whole)
        assert all(sizes == told["sizes"][0] and len(sizes) == 2 for sizes in told["sizes"])
