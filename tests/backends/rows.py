"""Records for the tests of backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gradtrack.delivery.run_files import note_files
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.reports.panels import CORE_PANELS

PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)


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


def finished_run(directory: Path, count: int = 30) -> list[Record]:
    """Return the records of a run that has left a picture and a report beside other people's files."""
    directory.mkdir(exist_ok=True)
    (directory / "passport.png").write_bytes(PICTURE)
    (directory / "training_curves.png").write_bytes(PICTURE)
    (directory / "report.html").write_text("<p>the report</p>")
    (directory / "journal-000.jsonl").write_text("{}")
    note_files(directory, "a-run", [directory / "training_curves.png", directory / "report.html"])
    return make_records(count, run_dir=directory, panels=CORE_PANELS)
