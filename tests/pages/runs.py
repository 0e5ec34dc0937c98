"""Reports of trainings that never took place, for what shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradtrack.delivery.journal.writing import Journal
from gradtrack.pages.run_data import RunData
from gradtrack.records import Record, RunInfo
from gradtrack.reports import HealthReport, Issue, IssueSeverity, IssueType, StepReport

HOSTILE = "<script>alert('x')</script>\n\"'&🔥"


def report(step: int, *, norm: float | None = 2.0, clipped: float = 1.0, **fields: object) -> StepReport:
    """Return the report of one step; its statistics follow from its norm."""
    size = 1.0 if norm is None else norm
    statistics = {
        "total_norm": size,
        "mean": size * 1e-3 * (-1) ** step,
        "variance": size * size / 100,
        "std": size / 10,
        "min": -size / 3,
        "max": size / 2,
        "zero_fraction": 0.0,
        "element_count": 100,
        "nan_count": 0,
        "inf_count": 0,
    }
    values: dict[str, object] = {
        "step": step,
        "loss": 1.0 / step,
        "clipping": {
            "norm_before": norm,
            "norm_after": clipped,
            "threshold": 1.0,
            "clip_rate": 0.5,
            "coefficient": 0.5,
        },
        "statistics": statistics,
    }
    return StepReport.model_validate(values | fields)


def issue(layer: str = "encoder.weight", kind: IssueType = IssueType.EXPLODING, step: int = 1) -> Issue:
    """Return an issue with every text filled in."""
    return Issue(
        issue_type=kind,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"the norm of {layer} jumped",
        statistic="jump",
        value=50.0,
        threshold=10.0,
        step=step,
        recommendation="Lower the learning rate.",
    )


def unhealthy(*issues: Issue) -> HealthReport:
    """Return the health of a step with these issues open."""
    return HealthReport.of(list(issues))


def row(step: int, *, norm: float = 2.0, issues: Sequence[Issue] = (), source: str = "", **fields: Any) -> Record:
    """Return the row of a step with two groups, as a manager makes it."""
    tail = f"/{source}" if source else ""
    metrics = {
        f"train/grad_norm{tail}": norm,
        f"train/grad_norm_clipped{tail}": min(norm, 1.0),
        f"train/grad_clip_threshold{tail}": 1.0,
        f"train/grad_clip_rate{tail}": 0.5,
        f"train/grad_clip_coef{tail}": 0.5,
        f"train/grad_variance{tail}": 0.25,
        f"train/grad_max{tail}": norm / 2,
        f"train/grad_min{tail}": -norm / 3,
        f"train/grad_healthy{tail}": float(not issues),
        **{f"train/grad_norm{tail}/{group}": norm * share for group, share in (("W_in", 0.6), ("W_out", 0.8))},
    }
    values: dict[str, Any] = {"loss": 1.0 / step, "metrics": metrics} | fields
    found = tuple(issue.model_dump(mode="json") for issue in issues)
    return Record(step=step, time=float(step), source=source, issues=found, **values)


def gather(*records: Record, directory: Path = Path("nowhere"), **config: Any) -> RunData:
    """Return the data of a run with these rows."""
    return RunData.of(RunInfo(run_id="a-run", created=1.8e9, config=config), directory, records)


def write_run(directory: Path, *records: Record, run_id: str = "a-run", created: float = 1.8e9, **config: Any) -> Path:
    """Write the journal of a run that has ended."""
    journal = Journal(directory, RunInfo(run_id=run_id, created=created, config=config))
    for number, record in enumerate(records):
        assert journal.append(number, record)
    journal.close(5.0)
    return directory
