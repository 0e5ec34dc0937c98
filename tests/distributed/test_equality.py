"""Spread over processes a training gives the numbers that it gives in one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import training
from tests.distributed.ranks import run_in_ranks
from tests.distributed.training import WIDTH

Found = dict[str, Any]


def spread(mode: str, num_processes: int, directory: Path, **settings: Any) -> list[Found]:
    """Train in several processes and return what each has found; a hang ends by the watchdog."""
    out = directory / "found.json"
    arguments = mode, json.dumps(settings), str(out)
    fault = run_in_ranks(num_processes, training.__name__, *arguments, errors=directory / "errors")
    assert not fault, fault
    paths = [out.with_suffix(f".{rank}.json") for rank in range(num_processes)]
    return [json.loads(path.read_text()) for path in paths]


def alone(**settings: Any) -> Found:
    """Train in this process."""
    found: Found = json.loads(json.dumps(training.run("single", settings)))
    return found


def differences(one: Any, other: Any, path: str = "", *, tolerance: float = 1e-9) -> list[str]:
    """Return where two reports differ by more than the order of sums explains."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(one.keys() ^ other.keys())}"]
        return [
            line for name in one for line in differences(one[name], other[name], f"{path}.{name}", tolerance=tolerance)
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = [(*pair, f"{path}.{index}") for index, pair in enumerate(zip(one, other, strict=True))]
        return [line for part in parts for line in differences(*part, tolerance=tolerance)]
    if isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance / 1000) or (
            math.isnan(one) and math.isnan(other)
        )
        return [] if close else [f"{path}: {one!r} {other!r}"]
    return [] if one == other else [f"{path}: {one!r} {other!r}"]


def comparable(report: Found, mode: str) -> Found:
    """Return a report, under DDP without the loss, since each rank has its own where nothing is sent."""
    return {name: value for name, value in report.items() if mode != "ddp" or name != "loss"}


def assert_same(found: list[Found], single: Found, mode: str, *, tolerance: float = 1e-9) -> None:
    """Every rank holds the reports and the weights of the single process."""
    for rank in found:
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            both = comparable(one, mode), comparable(other, mode)
            assert not differences(*both, tolerance=tolerance), f"step {other['step']}"
        assert not differences(rank["weights"], single["weights"], tolerance=tolerance)


@pytest.mark.parametrize(
    ("mode", "num_processes"), [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("hsdp", 4), ("tp", 2), ("fsdp+tp", 4),
    ))],
)  # fmt: skip
def test_histograms_count_every_element_once(mode: str, num_processes: int, tmp_path: Path) -> None:
    """The elements that several ranks hold, or only one, are counted as one process counts them."""
    settings: dict[str, Any] = {"log_histograms": True, "steps": 3}
    found = spread(mode, num_processes, tmp_path, **settings)
    single = alone(**settings)["histograms"]
    assert found[0]["histograms"] == single
    assert len(single) == 3
    assert all(single)


