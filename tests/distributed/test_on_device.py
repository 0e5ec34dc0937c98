"""Gradients that are spread over accelerators: measured, added up and decided about there, as the host would."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import on_device
from tests.distributed.ranks import run_in_ranks
from tests.distributed.test_equality import differences

Found = dict[str, Any]
ENGINES = ["torch", "triton"]


def spread(
    mode: str, num_processes: int, directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[Found]:
    """Train in several processes, whose tensors are shown as those of an accelerator; return what each has found."""
    if settings["engine"] == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = directory / "found.json"
    arguments = mode, json.dumps({"steps": 5, **settings}), str(out)
    fault = run_in_ranks(num_processes, on_device.__name__, *arguments, errors=directory / "errors")
    assert not fault, fault
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(num_processes)]


def assert_decided_alike(ranks: list[Found], num_late: int = 5) -> None:
    """Steps stayed on the device; their reports are those of the host, and the weights are the same to the bit."""
    for found in ranks:
        late, at_once = found["late"], found["at_once"]
        assert (late["late"], at_once["late"]) == (num_late, 0)
        assert late["sizes"] == at_once["sizes"]
        assert json.dumps(late["weights"]) == json.dumps(at_once["weights"])
        for one, other in zip(late["reports"], at_once["reports"], strict=True):
            assert not differences(one, other), f"step {one['step']}"
        assert not differences(late["reports"], ranks[0]["late"]["reports"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("mode", "num_processes"),
    [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("tp", 2), ("sp", 2), ("ddp+group", 2), ("fsdp1", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp+tp", 4),
    ))],
)  # fmt: skip
def test_numbers_are_those_of_whole_gradients(
    mode: str, num_processes: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statistic is what float64 makes of the whole gradients, and clipping is that of the host, to the bit."""
    settings = {"max_grad_norm": 0.1, "nonfinite_action": "report", "per_rank": True, "engine": engine}
    ranks = spread(mode, num_processes, tmp_path, monkeypatch, optimizer="SGD", lr=0.1, **settings)
    assert_decided_alike(ranks)
    late = ranks[0]["late"]
    for report, expected in zip(late["reports"], late["oracle"], strict=True):
        statistics = report["statistics"]
        statistics["norm"] = statistics["total_norm"]
        found = {"": statistics, **report["parameters"]}
        assert not expected or found.keys() == expected.keys()
        for name, values in expected.items():
            assert not differences({key: found[name][key] for key in values}, values, tolerance=1e-11), name
        assert report["clipping"]["clipped"]
        assert report["ranks"]["num_ranks"] == num_processes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("mode", "num_processes"),
    [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fsdp", 4), ("hsdp", 4)))],
)
def test_nan_on_one_rank_skips_everywhere(
    mode: str, num_processes: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer leaves the step out on every rank, by the flag of its device."""
    ranks = spread(mode, num_processes, tmp_path, monkeypatch, fused=True, nan_step=3, engine=engine)
    assert_decided_alike(ranks)
    for found in ranks:
        reports = found["late"]["reports"]
        assert [report["skipped"] for report in reports] == [False, False, True, False, False]
        assert any(entry["name"].endswith("head.weight") for entry in reports[2]["nan_inf"]["parameters"])
        assert all(math.isfinite(value) for values in found["late"]["weights"].values() for value in values)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["fsdp", "tp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"nan_step": 3, "replace_nan_with": 0.01, "max_grad_norm": 0.1},
        {"adaptive_clipping": True, "nonfinite_action": "report"},
        {"enable_gradient_clipping": False, "nonfinite_action": "report"},
    ],
    ids=str,
)
def test_settings_decide_as_on_the_host(
    mode: str, settings: Found, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are replaced, and limits that follow the norms."""
    assert_decided_alike(spread(mode, 2, tmp_path, monkeypatch, optimizer="SGD", lr=0.1, engine=engine, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("mode", "num_processes"), [("fsdp", 2), ("fsdp+tp", 4)])
@pytest.mark.parametrize("bad", [{}, {"nan_step": 3}, {"nan_step": 3, "replace_nan_with": 0.01}], ids=str)
def test_each_element_is_limited_on_the_device(
    mode: str, num_processes: int, bad: Found, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clamping limits is known before the sum, from a kernel that writes nothing; torch leaves it to the host."""
    settings = {"clip_type": "value", "max_grad_norm": 0.003, "nonfinite_action": "report", **bad}
    if "replace_nan_with" in bad:
        settings["nonfinite_action"] = "replace"
    ranks = spread(mode, num_processes, tmp_path, monkeypatch, optimizer="SGD", lr=0.1, engine=engine, **settings)
    assert_decided_alike(ranks, 5 if engine == "triton" else 0)
    assert all(0 < report["clipping"]["clipped_fraction"] < 1 for report in ranks[0]["late"]["reports"][:2])


@pytest.mark.parametrize("first", ENGINES)
def test_no_rank_leaves_a_step_there_that_another_cannot(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks agree on it: only Triton limits elements on a device, and it may work on that of one rank alone."""
    other = "torch" if first == "triton" else "triton"
    settings: Found = {"clip_type": "value", "max_grad_norm": 0.003, "nonfinite_action": "replace", "nan_step": 4}
    settings |= {"check_frequency": 3, "optimizer": "SGD", "lr": 0.1, "first_rank": {"engine": first}}
    pytest.importorskip("triton", reason="triton is not installed")
    ranks = spread("fsdp", 2, tmp_path, monkeypatch, engine=other, **settings)
    for found in ranks:
        assert found["late"]["late"] == 0
        assert found["late"]["sizes"] == ranks[0]["late"]["sizes"]
        assert found["late"]["weights"] == found["at_once"]["weights"] == ranks[0]["late"]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["fsdp", "fsdp1"])
def test_every_scaler_leaves_out_what_one_rank_found(
    mode: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags of a loss scaler are set on the device, where another rank has found something."""
    settings = {"scale": 1024.0, "nan_step": 3, "max_grad_norm": 0.1, "optimizer": "SGD", "lr": 0.1}
    ranks = spread(mode, 2, tmp_path, monkeypatch, engine=engine, **settings)
    assert_decided_alike(ranks)
    for found in ranks:
        assert found["late"]["scale"] == 512.0
        assert [report["skipped"] for report in found["late"]["reports"]] == [False, False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_between_reports_one_collective_is_enough(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first NaN between reports makes a row without statistics, since no rank knows of it before all have decided."""
    settings = {"check_frequency": 3, "nan_step": 4, "nonfinite_action": "replace", "optimizer": "SGD", "lr": 0.1}
    ranks = spread("fsdp", 2, tmp_path, monkeypatch, engine=engine, **settings)
    for found in ranks:
        late, at_once = found["late"], found["at_once"]
        assert [len(sizes) for sizes in late["sizes"]] == [1, 1, 2, 1, 1]
        assert json.dumps(late["weights"]) == json.dumps(at_once["weights"])
        assert not differences(late["reports"], ranks[0]["late"]["reports"])
        for one, other in zip(late["reports"], at_once["reports"], strict=True):
            assert not differences([one["clipping"], one["nan_inf"]], [other["clipping"], other["nan_inf"]])
        assert [report["measured"] for report in late["reports"]] == [False, False, True, False, False]
        assert late["reports"][3]["nan_inf"]["replaced_count"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("check_frequency", [1, 3])
def test_an_analyzer_of_one_rank_makes_that_rank_wait_alone(
    check_frequency: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it looks, its rank reads the numbers at once and sends what the others do, which leave theirs there."""
    settings = {"nonfinite_action": "replace", "check_frequency": check_frequency, "nan_step": 4, "max_grad_norm": 0.1}
    settings |= {"optimizer": "SGD", "lr": 0.1, "first_rank": {"analyzers": ["flow"]}}
    first, second = spread("fsdp", 2, tmp_path, monkeypatch, engine=engine, **settings)
    assert first["late"]["late"] < second["late"]["late"] == 5
    assert first["late"]["sizes"] == second["late"]["sizes"]
    assert {json.dumps(found[way]["weights"]) for found in (first, second) for way in ("late", "at_once")} == {
        json.dumps(second["late"]["weights"])
    }
    for one, other in zip(first["late"]["reports"], second["late"]["reports"], strict=True):
        for part in ("clipping", "nan_inf", "statistics", "parameters", "loss", "groups"):
            assert one["measured"] != other["measured"] or not differences(one[part], other[part]), part
