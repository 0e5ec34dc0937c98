"""Rows of usual steps as a few numbers, of which their metrics are made when somebody wants them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gradtrack.measure.moments import WIDTH, describe_whole
from gradtrack.protect.clipping import clipping_fields
from gradtrack.records import Record
from gradtrack.reports.flat import flat_metrics
from gradtrack.reports.issues import HEALTHY

_ROW: Final = struct.Struct(f"<qqqqdddd{8 * WIDTH}sq")
_NUMBER: Final = struct.Struct("<q")
_TOTAL: Final = struct.Struct(f"<{WIDTH}d")
NO_EPOCH: Final = -(2**63)
NO_LOSS: Final = float("nan")
ROW_BYTES: Final = _ROW.size
pack: Final = _ROW.pack
"""Writes down a row: number + 1, terms, step, epoch, time, loss, norm, clip rate, the last of the sums, number + 1. The
number stands at both ends, so that half a row is none."""


class Terms(NamedTuple):
    """What the rows of successive usual steps have in common."""

    source: str
    num_elements: int
    """Those of all gradients."""
    clip_type: str
    limit: float | None
    """The limit of the norm, None where nothing is clipped."""
    epsilon: float
    nan_inf: str
    """What is reported of elements that are not finite: `none`, or `off`."""
    with_statistics: bool


def number_of(row: bytes) -> int:
    """Return the number of a row, -1 where it is no whole one."""
    first: int = _NUMBER.unpack_from(row)[0]
    return first - 1 if first > 0 and row.endswith(row[: _NUMBER.size]) else -1


def unpack_row(known: Sequence[Terms], row: bytes) -> tuple[int, Record]:
    """Return the number of a row and its record: to the bit what is made of the report of its step."""
    following, index, step, epoch, time, loss, norm, rate, total, _ = _ROW.unpack(row)
    terms = known[index]
    return following - 1, Record(
        step=step,
        time=time,
        metrics=_metrics(terms, step, norm, rate, _TOTAL.unpack(total)),
        epoch=None if epoch == NO_EPOCH else epoch,
        loss=None if loss != loss else loss,
        source=terms.source,
    )


def _metrics(terms: Terms, step: int, norm: float, rate: float, total: Any) -> dict[str, float]:
    return flat_metrics(
        step=step,
        source=terms.source,
        skipped=False,
        health=HEALTHY,
        clipping=clipping_fields(terms.clip_type, terms.limit, terms.epsilon, norm, rate),
        nan_inf={"action": terms.nan_inf},
        statistics=describe_whole(total, terms.num_elements, ()) if terms.with_statistics else None,
        groups={},
        parameters={},
        ranks=None,
        scaler=None,
        analyzers={},
    )
