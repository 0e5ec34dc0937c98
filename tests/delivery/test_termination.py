"""SIGTERM, by which schedulers ask a training to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.delivery.doubles import ROOT, WAIT_SECONDS

_SCRIPT = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from tests.delivery.training import FileBackend, Loop

class Slow(FileBackend):
    def write(self, records):
        time.sleep(0.3)
        super().write(records)

def ready():
    print("ready", flush=True)

loop = Loop(sys.argv[1], [Slow(Path(sys.argv[1], "rows"))])
"""
_IN_PYTHON = "loop.run(20)\nready()\nwhile True: loop.run(1); time.sleep(0.01)"
_IN_C = """loop.run(20)
ready()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second waits for ever, whatever signal comes
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def end(code: str, directory: Path) -> tuple[int, str, list[str]]:
    """Run a training, send SIGTERM when it says that it is ready; return its code, output and delivered rows."""
    command = [sys.executable, "-c", _SCRIPT + code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        finally:
            process.kill()
    rows = directory / "rows"
    return process.returncode, output, rows.read_text().splitlines() if rows.exists() else []


@pytest.mark.parametrize("code", [_IN_PYTHON, _IN_C], ids=["training", "in a call that Python cannot interrupt"])
def test_what_is_queued_is_delivered_before_the_signal_ends_the_process(code: str, tmp_path: Path) -> None:
    """The tracker has every row and its run an end, and the process dies of the signal as without gradtrack."""
    code_of_end, _, rows = end(code, tmp_path)
    assert code_of_end == -signal.SIGTERM
    assert rows[-1] == "closed failed=True"
    assert rows[:-1] == [str(step) for step in range(1, len(rows))]
    assert len(rows) > 20


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_handler_of_the_program_is_left_alone(moment: str, tmp_path: Path) -> None:
    """Set before the first row or after it, it runs, and the process does what it says."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('mine', flush=True), sys.exit(7)))\n"
    code = (handler if moment == "before" else "") + "loop.run(3)\n" + (handler if moment == "after" else "")
    assert end(code + "ready()\nwhile True: time.sleep(0.01)", tmp_path)[:2] == (7, "mine\n")


def test_a_forked_process_and_a_process_after_the_close_have_the_default(tmp_path: Path) -> None:
    """Workers of a data loader die at once of the signal, and nothing of ours stays after the last run."""
    code = """
loop.run(3)
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
for _ in range(50):  # at any moment after the fork
    if (child := os.fork()) == 0:
        time.sleep(600)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
loop.manager.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
ready()
time.sleep(600)
"""
    code_of_end, _, rows = end(code, tmp_path)
    assert (code_of_end, rows) == (-signal.SIGTERM, ["1", "2", "3", "closed failed=False"])
