"""Several processes around one training: forks of it, workers of its data loader, and other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.programs import TRACKERS, held, journaled, once, prepare, run, start

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

STEPS = range(1, 121)
slow = pytest.mark.slow
FORKED = ["user's writer", *(pytest.param(tracker, marks=slow) for tracker in TRACKERS)]


@pytest.mark.parametrize("tracker", FORKED)
def test_case_20_fork_leaves_the_series_of_its_parent_alone(tmp_path: Path, tracker: str) -> None:
    """A child that trains on records nothing, warns once and never blocks; its exit neither writes nor closes."""
    prepare(tmp_path, tracker)
    program = """
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
        train(loop, 60)
        child = os.fork()
        if child == 0:
            loop.run(60)
            loop.manager.flush()
            if tracker == "attached wandb":
                os._exit(0)  # as multiprocessing ends a child; W&B's own exit would end the parent's service
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(loop, 60)
        loop.manager.close()
    """
    done = run(program, tmp_path, tracker)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it records nothing") == 1
    assert journaled(tmp_path) == list(STEPS)
    assert held(tmp_path, "tensorboard" if tracker == "user's writer" else tracker) == once(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["user's writer", pytest.param("attached wandb", marks=slow)])
def test_case_20_workers_of_a_data_loader(tmp_path: Path, tracker: str) -> None:
    """Workers that are forked from the middle of a training do it no harm."""
    program = """
        import torch
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
        for _ in range(3):
            for batch in torch.utils.data.DataLoader(torch.arange(40), num_workers=2, multiprocessing_context="fork"):
                train(loop, 1)
        loop.manager.close()
    """
    done = run(program, tmp_path, tracker)
    assert done.returncode == 0, done.stderr
    assert held(tmp_path, "tensorboard" if tracker == "user's writer" else tracker) == once(STEPS)


RANKS = """
    import torch.distributed as distributed
    rank = int(os.environ["OF_FOUR"])
    distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=4)
    loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
    loop.run(120)
    loop.manager.close()
    distributed.barrier()
    assert len(loop.manager.reports) == 120
"""


@slow
@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_case_22_four_ranks_are_one_run(tmp_path: Path, tracker: str) -> None:
    """Of four ranks one has a run in the tracker, with every row once; each has a journal of its own."""
    prepare(tmp_path, tracker)
    started = [start(RANKS, tmp_path, tracker, OF_FOUR=str(rank)) for rank in range(4)]
    ends = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started] == [0] * 4, ends
    assert held(tmp_path, tracker, ended=True) == once(STEPS)
    assert len(list((tmp_path / "run").glob("journal*.jsonl"))) == 4
    assert len(list((tmp_path / "wandb").glob("*run-*"))) == (tracker == "wandb")
