"""Metrics that are declared on the fields of a report."""

import math
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from gradtrack.records import Metric
from gradtrack.reports import Report
from gradtrack.reports.base import measured


class Part(Report):
    """One of several parts."""

    share: Annotated[float, Metric("own/share/<part>", "Share of a part.", unit="share")]
    hidden: float = 3.0


class Whole(Report):
    """A report with metrics of every kind."""

    parts: dict[str, Part] = Field(default_factory=dict)
    single: Part | None = None
    number: float | None = measured("own/number", "A number.", when="known")
    count: int = measured("own/count", "A count.", default=0)
    risk: Literal["LOW", "HIGH"] | None = measured("own/risk", "A risk.", unit="0 or 1")

    @property
    def double(self) -> Annotated[float | None, Metric("own/double", "Twice the number.")]:
        """Return twice the number."""
        return None if self.number is None else 2 * self.number


def test_metrics_follow_the_declarations() -> None:
    """Numbers, counts, labels, properties and parts by name come out under their declared names."""
    report = Whole(number=0.5, risk="HIGH", parts={"a": Part(share=0.25), "b/<c>": Part(share=0.75)})
    assert report.metrics() == {
        "own/number": 0.5,
        "own/count": 0.0,
        "own/risk": 1.0,
        "own/double": 1.0,
        "own/share/a": 0.25,
        "own/share/b/<c>": 0.75,
    }
    assert all(type(value) is float for value in report.metrics().values())


@pytest.mark.parametrize("number", [None, math.nan, math.inf])
def test_what_a_chart_cannot_show_is_left_out(number: float | None) -> None:
    """A number that is unknown or not finite has no metric; defaults do."""
    assert Whole(number=number).metrics() == {"own/count": 0.0}


def test_sentences_follow_the_declarations() -> None:
    """The fields come first, then properties, then the parts, each with its sentence; a field's type stays its own."""
    names = [metric.name for metric in Whole.described]
    assert names == ["own/number", "own/count", "own/risk", "own/double", "own/share/<part>"]
    assert Whole.described[0] == Metric("own/number", "A number.", when="known")
    assert Whole.model_fields["number"].annotation == float | None
    assert Whole().number is None


def test_each_level_fills_its_place_in_a_name() -> None:
    """The inner report's key stands before the outer one's; entries of a list are called by their name."""

    class Gate(Report):
        mean: Annotated[float, Metric("own/<gate>/<cell>", "A mean.")]

    class Cell(Report):
        name: str
        gates: dict[str, Gate]

    class Cells(Report):
        cells: list[Cell]

    report = Cells(cells=[Cell(name="rnn.0", gates={"forget": Gate(mean=0.5)})])
    assert report.metrics() == {"own/forget/rnn.0": 0.5}


def test_subclass_adds_and_replaces() -> None:
    """A class that inherits a report inherits its metrics; a field declared again has its new one."""

    class More(Whole):
        count: int = measured("own/new_count", "A count.", default=1)
        extra: float = measured("own/extra", "More.", default=2.0)

    assert More().metrics() == {"own/new_count": 1.0, "own/extra": 2.0}


def test_report_may_write_its_metrics_by_hand() -> None:
    """A plugin's report with `described` and `metrics` of its own keeps both."""

    class ByHand(Report):
        number: float = 2.0
        described: ClassVar[tuple[Metric, ...]] = (Metric("hand/number", "A number."),)

        def metrics(self) -> dict[str, float]:
            return {"hand/number": self.number}

    assert ByHand().metrics() == {"hand/number": 2.0}
    assert [metric.name for metric in ByHand.described] == ["hand/number"]


def test_report_without_metrics_has_none() -> None:
    """Nothing is declared by fields alone, nor by properties whose types exist for the type checker alone."""

    class Plain(Report):
        number: float = 2.0

        @property
        def odd(self) -> "Unknown.Kind":  # type: ignore[name-defined]  # noqa: F821
            """Return nothing."""

    assert (Plain().metrics(), Plain.described) == ({}, ())


def test_reports_that_hold_each_other() -> None:
    """A report that may hold one of its own type is followed to the end."""
    report = Tree(size=1, children={"a": Tree(size=2)})
    assert report.metrics() == {"tree/size": 1.0}
    assert [metric.name for metric in Tree.described] == ["tree/size"]


class Tree(Report):
    """A report with others of its own type."""

    size: Annotated[int, Metric("tree/size", "A size.")]
    children: dict[str, "Tree"] = Field(default_factory=dict)
