"""The Weights & Biases backend in real offline runs, whose files two independent readers agree on."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

wandb: Any = pytest.importorskip("wandb")

from gradtrack.backends.wandb import WandbBackend  # noqa: E402
from gradtrack.backends.wandb.columns import metric_name  # noqa: E402
from gradtrack.backends.wandb.history import Index  # noqa: E402
from gradtrack.delivery.run import build_backends  # noqa: E402
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError, UsageError  # noqa: E402
from gradtrack.records import Histogram, Record, RunInfo  # noqa: E402
from tests.backends.history import messages_of, rows_of  # noqa: E402
from tests.backends.rows import make_records  # noqa: E402
from tests.backends.wandb_runs import (  # noqa: E402, F401
    NORM,
    STEP,
    expected,
    file_in,
    file_of,
    offline,
    open_run,
    ours,
    run_program,
)
from tests.delivery.training import Loop  # noqa: E402

COUNT = 12


User = Callable[[Any, int], dict[str, Any]]


def _log(run: Any, values: dict[str, Any], **options: Any) -> dict[str, Any]:
    run.log(values, **options)
    return values


def _nothing(run: Any, index: int) -> dict[str, Any]:
    return {}


def _explicit(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"loss": float(index)}, step=index)


def _explicit_twice(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"loss": float(index)}, step=index)


def _extra(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"accuracy": float(index)}, step=index)


def _epochs(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"val": float(index)}, step=index // 4) if index % 4 == 3 else {}


def _every_third(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"loss": float(index)}, step=index) if index % 3 == 0 else {}


def _implicit(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"loss": float(index)})


def _implicit_twice(run: Any, index: int) -> dict[str, Any]:
    _log(run, {"other": float(index)})
    return {**_log(run, {"loss": float(index)}), "other": float(index)}


def _implicit_rarely(run: Any, index: int) -> dict[str, Any]:
    return _log(run, {"loss": float(index)}) if index % 4 == 0 else {}


PATTERNS: dict[str, tuple[User, User]] = {
    "explicit step before our hook": (_explicit, _nothing),
    "explicit step after our hook": (_nothing, _explicit),
    "explicit step from 1, our steps from 1": (_nothing, lambda run, index: _explicit(run, index + 1)),
    "twice at one step, ours in between": (_explicit_twice, _extra),
    "validation at step=epoch": (_nothing, _epochs),
    "every third step": (_nothing, _every_third),
    "implicit, once per iteration": (_nothing, _implicit),
    "implicit, twice per iteration": (_implicit, _implicit_twice),
    "implicit, rarely": (_nothing, _implicit_rarely),
    "never": (_nothing, _nothing),
}


def collect(given_values: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return every value that the user logged, by name."""
    found: dict[str, list[float]] = {}
    for values in given_values:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def survivors(rows: list[dict[str, Any]], names: Any) -> dict[str, list[float]]:
    """Return every value of the user's that is in the file, by name."""
    return {name: [row[name] for row in rows if name in row] for name in names}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("threaded", [False, True], ids=["in the loop", "from a worker"])