@pytest.mark.parametrize(
    ("mode", "num_processes"),
    [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ddp", 2), ("ddp", 4), ("ddp+group", 2), ("ddp+group", 4), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4),
        ("fsdp+tp", 4),
    ))],
)  # fmt: skip
def test_numbers_are_those_of_one_process(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Each field of each report and the weights after 20 clipped steps agree, with two collectives a step at most."""
    found = spread(mode, num_processes, tmp_path, max_grad_norm=0.1)
    single = alone(max_grad_norm=0.1)
    assert_same(found, single, mode)
    assert all(report["clipping"]["clipped"] for report in single["reports"][:3])
    for rank in found:
        count = len(rank["weights"])
        expected = [] if mode == "ddp" else [16 * count, 72 * count + 16]
        assert all(sizes == expected for sizes in rank["sizes"])
        assert sum(expected) <= 128 * count


@pytest.mark.slow
@pytest.mark.parametrize(("clip_type", "num_processes"), [("norm", 2), ("norm", 4), ("agc", 2)])
def test_pending_sums_are_made_together(clip_type: str, num_processes: int, tmp_path: Path) -> None:
    """Under sequence parallelism the gradients of all norms are added up at once, before the report's collectives."""
    settings = {"max_grad_norm": 0.1, "clip_type": clip_type, "agc_clip_factor": 0.002}
    found, single = spread("sp", num_processes, tmp_path, **settings), alone(**settings)
    assert_same(found, single, "sp")
    assert all(report["clipping"]["clipped"] for report in single["reports"][:3])
    for rank in found:
        assert all(len(sizes) == 3 and sizes[0] == 8 * 2 * 2 * WIDTH for sizes in rank["sizes"])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_processes"), [("fsdp", 2), ("fsdp+tp", 4)])
def test_between_reports_one_collective_is_enough(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Steps that are not reported clip alike with one collective, and the reported ones have all numbers."""
    settings = {"max_grad_norm": 0.1, "check_frequency": 4, "grad_log_every_n_steps": 8}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    measured = [step in (1, 2) or step % 4 == 0 for step in range(1, 21)]
    for rank in found:
        assert [len(sizes) for sizes in rank["sizes"]] == [1 + one for one in measured]
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            both = (one, other) if one["measured"] else (one["clipping"], other["clipping"])
            assert not differences(*both)
        assert [report["measured"] for report in rank["reports"]] == measured
        assert not differences(rank["weights"], single["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_processes"),
    [("ddp+group", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("tp", 2), ("tp", 4), ("fsdp+tp", 4)],
)
def test_numbers_in_single_precision(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Models of float32 agree to 1e-4, in each field of each report and in the weights."""
    settings = {"dtype": "float32", "optimizer": "SGD", "lr": 0.1, "max_grad_norm": 0.1}
    assert_same(spread(mode, num_processes, tmp_path, **settings), alone(**settings), mode, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_processes"), [("ddp", 2), ("fsdp", 2), ("fsdp1", 2), ("fsdp", 4), ("hsdp", 4)])
def test_a_loss_scaler_leaves_out_the_same_steps_everywhere(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Scaled losses change no number, and a NaN on one rank makes every rank's scaler back off once."""
    settings = {"scale": 1024.0, "nan_step": 3, "steps": 6}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    for rank in found:
        assert rank["scale"] == single["scale"] == 512.0
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            assert one["scaler"] == other["scaler"]
        assert [report["skipped"] for report in rank["reports"]] == [False, False, True, False, False, False]
        used = {name: values for name, values in single["weights"].items() if name != "unused"}
        assert not differences({name: rank["weights"][name] for name in used}, used)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_processes"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("fsdp+tp", 4)])
def test_updates_are_those_of_one_process(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Each rank looks at its own parts, and what they add up to in the report's sum is what one process finds."""
    settings: dict[str, Any] = {"analyzers": ["updates"], "max_grad_norm": 0.1, "optimizer": "AdamW"}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    expected = [report["analyzers"].get("updates") for report in single["reports"]]
    assert sum(one is not None for one in expected) == 4
    for one in filter(None, expected):
        for group in one["groups"].values():
            group |= dict.fromkeys(("gradient_cosine", "momentum_cosine", "moment_ratio"))
    for rank in found:
        reports = [report["analyzers"].get("updates") for report in rank["reports"]]
        assert not differences(reports, expected)
        assert not any("rank" in note for report in rank["reports"] for note in report["notes"])
        most = 128 * len(rank["weights"])
        assert all(len(sizes) == 2 and sum(sizes) <= most for sizes in rank["sizes"])


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_flat_shards_are_counted_once(num_processes: int, tmp_path: Path) -> None:
    """FSDP 1, whose shards are plain tensors, clips by the norm of the whole, and its counts are those of the whole."""
    found = spread("fsdp1", num_processes, tmp_path, max_grad_norm=0.1)
    single = alone(max_grad_norm=0.1)
    for rank in found:
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            assert not differences(one["clipping"], other["clipping"])
            one["parameters"].pop("unused")  # which has a gradient of zeros, since it shares a tensor with others
            assert not differences(one["parameters"], other["parameters"])
        count = len(rank["weights"])
        assert all(sizes == [16 * count, 80 * count + 16] for sizes in rank["sizes"])


@pytest.mark.slow
def test_spread_between_ranks(tmp_path: Path) -> None:
    """Every rank knows the smallest and the largest norm of a rank, and which ranks have them."""
    found = spread("fsdp", 4, tmp_path, per_rank=True, steps=3, nan_step=2)
    for rank in found:
        assert rank["reports"] == found[0]["reports"]
        spreads = [report["ranks"] for report in rank["reports"]]
        assert all(one["num_ranks"] == 4 for one in spreads)
        assert all(0 <= one["norm_min"] < one["norm_max"] for one in spreads[::2])
        squares = [4 * (one["norm_std"] ** 2 + one["norm_mean"] ** 2) for one in spreads]
        norms = [report["statistics"]["total_norm"] for report in rank["reports"]]
        assert squares == pytest.approx([norm**2 for norm in norms], rel=1e-6)  # each shard counts once
        assert [one["nonfinite_ranks"] > 0 for one in spreads] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "fsdp+tp"])
@pytest.mark.parametrize("settings", [{"clip_type": "value", "max_grad_norm": 0.003}, {"adaptive_clipping": True}])
def test_other_strategies_agree(mode: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Clamping each element, and a limit from the steps before, are the same on shards, in two collectives."""
    found = spread(mode, 4, tmp_path, **settings)
    assert_same(found, alone(**settings), mode)
    assert all(len(sizes) == 2 for rank in found for sizes in rank["sizes"])
    assert any(report["clipping"]["clipped"] for report in found[0]["reports"])


@pytest.mark.parametrize(
    ("mode", "num_processes", "order"),
    [("fsdp", 2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("fsdp", 2, 2), ("fsdp", 3, 3), ("fsdp", 4, "inf"), ("hsdp", 4, 1), ("tp", 2, 1), ("tp", 2, "inf"),
        ("fsdp1", 2, 1), ("fsdp+tp", 4, 2), ("fsdp+tp", 4, 1), ("ddp", 2, 1), ("ddp+group", 2, 1),
    ))],
)  # fmt: skip
def test_groups_are_clipped_alike(mode: str, num_processes: int, order: Any, tmp_path: Path) -> None:
    """Limits by group and norms of other orders are those of one process; another order takes collectives more."""
    settings: dict[str, Any] = {"max_grad_norm": {"blocks": 0.1, "head": 0.01}, "norm_type": order, "steps": 6}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    more = 0 if order == 2 or mode == "ddp" else 1 if order == "inf" else 2
    for rank in found:
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            assert not differences(one["clipping"], other["clipping"]), f"step {other['step']}"
        used = {name: values for name, values in single["weights"].items() if name != "unused"}  # fsdp1 decays it
        assert not differences({name: rank["weights"][name] for name in used}, used)
        assert all(len(sizes) == (0 if mode == "ddp" else 2) + more for sizes in rank["sizes"])
    first = single["reports"][0]["clipping"]["groups"]
    assert [first[name]["clipped"] for name in ("blocks", "head")] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_processes"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("fsdp+tp", 4)])
def test_units_that_no_rank_has_whole_are_limited_alike(mode: str, num_processes: int, tmp_path: Path) -> None:
    """A row or a vector that is cut is limited by its norm over all ranks, which takes 16 bytes and no collective."""
    settings = {"clip_type": "agc", "agc_clip_factor": 0.002}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    assert_same(found, single, mode)
    assert all(report["clipping"]["clipped"] for report in single["reports"][:3])
    # Every vector in FSDP's shards; of tensor parallel the biases of the columns, and the rows that are cut.
    num_cut = {"tp": 2 + 2 * WIDTH, "fsdp+tp": 11 + 2 * WIDTH}.get(mode, 11)
    for rank in found:
        count = len(rank["weights"])
        assert all(sizes == [16 * count, 88 * count + 16 + 16 * num_cut] for sizes in rank["sizes"])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_processes"), [("fsdp", 2), ("tp", 2), ("fsdp+tp", 4)])
def test_rows_that_are_not_due_are_whole(mode: str, num_processes: int, tmp_path: Path) -> None:
    """The row that an issue or a first NaN makes has the norms of the weights too, as in one process."""
    settings = {"nan_step": 5, "steps": 7, "grad_log_every_n_steps": 100}
    found, single = spread(mode, num_processes, tmp_path, **settings), alone(**settings)
    used = {**single, "reports": [{**report, "loss": None} for report in single["reports"]]}
    for rank in found:
        rank["reports"] = [{**report, "loss": None} for report in rank["reports"]]
    assert_same(found, used, mode)
    weighed = [any(group["weight_norm"] for group in report["groups"].values()) for report in single["reports"]]
    assert weighed == [True, True, False, True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_processes"), [("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("fsdp1", 4), ("hsdp", 4), ("fsdp+tp", 4)]
)
def test_nan_on_one_rank_skips_everywhere(mode: str, num_processes: int, tmp_path: Path) -> None:
    """A loss that is NaN on one rank only makes every rank leave the step out, and the report names parameters."""
    found = spread(mode, num_processes, tmp_path, nan_step=4, steps=8)
    for rank in found:
        skipped = [report["step"] for report in rank["reports"] if report["skipped"]]
        assert skipped == [4]
        names = [entry["name"] for entry in rank["reports"][3]["nan_inf"]["parameters"]]
        assert any(name.endswith("head.weight") for name in names)
        assert not differences(rank["weights"], found[0]["weights"])
        assert all(math.isfinite(value) for values in rank["weights"].values() for value in values)


@pytest.mark.parametrize(
    ("mode", "num_processes", "action"),
    [("fsdp", 2, "skip"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ddp", 2, "skip"), ("ddp+group", 3, "skip"), ("hsdp", 4, "skip"), ("fsdp+tp", 4, "clip"), ("fsdp1", 2, "skip"),
        ("fsdp", 4, "rollback"), ("tp", 2, "rollback"),
    ))],
)  # fmt: skip
def test_a_spike_on_one_rank_is_one_everywhere(mode: str, num_processes: int, action: str, tmp_path: Path) -> None:
    """Every rank acts on it, and goes back to the same step, though one rank alone has saved it."""
    settings = {"spike_action": action, "spike_window": 8, "spike_threshold": 20.0, "spike_step": 14, "save_step": 12}
    found = spread(mode, num_processes, tmp_path, **settings)
    for rank in found:
        spikes = {report["step"]: report["spike"]["action"] for report in rank["reports"] if report["spike"]}
        assert spikes == {14: action}
        assert [report["step"] for report in rank["reports"] if report["skipped"]] == [14] * (action != "clip")
        assert rank["rollbacks"] == [11] * (action == "rollback")
        assert not differences(rank["weights"], found[0]["weights"])
        notes = " ".join(note for report in rank["reports"] for note in report["notes"])
        assert ("judged by the norm alone" in notes) == (mode == "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "fsdp+tp"])
@pytest.mark.parametrize("clipping", [{"max_grad_norm": 0.1}, {"clip_type": "value", "max_grad_norm": 0.003}])
def test_replaced_gradients_are_clipped_alike(mode: str, clipping: dict[str, Any], tmp_path: Path) -> None:
    """With `replace` the norm of the replaced gradients follows from what was sent, and is that of one process."""
    settings = {"nan_step": 3, "steps": 6, "replace_nan_with": 0.01, **clipping}
    found = spread(mode, 4, tmp_path, **settings)
    assert_same(found, alone(**settings), mode)
    for rank in found:
        assert rank["reports"][2]["nan_inf"]["replaced_count"] > 0
        assert rank["reports"][2]["clipping"]["norm_after"] > 0
        assert all(len(sizes) == 2 for sizes in rank["sizes"])


@pytest.mark.slow
def test_manager_may_run_the_backward_pass(tmp_path: Path) -> None:
    """The first step finds the parameters though the forward pass has just replaced them by whole ones."""
    found = spread("fsdp", 2, tmp_path, by_hand=False, steps=4)
    assert_same(found, alone(steps=4), "fsdp")
