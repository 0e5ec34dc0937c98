"""The names of metrics in W&B."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from gradtrack.record.naming import valid_name
from gradtrack.records import tail_of

STEP: Final = "gradtrack/step"
_LONGEST_NAME: Final = 300
_LONGEST_CHART_NAME: Final = 80
"""A chart's table is an artifact, in whose name of 128 characters W&B puts the run and words of its own."""


@lru_cache(maxsize=4096)  # asked for with every row, by a thread that holds up the training while it computes
def metric_name(name: str) -> str:
    """Return the name of a metric in W&B, where a dot would be a path, a star a pattern, and an underscore reserved.

    So are the names of our own axes.
    """
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def chart_name(name: str) -> str:
    """Return the name of a chart in W&B, which may not be as long as that of a metric."""

    def plain(name: str) -> str | None:
        found = _plain(name)
        return None if found is None or len(found) > _LONGEST_CHART_NAME else found

    return valid_name(name, plain=plain, clean=_clean, longest=_LONGEST_CHART_NAME)


def _plain(name: str) -> str | None:
    usual = re.fullmatch(rf"[\w/.\- ]{{1,{_LONGEST_NAME}}}", name) is not None and name == name.strip()
    reserved = name == STEP or name.startswith(("_", f"{STEP}/"))
    return name.replace(".", ":") if usual and not reserved else None


def _clean(name: str) -> str:
    return re.sub(r"[^\w/\- ]", "_", name).strip("_ ")


def axis_of(source: str) -> str:
    """Return the name of the axis of a (model, optimizer) pair."""
    return f"{STEP}{tail_of(metric_name(source) if source else source)}"