def test_case_01_and_02_neither_side_loses_a_row(pattern: str, threaded: bool) -> None:
    """In each of ten ways to log, all of the user's rows and all of ours are in the file."""
    before, after = PATTERNS[pattern]
    run, records, logged = open_run(), make_records(COUNT), []
    backend, waiting = WandbBackend(), queue.Queue[Record | None]()

    def work() -> None:
        while (record := waiting.get()) is not None:
            backend.write([record])

    worker = threading.Thread(target=work)
    worker.start()
    for index, record in enumerate(records):
        logged.append(before(run, index))
        waiting.put(record) if threaded else backend.write([record])
        logged.append(after(run, index))
    waiting.put(None)
    worker.join()
    backend.close()
    logged.append(_log(run, {"final": 1.0}, step=run.step))
    run.finish()
    rows, wanted = rows_of(file_of(run)), collect(logged)
    assert survivors(rows, wanted) == wanted
    for name in records[0].metrics:
        assert ours(rows, name) == expected(records, name)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 3)),
            st.tuples(st.just("commit"), st.just(0)),
            st.tuples(st.just("open"), st.just(0)),
            st.tuples(st.just("jump"), st.integers(0, 5)),
        ),
        max_size=25,
    )
)
def test_any_order_of_calls_loses_nothing(calls: list[tuple[str, int]]) -> None:
    """Whatever the user does between our writes, every row of both is in the file."""
    run = wandb.init(project="tests", reinit="create_new")
    backend, records = WandbBackend(run=run), make_records(60)
    written, logged, at = 0, 0, 0
    for call, number in calls:
        if call == "write":
            backend.write(records[written : written + number])
            written += number
            continue
        logged += 1
        # One name for each call: W&B itself replaces a value that is logged twice under one name at one step.
        values = {f"user{logged}": float(logged)}
        if call == "jump":
            at = max(at, run.step) + number
            run.log(values, step=at)
        else:
            run.log(values, commit=call == "commit")
    backend.close()
    run.finish()
    rows = rows_of(file_of(run))
    names = [f"user{number}" for number in range(1, logged + 1)]
    assert survivors(rows, names) == {name: [float(index)] for index, name in enumerate(names, start=1)}
    assert ours(rows) == expected(records[:written])


def test_rows_join_the_steps_of_the_user() -> None:
    """Where the user logs in every iteration, our rows are written during the training, not at its end."""
    run, records = open_run(), make_records(30)
    backend = WandbBackend()
    for index, record in enumerate(records):
        backend.write([record])
        run.log({"loss": float(index)}, step=index)
    run.finish()
    rows = rows_of(file_of(run))
    assert len(rows) == 30
    assert [(row["loss"], row[STEP]) for row in rows] == [(index, index + 1) for index in range(30)]


def test_rows_that_find_no_row_of_the_user_are_not_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long line of rows costs one moment of waiting for the user, as long as the user does not log."""
    pauses: list[float] = []
    monkeypatch.setattr("gradtrack.backends.wandb.rows.time.sleep", pauses.append)
    monkeypatch.setattr("gradtrack.backends.wandb.rows.time.monotonic", lambda: sum(pauses))
    run, records = open_run(), make_records(200)
    WandbBackend().write(records)
    assert sum(pauses) < 0.1
    run.finish()
    assert ours(rows_of(file_of(run))) == expected(records)


def test_counter_stays_the_user_s_after_our_close() -> None:
    """Rows that find none of the user's wait for the end of the run, so a late explicit step is not behind them."""
    run, records = open_run(), make_records(20)
    backend = WandbBackend()
    run.log({"loss": 0.0}, step=0)
    backend.write(records)
    backend.close()
    run.log({"test": 1.0}, step=3)
    run.finish()
    rows = rows_of(file_of(run))
    assert [row["_step"] for row in rows if "test" in row] == [3]
    assert ours(rows) == expected(records)


def test_held_rows_are_written_at_the_interpreter_s_exit(tmp_path: Path) -> None:
    """A program that never finishes its run and never closes us leaves every row in the file."""
    program = """
        import wandb
        from gradtrack.backends.wandb import WandbBackend
        from tests.backends.rows import make_records
        run = wandb.init(project="tests")
        WandbBackend().write(make_records(9))
        print(run.dir)
    """
    assert ours(rows_of(file_in(run_program(program)))) == expected(make_records(9))


def test_case_20_forked_copy_leaves_held_rows_to_its_parent() -> None:
    """The end of a child is not the end of the run: rows in line are written by the parent, once."""
    program = """
        import os, wandb
        from gradtrack.backends.wandb import WandbBackend
        from tests.backends.rows import make_records
        run = wandb.init(project="tests")
        backend = WandbBackend()
        backend.write(make_records(9))
        child = os.fork()
        if child == 0:
            backend._rows._ending.come()
            os._exit(0)
        os.waitpid(child, 0)
        run.finish()
        print(run.dir)
    """
    assert ours(rows_of(file_in(run_program(program)))) == expected(make_records(9))


