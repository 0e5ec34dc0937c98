"""Fuzzing: whatever the files of a run directory hold, each reader returns, or raises an error of this package, soon.

`make fuzz` runs longer; a failing case is printed by Hypothesis with what reproduces it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gradtrack.backends.json import JsonBackend
from gradtrack.capture.files import TENSORS, VALUES
from gradtrack.capture.replay import replay_step
from gradtrack.delivery import replay as replays
from gradtrack.delivery.journal.offsets import offsets_path, read_offsets
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.tail import read_tail
from gradtrack.delivery.replay import replay
from gradtrack.delivery.run_files import LISTED_FILES, RUN_END, RunEnd, files_to_show, noted_files
from gradtrack.errors import GradtrackError
from gradtrack.fingerprints import first_difference
from gradtrack.pages.comparison import Comparison
from gradtrack.pages.documents import show_document
from gradtrack.pages.html import render, write_html_report
from gradtrack.pages.run_data import load_run
from gradtrack.pages.tables import read_run, write_table
from gradtrack.pages.terminal.overview import show
from gradtrack.records import Record, RunInfo
from gradtrack.support.checksums import CHECKSUM, with_checksum
from tests.capture.test_replay import make, train
from tests.delivery.training import Loop

EARLIER = Path(__file__).parents[1] / "delivery" / "journal" / "earlier" / "killed"
SHORT, LONG = 60, int(os.environ.get("GRADTRACK_FUZZ_EXAMPLES", "1500"))
SECONDS, BYTES = 30.0, 2**30
"""What a reader may take for one directory."""
PART, TAIL = "journal-000.jsonl", "journal-000.tail"
OFFSETS = "journal-000.acknowledged.json"
CAPTURE = "capture-00004"
PRINTS = "fingerprints-000.jsonl"
CAPTURED = (f"{CAPTURE}/{VALUES}", f"{CAPTURE}/{TENSORS}")
EVENTS = "tensorboard/events.out.tfevents.1.host.1.0"
WANDB = "wandb/offline-run-20260101_000000-a-run/run-a-run.wandb"
STATISTICS = "gradient_statistics.json"
HAS = {name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name)}

NUMBERS: list[object] = [10**400, -(10**400), 2**63, 2**64, -1, 0, 1e308, 5e-324, math.nan, math.inf, -math.inf]
OTHERS: list[object] = [None, True, "", "\ud800", "\x1b[31m", "../../x", "/dev/zero", "nan", "x" * 5000]
NESTED: list[object] = [[], {}, [[]], {"": None}, [[[[[[]]]]]]]
WEIRD = st.one_of(
    st.sampled_from([*NUMBERS, *OTHERS, *NESTED]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with every file that a reader looks at."""
    directory = tmp_path_factory.mktemp("fuzz") / "run"
    trackers = ["json", *HAS & {"tensorboard"}]
    loop = Loop(directory, trackers, log_histograms=True, track_parameters=True)
    loop.run(6)
    loop.manager.close()
    shutil.copy(EARLIER / TAIL, directory / TAIL)
    (directory / "gradient_gain.png").write_bytes(b"picture")
    train(directory.parent / "captured", bad=4, steps=4, fingerprints=1)
    shutil.copy(directory.parent / "captured" / PRINTS, directory / PRINTS)
    shutil.move(directory.parent / "captured" / CAPTURE, directory / CAPTURE)
    (run,) = find_journals(directory)
    (directory / LISTED_FILES).write_text(json.dumps({"run_id": run.run.run_id, "files": ["gradient_gain.png"]}))
    assert {RUN_END, OFFSETS, PART, STATISTICS} <= set(os.listdir(directory))
    assert len(list(run.rows())) == 6
    if "tensorboard" in HAS:
        (events,) = (directory / "tensorboard").glob("*tfevents*")
        events.rename(directory / EVENTS)
    if "wandb" in HAS:
        from tests.backends.test_wandb_history import framed, history_of

        rows = [history_of({"gradtrack/step": row.step, **row.metrics}) for _, row in itertools.islice(run.rows(), 3)]
        (directory / WANDB).parent.mkdir(parents=True)
        (directory / WANDB).write_bytes(framed([*rows, b"\0" * 40_000]))
    return directory


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value within plain data."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        found += places_in(entry, (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return plain data with another value at one place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def mutated_json(data: st.DataObject, content: bytes) -> bytes:
    """Replace some values of a JSON document, or leave them out."""
    value = json.loads(content)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places_in(value)))
        value = replaced(value, path, data.draw(WEIRD))
    return json.dumps(value).encode()


