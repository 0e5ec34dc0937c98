"""Records as the columns of a W&B run: on our axis, under names that W&B keeps and no other writer uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import Any, Final

from gradtrack.records import Record, tail_of
from gradtrack.support.names import valid_name

STEP: Final = "gradtrack/step"
_LONGEST_NAME: Final = 300
_LONGEST_CHART_NAME: Final = 80
"""A chart's table is an artifact, in whose name of 128 characters W&B puts the run and words of its own."""


@lru_cache(maxsize=4096)  # asked for with every row, by a thread that holds up the training while it computes
def metric_name(name: str) -> str:
    """Return a metric's name in W&B, where a dot is a path, a star a pattern; underscores and our axes are reserved."""
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def chart_name(name: str) -> str:
    """Return the name of a chart in W&B, which may not be as long as that of a metric."""
    plain = partial(_plain, longest=_LONGEST_CHART_NAME)
    return valid_name(name, plain=plain, clean=_clean, longest=_LONGEST_CHART_NAME)


def _plain(name: str, longest: int = _LONGEST_NAME) -> str | None:
    usual = re.fullmatch(rf"[\w/.\- ]{{1,{longest}}}", name) is not None and name == name.strip()
    reserved = name == STEP or name.startswith(("_", f"{STEP}/"))
    return name.replace(".", ":") if usual and not reserved else None


def _clean(name: str) -> str:
    return re.sub(r"[^\w/\- ]", "_", name).strip("_ ")


def axis_of(source: str) -> str:
    """Return the name of the axis of a (model, optimizer) pair."""
    return f"{STEP}{tail_of(metric_name(source) if source else source)}"


_TAKEN_NAME: Final = "train/grad_norm"
_MOST_BINS: Final = 512


class Columns:
    """The columns that a run has from us, each defined once, at its first value."""

    def __init__(self, package: Any, withhold: Collection[str], *, owned: bool, tell: Callable[[str], object]) -> None:
        self._wandb, self.owned, self._tell = package, owned, tell
        self.withheld = set(withhold)
        self._known: set[str] = set()
        self._originals: dict[str, str] = {}
        self._told_names = 0

    def named(self, record: Record) -> dict[str, float]:
        """Return the metrics of a record that are not withheld, by their names in W&B."""
        return {metric_name(name): value for name, value in record.metrics.items() if name not in self.withheld}

    def row(self, run: Any, record: Record) -> dict[str, Any]:
        """Return what is logged for a record."""
        if _TAKEN_NAME in record.metrics:
            self._look_for_others(run)
        axis = axis_of(record.source)
        row: dict[str, Any] = {
            self._define(run, name, axis): value for name, value in record.metrics.items() if name not in self.withheld
        }
        for name, histogram in record.histograms.items():
            if histogram.drawable and len(histogram.counts) <= _MOST_BINS:
                bins = list(histogram.counts), list(histogram.edges)
                row[self._define(run, name, axis)] = self._wandb.Histogram(np_histogram=bins)
        if axis not in self._known:
            self._known.add(axis)
            run.define_metric(axis, hidden=True)
        if len(self._originals) > self._told_names:
            self._told_names = len(self._originals)
            run.config.update({"gradtrack_names": dict(self._originals)}, allow_val_change=True)
        return {**row, axis: record.step}

    def _define(self, run: Any, name: str, axis: str) -> str:
        """Give a metric our axis, by its exact name: among patterns that overlap W&B chooses at random."""
        key = metric_name(name)
        if key not in self._known:
            self._known.add(key)
            run.define_metric(key, step_metric=axis)
            if key != name.replace(".", ":"):
                self._originals[key] = name
        return key

    def _look_for_others(self, run: Any) -> None:
        """Leave our norm out where a framework writes one under the same name to the same run."""
        if self.owned or _TAKEN_NAME in self.withheld:
            return
        if "per_device_train_batch_size" in run.config:
            reason = "the Hugging Face Trainer"
        elif self._wandb.patched["tensorboard"] or getattr(run.settings, "sync_tensorboard", False):
            reason = "sync_tensorboard"
        elif _TAKEN_NAME not in self._known and _TAKEN_NAME in run.summary.keys():  # noqa: SIM118 (no iterator)
            reason = "another part of the program"
        else:
            return
        self.withheld.add(_TAKEN_NAME)
        self._tell(f"{_TAKEN_NAME} is written to this run by {reason}; ours is left out here, the journal has it")
