"""Spread over processes a training gives the numbers that it gives in one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import training
from tests.processes import torchrun

Found = dict[str, Any]


def spread(mode: str, num_processes: int, directory: Path, **settings: Any) -> list[Found]:
    """Train in several processes and return what each has found; a hang ends by the watchdog."""
    out = directory / "found.json"
    result = torchrun(num_processes, "-m", training.__name__, mode, json.dumps(settings), str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    paths = [out.with_suffix(f".{rank}.json") for rank in range(num_processes)]
    return [json.loads(path.read_text()) for path in paths]


def alone(**settings: Any) -> Found:
    """Train in this process."""
    found: Found = json.loads(json.dumps(training.run("single", settings)))
    return found


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two reports differ by more than the order of sums explains."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(one.keys() ^ other.keys())}"]
        return [line for name in one for line in differences(one[name], other[name], f"{path}.{name}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}.{index}")]
    if isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
        return [] if close else [f"{path}: {one!r} {other!r}"]
    return [] if one == other else [f"{path}: {one!r} {other!r}"]


def unnamed(report: Found) -> Found:
    """Return a report with the names that the model has without DDP, and without the loss of a rank's own share."""
    plain: Found = json.loads(json.dumps(report).replace("module.", ""))
    plain.pop("loss")
    return plain


def assert_same(found: list[Found], single: Found, mode: str) -> None:
    """Every rank holds the reports and the weights of the single process."""
    for rank in found:
        for one, other in zip(rank["reports"], single["reports"], strict=True):
            both = (one, other) if mode != "ddp" else (unnamed(one), unnamed(other))
            assert not differences(*both), f"step {other['step']}"
        assert not differences(rank["weights"], single["weights"])


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
        ("ddp", 2), ("ddp", 4), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4), ("fsdp+tp", 4),
    ))],
)  # fmt: skip
def test_numbers_are_those_of_one_process(mode: str, num_processes: int, tmp_path: Path) -> None:
    """Each field of each report and the weights after 20 clipped steps agree, with two collectives a step at most."""
    found = spread(mode, num_processes, tmp_path, max_grad_norm=0.1)
    single = alone(max_grad_norm=0.1)
    assert_same(found, single, mode)
    assert all(report["clipping"]["clipped"] for report in single["reports"][:3])
    for rank in found:
        assert set(rank["calls"]) == ({0} if mode == "ddp" else {2})
        assert rank["bytes"] == (0 if mode == "ddp" else 80 * len(rank["weights"]) + 16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "fsdp+tp"])
@pytest.mark.parametrize("settings", [{"clip_type": "value", "max_grad_norm": 0.003}, {"adaptive_clipping": True}])
def test_other_strategies_agree(mode: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Clamping each element, and a limit from the steps before, are the same on shards."""
    assert_same(spread(mode, 4, tmp_path, **settings), alone(**settings), mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "fsdp+tp"])
def test_nan_on_one_rank_skips_everywhere(mode: str, tmp_path: Path) -> None:
    """A loss that is NaN on one rank only makes every rank leave the step out, and the report names parameters."""
    found = spread(mode, 4, tmp_path, nan_step=4, steps=8)
    for rank in found:
        skipped = [report["step"] for report in rank["reports"] if report["skipped"]]
        assert skipped == [4]
        names = [entry["name"] for entry in rank["reports"][3]["nan_inf"]["parameters"]]
        assert any(name.endswith("head.weight") for name in names)
        assert not differences(rank["weights"], found[0]["weights"])
        assert all(math.isfinite(value) for values in rank["weights"].values() for value in values)


@pytest.mark.slow
def test_replacement_is_measured_again_on_every_rank(tmp_path: Path) -> None:
    """With `replace` all ranks clip by the norm of the replaced gradients and go on with the same weights."""
    found = spread("fsdp", 2, tmp_path, nan_step=3, steps=6, nonfinite_action="replace")
    assert found[0]["reports"][2]["nan_inf"]["replaced_count"] > 0
    assert not differences(found[0]["reports"], found[1]["reports"])
    assert not differences(found[0]["weights"], found[1]["weights"])


@pytest.mark.slow
def test_manager_may_run_the_backward_pass(tmp_path: Path) -> None:
    """The first step finds the parameters though the forward pass has just replaced them by whole ones."""
    found = spread("fsdp", 2, tmp_path, by_hand=False, steps=4)
    assert_same(found, alone(steps=4), "fsdp")
