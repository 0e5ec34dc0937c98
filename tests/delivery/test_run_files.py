"""How a run ended, on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import JournalError
from gradtrack.reports import NormSummary, ParameterStatistics, StepReport, TrainingSummary
from gradtrack.support.regular_files import check_json


def step(batch: object = None) -> StepReport:
    """Return a report whose numbers are as bad as they get."""
    weight = ParameterStatistics(
        norm=math.inf, mean=math.nan, variance=-0.0, min=-math.inf, max=5e-324, zero_fraction=0.0, element_count=3
    )
    return StepReport(step=7, loss=math.nan, parameters={"<weight>\n": weight}, batch=batch)


def same(first: StepReport, second: StepReport) -> bool:
    """Compare reports in which NaN equals NaN."""
    return first.model_dump_json() == second.model_dump_json()


def test_an_end_comes_back_as_it_was(tmp_path: Path) -> None:
    """Non-finite numbers, names of any kind and the batch survive the way through the file."""
    summary = TrainingSummary(total_steps=7)
    end = RunEnd(run_id="a-run", summary=summary, failed=True, last=[step()], flight_recorder=[step(batch=[1, 2])] * 2)
    found = RunEnd.load(end.save(tmp_path / RUN_END))
    assert found is not None
    assert (found.run_id, found.failed, found.summary) == ("a-run", True, summary)
    assert same(found.last[0], end.last[0])
    assert [report.batch for report in found.flight_recorder] == [[1, 2], [1, 2]]


def test_a_batch_that_is_no_plain_data_is_kept_as_text(tmp_path: Path) -> None:
    """A batch can be anything; what it is called is enough to find it again."""
    end = RunEnd(run_id="a-run", summary=TrainingSummary(), last=[step(batch=torch.zeros(1000))])
    found = RunEnd.load(end.save(tmp_path / RUN_END))
    assert found is not None
    assert found.last[0].batch.startswith("tensor(")
    assert len(found.last[0].batch) <= 200


def test_a_run_that_has_not_ended_has_none(tmp_path: Path) -> None:
    """A file that is not there is not an error."""
    assert RunEnd.load(tmp_path / RUN_END) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "summary": 3}'])
def test_a_file_that_is_something_else_is_an_error(tmp_path: Path, text: str) -> None:
    """The error names the file."""
    (tmp_path / RUN_END).write_text(text)
    with pytest.raises(JournalError, match=r"run_end\.json' cannot be read"):
        RunEnd.load(tmp_path / RUN_END)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"parameters": {str(number): {} for number in range(5000)}}, "7 validation errors"),
        ({"notes": [0] * 5000}, "1 validation error"),
        ({"health": {"issues": [{}] * 5000}}, "3 validation errors"),
        ({"clipping": {"groups": {str(number): {} for number in range(5000)}}}, "3 validation errors"),
    ],
)
def test_the_first_fault_of_many_ends_the_reading(tmp_path: Path, report: dict[str, Any], reason: str) -> None:
    """Of a million faults, which a file of 10 MB can have, the descriptions alone would take a gigabyte."""
    end = {"format": 1, "run_id": "a-run", "summary": {}, "last": [{"step": 1, **report}]}
    (tmp_path / RUN_END).write_text(json.dumps(end))
    with pytest.raises(JournalError, match=reason):
        RunEnd.load(tmp_path / RUN_END)


@pytest.mark.parametrize("end", ["[[],[],[]]", '{"format": 1, "last": [%s0]}' % (2000 * "0,")])
def test_an_end_beyond_the_bounds_is_an_error(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are counted before they are made."""
    monkeypatch.setattr(check_json, "__kwdefaults__", {"most_memory": 10**6})
    (tmp_path / RUN_END).write_text(end.replace("[],", "[]," * 20_000))
    with pytest.raises(JournalError, match=r"could take 6 MB of memory|more than 1000 reports"):
        RunEnd.load(tmp_path / RUN_END)


def test_a_manager_leaves_how_its_run_ended(tmp_path: Path) -> None:
    """The last step and the steps up to the first fault are there with every parameter."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GradientManager(run_dir=tmp_path, save_gradient_plots=False)
    for value in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        manager.step(model, optimizer, (model(torch.ones(1, 2)) * value).sum(), batch=value)
    manager.close(failed=True)
    found = RunEnd.load(tmp_path / RUN_END)
    assert found is not None
    assert found.failed
    assert found.summary.nan_inf_summary.skipped_steps == 1
    assert [report.step for report in found.last] == [3]
    assert [report.step for report in found.flight_recorder] == [1, 2]
    assert set(found.flight_recorder[-1].parameters) == {"weight", "bias"}
    assert found.summary.gradient_statistics.gradient_norms != NormSummary()


def test_nothing_is_left_where_nothing_happened(tmp_path: Path) -> None:
    """A manager that took no step leaves no file."""
    GradientManager(run_dir=tmp_path).close()
    assert not list(tmp_path.iterdir())
