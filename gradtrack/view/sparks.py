"""Curves as one line of characters."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.view.thinning import thin_out

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 28


def sparkline(
    values: NDArray[np.float64],
    *,
    log_scale: bool = False,
    width: int = WIDTH,
    scale: NDArray[np.float64] | None = None,
) -> str:
    """Draw a line with block characters; what is not finite is left out.

    The lowest and the highest block are the extremes of the line, or of the values in `scale`.
    """
    shown = thin_out(np.arange(len(values)), _logs(values) if log_scale else values, buckets=width).median
    if not len(shown):
        return ""
    bounds = shown
    if scale is not None:
        known = _logs(scale) if log_scale else scale
        bounds = known[np.isfinite(known)]
    low, high = float(bounds.min()), float(bounds.max())
    steps = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * steps)] for value in shown.tolist())


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)