@pytest.mark.parametrize("mode", ["row", "step"])
def test_other_step_modes_write_at_once(mode: Any) -> None:
    """With `row` and `step` every row is committed on its own, at the counter or at the record's step."""
    run, records = open_run(), make_records(6)
    backend = WandbBackend(step_mode=mode)
    backend.write(records)
    backend.close()
    run.finish()
    rows = rows_of(file_of(run))
    assert ours(rows) == expected(records)
    assert [row["_step"] for row in rows] == [index + (mode == "step") for index in range(6)]


def test_step_mode_keeps_what_comes_behind_the_counter_of_the_user() -> None:
    """Where the user is ahead, a row would be dropped; it is written when the run ends, and ours meet at no step."""
    run, records = open_run(), make_records(12)
    backend = WandbBackend(step_mode="step")
    logged = []
    for index, record in enumerate(records):
        if index in (3, 4, 8):
            logged.append(_log(run, {"loss": float(index)}, step=index + 3))
        backend.write([record])
    backend.close()
    logged.append(_log(run, {"final": 1.0}, step=40))
    run.finish()
    rows, wanted = rows_of(file_of(run)), collect(logged)
    assert survivors(rows, wanted) == wanted
    assert ours(rows) == expected(records)


class Racing:
    """A run whose user logs just before or just after what the backend asks of it."""

    def __init__(self, run: Any, moves: list[int]) -> None:
        self._run, self._moves, self.logged = run, moves, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def step(self) -> int:
        """Return the counter, and let the user log then."""
        found = int(self._run.step)
        self._user()
        return found

    def log(self, row: dict[str, Any], **options: Any) -> None:
        """Let the user log, pass on what the backend logs, and let the user log again."""
        self._user()
        self._run.log(row, **options)
        self._user()

    def _user(self) -> None:
        move = self._moves.pop() if self._moves else 0
        if move:
            self.logged += 1
            self._run.log({f"user{self.logged}": float(self.logged)}, step=self._run.step + move - 1)


@pytest.mark.parametrize("mode", ["polite", "step"])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.integers(0, 4), max_size=40), steps=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_user_who_logs_between_our_calls_costs_no_row(mode: Any, moves: list[int], steps: list[int]) -> None:
    """Wherever in a write of ours the user moves the counter, every row of both is in the file."""
    run = wandb.init(project="tests", reinit="create_new")
    racing = Racing(run, moves)
    backend, records, step = WandbBackend(run=racing, step_mode=mode), [], 0
    for index, more in enumerate(steps):
        step += more
        records.append(Record(step=step, time=float(index), metrics={NORM: float(index), f"only{index}": 1.0}))
        backend.write(records[-1:])
    backend.close()
    moves.clear()
    run.finish()
    rows = rows_of(file_of(run))
    names = [f"user{number}" for number in range(1, racing.logged + 1)]
    assert survivors(rows, names) == {name: [float(index)] for index, name in enumerate(names, start=1)}
    assert sorted(ours(rows), key=lambda row: row[1]) == expected(records)


def test_own_run_is_beside_the_user_s() -> None:
    """With a project of our own the user's run stays open and holds nothing of ours."""
    run = open_run()
    backend = WandbBackend(project="ours", name="gradients")
    backend.write(make_records(5, run_id="a-run"))
    backend.close()
    assert wandb.run is run
    run.log({"loss": 1.0})
    run.finish()
    assert backend.run.project == "ours"
    assert ours(rows_of(file_of(backend.run))) == expected(make_records(5))
    assert not ours(rows_of(file_of(run)))


