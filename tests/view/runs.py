"""Reports of trainings that never took place, for what shows them."""

from __future__ import annotations

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