def mutated_lines(data: st.DataObject, content: bytes) -> bytes:
    """Replace values in a line of a journal, which keeps a checksum that matches."""
    lines = content.splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    line = json.loads(lines[index])
    line.pop(CHECKSUM)
    changed = json.loads(mutated_json(data, json.dumps(line).encode()))
    lines[index] = with_checksum(f"{json.dumps(changed)}\n".encode()) if isinstance(changed, dict) else b"[]\n"
    return b"".join(lines)


def mutated_prints(data: st.DataObject, content: bytes) -> bytes:
    """Replace values in a line of fingerprints, which keeps a checksum that matches."""
    return b"\n" + mutated_lines(data, content.removeprefix(b"\n"))


def mutated_tail(data: st.DataObject, content: bytes) -> bytes:
    """Replace values in the header of a tail, or words of its rows."""
    if data.draw(st.booleans()):
        header = mutated_json(data, content[:4096])
        return header.ljust(4096)[:4096] + content[4096:]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        start = 4096 + 8 * data.draw(st.integers(0, 17 * 19 - 1))
        changed[start : start + 8] = data.draw(st.binary(min_size=8, max_size=8))
    return bytes(changed)


def mutated_events(data: st.DataObject, content: bytes) -> bytes:
    """Change some bytes of an event, or the length of its record; the checksums match."""
    from gradtrack.backends.tensorboard.files import _checksum, frame

    payloads, start = list[bytes](), 0
    while start < len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        payloads.append(content[start + 12 : start + 12 + length])
        start += length + 16
    index = data.draw(st.integers(0, len(payloads) - 1))
    if data.draw(st.booleans()):
        payloads[index] = mutated_bytes(data, payloads[index])
        return b"".join(map(frame, payloads))
    length = struct.pack(
        "<Q", data.draw(st.sampled_from([0, 1, 2**24, 2**40, 2**63, 2**64 - 1]) | st.integers(0, 10**4))
    )
    whole = [frame(payload) for payload in payloads]
    whole[index] = length + _checksum(length) + whole[index][12:]
    return b"".join(whole)


