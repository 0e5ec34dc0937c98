"""What the gradients of a model have in common from step to step: their names, groups and sizes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn


class Layout:
    """The names, groups and sizes of the gradients that are there, which stay the same from step to step."""

    __slots__ = (
        "counts",
        "group_counts",
        "group_names",
        "group_of",
        "missing",
        "names",
        "param_refs",
        "plan",
        "sizes",
        "total_count",
    )

    def __init__(
        self,
        names: list[str],
        params: list[nn.Parameter],
        counts: Sequence[int],
        group_of: NDArray[np.int64],
        group_names: list[str],
        missing: list[str],
    ) -> None:
        self.names, self.missing = names, missing
        self.param_refs = [weakref.ref(param) for param in params]
        self.group_of, self.group_names = group_of, group_names
        self.recount(counts)

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters, of which a report that is kept keeps none alive."""
        return [param for ref in self.param_refs if (param := ref()) is not None]

    def recount(self, counts: Sequence[int]) -> None:
        """Take new sizes, as those of sparse gradients are on every step."""
        self.counts = list(counts)
        self.sizes = np.array(self.counts, dtype=np.int64)
        self.plan: Any = None
        """What the measurer has found of gradients of these sizes, to be given to it with the next ones."""
        sums = np.bincount(self.group_of, weights=self.counts, minlength=len(self.group_names))
        self.group_counts = [int(count) for count in sums]
        self.total_count = sum(self.counts)
