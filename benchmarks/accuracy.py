"""The error of the norm against float64, next to torch's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.timing import Row
from gradtrack.gradients.measurer import Measurer

SIZE = 38_000_000
BAR = 1e-6


def run(quick: bool = False) -> Iterator[Row]:
    """Measure one large tensor in every type."""
    size = SIZE // 10 if quick else SIZE
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = float(sum((piece.double() ** 2).sum() for piece in grad.split(1 << 20)) ** 0.5)
        for engine in ("native", "torch"):
            group_of = torch.zeros(1, dtype=torch.int64).numpy()
            norm = Measurer(engine).measure([grad], group_of, 1).norm  # type: ignore[arg-type]
            case = f"{size:,} elements, {str(dtype).removeprefix('torch.')}"
            yield Row(
                benchmark="accuracy",
                case=case,
                what=f"gradtrack ({engine})",
                ratio=abs(norm / exact - 1),
                bar=BAR,
                unit="",
            )
        theirs = float(torch.linalg.vector_norm(grad))
        yield Row(benchmark="accuracy", case=case, what="torch norm", ratio=abs(theirs / exact - 1), unit="")