def mutated_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Change, cut out or add some bytes."""
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(start + 40, len(content))))
    return content[:start] + data.draw(st.binary(max_size=20)) + content[end:]


def read_everything(directory: Path) -> None:
    """Read a directory as the commands do."""
    run = load_run(directory)
    stream = io.StringIO()
    Console(file=stream, width=120).print(show(run))
    json.dumps(show_document(run), allow_nan=False)
    render(run)
    run.faults()
    comparison = Comparison(run, run)
    json.dumps(comparison.to_plain(), default=str)
    Console(file=stream, width=120).print(comparison.show())
    tables = read_run(directory)
    for table in (tables.steps, tables.issues):
        assert len({len(column) for column in table.values()}) == 1
        for kind in ("csv", "jsonl", "parquet"):
            write_table(table, kind, directory / f"table.{kind}")
    read_offsets(offsets_path(directory / PART))
    files_to_show(run.run, [path.name for path in noted_files(directory, run.run.run_id)])


def read_one(directory: Path, name: str, unchanged: bytes) -> None:
    """Read one file by its own reader."""
    if name == OFFSETS:
        for entry in read_offsets(directory / name).values():
            assert set(entry) == {"next", "refused", "address"}
    elif name in CAPTURED:
        replay_step(directory / CAPTURE, make)
    elif name == PRINTS:
        whole = directory.parent / "whole"
        whole.mkdir()
        (whole / PRINTS).write_bytes(unchanged)
        for pair in ((directory, whole), (whole, directory)):
            with contextlib.suppress(GradtrackError):
                first_difference(*pair)
    elif name == EVENTS:
        from gradtrack.backends.tensorboard import files

        (run,) = find_journals(directory)
        files.Index().read([directory / "tensorboard"], run.run.run_id)
        files.read_tags(directory / "tensorboard", run.run.run_id)
    elif name == WANDB:
        from gradtrack.backends.wandb import history

        (path,) = history.files_of("a-run", str(directory))
        history.Index().find([path], {("", 1): {"train/grad_norm": 1.0}})
        history.count_rows(path)
        history.read_keys([path])
    elif name == STATISTICS:
        backend = JsonBackend()
        backend.confine(directory)
        backend.present([Record(step=1, time=1.0, metrics={}, run=RunInfo(run_id="run", run_dir=str(directory)))])
    elif name == LISTED_FILES:
        noted_files(directory, "run")
    elif name == RUN_END:
        RunEnd.load(directory / name)
    elif name == TAIL:
        run = json.loads((EARLIER / TAIL).read_bytes()[:4096])
        for _, record in read_tail(directory / name, run["run_id"], 0, ()):
            assert all(type(value) is float for value in record.metrics.values())
    else:
        for journal in find_journals(directory):
            list(journal.rows())


MUTATIONS: list[tuple[str, Callable[[st.DataObject, bytes], bytes]]] = [
    (PART, mutated_lines),
    (PART, mutated_bytes),
    (TAIL, mutated_tail),
    (TAIL, mutated_bytes),
    (OFFSETS, mutated_json),
    (OFFSETS, mutated_bytes),
    (LISTED_FILES, mutated_json),
    (LISTED_FILES, mutated_bytes),
    (RUN_END, mutated_json),
    (RUN_END, mutated_bytes),
    (CAPTURED[0], mutated_json),
    (CAPTURED[0], mutated_bytes),
    (CAPTURED[1], mutated_bytes),
    (PRINTS, mutated_prints),
    (PRINTS, mutated_bytes),
    (STATISTICS, mutated_json),
    (STATISTICS, mutated_bytes),
]
FOREIGN = [(EVENTS, mutated_events), (EVENTS, mutated_bytes)] if "tensorboard" in HAS else []
MUTATIONS += [*FOREIGN, *([(WANDB, mutated_bytes)] if "wandb" in HAS else [])]
IDS = [f"{name}-{mutate.__name__}" for name, mutate in MUTATIONS]


class TooLong(BaseException):
    """A reader hangs; no fault that readers contain."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"it takes longer than {SECONDS} seconds of the processor")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let a reader take no more than a gigabyte, and no longer than some seconds."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    (taken,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    handler = signal.signal(signal.SIGPROF, _too_long)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(taken) + BYTES, limits[1]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def examples(count: int) -> settings:
    """Return the settings of a law that is held to so many examples."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@contextlib.contextmanager
def copied(whole: Path) -> Iterator[Path]:
    """Copy a run directory for one example."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        shutil.copytree(whole, directory)
        yield directory


def fuzz(whole: Path, name: str, mutate: Callable[[st.DataObject, bytes], bytes], count: int, *, deep: bool) -> None:
    """Hold a reader to its law for some mutations of its file."""
    content = (whole / name).read_bytes()

    @examples(count)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        with copied(whole) as directory:
            (directory / name).write_bytes(mutate(data, content))
            with contextlib.suppress(GradtrackError), bounded():
                read_one(directory, name, content)
            with contextlib.suppress(GradtrackError), bounded():
                if deep:
                    read_everything(directory)

    law()


@pytest.mark.parametrize(("name", "mutate"), MUTATIONS, ids=IDS)
def test_reader_survives_any_file(whole: Path, name: str, mutate: Callable[[st.DataObject, bytes], bytes]) -> None:
    """A short run of each target."""
    fuzz(whole, name, mutate, SHORT, deep=False)


@pytest.mark.parametrize("name", [PART, RUN_END])
def test_pages_survive_any_file(whole: Path, name: str) -> None:
    """What a reader lets pass can be shown."""
    fuzz(whole, name, dict(MUTATIONS[::-1])[name], SHORT // 3, deep=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mutate"), MUTATIONS, ids=IDS)
def test_readers_and_pages_survive_any_file(
    whole: Path, name: str, mutate: Callable[[st.DataObject, bytes], bytes]
) -> None:
    """A longer run of each target, the pages included."""
    fuzz(whole, name, mutate, LONG, deep=True)


def fuzz_replay(whole: Path, to: str, count: int) -> None:
    """Hold a replay to its law: it delivers what can be read, or says why it does not."""
    own_file = {"tensorboard": EVENTS, "wandb": WANDB, "json": STATISTICS}[to]
    targets = [found for found in MUTATIONS if found[0] in (own_file, PART, TAIL, OFFSETS, LISTED_FILES)]

    @examples(count)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        with copied(whole) as directory:
            name, mutate = data.draw(st.sampled_from(targets))
            (directory / name).write_bytes(mutate(data, (directory / name).read_bytes()))
            try:
                own = {"run_id": "a-run", "directory": str(directory)} if to == "wandb" else {}
                found = replay(directory, to=to, options=own)
            except GradtrackError:
                return
            assert all(one.fault is None or ":" in one.fault for one in found)

    law()


@pytest.mark.parametrize("to", ["json", *sorted(HAS & {"tensorboard"})])
def test_replay_survives_any_file(whole: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the journal, and those of the tracker that it finds in the directory."""
    monkeypatch.setattr(replays, "_DELAYS_SECONDS", ())
    fuzz_replay(whole, to, 15)


@pytest.mark.slow
@pytest.mark.skipif("wandb" not in HAS, reason="wandb is not installed")
def test_replay_to_wandb_survives_any_file(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example is a run of its own in W&B's process, which takes seconds."""
    monkeypatch.setattr(replays, "_DELAYS_SECONDS", ())
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    fuzz_replay(whole, "wandb", 10)


def test_a_reader_that_fills_memory_is_found() -> None:
    """The bound of the tests above holds."""
    with pytest.raises(MemoryError), bounded():
        bytearray(2 * BYTES)


def test_name_that_is_not_unicode_is_shown(whole: Path, tmp_path: Path) -> None:
    """A lone surrogate in a metric's name, which no encoding has, breaks no page."""
    shutil.copytree(whole, tmp_path / "run")
    lines = (tmp_path / "run" / PART).read_bytes().splitlines(keepends=True)
    row = json.loads(lines[-1])
    row.pop(CHECKSUM)
    row["source"] = "\ud800"
    (tmp_path / "run" / PART).write_bytes(b"".join(lines[:-1]) + with_checksum(f"{json.dumps(row)}\n".encode()))
    run = load_run(tmp_path / "run")
    assert "\ud800" in run.tracks
    assert write_html_report(run).stat().st_size > 1000


def test_a_panel_without_metrics_is_shown(whole: Path, tmp_path: Path) -> None:
    """It has no curve, and breaks neither the terminal nor the page."""
    shutil.copytree(whole, tmp_path / "run")
    header, first, *others = (tmp_path / "run" / PART).read_bytes().splitlines(keepends=True)
    row = json.loads(first)
    row.pop(CHECKSUM)
    row["panels"][0][2] = []
    first = with_checksum(f"{json.dumps(row)}\n".encode())
    (tmp_path / "run" / PART).write_bytes(b"".join([header, first, *others]))
    read_everything(tmp_path / "run")
