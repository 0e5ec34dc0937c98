"""Records for the tests of backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gradtrack.records import Panel, Record, RunInfo


def make_records(
    count: int,
    *,
    run_id: str = "a-run",
    run_dir: Path | None = None,
    source: str = "",
    panels: Sequence[Panel] = (),
) -> list[Record]:
    """Return records of the steps from 1 on; the first carries the run and its panels."""
    tail = f"/{source}" if source else ""
    records = [
        Record(
            step=step,
            time=1_700_000_000.0 + step / 8,
            source=source,
            metrics={
                f"train/grad_norm{tail}": 1.0 / step,
                f"train/grad_norm_clipped{tail}": min(1.0, 0.7 / step),
                f"train/grad_clip_threshold{tail}": 0.7,
                f"train/grad_nan_count{tail}": float(step % 3),
                f"train/grad_norm{tail}/W_rec": 0.5 / step,
            },
        )
        for step in range(1, count + 1)
    ]
    run = RunInfo(
        run_id=run_id,
        run_dir=None if run_dir is None else str(run_dir),
        created=1_700_000_000.0,
        config={"max_grad_norm": 1.0},
    )
    return [dataclasses.replace(records[0], run=run, panels=tuple(panels)), *records[1:]]
