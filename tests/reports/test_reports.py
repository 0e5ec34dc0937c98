"""Reports: dictionary access, JSON, lateness and metric names."""

import copy
import json
import math
import pickle
from collections import UserDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from gradtrack import HealthReport, Issue, IssueSeverity, IssueType, StepReport
from gradtrack.reports import Report, TrainingSummary, usual_confidence

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def values(number: float, *, step: int = 3) -> dict[str, Any]:
    """Return the fields of a report in which every number is the same."""
    statistics = dict.fromkeys(("mean", "variance", "min", "max", "zero_fraction"), number)
    counts = {"element_count": 4, "nan_count": 1, "inf_count": 2}
    return {
        "step": step,
        "loss": number,
        "lr": {"0": number},
        "clipping": {"norm_before": number, "norm_after": number, "threshold": 1.0},
        "statistics": {"total_norm": number, "std": number, **statistics, **counts},
        "groups": {"a": {"norm": number, **statistics, **counts}},
        "health": HealthReport.of([issue(IssueSeverity.HIGH)]),
        "notes": ["a note"],
    }


def issue(severity: IssueSeverity, layer: str = "fc1") -> Issue:
    """Return an issue of this severity."""
    return Issue(issue_type=IssueType.DEAD, severity=severity, layer=layer, message="Half is dead.", value=math.inf)


@given(number=FLOATS)
def test_json_round_trip_is_exact(number: float) -> None:
    """A report that went through JSON prints the same JSON again, NaN and infinities included."""
    report = StepReport.model_validate(values(number))
    text = report.model_dump_json()
    again = StepReport.model_validate_json(text)
    assert again.model_dump_json() == text
    assert again.loss == number or (math.isnan(number) and again.loss is not None and math.isnan(again.loss))


@given(number=FLOATS)
def test_nonfinite_numbers_survive_in_nested_reports(number: float) -> None:
    """A parent model without the setting does not turn a nested NaN into null."""

    class Parent(BaseModel):
        child: StepReport

    text = Parent(child=StepReport.model_validate(values(number))).model_dump_json()
    assert "null" not in json.dumps(json.loads(text)["child"]["statistics"])


def test_reads_like_a_dictionary() -> None:
    """Keys, get, in, [] and dict() work on a report and on its parts."""
    report = StepReport.model_validate(values(1.5))
    assert report["clipping"]["norm_before"] == 1.5
    assert "health" in report
    assert report.get("nothing", 7) == 7
    assert dict(report)["step"] == 3
    assert {**report.clipping}["threshold"] == 1.0
    with pytest.raises(KeyError, match="expected one of schema_version, step"):
        report["helth"]


def test_is_frozen() -> None:
    """A report cannot be changed, and takes no unknown field."""
    report = StepReport(step=1)
    with pytest.raises(ValidationError, match="frozen"):
        report.step = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        StepReport(step=1, stp=2)  # type: ignore[call-arg]


def test_schema_is_versioned() -> None:
    """The JSON names its schema's version, and another version is refused."""
    assert json.loads(StepReport(step=1).model_dump_json())["schema_version"] == 1
    with pytest.raises(ValidationError):
        StepReport.model_validate({"step": 1, "schema_version": 2})
    assert "schema_version" in StepReport.model_json_schema()["properties"]