def test_a_run_that_is_opened_later_is_joined() -> None:
    """A backend that was made before `wandb.init()` writes to that run, which stays the user's."""
    backend = WandbBackend()
    run = open_run()
    backend.write(make_records(3))
    backend.close()
    assert backend.run is run is wandb.run
    assert backend.address()["run_id"] == run.id
    run.finish()
    assert ours(rows_of(file_of(run))) == expected(make_records(3))


@pytest.mark.parametrize("failed", [False, True])
def test_own_run_is_ended_as_it_went(failed: bool) -> None:
    """A training that raised leaves a run with an exit code."""
    backend = WandbBackend()
    backend.write(make_records(1))
    backend.close(failed=failed)
    assert exit_code(file_of(backend.run)) == int(failed)


def exit_code(directory: Path) -> int:
    """Return the exit code that a run's file ends with."""
    (code,) = [message.exit.exit_code for message in messages_of(directory) if message.HasField("exit")]
    return int(code)


def test_configuration_names_the_run(tmp_path: Path) -> None:
    """What a configuration calls `run_name` is the name of a run of our own: its `name` is that of the backend."""
    (backend,) = build_backends([{"name": "wandb", "project": "p", "run_name": "a training"}]).values()
    backend.write(make_records(1))
    backend.close()
    assert isinstance(backend, WandbBackend)
    assert backend.run.name == "a training"


def test_own_run_is_in_the_run_directory(tmp_path: Path) -> None:
    """A run of our own lies in the directory of the training."""
    backend = WandbBackend()
    backend.write(make_records(1, run_dir=tmp_path / "training"))
    backend.close()
    assert file_of(backend.run).is_relative_to(tmp_path / "training" / "wandb")


def test_case_05_user_run_is_open_after_our_close() -> None:
    """Closing ends neither the run nor its logging."""
    run = open_run()
    backend = WandbBackend()
    backend.write(make_records(3))
    backend.close(failed=True)
    assert wandb.run is run
    run.log({"loss": 1.0})
    run.finish()
    assert survivors(rows_of(file_of(run)), ["loss"]) == {"loss": [1.0]}


def test_case_06_run_finished_before_us() -> None:
    """Rows before the end of the run are in it; rows after it are refused for good and not lost in silence."""
    run, records = open_run(), make_records(8)
    backend = WandbBackend()
    backend.write(records[:5])
    run.finish()
    with pytest.raises(PermanentBackendError, match="Close the manager before the run"):
        backend.write(records[5:])
    backend.close()
    assert ours(rows_of(file_of(run))) == expected(records[:5])


@pytest.mark.parametrize("mode", ["polite", "row", "step"])
def test_case_06_rows_that_wait_come_before_the_user_s_end(tmp_path: Path, mode: Any) -> None:
    """What a training has recorded until the user ends the run is in it, also what its worker had yet to write."""
    run = open_run()
    loop = Loop(tmp_path / "run", [{"name": "wandb", "step_mode": mode}], close_timeout_seconds=60.0)
    loop.run(12)
    run.finish()
    loop.run(3)
    loop.manager.close()
    status = loop.manager.status()["backends"]["wandb"]
    assert (status["acknowledged"], status["refused"]) == (12, 3)
    assert [step for step, _ in ours(rows_of(file_of(run)))] == list(range(1, 13))


@pytest.mark.parametrize("theirs_first", [False, True])
def test_case_03_star_of_a_framework_leaves_our_axis(theirs_first: bool) -> None:
    """Where a framework defines every metric by a star, nothing is inserted into rows of ours alone."""
    run, records = open_run(), make_records(4)
    backend = WandbBackend(step_mode="row")
    if theirs_first:
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    backend.write(records[:2])
    if not theirs_first:
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    run.log({"trainer/global_step": 7, "loss": 1.0})
    backend.write(records[2:])
    run.finish()
    rows = rows_of(file_of(run))
    assert ours(rows) == expected(records)
    assert not any("trainer/global_step" in row for row in rows if STEP in row)


