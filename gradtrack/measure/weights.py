"""The norms of the weights themselves, by group."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gradtrack.measure.measurer import Measurer
from gradtrack.measure.moments import SQUARES, Moments, finite_norm
from gradtrack.measure.shards import local_part
from gradtrack.measure.table import ParameterTable


def weight_norms(table: ParameterTable, measurer: Measurer) -> dict[str, float]:
    """Return the norm of each group's weights."""
    moments, names = _measure(table, measurer), table.group_names
    return {
        name: finite_norm(row, moments.exponent) for name, row in zip(names, moments.group_rows.tolist(), strict=True)
    }


def weight_squares(table: ParameterTable, measurer: Measurer) -> NDArray[np.float64]:
    """Return the squared norm of what this rank holds of each parameter."""
    moments = _measure(table, measurer)
    scale: float = np.ldexp(1.0, 2 * moments.exponent)
    return moments.rows[:, SQUARES] * scale


def norms_from_squares(table: ParameterTable, squares: NDArray[np.float64]) -> dict[str, float]:
    """Return the norm of each group's weights from the squared norms of the parameters, added over the ranks."""
    groups = np.bincount(table.group_of, squares, len(table.group_names))
    return dict(zip(table.group_names, np.sqrt(groups).tolist(), strict=True))


def _measure(table: ParameterTable, measurer: Measurer) -> Moments:
    parts = [local_part(param) for param in table.params]
    weights = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return measurer.measure(weights, table.group_of, len(table.group_names))
