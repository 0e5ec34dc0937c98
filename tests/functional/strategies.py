"""Nestings of numbers and arrays, and the plain list of what is inside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

numbers = st.floats(min_value=-1e6, max_value=1e6, allow_subnormal=False).filter(
    lambda value: value == 0.0 or abs(value) > 1e-12
)
float64_arrays = st.lists(numbers, max_size=8).map(lambda values: np.array(values, dtype=np.float64))
float32_arrays = st.lists(st.floats(-1e6, 1e6, width=32), max_size=8).map(
    lambda values: np.array(values, dtype=np.float32)
)
tensors = st.lists(st.floats(-1e4, 1e4, width=16), max_size=8).map(
    lambda values: torch.tensor(values, dtype=torch.float16)
)
gradients = st.recursive(
    st.one_of(st.none(), numbers, float64_arrays, float32_arrays, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)


def flat(nested: object) -> NDArray[np.float64]:
    """Return all numbers of a nesting, by other means than the package."""
    if nested is None:
        return np.zeros(0)
    if isinstance(nested, torch.Tensor):
        return nested.double().numpy().reshape(-1)
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, Sequence):
        return np.concatenate([np.zeros(0), *(flat(item) for item in nested)])
    return np.asarray(nested, dtype=np.float64).reshape(-1)


def exact_square_sum(values: NDArray[np.float64]) -> Fraction:
    """Return the sum of squares without any rounding."""
    return sum((Fraction(float(value)) ** 2 for value in values), Fraction(0))