@pytest.mark.parametrize("by", ["config", "summary"])
def test_case_04_taken_name_is_withheld_with_one_warning(by: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the Trainer writes train/grad_norm, ours is left out and everything else is there."""
    run, records = open_run(), make_records(4)
    if by == "config":
        run.config.update({"per_device_train_batch_size": 8})
    run.log({NORM: 0.25})
    backend = WandbBackend()
    for record in records:
        backend.write([record])
        run.log({NORM: 0.25})
    run.finish()
    rows = rows_of(file_of(run))
    assert [row[NORM] for row in rows if NORM in row] == [0.25] * 5
    others = [name for name in records[0].metrics if name != NORM]
    assert len(others) > 3
    for name in others:
        assert ours(rows, name) == expected(records, name)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "gradtrack"]
    assert "ours is left out" in told


def test_withheld_names_are_left_out() -> None:
    """An integration can name what its framework writes."""
    run = open_run()
    WandbBackend(withhold=[NORM]).write(make_records(2))
    run.finish()
    rows = rows_of(file_of(run))
    assert not any(NORM in row for row in rows)
    assert len(ours(rows, "train/grad_norm_clipped")) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4028234663852886e38, 1e308, 5e-324, 0.1])
def test_case_16_extreme_values_survive(value: float) -> None:
    """Every float comes back to the bit."""
    backend = WandbBackend()
    backend.write([Record(step=1, time=1.0, metrics={NORM: value})])
    backend.close()
    ((_, got),) = ours(rows_of(file_of(backend.run)))
    assert repr(float(got)) == repr(value)


@given(st.lists(st.text(alphabet="a/.:[]*| _-gt0", min_size=1, max_size=8), unique=True, max_size=50))
def test_case_18_names_never_merge(names: list[str]) -> None:
    """Two metrics have two names, none of them with a dot, a star or a reserved beginning, or that of an axis."""
    everything = {*names, *(metric_name(name) for name in names), STEP, f"{STEP}/critic"}
    mapped = {metric_name(name) for name in everything}
    assert len(mapped) == len(everything)
    assert not any("." in name or "*" in name or name.startswith("_") for name in mapped)
    assert not mapped & {STEP, f"{STEP}/critic"}


def test_pairs_have_axes_of_their_own() -> None:
    """The rows of a named pair carry its own step."""
    backend = WandbBackend()
    backend.write([*make_records(2), *make_records(2, source="critic")])
    backend.close()
    rows = rows_of(file_of(backend.run))
    assert [row["gradtrack/step/critic"] for row in rows if "train/grad_norm/critic" in row] == [1, 2]
    assert len(ours(rows)) == 2


def test_metrics_are_defined_once_by_exact_name() -> None:
    """Every metric has our axis by its exact name, and the axis itself is hidden."""
    backend = WandbBackend()
    backend.write(make_records(3))
    backend.close()
    messages = messages_of(file_of(backend.run))
    metrics = [message.metric for message in messages if message.HasField("metric")]
    axis = {metric.name: metric.step_metric for metric in metrics}
    assert len(metrics) == len(axis)
    assert axis == {**dict.fromkeys(make_records(1)[0].metrics, STEP), STEP: ""}
    assert [metric.name for metric in metrics if metric.options.hidden] == [STEP]
    assert not any(metric.glob_name for metric in metrics)


def test_histograms_are_drawn() -> None:
    """A histogram keeps its counts and edges; one that W&B cannot hold costs nothing."""
    good = Histogram(edges=(-1.0, 0.0, 2.0), counts=(3.0, 4.0))
    bad = Histogram(edges=(0.0, math.inf), counts=(1.0,))
    backend = WandbBackend()
    backend.write([Record(step=1, time=1.0, histograms={"grads": good, "broken": bad})])
    backend.close()
    (row,) = rows_of(file_of(backend.run))
    assert (row["grads.bins"], row["grads.values"]) == ([-1.0, 0.0, 2.0], [3.0, 4.0])
    assert not any("broken" in key for key in row)


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch W&B off, which it asks the environment only once."""
    wandb: Any = importlib.import_module("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield
    wandb.teardown()


def test_disabled_mode_takes_nothing(disabled: None) -> None:
    """In the disabled mode nothing is kept, and nothing is said to be."""
    open_run()
    for backend in (WandbBackend(), WandbBackend(project="own")):
        with pytest.raises(PermanentBackendError, match="W&B is disabled and keeps nothing"):
            backend.write(make_records(3))
        backend.close()


def test_case_14_file_that_lacks_rows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where W&B has taken rows and its file has fewer, the close says so."""
    monkeypatch.setattr("gradtrack.backends.wandb.history._PATIENCE_SECONDS", 0.0)
    backend = WandbBackend()
    backend.write(make_records(5))
    monkeypatch.setattr(backend, "_written", 7)
    with pytest.raises(BackendError, match=r"\d of 7 rows are in its file .*gradtrack replay"):
        backend.close()


def test_case_14_run_of_the_user_that_drops_rows_is_told() -> None:
    """Where W&B's own log tells of a record that was not saved, our close does."""
    run = open_run()
    backend = WandbBackend()
    backend.write(make_records(5))
    with (file_of(run) / "logs" / "debug-internal.log").open("a") as log:
        log.write('{"msg":"writer: failed to save record","error":"no space left on device"}')
    with pytest.raises(BackendError, match="is full"):
        backend.close()


def test_case_09_killed_core_is_contained() -> None:
    """When W&B's own process is killed, write and close raise errors of ours and nothing else."""
    program = """
        import os, signal, psutil, wandb
        from gradtrack.backends.wandb import WandbBackend
        from gradtrack.errors import BackendError
        from tests.backends.rows import make_records
        user = wandb.init(project="tests")
        records = make_records(10)
        attached, own = WandbBackend(), WandbBackend(project="own")
        attached.write(records[:3])
        own.write(records[:3])
        cores = [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]
        assert cores
        for core in cores:
            core.kill()
            core.wait()
        caught = []
        for backend in (attached, own):
            for action in (lambda: backend.write(records[3:]), lambda: backend.close(failed=True)):
                try:
                    action()
                except BackendError as fault:
                    caught.append(str(fault))
        assert len(caught) >= 3, caught
        print("contained", flush=True)
        os._exit(0)
    """
    assert run_program(program) == "contained\n"


def test_failed_batch_that_comes_again_is_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault in the middle of a batch, the rows that W&B took are left out of the next attempt."""
    backend, records = WandbBackend(), make_records(5)
    backend.write(records[:1])
    log, calls = backend.run.log, []

    def failing(row: dict[str, Any], **options: Any) -> None:
        calls.append(row)
        if len(calls) == 3:
            raise ConnectionResetError
        log(row, **options)

    monkeypatch.setattr(backend.run, "log", failing)
    with pytest.raises(BackendError, match="ConnectionResetError"):
        backend.write(records[1:])
    assert backend.present(records[1:]) == {("", 2), ("", 3)}
    backend.write(records[1:])
    backend.close()
    assert ours(rows_of(file_of(backend.run))) == expected(records)


def test_present_reads_the_file_of_the_run() -> None:
    """Another instance, made from the address, finds each row that the file holds, and not one with other values."""
    backend, records = WandbBackend(), make_records(10)
    backend.write(records[:7])
    backend.close()
    messages_of(file_of(backend.run))
    again = WandbBackend(**backend.address())
    assert again.present(records) == {("", step) for step in range(1, 8)}
    changed = [Record(step=record.step, time=record.time, metrics={NORM: -1.0}) for record in records]
    assert again.present(changed) == set()


def test_file_is_read_once_however_many_parts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking in parts reads each row once; a file that was replaced by a shorter one is read anew."""
    backend, records, taken = WandbBackend(), make_records(40), []
    backend.write(records[:30])
    backend.close()
    messages_of(file_of(backend.run))
    take = Index._take

    def counted(index: Index, items: Any) -> None:
        taken.append(items)
        take(index, items)

    monkeypatch.setattr(Index, "_take", counted)
    again = WandbBackend(**backend.address())
    found = [again.present(records[start : start + 5]) or set() for start in range(0, 40, 5)]
    assert set().union(*found) == {("", step) for step in range(1, 31)}
    assert len(taken) == 30
    (file,) = file_of(backend.run).glob("*.wandb")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert (again.present(records) or set()) < {("", step) for step in range(1, 31)}


def test_replay_adds_what_is_missing() -> None:
    """A new instance writes the rest into a run of the same identity, and then nothing is missing."""
    backend, records = WandbBackend(), make_records(10)
    backend.write(records[:7])
    backend.close()
    messages_of(file_of(backend.run))
    again = WandbBackend(**backend.address())
    there = again.present(records) or set()
    again.write([record for record in records if (record.source, record.step) not in there])
    again.close()
    messages_of(file_of(again.run))
    assert again.run.id == backend.run.id
    assert WandbBackend(**backend.address()).present(records) == {("", step) for step in range(1, 11)}


def test_case_07_own_run_is_found_without_its_address(tmp_path: Path) -> None:
    """A process that is killed before it could note where its rows went has them in the run that a replay finds."""
    records = make_records(6)
    records[0] = dataclasses.replace(records[0], run=RunInfo(run_id="20260101T000000Z-1-0a", run_dir=str(tmp_path)))
    first = WandbBackend(project="p")
    first.write(records[:4])
    first.close()
    again = WandbBackend(project="p")
    assert again.present(records) == {("", step) for step in range(1, 5)}
    again.write(records[4:])
    again.close()
    assert again.run.id == first.run.id
    assert WandbBackend(project="p").present(records) == {("", step) for step in range(1, 7)}


def test_torn_file_tells_what_is_whole() -> None:
    """A file that ends in the middle of a row tells of the rows before it."""
    backend, records = WandbBackend(), make_records(400)
    backend.write(records)
    backend.close()
    messages_of(file_of(backend.run))
    (file,) = file_of(backend.run).glob("*.wandb")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    found = WandbBackend(**backend.address()).present(records)
    assert found == {("", step) for step in range(1, len(found or ()) + 1)}
    assert 50 < len(found or ()) < 350


def test_case_07_killed_process_loses_a_second_at_most(tmp_path: Path) -> None:
    """The file of our own run is flushed every second, so a kill leaves what is older in it."""
    program = """
        import os, signal, sys, time
        from pathlib import Path
        from gradtrack.backends.wandb import WandbBackend
        from gradtrack.backends.wandb.history import count_rows
        from tests.backends.rows import make_records
        backend = WandbBackend()
        backend.write(make_records(50))
        directory, end = Path(backend.run.dir).parent, time.monotonic() + 60
        while sum(count_rows(file) for file in directory.glob("*.wandb")) < 50:
            assert time.monotonic() < end
            time.sleep(0.1)
        print(backend.run.dir, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    output = run_program(program, returncode=-signal.SIGKILL)
    assert ours(rows_of(file_in(output), ended=False)) == expected(make_records(50))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "shared"])
def test_case_10_unreachable_server_keeps_the_run_on_disk(mode: str) -> None:
    """A run of our own that cannot reach the server is kept offline, with every row in its file."""
    program = """
        from gradtrack.backends.wandb import WandbBackend
        from tests.backends.rows import make_records
        backend = WandbBackend()
        backend.write(make_records(5))
        backend.close()
        assert backend.run.offline
        print(backend.run.dir)
    """
    environment: Any = {"WANDB_MODE": mode, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "x" * 40}
    assert ours(rows_of(file_in(run_program(program, **environment)))) == expected(make_records(5))


def test_case_24_no_error_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of W&B that quotes the key is quoted without it."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    backend = WandbBackend()
    backend.write(make_records(1))

    def leaking(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"key {os.environ['WANDB_API_KEY']} at http://api:{os.environ['WANDB_API_KEY']}@host")

    monkeypatch.setattr(backend.run, "log", leaking)
    with pytest.raises(BackendError) as caught:
        backend.write(make_records(2)[1:])
    monkeypatch.undo()
    assert "0123456789abcdef" not in f"{caught.value!r}{backend.address()}{backend!r}"
    assert caught.value.__suppress_context__
    backend.run.finish()


def test_alerts_are_asked_for_and_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A critical issue alerts once in a while, a lesser one never, and none unless it was asked for."""
    critical = {"severity": "CRITICAL", "issue_type": "NUMERICAL", "layer": "", "message": "NaN"}
    lesser = {"severity": "HIGH", "issue_type": "EXPLODING", "layer": "", "message": "large"}
    times = [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 50.0]
    rows = [
        Record(step=step, time=time, metrics={"a": 1.0}, issues=(critical, lesser)) for step, time in enumerate(times)
    ]
    sent: list[str] = []
    monkeypatch.setattr("wandb.Run.alert", lambda _, **options: sent.append(options["text"]))
    for alerts, wanted in ((False, []), (True, ["step 0: NaN", "step 3: NaN", "step 6: NaN"])):
        backend = WandbBackend(alerts=alerts)
        backend.write(rows)
        backend.close()
        assert sent == wanted


def test_closed_backend_refuses_records() -> None:
    """A second close does nothing, and writing after it is an error."""
    backend = WandbBackend()
    backend.close()
    backend.close()
    with pytest.raises(ClosedError):
        backend.write(make_records(1))


def test_options_are_checked() -> None:
    """Options that cannot mean anything are refused with the remedy."""
    with pytest.raises(UsageError, match="expected 'polite', 'row' or 'step'"):
        WandbBackend(step_mode="rude")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Pass what wandb\.init\(\) returned"):
        WandbBackend(run="abc")


def test_address_is_known_before_a_run_is_open(tmp_path: Path) -> None:
    """A replay that finds nothing to write leaves the way back to the run, and what is withheld there, as it was."""
    given: dict[str, Any] = {"run_id": "r", "project": "p", "directory": str(tmp_path), "withhold": [NORM]}
    assert WandbBackend(**given).address() == given


def test_probe_opens_nothing(tmp_path: Path) -> None:
    """The doctor learns where rows would go, and no run is opened."""
    assert WandbBackend.probe(project="p") == "a new run in project p (offline)"
    assert not (tmp_path / "wandb").exists()
    run = open_run()
    assert WandbBackend.probe() == f"run {run.id} of project tests, which is open"


def test_config_names_the_training() -> None:
    """A run of our own carries the identity and the settings of the training."""
    backend = WandbBackend()
    info = RunInfo(run_id="a-run", config={"max_grad_norm": 2.0})
    backend.write([Record(step=1, time=1.0, metrics={"a.b": 1.0, "_c": 2.0}, run=info)])
    backend.close()
    assert backend.run.config["gradtrack"] == {"run_id": "a-run", "max_grad_norm": 2.0}
    assert backend.run.config["gradtrack_names"] == {metric_name("_c"): "_c"}


def test_two_records_of_one_step_are_two_rows() -> None:
    """What an optimizer did to a step comes as a record of its own, neither dropped nor taken for the first."""
    first = Record(step=1, time=1.0, metrics={NORM: 1.0})
    second = Record(step=1, time=1.0, metrics={"updates/ratio": 2.0})
    backend = WandbBackend()
    backend.write([first])
    assert backend.present([second]) == set()
    backend.write([second])
    backend.close()
    rows = rows_of(file_of(backend.run))
    assert ours(rows) == [(1, 1.0)]
    assert ours(rows, "updates/ratio") == [(1, 2.0)]
    assert backend.present([first]) == backend.present([second]) == {("", 1)}
