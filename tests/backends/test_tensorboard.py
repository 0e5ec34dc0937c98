"""The TensorBoard backend, read back with TensorBoard's own readers."""

from __future__ import annotations

import dataclasses
import math
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.backends.tensorboard import TensorBoardBackend
from gradtrack.backends.tensorboard.files import Index
from gradtrack.delivery.run_files import note_files
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError, UsageError
from gradtrack.records import Histogram, Panel, Record, RunInfo
from gradtrack.reports.panels import CORE_PANELS
from tests.backends.rows import PICTURE, finished_run, make_records

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util


def read(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, wall time, value) of every scalar as TensorBoard itself sees them."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(directory.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                array = tensor_util.make_ndarray(value.tensor)
                if array.dtype.kind == "f" and array.ndim == 0:
                    found.setdefault(value.tag, []).append((event.step, event.wall_time, array.item()))
    return found


def accumulate(directory: Path) -> EventAccumulator:
    """Return the classical reader, loaded."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return reader.Reload()


def layout_of(directory: Path) -> Any:
    """Return the layout that the newest event of a sub-run holds."""
    event = accumulate(directory / "gradtrack").Tensors("custom_scalars__config__")[-1]
    return layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])


def single(value: float) -> float:
    """Round to a float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_classical_reader_finds_every_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """EventAccumulator finds each metric at each step with the record's own time, and wonders about nothing."""
    records = make_records(50)
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.write(records[:20])
    backend.write(records[20:])
    backend.close()
    events = accumulate(tmp_path).Scalars("train/grad_norm")
    expected = [(record.step, record.time, single(record.metrics["train/grad_norm"])) for record in records]
    assert [(event.step, event.wall_time, event.value) for event in events] == expected
    assert "oddly" not in caplog.text


@given(st.floats(allow_nan=False))
def test_every_value_is_shown_and_kept(value: float) -> None:
    """The shown value is the float next to the number, never an infinity that was none; a float's loss is made good."""
    with tempfile.TemporaryDirectory() as directory:
        TensorBoardBackend(log_dir=directory).write([Record(step=1, time=1.0, metrics={"m": value})])
        found = read(Path(directory))
    ((_, _, shown),) = found["m"]
    assert math.isinf(shown) == math.isinf(value)
    exact = found.get("gradtrack/exact/m", [(0, 0.0, shown)])[0][2]
    assert exact == pytest.approx(value, rel=1e-7, abs=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4028234663852886e38, 1e308, -1e308, 5e-324, 1e-40])
def test_case_16_extreme_values_survive(tmp_path: Path, value: float) -> None:
    """NaN and infinities are kept, and what a float would turn into one or into zero stands beside it as a double."""
    TensorBoardBackend(log_dir=tmp_path).write([Record(step=1, time=1.0, metrics={"m": value})])
    found = read(tmp_path)
    ((_, _, got),) = found.get("gradtrack/exact/m", found["m"])
    assert got == value or (math.isnan(got) and math.isnan(value))


def test_fast_reader_shows_every_row(tmp_path: Path) -> None:
    """The classical reader, which knows floats only, finds a row at every step across an overflow."""
    values = [1.0, 1e300, math.nan, -1e300]
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.write([Record(step=index, time=1.0, metrics={"m": value}) for index, value in enumerate(values)])
    got = [event.value for event in accumulate(tmp_path).Scalars("m")]
    assert got == [1.0, 3.4028234663852886e38, pytest.approx(math.nan, nan_ok=True), -got[1]]


