"""Ranks that are forked from a process which has imported everything, and so begin at once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.processes import WATCHDOG_SECONDS

_PRELOADED = ("torch", "gradtrack.manager", "gradtrack.gradients.native.engine", "tests.distributed.training")


def run_in_ranks(num_processes: int, module: str, *arguments: str, errors: Path) -> str:
    """Run the `main` of a module in processes that know of each other; return what went wrong, or nothing.

    They find each other as those of torchrun do. What a rank writes to stderr is in `errors`; a watchdog ends those
    that hang.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, as torch does in that process
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, num_processes, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = []
    for rank in range(num_processes):
        own = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        path = errors.with_suffix(f".{rank}.txt")
        ranks.append(context.Process(target=_run, args=(module, arguments, own, os.getcwd(), str(path)), daemon=True))
        ranks[-1].start()
    end = time.monotonic() + WATCHDOG_SECONDS
    for process in ranks:
        process.join(max(end - time.monotonic(), 0.0))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    if codes == [0] * num_processes:
        return ""
    written = [path.read_text()[-3000:] for path in sorted(errors.parent.glob(f"{errors.stem}.*.txt"))]
    return "\n".join([f"exit codes {codes} (None: it hung)", *written])


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], directory: str, errors: str) -> None:
    with Path(errors).open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
