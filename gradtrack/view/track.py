"""The rows of one (model, optimizer) pair as columns of numbers."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.records import Panel, Record

_GROUP_NORM: Final = "train/grad_norm/"
_LOSS: Final = "loss"
_OVER_FINITE: Final = re.compile(r"train/grad_(?:norm(?=/)|variance)(|/.*)$", re.DOTALL)


class Track:
    """The recorded steps of one (model, optimizer) pair as columns of numbers; what a row lacks is NaN.

    The columns and the metrics of its panels are called without the name of the pair. A step that was
    recorded twice, as some findings are known one step late and as a resumed run repeats steps, is one row with what
    came last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: dict[int, int] = {}
        self._loss = array("d")
        self._columns: dict[str, array[float]] = {}
        self._nan_steps: dict[str, set[int]] = {}
        self._panels: dict[Panel, None] = {}

    def add(self, record: Record) -> None:
        """Take in one row."""
        row = self._rows.setdefault(record.step, len(self._rows))
        if record.loss is not None:
            self._set(self._loss, row, record.loss, record.step, _LOSS)
        columns = self._columns
        for name, value in record.metrics.items():
            own = self._without_source(name) if self.name else name
            column = columns.get(own)
            if column is None:
                column = columns[own] = array("d")
            if value == value and len(column) == row:
                column.append(value)  # the usual case by itself: a long run has millions of values
            else:
                self._set(column, row, value, record.step, own)
        for panel in record.panels:
            own_metrics = tuple(map(self._without_source, panel.metrics)) if self.name else panel.metrics
            self._panels[replace(panel, metrics=own_metrics)] = None

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the step of every row, in order."""
        return np.array(sorted(self._rows), dtype=np.int64)

    @property
    def loss(self) -> NDArray[np.float64]:
        """Return the loss of every row."""
        return self._in_order(self._loss)

    @property
    def names(self) -> list[str]:
        """Name the metrics, in the order in which they appeared."""
        return list(self._columns)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Return the panels that the pair declared, in a section of its own where it has a name."""
        return tuple(self._panels)

    @property
    def groups(self) -> list[str]:
        """Name the groups of parameters, in the order of the model."""
        return [name.removeprefix(_GROUP_NORM) for name in self._columns if name.startswith(_GROUP_NORM)]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a metric at every row."""
        return self._in_order(self._columns.get(name, array("d")))

    def over_finite(self, name: str) -> NDArray[np.float64]:
        """Return a metric as `column` does, but for a norm or a variance NaN where no gradient element was finite.

        Over no element at all both are 0, and the mean is not a number.
        """
        values, found = self.column(name), _OVER_FINITE.match(name)
        if found is None or f"train/grad_mean{found[1]}" not in self._columns:
            return values
        return np.where((values == 0.0) & np.isnan(self.column(f"train/grad_mean{found[1]}")), math.nan, values)

    def last(self, name: str) -> float | None:
        """Return a metric as it was last recorded, be it a number or not; None is one that never was."""
        return self._last_recorded(name, self.column(name), self.over_finite(name))

    def last_loss(self) -> float | None:
        """Return the loss that was last recorded, be it a number or not; None is none at all."""
        return self._last_recorded(_LOSS, self.loss, self.loss)

    def nan_steps(self, name: str) -> list[int]:
        """Return the steps at which a metric was recorded and is not a number."""
        rows = np.flatnonzero(np.isnan(self.column(name)))
        return sorted(self._nan_steps.get(name, set()) & set(self.steps[rows].tolist()))

    def nan_losses(self) -> list[int]:
        """Return the steps at which the loss is not a number."""
        rows = np.flatnonzero(np.isnan(self.loss))
        return sorted(self._nan_steps.get(_LOSS, set()) & set(self.steps[rows].tolist()))

    def last_norm(self, group: str) -> float:
        """Return the last norm of a group that was over a finite gradient."""
        return _last_known(self.over_finite(f"{_GROUP_NORM}{group}"))

    def end_of(self, values: NDArray[np.float64]) -> tuple[float, int | None]:
        """Return the last number of a column, and its step where a later row has none."""
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return math.nan, None
        row = int(known[-1])
        return float(values[row]), None if row + 1 == len(values) else int(self.steps[row])

    def _last_recorded(self, name: str, recorded: NDArray[np.float64], shown: NDArray[np.float64]) -> float | None:
        there = ~np.isnan(recorded)
        if name in self._nan_steps:
            there |= np.isin(self.steps, list(self._nan_steps[name]))
        rows = np.flatnonzero(there)
        return float(shown[rows[-1]]) if len(rows) else None

    def _set(self, column: array[float], row: int, value: float, step: int, name: str) -> None:
        if math.isnan(value):
            # In a column it looks like a gap.
            self._nan_steps.setdefault(name, set()).add(step)
        if row == len(column):
            column.append(value)
            return
        if row > len(column):
            column.extend([math.nan] * (row + 1 - len(column)))
        column[row] = value

    def _in_order(self, column: array[float]) -> NDArray[np.float64]:
        values = np.full(len(self._rows), math.nan)
        values[: len(column)] = column
        order = np.fromiter(self._rows, dtype=np.int64, count=len(self._rows)).argsort()
        return values[order]

    def _without_source(self, name: str) -> str:
        head, found, group = name.partition(f"/{self.name}/")
        return f"{head}/{group}" if found else name.removesuffix(f"/{self.name}")


def _last_known(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else math.nan