def test_write_is_durable_without_close(tmp_path: Path) -> None:
    """A process that is killed right after write has lost nothing (cases 7 and 8)."""
    program = """
        import os, signal, sys
        from gradtrack.backends.tensorboard import TensorBoardBackend
        from tests.backends.rows import make_records
        backend = TensorBoardBackend(log_dir=sys.argv[1])
        for record in make_records(100):
            backend.write([record])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    assert subprocess.run(command, cwd=root, check=False).returncode == -9
    assert len(accumulate(tmp_path).Scalars("train/grad_norm")) == 100


def test_default_directory_is_in_the_run_directory(tmp_path: Path) -> None:
    """Without options the files go to `tensorboard` in the run directory."""
    TensorBoardBackend().write(make_records(1, run_dir=tmp_path))
    assert list((tmp_path / "tensorboard").glob("*tfevents*"))


def test_case_15_removed_directory_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the directory is removed, writing goes on in a new one and the loss is reported."""
    backend = TensorBoardBackend(log_dir=tmp_path / "logs")
    records = make_records(4)
    backend.write(records[:2])
    shutil.rmtree(tmp_path / "logs")
    backend.write(records[2:])
    assert [step for step, _, _ in read(tmp_path / "logs")["train/grad_norm"]] == [3, 4]
    assert "was removed" in caplog.text


def test_case_15_unwritable_directory_is_contained(tmp_path: Path) -> None:
    """A directory that cannot be made is a BackendError, and the same batch goes through once it can be."""
    (tmp_path / "logs").write_text("in the way")
    backend = TensorBoardBackend(log_dir=tmp_path / "logs")
    with pytest.raises(BackendError, match="cannot be written"):
        backend.write(make_records(3))
    (tmp_path / "logs").unlink()
    backend.write(make_records(3))
    assert [step for step, _, _ in read(tmp_path / "logs")["train/grad_norm"]] == [1, 2, 3]


def test_case_14_full_disk_takes_a_batch_wholly_or_not_at_all(tmp_path: Path) -> None:
    """Where the file may not grow, write raises, nothing of the batch is in the file, and trying again helps."""
    program = """
        import resource, signal, sys
        from gradtrack.backends.tensorboard import TensorBoardBackend
        from gradtrack.errors import BackendError
        from tests.backends.rows import make_records
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        backend, records = TensorBoardBackend(log_dir=sys.argv[1]), make_records(40)
        backend.write(records[:20])
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
        try:
            backend.write(records[20:])
        except BackendError as fault:
            print("refused")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        backend.write(records[20:])
    """
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    assert result.stdout == "refused\n"
    assert [step for step, _, _ in read(tmp_path)["train/grad_norm"]] == list(range(1, 41))


def test_histogram_keeps_edges_and_counts(tmp_path: Path) -> None:
    """The buckets of a histogram come back as they were counted."""
    histogram = Histogram(edges=(-1.0, -0.5, 0.0, 2.0), counts=(3.0, 4.0, 5.0))
    TensorBoardBackend(log_dir=tmp_path).write([Record(step=3, time=1.0, histograms={"grads": histogram})])
    (event,) = accumulate(tmp_path).Histograms("grads")
    found = event.histogram_value
    assert (found.min, found.max, found.num) == (-1.0, 2.0, 12.0)
    assert (list(found.bucket_limit), list(found.bucket)) == ([-0.5, 0.0, 2.0], [3.0, 4.0, 5.0])


def test_issues_are_text_once_and_escaped(tmp_path: Path) -> None:
    """The open issues are written when they change, with names that cannot become markup."""
    issue = {"severity": "HIGH", "message": "layer <script> vanishes"}
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.write([Record(step=step, time=1.0, issues=(issue,) if step < 3 else ()) for step in range(2)])
    backend.write([Record(step=1, time=2.0, metrics={"updates/ratio": 0.1})])  # told later, without the issues
    backend.write([Record(step=step, time=3.0, issues=(issue,) if step < 3 else ()) for step in range(2, 5)])
    events = accumulate(tmp_path).Tensors("gradtrack/issues")
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]
    assert texts == [(0, "- **HIGH** layer &lt;script&gt; vanishes"), (3, "- no open issue")]


def test_case_18_metric_called_like_our_axis_is_beside_it(tmp_path: Path) -> None:
    """The axis keeps its values, the metric has a tag of its own, and the row is found again."""
    record = Record(step=3, time=1.0, metrics={"gradtrack/step": 7.0}, run=RunInfo(run_id="r"))
    TensorBoardBackend(log_dir=tmp_path).write([record])
    found = read(tmp_path)
    assert [value for _, _, value in found.pop("gradtrack/step")] == [3.0]
    assert [value for rows in found.values() for _, _, value in rows] == [7.0]
    assert TensorBoardBackend(log_dir=tmp_path).present([record]) == {("", 3)}


