"""The fixed sample of a tensor."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.tools.samples import dot, sampled


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_it_takes_the_same_elements_from_every_layout(rows: int, columns: int, most: int, transposed: bool) -> None:
    """At most so many elements, in their logical order, however the tensor lies in memory; a copy, not a view."""
    values = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    tensor = values.t().contiguous().t() if transposed else values
    found = sampled(tensor, most)
    assert len(found) <= most
    assert len(found) >= min(rows * columns, most) / (2 + columns)
    assert torch.equal(found, sampled(values, most))
    found += 1
    assert torch.equal(tensor, values)


def test_no_column_is_left_out() -> None:
    """A matrix whose width is a power of two is sampled in all of its columns."""
    columns = sampled(torch.arange(1024 * 1024).reshape(1024, 1024) % 1024, 4096)
    assert len(set(columns.tolist())) == 1024


def test_complex_numbers_are_two_each() -> None:
    """Real and imaginary parts are elements."""
    assert torch.equal(sampled(torch.tensor([1 + 2j])), torch.tensor([1.0, 2.0]))
    assert math.isclose(float(sampled(torch.ones(3, requires_grad=True)).sum()), 3.0)


@given(st.lists(st.floats(-1e100, 1e100), max_size=30))
def test_a_dot_product_is_the_sum_of_products(values: list[float]) -> None:
    """As exact sums of the products have it."""
    first, second = np.array(values), np.array(values[::-1])
    exact = math.fsum(a * b for a, b in zip(values, values[::-1], strict=True))
    scale = math.fsum(abs(a * b) for a, b in zip(values, values[::-1], strict=True))
    assert abs(dot(first, second) - exact) <= 1e-14 * scale + 1e-300


_OTHER_THREADS = """
import os
from pathlib import Path
import numpy as np
from gradtrack.analyzers.tools.samples import dot

def ticks():
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    fields = [task.joinpath("stat").read_text().rpartition(")")[2].split() for task in tasks]
    return sum(int(found[11]) + int(found[12]) for found in fields)

values = np.random.default_rng(0).standard_normal(60_000)
before = ticks()
for _ in range(5_000):
    dot(values, values)
print(ticks() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads cannot be looked at here")
def test_a_dot_product_wakes_no_other_thread() -> None:
    """Threads that numpy's BLAS has woken go on spinning beside those of torch, and slow the training's next steps."""
    done = subprocess.run([sys.executable, "-c", _OTHER_THREADS], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
