"""The sentences on metrics: every name that is emitted has one, and none is about a name that nothing emits."""

from functools import cache

import pytest

from gradtrack import registry
from gradtrack.records import Metric
from gradtrack.reports import StepReport
from tests.docs import emission

CORE = StepReport.described


def described(analyzer: str) -> tuple[Metric, ...]:
    """Return the sentences of an analyzer, or of the core."""
    return CORE if analyzer == "core" else registry.analyzers.load(analyzer).report_type.described


@cache
def emitted(analyzer: str) -> frozenset[str]:
    """Return the names that a part emits beyond those of every training."""
    names = emission.every()[analyzer]()
    if analyzer == "core":
        return frozenset(names)
    return frozenset(name for name in names if not name.startswith("train/"))


def undescribed(names: frozenset[str] | set[str], metrics: tuple[Metric, ...]) -> list[str]:
    """Return the names without a sentence."""
    return sorted(name for name in names if not any(metric.matches(name) for metric in metrics))


def test_every_analyzer_is_made_to_emit() -> None:
    """A new analyzer needs a training here that shows all of its metrics."""
    assert set(emission.every()) == {"core", *registry.analyzers.builtin()}


@pytest.mark.parametrize("analyzer", emission.every())
def test_every_metric_has_a_sentence(analyzer: str) -> None:
    """What is emitted is described beside the code that emits it."""
    assert emitted(analyzer)
    assert undescribed(emitted(analyzer), described(analyzer)) == []


@pytest.mark.parametrize("analyzer", emission.every())
def test_every_sentence_is_about_a_metric(analyzer: str) -> None:
    """What is described can be emitted; a name with its own sentence is no example of a pattern."""
    names = emitted(analyzer) - {metric.name for metric in described(analyzer) if "<" not in metric.name}
    missing = [
        metric.name
        for metric in described(analyzer)
        if (not any(map(metric.matches, names)) if "<" in metric.name else metric.name not in emitted(analyzer))
    ]
    assert missing == []


def test_named_pair_adds_its_name() -> None:
    """A pair with a name emits the same metrics with its name in them, before that of a group."""
    names = emission.second_pair()
    core = {name for name in names if name.startswith("train/")}
    assert all(f"/{emission.PAIR}" in name for name in names)
    assert undescribed({name.replace(f"/{emission.PAIR}", "") for name in core}, CORE) == []
    assert f"train/grad_norm/{emission.PAIR}/4" in names
    assert f"gain/mean/{emission.PAIR}" in names


def test_ranks_emit_nothing_else() -> None:
    """Sharded parameters have the same metrics as plain ones."""
    names = emission.on_ranks()
    assert "train/grad_norm" in names
    assert undescribed(names, CORE) == []


def test_sentences_are_sentences() -> None:
    """Each begins with a capital letter or a number, ends with a full stop, and each name has one."""
    metrics = [metric for analyzer in emission.every() for metric in described(analyzer)]
    assert [one.name for one in metrics if not one.meaning.endswith(".") or one.meaning[0].islower()] == []
    assert len({one.name for one in metrics}) == len(metrics)