def test_layout_is_in_a_sub_run_only(tmp_path: Path) -> None:
    """The panels are arranged in the sub-run, so the layout of the user's own run stays."""
    backend = TensorBoardBackend(log_dir=tmp_path)
    metrics = {name.replace("*", "a"): 1.0 for panel in CORE_PANELS for name in panel.metrics}
    backend.write([*make_records(2, panels=CORE_PANELS), Record(step=3, time=1.0, metrics=metrics)])
    assert "custom_scalars__config__" not in accumulate(tmp_path).Tags()["tensors"]
    (category,) = layout_of(tmp_path).category
    assert [chart.title for chart in category.chart] == [panel.title for panel in CORE_PANELS]
    (series,) = next(chart for chart in category.chart if chart.HasField("margin")).margin.series
    assert (series.value, series.lower, series.upper) == ("train/grad_mean", "train/grad_min", "train/grad_max")


def test_later_panels_join_the_layout(tmp_path: Path) -> None:
    """Panels of an analyzer are added to those that are there when they have a number: none is empty."""
    backend = TensorBoardBackend(log_dir=tmp_path)
    late = Panel(title="late", section="rnn", metrics=("rnn/a/*",), kind="multi-line")
    backend.write(make_records(1, panels=(*CORE_PANELS, late)))
    assert [category.title for category in layout_of(tmp_path).category] == ["gradients"]
    backend.write([Record(step=2, time=1.0, metrics={"rnn/a/l0": 1.0})])
    assert [category.title for category in layout_of(tmp_path).category] == ["gradients", "rnn"]


def test_a_resumed_run_keeps_the_panels_of_its_first_half(tmp_path: Path) -> None:
    """The newest layout counts, and what an earlier process has written is not known to this one."""
    late = Panel(title="late", section="rnn", metrics=("rnn/a",))
    run = RunInfo(run_id="second", resumed_from="first", resumed_at={"": 4})
    TensorBoardBackend(log_dir=tmp_path).write([Record(step=5, time=1.0, metrics={"x": 1.0}, run=run, panels=(late,))])
    assert [category.title for category in layout_of(tmp_path).category] == ["rnn"]


@pytest.mark.parametrize(
    ("metric", "matching", "others"),
    [
        ("a/b", ["a/b"], ["a/bc", "a/b/c", "xa/b"]),
        ("a.b(c)", ["a.b(c)"], ["axb(c)"]),
        ("a/b/*", ["a/b/c", "a/b/c/d"], ["a/b", "a/bx", "a/b/"]),
        ("a/<script>'\"🔥\u202e[$^", ["a/<script>'\"🔥\u202e[$^"], ["a/", "a/<script>"]),
        (f"a/{'n' * 500}", [f"a/{'n' * 500}"], [f"a/{'n' * 499}"]),
    ],
)
def test_chart_patterns_match_their_metrics_only(
    tmp_path: Path, metric: str, matching: Iterable[str], others: Iterable[str]
) -> None:
    """A tag of a chart is a regular expression, and matches what the panel means."""
    import re

    panel = Panel(title=metric, section="s", metrics=(metric,), kind="multi-line")
    TensorBoardBackend(log_dir=tmp_path).write(
        [Record(step=1, time=1.0, metrics=dict.fromkeys(matching, 1.0), panels=(panel,))]
    )
    (chart,) = layout_of(tmp_path).category[0].chart
    (pattern,) = chart.multiline.tag
    assert chart.title == metric
    assert all(re.match(pattern, name) for name in matching)
    assert not any(re.match(pattern, name) for name in others)


def test_present_tells_what_the_files_hold(tmp_path: Path) -> None:
    """Another instance finds the records of this run, by source and step, and not those of another run."""
    records = make_records(10, source="critic")
    TensorBoardBackend(log_dir=tmp_path).write(records[:6])
    TensorBoardBackend(log_dir=tmp_path).write(make_records(10, run_id="another", source="critic"))
    found = TensorBoardBackend(log_dir=tmp_path).present(records)
    assert found == {("critic", step) for step in range(1, 7)}


