"""The analyzer of precision: which share of the gradients a format of fewer bits would lose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

from pydantic import Field
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, model_of, often, panel
from gradtrack.analyzers.precision.counts import NUM_FIXED, Counts, all_counts, fixed_counts
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps, untouched
from gradtrack.gradients.groups import assign_groups
from gradtrack.records import Panel
from gradtrack.reports import Report
from gradtrack.reports.base import measured

_SHARE = "share of elements"


class GroupPrecision(Report):
    """The shares of one group of parameters; see `PrecisionReport`."""

    float16_underflow: float | None = measured(
        "precision/float16_underflow/<group>", "Elements of one group that float16 would flush to zero.", unit=_SHARE
    )
    float16_overflow: float | None = None
    bfloat16_underflow: float | None = None
    bfloat16_overflow: float | None = None
    float16_scaled_underflow: float | None = None
    float8_e4m3_underflow: float | None = measured(
        "precision/float8_e4m3_underflow/<group>",
        "Elements of one group that float8 would flush to zero, each tensor scaled to its range.",
        unit=_SHARE,
    )
    float8_e5m2_underflow: float | None = None
    num_nonzero: int = 0


class PrecisionReport(Report):
    """Shares of the finite gradient elements other than zero that a cast, to the nearest number, would lose.

    Underflow becomes zero, overflow infinite. `float16_scale` is the largest power of two as a loss scale under which
    no element overflows float16, and `float16_scaled_underflow` what is lost even so. In float8 each tensor is scaled
    so that its largest element is the largest number of the format. Where ranks share the parameters, what needs a
    scale is None.
    """

    float16_underflow: float | None = measured(
        "precision/float16_underflow", "Elements that float16 would flush to zero, without a loss scale.", unit=_SHARE
    )
    float16_overflow: float | None = measured(
        "precision/float16_overflow", "Elements that are infinite in float16, without a loss scale.", unit=_SHARE
    )
    float16_scaled_underflow: float | None = measured(
        "precision/float16_scaled_underflow",
        "Elements that float16 would flush to zero under the best loss scale.",
        unit=_SHARE,
        when="whole parameters",
    )
    float16_scale: float | None = measured(
        "precision/float16_scale",
        "The largest power of two as a loss scale under which no element overflows float16.",
        when="whole parameters",
    )
    bfloat16_underflow: float | None = measured(
        "precision/bfloat16_underflow", "Elements that bfloat16 would flush to zero.", unit=_SHARE
    )
    bfloat16_overflow: float | None = measured(
        "precision/bfloat16_overflow", "Elements that are infinite in bfloat16.", unit=_SHARE
    )
    float8_e4m3_underflow: float | None = measured(
        "precision/float8_e4m3_underflow",
        "Elements that float8 e4m3 would flush to zero, each tensor scaled to its range.",
        unit=_SHARE,
        when="whole parameters",
    )
    float8_e5m2_underflow: float | None = measured(
        "precision/float8_e5m2_underflow",
        "Elements that float8 e5m2 would flush to zero, each tensor scaled to its range.",
        unit=_SHARE,
        when="whole parameters",
    )
    groups: dict[str, GroupPrecision] = Field(default_factory=dict)
    num_nonzero: int = 0


@final
class PrecisionAnalyzer(Analyzer):
    """An analyzer of what gradients would lose in float16, bfloat16 and float8.

    It counts all elements, as they are when the optimizer gets them: unscaled and clipped. Zeros, NaN and infinities
    count nowhere, so that a share tells of the format and not of the layer.

    References: IEEE 754 for the edges of float16; Micikevicius et al. 2018, arXiv 1710.03740, for loss scales, and
    2022, arXiv 2209.05433, for float8.

    Cost: on every 4th step up to 64, then on every 64th, about a dozen passes over the gradients.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> report = PrecisionAnalyzer(model).analyze(lambda: torch.tensor([[1e-9, 1.0]]), torch.sum)
    >>> report.float16_underflow, report.float16_scale, report.float16_scaled_underflow
    (0.5, 32768.0, 0.0)
    """

    report_type: ClassVar[type[Report]] = PrecisionReport
    adds_up: ClassVar[bool] = True
    schedule: ClassVar[Schedule] = staticmethod(often)
    panels: ClassVar[tuple[Panel, ...]] = (
        panel(
            "Lost in 16 bits",
            "precision/float16_underflow",
            "precision/float16_scaled_underflow",
            "precision/float16_overflow",
            "precision/bfloat16_underflow",
            "precision/bfloat16_overflow",
        ),
        panel("Lost in float16, by group", "precision/float16_underflow/*"),
        panel("Lost in float8", "precision/float8_e4m3_underflow", "precision/float8_e5m2_underflow"),
        panel("Lost in float8 e4m3, by group", "precision/float8_e4m3_underflow/*"),
        panel("Best loss scale", "precision/float16_scale", log_scale=True),
    )

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._groups: list[str] = []

    def analyze(self, input_fn: InputFunction, loss_fn: LossFunction) -> PrecisionReport:
        """Return the shares for the gradients of one batch; the model stays as it is."""
        model = model_of(self, self._model)
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        groups = dict(zip(names, assign_groups(model, names, {}), strict=True))
        with untouched(model):
            for _ in offline_steps(model, input_fn, loss_fn, 1):
                found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
                return _of_whole(found, groups)
        raise AssertionError("offline_steps yields once")

    def num_sums(self, step: int, num_groups: int) -> int:
        return NUM_FIXED * (1 + num_groups) if self.scheduled(step) else 0

    def sums(self, snapshot: Snapshot, groups: Sequence[str]) -> Sequence[float]:
        self._groups = list(groups)
        share, (counts, _) = snapshot.counts_as or {}, fixed_counts(snapshot.gradients)
        rows = {name: [share.get(name, 1.0) * count for count in row] for name, row in counts.items()}
        parts = _by_group(rows, snapshot.groups)
        empty = [[0.0] * NUM_FIXED]
        sums = [_sum(rows.values()), *(_sum(parts.get(group, empty)) for group in groups)]
        return list(itertools.chain.from_iterable(sums))

    def inspect(self, snapshot: Snapshot) -> PrecisionReport | None:
        if snapshot.counts_as is None:
            return _of_whole(snapshot.gradients, snapshot.groups)
        if snapshot.sums is None:
            return None
        rows = [snapshot.sums[at : at + NUM_FIXED] for at in range(0, len(snapshot.sums), NUM_FIXED)]
        groups = {name: Counts(*row) for name, row in zip(self._groups, rows[1:], strict=True)}
        return _described(Counts(*rows[0]), groups, scale=None)


def _of_whole(gradients: Mapping[str, Tensor], groups: Mapping[str, str]) -> PrecisionReport:
    counts, scale = all_counts(gradients)
    parts = {group: Counts(*_sum(rows)) for group, rows in _by_group(counts, groups).items()}
    return _described(Counts(*_sum(counts.values())), parts, scale)


def _by_group(rows: Mapping[str, Sequence[float]], groups: Mapping[str, str]) -> dict[str, list[Sequence[float]]]:
    found: dict[str, list[Sequence[float]]] = {}
    for name, row in rows.items():
        if name in groups:
            found.setdefault(groups[name], []).append(row)
    return found


def _sum(rows: Iterable[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*rows, strict=True)] or [0.0] * NUM_FIXED


def _described(everything: Counts, groups: Mapping[str, Counts], scale: float | None) -> PrecisionReport:
    of_groups = {name: GroupPrecision(**_shares(counts)) for name, counts in groups.items() if counts.nonzero}
    return PrecisionReport(**_shares(everything), float16_scale=scale, groups=of_groups)


def _shares(counts: Counts) -> dict[str, Any]:
    lost = {
        "float16_underflow": counts.float16_underflow,
        "float16_overflow": counts.float16_overflow,
        "bfloat16_underflow": counts.bfloat16_underflow,
        "bfloat16_overflow": counts.bfloat16_overflow,
        "float16_scaled_underflow": counts.float16_scaled,
        "float8_e4m3_underflow": counts.float8_e4m3,
        "float8_e5m2_underflow": counts.float8_e5m2,
    }
    known = {name: count for name, count in lost.items() if counts.nonzero and not math.isnan(count)}
    return {name: count / counts.nonzero for name, count in known.items()} | {"num_nonzero": round(counts.nonzero)}
