"""The verdict on the values of a loss: targets out of range, and a loss that stays at that of guessing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.loss_graph.graph import BINARY, CLASSES, Operation, layer_of, num_classes, whole_loss
from gradtrack.reports import Issue, IssueSeverity, IssueType


@dataclass(frozen=True)
class LossFunction:
    """The loss function that is all of a loss, with what its values tell together with it."""

    name: str
    layer: str
    num_classes: int | None

    @classmethod
    def of(cls, root: Operation, params: Mapping[str, nn.Parameter]) -> LossFunction | None:
        """Return that of a graph; None where it is a sum of several, or no function of torch."""
        operation = whole_loss(root)
        if operation is None or operation.name not in CLASSES | BINARY:
            return None
        return cls(operation.name, layer_of(operation, params), num_classes(operation))

    def judge(self, series: Series) -> list[Issue]:
        """Return what the values of the loss show that its graph does not."""
        return [*self._below_zero(series), *self._at_chance(series)]

    def _below_zero(self, series: Series) -> Iterator[Issue]:
        """Open where a binary cross-entropy is negative, which it is for targets outside of 0 to 1 alone."""
        last = list(series.losses)[-_FEW:]
        if self.name not in BINARY or len(last) < _FEW or not statistics.median(last) < 0:
            return
        yield Issue(
            issue_type=IssueType.TARGET_RANGE,
            severity=IssueSeverity.HIGH,
            layer=self.layer,
            message=f"The binary cross-entropy is {statistics.median(last):.3g}: it is below zero only where targets "
            "are not between 0 and 1, and then has no least value.",
            statistic="loss",
            value=statistics.median(last),
            threshold=0.0,
            window=_FEW,
            step=series.num_steps,
            confidence=0.95,
            recommendation="Give it targets of 0 and 1: labels of -1 and 1 become (labels + 1) / 2.",
        )

    def _at_chance(self, series: Series) -> Iterator[Issue]:
        """Open where a cross-entropy stays at ln(classes), which says nothing of the inputs at all.

        That is a hypothesis: there are tasks of which the beginning is flat.
        """
        last = list(series.losses)[-_LONG // 2 :]
        if self.num_classes is None or self.num_classes < 2 or series.num_steps < _LONG or len(last) < _LONG // 2:
            return
        chance = math.log(self.num_classes)
        levels = [statistics.median(last[: _LONG // 4]), statistics.median(last[_LONG // 4 :])]
        first = statistics.median(series.first_losses)
        if not all(_NEAR * chance < level < chance / _NEAR for level in [*levels, first]):
            return
        if levels[0] - levels[1] > _STILL * chance:
            return
        yield Issue(
            issue_type=IssueType.CHANCE_LEVEL,
            severity=IssueSeverity.LOW,
            layer="",
            message=f"Perhaps nothing is learned: after {series.num_steps} steps the loss is {levels[1]:.3g}, and "
            f"guessing among {self.num_classes} classes gives {chance:.3g}.",
            statistic="loss",
            value=levels[1],
            threshold=chance,
            window=_LONG // 2,
            step=series.num_steps,
            confidence=0.5,
            recommendation="If no other issue is open, the gradients are not to blame: check that inputs and labels "
            "belong together, by training on a single batch.",
        )


_FEW: Final = 8
_LONG: Final = 128
_NEAR: Final = 0.97
_STILL: Final = 0.005