def test_present_skips_a_torn_tail(tmp_path: Path) -> None:
    """A file whose last event is torn tells of all the others."""
    records = make_records(10)
    TensorBoardBackend(log_dir=tmp_path).write(records)
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-30])
    assert TensorBoardBackend(log_dir=tmp_path).present(records) == {("", step) for step in range(1, 10)}


def test_replayed_tail_continues_the_run(tmp_path: Path) -> None:
    """What is missing at the end goes to the run itself."""
    records = make_records(10)
    TensorBoardBackend(log_dir=tmp_path).write(records[:6])
    again = TensorBoardBackend(log_dir=tmp_path)
    assert again.present(records) is not None
    again.write(records[6:])
    assert [step for step, _, _ in read(tmp_path)["train/grad_norm"]] == list(range(1, 11))


def test_replayed_gap_goes_to_a_sub_run(tmp_path: Path) -> None:
    """What is missing in the middle goes to a sub-run: steps that go back make TensorBoard drop what was there."""
    records = make_records(10)
    TensorBoardBackend(log_dir=tmp_path).write([*records[:3], *records[6:]])
    again = TensorBoardBackend(log_dir=tmp_path)
    there = again.present(records) or set()
    again.write([record for record in records if (record.source, record.step) not in there])
    assert [step for step, _, _ in read(tmp_path / "gradtrack-late")["train/grad_norm"]] == [4, 5, 6]
    assert TensorBoardBackend(log_dir=tmp_path).present(records) == {("", step) for step in range(1, 11)}