class TestDeferred:
    """A report whose numbers are found when they are read."""

    def test_known_fields_do_not_resolve(self) -> None:
        """Reading what is known calls nothing."""
        report = StepReport.deferred(lambda: pytest.fail("resolved"), step=3)
        assert report.step == 3

    def test_first_read_resolves_once(self) -> None:
        """The first read of another field finds all of them, and the next read does not again."""
        calls: list[int] = []

        def resolve() -> dict[str, Any]:
            calls.append(1)
            return values(2.0)

        report = StepReport.deferred(resolve, step=3)
        assert (report.loss, report.clipping.norm_after, calls) == (2.0, 2.0, [1])

    @pytest.mark.parametrize(
        "use",
        [
            lambda report: report.model_dump()["loss"],
            lambda report: json.loads(report.model_dump_json())["loss"],
            lambda report: dict(report)["loss"],
            lambda report: copy.copy(report).loss,
            lambda report: copy.deepcopy(report).loss,
            lambda report: pickle.loads(pickle.dumps(report)).loss,
            lambda report: report.model_copy(update={"notes": []}).loss,
            lambda report: 2.0 if "loss=2.0" in repr(report) else None,
        ],
    )
    def test_every_use_sees_the_resolved_report(self, use: Any) -> None:
        """Dumping, copying, pickling and printing resolve first."""
        assert use(StepReport.deferred(lambda: values(2.0), step=3)) == 2.0

    def test_equals_the_same_report_made_at_once(self) -> None:
        """How a report was made cannot be seen from outside."""
        late = StepReport.deferred(lambda: values(2.0), step=3)
        assert late == StepReport.model_validate(values(2.0))
        assert late.model_dump_json() == StepReport.model_validate(values(2.0)).model_dump_json()

    @given(st.lists(st.sampled_from(sorted(StepReport.model_fields))))
    def test_fields_may_be_read_in_any_order(self, names: list[str]) -> None:
        """Each read gives what the whole report has, a second read the same object, and the rest stays unchanged."""
        whole, late = StepReport.model_validate(values(2.0)), StepReport.deferred(lambda: values(2.0), step=3)
        read = {name: late[name] for name in names}
        assert read == {name: whole[name] for name in names}
        assert late.metrics() == whole.metrics()
        assert (late, late.model_fields_set) == (whole, whole.model_fields_set)
        assert late.model_dump_json() == whole.model_dump_json()
        assert all(late[name] is found for name, found in read.items())

    def test_makes_only_what_is_read(self) -> None:
        """A shared field needs no call, and of the others only the one that is read is looked up."""

        class Fields(UserDict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                looked_up.append(name)
                return super().__getitem__(name)

        looked_up: list[str] = []
        health = HealthReport()
        report = StepReport.deferred(lambda: Fields(values(2.0)), {"health": health}, step=3)
        assert (report.health, looked_up) == (health, [])
        assert report.health.issues is not health.issues
        assert (report.loss, report.clipping.norm_after, looked_up) == (2.0, 2.0, ["loss", "clipping"])

    def test_knows_which_fields_were_set(self) -> None:
        """The set fields and the dictionary behind a report are those of the whole report before any field is read."""
        whole = StepReport.model_validate(values(2.0))
        assert StepReport.deferred(lambda: values(2.0), step=3).model_fields_set == whole.model_fields_set
        assert vars(StepReport.deferred(lambda: values(2.0), step=3)) == vars(whole)

    def test_unknown_attribute(self) -> None:
        """A typo is an AttributeError and resolves nothing."""
        with pytest.raises(AttributeError, match="no attribute 'helth'"):
            StepReport.deferred(lambda: pytest.fail("resolved"), step=3).helth  # noqa: B018


class TestMetrics:
    """The flat names that trackers plot."""

    def test_names_of_a_full_report(self) -> None:
        """Exactly the documented names, for the whole, the issues and the groups."""
        names = set(StepReport.model_validate(values(1.0)).metrics())
        stems = (
            "norm norm_clipped variance mean std max min zero_fraction nan_count inf_count clip_coef "
            "clip_threshold clip_rate skipped healthy issues/dead norm/a variance/a mean/a"
        )
        assert names == {f"train/grad_{stem}" for stem in stems.split()}

    def test_names_of_a_named_pair(self) -> None:
        """The name of a pair follows the metric and comes before the group."""
        names = StepReport.model_validate({**values(1.0), "source": "D"}).metrics()
        assert {"train/grad_norm/D", "train/grad_norm/D/a", "train/grad_healthy/D"} <= set(names)

    def test_analyzer_metrics_are_included(self) -> None:
        """An analyzer's own metrics keep their section."""

        class Own(Report):
            number: float = 2.0

            def metrics(self) -> dict[str, float]:
                return {"rnn/number": self.number}

        assert StepReport(step=1, analyzers={"own": Own()}).metrics()["rnn/number"] == 2.0

    def test_unknown_analyzer_report_stays_a_dictionary(self) -> None:
        """A report of an analyzer that is not installed is kept as plain data."""
        text = StepReport(step=1, analyzers={"gone": {"number": 2.0}}).model_dump_json()
        assert StepReport.model_validate_json(text).analyzers["gone"] == {"number": 2.0}


class TestHealth:
    """Issues and what they add up to."""

    @pytest.mark.parametrize("make", [StepReport, StepReport.deferred])
    def test_each_report_has_lists_of_its_own(self, make: Any) -> None:
        """What a caller adds to one report's health is in no other report's, made from the same health or not."""
        for health in (HealthReport.of([]), HealthReport.of([issue(IssueSeverity.HIGH)])):
            fields = {"step": 1, "health": health}
            one, other = (make(lambda fields=fields: fields) if make != StepReport else make(**fields) for _ in "ab")
            before = health.model_copy(deep=True)
            one.health.warnings.append("mine")
            one.health.issues.clear()
            one.health.recommendations.append("mine")
            assert other.health == health == before
            assert StepReport(step=2).health == HealthReport.of([]) == HealthReport()
            assert other.health.model_fields_set == health.model_fields_set

    @given(st.lists(st.sampled_from(IssueSeverity)))
    def test_healthy_means_nothing_of_medium_or_above(self, severities: list[IssueSeverity]) -> None:
        """LOW and INFO do not make a step unhealthy."""
        report = HealthReport.of([issue(severity) for severity in severities])
        assert report.healthy == all(severity.value in ("INFO", "LOW") for severity in severities)
        assert len(report.warnings) == len(severities)

    def test_severities_compare(self) -> None:
        """Severities are ordered by what they mean."""
        assert sorted(IssueSeverity, reverse=True)[0] is IssueSeverity.CRITICAL
        assert IssueSeverity.LOW < IssueSeverity.MEDIUM <= IssueSeverity.MEDIUM
        with pytest.raises(TypeError):
            assert IssueSeverity.LOW < 3

    def test_prints_as_a_sentence(self) -> None:
        """An issue and a health report print for people."""
        text = str(HealthReport.of([issue(IssueSeverity.HIGH)]))
        assert text == "unhealthy\n  [HIGH] DEAD at fc1: Half is dead."


def test_summary_has_the_documented_keys() -> None:
    """The nested keys that training scripts read are there."""
    summary = TrainingSummary()
    assert summary["gradient_statistics"]["gradient_norms"]["mean"] == 0.0
    assert summary["health_issues"]["unhealthy_steps"] == summary["total_steps"] == 0
    assert summary["nan_inf_summary"]["total_replacements"] == 0


def test_the_confidence_of_an_issue_is_what_was_measured_of_its_type() -> None:
    """A rule that gives none has the usual one of its type, and a low one is said, unless another issue explains it."""
    dead = Issue.found(IssueType.DEAD, "fc1", ("units_off", 0.6, 0.5), "Half is dead.", "Look.")
    assert dead.confidence == usual_confidence(IssueType.DEAD) < 0.7 < usual_confidence(IssueType.DISCONNECTED)
    assert str(dead) == "[HIGH] DEAD at fc1: Half is dead. (perhaps not the cause) Look."
    assert "perhaps" not in str(dead.model_copy(update={"explained_by": "LR_TOO_HIGH"}))
    assert all(0.5 < usual_confidence(kind) < 1.0 for kind in IssueType)
    assert Issue.found(IssueType.DEAD, "", ("", None, None), "", "", confidence=0.4).confidence == 0.4
