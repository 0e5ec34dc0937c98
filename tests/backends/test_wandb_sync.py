"""W&B's sync_tensorboard beside gradtrack, which writes through the SummaryWriter that W&B watches."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")

from tests.backends.history import rows_of
from tests.backends.wandb_runs import NORM, STEP, file_in, run_program

ROWS: Final = 12

PROGRAM: Final = """
    import os, time
    from pathlib import Path
    import wandb
    from torch.utils.tensorboard import SummaryWriter
    from gradtrack.backends.tensorboard import TensorBoardBackend
    from gradtrack.reports.panels import CORE_PANELS
    from tests.backends.rows import finished_run

    def wait_for_watcher():
        log, end = Path(run.dir).parent / "logs" / "debug-internal.log", time.monotonic() + 60
        while "saving file" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)

    wandb.tensorboard.patch(root_logdir=os.path.abspath("logs"))  # else W&B waits ten seconds for a second directory
    run = wandb.init(project="tests")
    writer = SummaryWriter("logs")
    backend = TensorBoardBackend(OPTIONS)
    records = finished_run(Path("run").absolute(), ROWS)
    for record in records:
        writer.add_scalar("losses/value", record.step / 4, record.step)
        backend.write([record])
        writer.flush()
        if record is records[0]:
            wait_for_watcher()
        time.sleep(0.05)  # the watcher may read between any two rows
    backend.close()
    for step in range(ROWS + 1, 2 * ROWS + 1):
        writer.add_scalar("losses/value", step / 4, step)
    writer.close()
    wandb.finish()
    print(run.dir)
"""


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("options", ["writer=writer", "log_dir='logs'", "log_dir='logs/mine'"])
def test_every_point_of_the_user_arrives(tmp_path: Path, options: str) -> None:
    """W&B reads the user's file to its end, wherever the files of gradtrack are, and what goes through the writer."""
    program = PROGRAM.replace("OPTIONS", options).replace("ROWS", str(ROWS))
    rows = rows_of(file_in(run_program(program, cwd=tmp_path, WANDB_DIR=str(tmp_path), WANDB_MODE="offline")))
    theirs = [(row["global_step"], row["losses/value"]) for row in rows if "losses/value" in row]
    assert theirs == [(step, step / 4) for step in range(1, 2 * ROWS + 1)]
    ours = [row[STEP] for row in rows if NORM in row]
    assert ours == (list(range(1, ROWS + 1)) if options == "writer=writer" else [])
    assert ("gradtrack/training_curves" in str(rows)) == (options == "writer=writer")
