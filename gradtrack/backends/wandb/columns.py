"""Records as the columns of a W&B run: on our axis, under names that W&B keeps, and none that somebody else writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Final

from gradtrack.backends.wandb.names import axis_of, metric_name
from gradtrack.records import Histogram, Record

_TAKEN_NAME: Final = "train/grad_norm"
_MOST_BINS: Final = 512


class Columns:
    """The columns that a run has from us, each defined once, at its first value."""

    def __init__(self, package: Any, withhold: Collection[str], *, owned: bool, tell: Callable[[str], object]) -> None:
        self._wandb, self._owned, self._tell = package, owned, tell
        self._withheld = set(withhold)
        self._known: set[str] = set()
        self._originals: dict[str, str] = {}
        self._told_names = 0

    @property
    def withheld(self) -> list[str]:
        """Name the metrics that are left out."""
        return sorted(self._withheld)

    def named(self, record: Record) -> dict[str, float]:
        """Return the metrics of a record that are not withheld, by their names in W&B."""
        return {metric_name(name): value for name, value in record.metrics.items() if name not in self._withheld}

    def row(self, run: Any, record: Record) -> dict[str, Any]:
        """Return what is logged for a record."""
        if _TAKEN_NAME in record.metrics:
            self._look_for_others(run)
        axis = axis_of(record.source)
        row: dict[str, Any] = {
            self._define(run, name, axis): value for name, value in record.metrics.items() if name not in self._withheld
        }
        for name, histogram in record.histograms.items():
            drawn = self._histogram(histogram)
            if drawn is not None:
                row[self._define(run, name, axis)] = drawn
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
        if self._owned or _TAKEN_NAME in self._withheld:
            return
        if "per_device_train_batch_size" in run.config:
            reason = "the Hugging Face Trainer"
        elif self._wandb.patched["tensorboard"] or getattr(run.settings, "sync_tensorboard", False):
            reason = "sync_tensorboard"
        elif _TAKEN_NAME not in self._known and _TAKEN_NAME in run.summary.keys():  # noqa: SIM118 (no iterator)
            reason = "another part of the program"
        else:
            return
        self._withheld.add(_TAKEN_NAME)
        self._tell(f"{_TAKEN_NAME} is written to this run by {reason}; ours is left out here, the journal has it")

    def _histogram(self, found: Histogram) -> Any:
        usable = len(found.edges) == len(found.counts) + 1 > 1 and all(math.isfinite(edge) for edge in found.edges)
        if not usable or len(found.counts) > _MOST_BINS:
            return None
        return self._wandb.Histogram(np_histogram=(list(found.counts), list(found.edges)))
