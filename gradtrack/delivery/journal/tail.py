"""The tail of a journal: rows that version 0.1.0 kept in a file of their own until they were lines of it.

No later version writes a tail; rows that a killed process left in one are still read and replayed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from gradtrack.gradients.moments import WIDTH, describe_whole
from gradtrack.protection.strategies import clipping_fields
from gradtrack.records import Record
from gradtrack.reports.issues import HEALTHY
from gradtrack.reports.metric_names import flat_metrics
from gradtrack.support.regular_files import open_regular

_HEADER_BYTES: Final = 4096
_MOST_BYTES: Final = 2**21
"""More than a tail ever has."""
_ROW: Final = struct.Struct(f"<qqqqdddd{WIDTH}dq")
"""Number + 1, index of the terms, step, epoch, time, loss, norm, clip rate, sums of all gradients, number + 1."""
_NO_EPOCH: Final = -(2**63)
_LATEST: Final = 1e12


class _Terms(BaseModel, strict=True, extra="forbid"):
    """What rows have in common; the epsilon is added to the norm before the limit is divided by it."""

    source: str
    num_elements: int
    clip_type: str
    limit: float | None
    epsilon: float
    nan_inf: str
    with_statistics: bool


def read_tail(
    path: Path, run_id: str, rank: int, known: Container[int], note: Callable[[str], object] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a run's tail whose numbers are not known; a note says which cannot have been measured."""
    try:
        with open_regular(path) as stream:
            content = stream.read(_MOST_BYTES)
        header = json.loads(content[:_HEADER_BYTES])
        if header["gradtrack_tail"] != 1 or (header["run_id"], header["rank"]) != (run_id, rank):
            return
        terms = [_Terms(**found) for found in header["terms"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # its process ended before its first row
        return
    before = -1
    for start in range(_HEADER_BYTES, len(content) - _ROW.size + 1, _ROW.size):
        following, index, *values, again = _ROW.unpack_from(content, start)
        if following != again or following - 1 <= before:  # half a row, or one of an earlier round
            return
        before = following - 1
        if before not in known and 0 <= index < len(terms):
            try:
                yield before, _record(terms[index], *values)
            except (ValueError, TypeError, ArithmeticError, LookupError) as fault:
                if note is not None:
                    note(f"{path.name}, row {before}: {fault!s:.120}")


def _record(
    terms: _Terms, step: int, epoch: int, time: float, loss: float, norm: float, clip_rate: float, *total: Any
) -> Record:
    if not -_LATEST < time < _LATEST:
        raise ValueError(f"time {time!r}: expected seconds since 1970")
    fields = {
        "health": HEALTHY,
        "clipping": clipping_fields(terms.clip_type, terms.limit, terms.epsilon, norm, clip_rate),
        "nan_inf": {"action": terms.nan_inf},
    }
    if terms.with_statistics:
        fields["statistics"] = describe_whole(total, terms.num_elements, ())
    return Record(
        step=step,
        time=time,
        metrics={name: float(value) for name, value in flat_metrics(fields, step, terms.source).items()},
        epoch=None if epoch == _NO_EPOCH else epoch,
        loss=None if loss != loss else loss,
        source=terms.source,
    )