def test_address_leads_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new instance made from the address finds the run, from any directory."""
    monkeypatch.chdir(tmp_path)
    backend = TensorBoardBackend(log_dir="logs")
    backend.write(make_records(2))
    monkeypatch.chdir("/")
    assert TensorBoardBackend(**backend.address()).present(make_records(2)) == {("", 1), ("", 2)}


def test_closed_backend_refuses_records(tmp_path: Path) -> None:
    """A second close does nothing, and writing after it is an error."""
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.close()
    backend.close(failed=True)
    with pytest.raises(ClosedError):
        backend.write(make_records(1))


def test_options_are_checked() -> None:
    """Options that cannot mean anything are refused with the remedy."""
    with pytest.raises(UsageError, match="Pass the writer itself"):
        TensorBoardBackend(writer="runs/exp1")
    with pytest.raises(UsageError, match="expected one of them"):
        TensorBoardBackend(log_dir="x", writer=object())


class TestUserWriter:
    """A SummaryWriter that the user opened."""

    @pytest.fixture
    def writer(self, tmp_path: Path) -> Any:
        """Open torch's own writer."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))
        yield writer
        writer.close()

    def test_case_05_writer_stays_usable(self, writer: Any, tmp_path: Path) -> None:
        """Our rows join the user's in one file, are there at our close, and the user goes on."""
        backend = TensorBoardBackend(writer=writer)
        writer.add_scalar("loss", 1.0, 1)
        backend.write(make_records(5))
        backend.close()
        assert len(read(tmp_path)["train/grad_norm"]) == 5
        writer.add_scalar("loss", 2.0, 2)
        writer.flush()
        assert [value for _, _, value in read(tmp_path)["loss"]] == [1.0, 2.0]
        assert len(list(tmp_path.glob("*tfevents*"))) == 1

    def test_user_layout_stays(self, writer: Any, tmp_path: Path) -> None:
        """The user's own custom scalars are not replaced."""
        writer.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
        backend = TensorBoardBackend(writer=writer)
        backend.write(make_records(1, panels=CORE_PANELS))
        backend.close()
        event = accumulate(tmp_path).Tensors("custom_scalars__config__")[-1]
        assert layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category[0].title == "mine"
        assert layout_of(tmp_path).category[0].title == "gradients"

    def test_case_06_writer_closed_before_us(self, writer: Any, tmp_path: Path) -> None:
        """A writer that the user closed is not re-opened behind the user's back."""
        backend = TensorBoardBackend(writer=writer)
        backend.write(make_records(2))
        writer.close()
        with pytest.raises(PermanentBackendError, match="closed before gradtrack"):
            backend.write(make_records(4)[2:])
        backend.close()
        assert len(list(tmp_path.glob("*tfevents*"))) == 1

    def test_batch_that_comes_again_is_not_doubled(self, writer: Any, tmp_path: Path) -> None:
        """After a fault in the middle of a batch, the rows that are in the file already are left out."""
        backend = TensorBoardBackend(writer=writer)
        file_writer, records = writer.file_writer, make_records(4)
        original, calls = file_writer.add_event, []

        def failing(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 3:
                raise OSError(28, "No space left on device")
            original(*arguments)

        file_writer.add_event = failing
        with pytest.raises(BackendError):
            backend.write(records)
        backend.write(records)
        assert [step for step, _, _ in read(tmp_path)["train/grad_norm"]] == [1, 2, 3, 4]

    def test_present_reads_the_user_run(self, writer: Any, tmp_path: Path) -> None:
        """A replay into the directory of the user's writer finds its rows."""
        backend = TensorBoardBackend(writer=writer)
        records = make_records(6)
        backend.write(records[:4])
        assert TensorBoardBackend(**backend.address()).present(records) == {("", step) for step in range(1, 5)}


def test_another_kind_of_writer_gets_single_values() -> None:
    """A writer with protocol buffers of its own, like tensorboardX, is given values, histograms and text."""
    calls: list[tuple[str, Any]] = []

    class Writer:
        logdir = "elsewhere"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("add_") or name == "flush":
                return lambda *arguments, **keywords: calls.append((name, arguments))
            raise AttributeError(name)

    with tempfile.TemporaryDirectory() as directory:
        Writer.logdir = directory
        backend = TensorBoardBackend(writer=Writer())
        histogram = Histogram(edges=(0.0, 1.0), counts=(2.0,))
        issue = {"severity": "LOW", "message": "m"}
        backend.write(
            [Record(step=7, time=2.0, metrics={"a": 0.5, "b": 1e300}, histograms={"h": histogram}, issues=(issue,))]
        )
        assert backend.present([Record(step=7, time=2.0, run=RunInfo(run_id="x"))]) is None
    assert ("add_scalar", ("a", 0.5, 7, 2.0)) in calls
    assert ("add_scalar", ("b", 3.4028234663852886e38, 7, 2.0)) in calls
    assert [name for name, _ in calls].count("add_histogram_raw") == 1
    assert [name for name, _ in calls].count("add_text") == 1


def test_two_records_of_one_step_are_two_events(tmp_path: Path) -> None:
    """What an optimizer did to a step comes as a record of its own, which is not taken for the first."""
    first = Record(step=1, time=1.0, metrics={"a": 1.0}, run=RunInfo(run_id="x"))
    second = Record(step=1, time=1.0, metrics={"b": 2.0})
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.write([first])
    assert backend.present([second]) == set()
    assert backend.present([first]) == {("", 1)}


def test_withheld_metrics_are_left_out(tmp_path: Path) -> None:
    """What another callback writes to the same run is not written twice, and a replay knows of it."""
    backend = TensorBoardBackend(log_dir=tmp_path, withhold=["train/grad_norm"])
    backend.write(make_records(2))
    backend.close()
    assert "train/grad_norm" not in read(tmp_path)
    assert "gradtrack/step" in read(tmp_path)
    assert backend.address()["withhold"] == ["train/grad_norm"]


def test_pictures_are_images_of_the_sub_run_once(tmp_path: Path) -> None:
    """At close the pictures of the run are images in the sub-run, at the last step; a replay adds none."""
    records = finished_run(tmp_path / "run")
    for rows in (records, records[-1:]):
        backend = TensorBoardBackend(log_dir=tmp_path / "logs")
        backend.write([dataclasses.replace(rows[0], run=records[0].run), *rows[1:]])
        backend.close()
        backend.close()
    reader = EventAccumulator(str(tmp_path / "logs" / "gradtrack"), size_guidance={"images": 0}).Reload()
    assert reader.Tags()["images"] == ["gradtrack/training_curves"]
    (image,) = reader.Images("gradtrack/training_curves")
    assert (image.step, image.width, image.height) == (30, 1, 1)
    assert image.encoded_image_string == PICTURE


def test_pictures_join_the_user_s_run_once(tmp_path: Path) -> None:
    """At close the pictures are images of the user's own run; a replay into its directory adds none."""
    from torch.utils.tensorboard import SummaryWriter

    records = finished_run(tmp_path / "run")
    writer = SummaryWriter(str(tmp_path / "mine"))
    backend = TensorBoardBackend(writer=writer)
    backend.write(records[:-1])
    backend.close()
    writer.close()
    replayed = TensorBoardBackend(log_dir=tmp_path / "mine")
    assert len(replayed.present(records) or ()) == 29
    replayed.write([dataclasses.replace(records[-1], run=records[0].run)])
    replayed.close()
    assert len(accumulate(tmp_path / "mine").Images("gradtrack/training_curves")) == 1
    assert accumulate(tmp_path / "mine" / "gradtrack").Tags()["images"] == []


def test_broken_picture_is_left_out(tmp_path: Path) -> None:
    """What only looks like a picture costs neither the others nor the close."""
    records = finished_run(tmp_path / "run")
    (tmp_path / "run" / "a.png").write_bytes(b"not a picture")
    note_files(tmp_path / "run", "a-run", [tmp_path / "run" / "a.png", tmp_path / "run" / "training_curves.png"])
    backend = TensorBoardBackend(log_dir=tmp_path / "logs")
    backend.write(records)
    backend.close()
    assert accumulate(tmp_path / "logs" / "gradtrack").Tags()["images"] == ["gradtrack/training_curves"]


def test_pictures_that_cannot_be_written_do_not_fail_the_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are there, and what is missing is told."""
    backend = TensorBoardBackend(log_dir=tmp_path / "logs")
    backend.write([dataclasses.replace(record, panels=()) for record in finished_run(tmp_path / "run")])
    (tmp_path / "logs" / "gradtrack").write_text("in the way")
    backend.close()
    assert "could not be shown" in caplog.text
    assert len(read(tmp_path / "logs")["train/grad_norm"]) == 30


def test_backend_without_rows_shows_nothing(tmp_path: Path) -> None:
    """A replay that has nothing to deliver, like a run without rows, leaves no file."""
    records = finished_run(tmp_path / "run")
    backend = TensorBoardBackend(log_dir=tmp_path / "logs")
    assert backend.present(records) == set()
    backend.close()
    assert not (tmp_path / "logs").exists()


def test_withheld_metrics_do_not_hide_a_row(tmp_path: Path) -> None:
    """A row is there although a metric of it was left out, so a replay does not write it again."""
    records = make_records(5)
    backend = TensorBoardBackend(log_dir=tmp_path, withhold=["train/grad_norm"])
    backend.write(records)
    again = TensorBoardBackend(log_dir=tmp_path, withhold=["train/grad_norm"])
    assert again.present(records) == {("", record.step) for record in records}


def test_files_are_read_once_however_many_parts_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking in parts reads each event once, also those that come in between; a file that was replaced is read anew."""
    records, taken = make_records(40), []
    take = Index._take

    def counted(index: Index, event: Any) -> None:
        taken.append(event)
        take(index, event)

    monkeypatch.setattr(Index, "_take", counted)
    backend = TensorBoardBackend(log_dir=tmp_path)
    backend.write(records[:20])
    for start in range(0, 40, 5):
        part = records[start : start + 5]
        there = backend.present(part) or set()
        assert there == ({("", record.step) for record in part} if start < 20 else set())
        backend.write([record for record in part if (record.source, record.step) not in there])
    assert backend.present(records) == {("", record.step) for record in records}
    assert len(taken) == len(records) + 1  # and the version of the file
    (path,) = tmp_path.glob("*tfevents*")
    path.unlink()
    backend.write(records[:3])
    assert backend.present(records) == {("", record.step) for record in records[:3]}
