"""A replay brings every journaled row to its destination exactly once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.backends.base import Backend
from gradtrack.delivery import destinations
from gradtrack.delivery import replay as module
from gradtrack.delivery.delivery import Delivery
from gradtrack.delivery.journal.offsets import offsets_path, read_offsets
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.replay import Replayed, replay
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import BackendError, JournalError, PermanentBackendError, UnknownPluginError, UsageError
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.reports import TrainingSummary
from tests.delivery.doubles import RUN, join_worker, row
from tests.plugins import install

PANEL = Panel(title="norms", section="gradients", metrics=("train/grad_norm",))


class Store(Backend):
    """A destination that outlives the backends that write to it."""

    records: ClassVar[list[Record]] = []
    made: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[int] = 0
    faults: ClassVar[list[BaseException]] = []
    ends: ClassVar[list[tuple[str, float]]] = []
    can_tell: ClassVar[bool] = True
    limit: ClassVar[int] = 10_000
    """How many rows there may be: every write beyond fails."""
    refuses: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, *, tracking_uri: str = "", place: str = "default", api_key: str = "", run_id: str = "") -> None:
        named = {"run_id": run_id} if run_id else {}
        self.made.append({"tracking_uri": tracking_uri, "place": place, "api_key": api_key} | named)
        self.place, self.run_id = place, run_id

    def write(self, records: Sequence[Record]) -> None:
        """Keep the records, unless something is wrong."""
        if self.faults:
            raise self.faults.pop(0)
        if any(record.step in self.refuses for record in records):
            raise PermanentBackendError("never")
        if len(self.records) + len(records) > self.limit:
            raise OSError("full")
        self.records.extend(records)

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        """Look into the store."""
        type(self).asked += 1
        return {(record.source, record.step) for record in self.records} if self.can_tell else None

    def end_run(self, outcome: str, *, time: float) -> str:
        """Note how the training ended."""
        self.ends.append((outcome, time))
        return outcome

    def address(self) -> Mapping[str, Any]:
        """Return the place, and which run it is there."""
        return {"place": self.place, "run_id": self.run_id or "seven"}


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    """Install the store as a plugin, empty."""
    install(monkeypatch, store=f"{__name__}:Store")
    monkeypatch.setattr(module, "_DELAYS_SECONDS", (0.0, 0.0))
    reset()
    yield Store
    reset()


def reset() -> None:
    """Empty the store."""
    Store.records.clear()
    Store.made.clear()
    Store.faults.clear()
    Store.ends.clear()
    Store.asked, Store.can_tell, Store.limit, Store.refuses = 0, True, 10_000, frozenset()


def journaled(directory: Path, steps: Sequence[int], options: Mapping[str, Any] | None = None) -> Path:
    """Write a journal of these steps that was to go to the store, as a killed process leaves it."""
    journal = Journal(directory, RUN, backends=[{"name": "store", "options": dict(options or {})}])
    for number, step in enumerate(steps):
        journal.append(number, row(step, panels=(PANEL,) if number == 0 else ()))
    journal.close(10.0)
    return directory


def stored() -> list[int]:
    """Return the steps in the store."""
    return [record.step for record in Store.records]


def test_missing_rows_are_delivered(tmp_path: Path) -> None:
    """Everything arrives in order, the run and the panels with the first row."""
    found = replay(journaled(tmp_path, range(1200)))
    assert stored() == list(range(1200))
    assert found == [Replayed(run_id="run-1", backend="store", rows=1200, delivered=1200, status="killed")]
    assert found[0].complete
    first = Store.records[0]
    assert first.run is not None
    assert (first.run.run_id, first.run.run_dir, first.panels) == ("run-1", str(tmp_path), (PANEL,))
    assert all(record.run is None for record in Store.records[1:])


def test_second_replay_finds_nothing_to_do(tmp_path: Path) -> None:
    """However often it is called, each row is there once."""
    journaled(tmp_path, range(700))
    replay(tmp_path)
    (again,) = replay(tmp_path)
    assert stored() == list(range(700))
    assert (again.present, again.delivered) == (700, 0)


@given(st.sets(st.integers(0, 29)))
def test_whatever_is_there_stays_once(there: set[int]) -> None:
    """For every part of the rows that the destination has, the replay brings exactly the others."""
    import tempfile

    reset()
    Store.records.extend(row(step) for step in sorted(there))
    with tempfile.TemporaryDirectory() as name:
        (found,) = replay(journaled(Path(name), range(30)))
    assert sorted(stored()) == list(range(30))
    assert (found.present, found.delivered) == (len(there), 30 - len(there))


def test_panels_reach_a_destination_that_has_the_first_rows(tmp_path: Path) -> None:
    """What came with a row that is there already goes with the first one that is not."""
    Store.records.append(row(0))
    replay(journaled(tmp_path, range(3)))
    assert [record.panels for record in Store.records] == [(), (PANEL,), ()]
    assert Store.records[1].run is not None


def test_acknowledged_rows_are_left_out_where_the_destination_cannot_tell(tmp_path: Path) -> None:
    """Without an answer the offsets decide: what was acknowledged is not sent twice, what was refused is tried."""
    Store.can_tell = False
    journaled(tmp_path, range(10))
    offsets = {"store": {"next": 6, "refused": [2], "address": {"run_id": "abc"}}}
    path = offsets_path(tmp_path / "journal-000.jsonl")
    path.write_text(json.dumps({"gradtrack_offsets": 1, "backends": offsets}))
    (found,) = replay(tmp_path)
    assert stored() == [2, 6, 7, 8, 9]
    assert (found.present, found.delivered) == (5, 5)
    assert Store.made == [{"tracking_uri": "", "place": "default", "api_key": "", "run_id": "abc"}]
    assert replay(tmp_path)[0].delivered == 0


def test_refused_row_that_a_failed_replay_has_not_reached_is_tried_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offsets of the first one go on to name it, where only they can tell what is missing."""
    monkeypatch.setattr(module, "_PART_ROWS", 2)
    Store.can_tell = False
    offsets = {"store": {"next": 6, "refused": [1, 5], "address": {}}}
    path = offsets_path(journaled(tmp_path, range(8)) / "journal-000.jsonl")
    path.write_text(json.dumps({"gradtrack_offsets": 1, "backends": offsets}))
    take = Store.write

    def one(self: Store, records: Sequence[Record]) -> None:
        if stored():
            raise OSError("down")
        take(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", one)
        replay(tmp_path)
    assert stored() == [1]
    replay(tmp_path)
    assert stored() == [1, 5, 6, 7]


def test_wrong_offsets_cost_no_row(tmp_path: Path) -> None:
    """A destination that lost what it had acknowledged gets it again."""
    journaled(tmp_path, range(10))
    path = offsets_path(tmp_path / "journal-000.jsonl")
    path.write_text(
        json.dumps({"gradtrack_offsets": 1, "backends": {"store": {"next": 9, "refused": [], "address": {}}}})
    )
    replay(tmp_path)
    assert stored() == list(range(10))


def test_repeated_steps_are_told_apart(tmp_path: Path) -> None:
    """Rows of one step, as after a resumed checkpoint, are never asked for together."""
    Store.can_tell = False
    replay(journaled(tmp_path, [1, 2, 2, 1, 3]))
    assert stored() == [1, 2, 2, 1, 3]


def test_options_come_from_the_run_and_secrets_from_outside(tmp_path: Path) -> None:
    """Hidden options are left out, and what the caller gives goes first."""
    options = {"tracking_uri": "http://***@host", "place": "here", "api_key": "***"}
    journaled(tmp_path, [1], options)
    replay(tmp_path)
    replay(tmp_path, tracking_uri="http://user:secret@host")
    assert Store.made[0] == {"tracking_uri": "", "place": "here", "api_key": ""}
    assert Store.made[-1] == {
        "tracking_uri": "http://user:secret@host",
        "place": "here",
        "api_key": "",
        "run_id": "seven",
    }
    assert "secret" not in (tmp_path / "journal-000.acknowledged.json").read_text()


def test_rows_can_go_to_another_backend(tmp_path: Path) -> None:
    """A destination that the run did not have gets all of it."""
    journaled(tmp_path, range(5))
    (found,) = replay(tmp_path, to="json")
    assert found.delivered == 5
    assert json.loads((tmp_path / "gradient_statistics.json").read_text())["step"] == list(range(5))
    assert replay(tmp_path, to="json")[0].delivered == 0
    assert stored() == []


def test_identity_outlives_a_replay_with_nothing_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has its identity only once it was written to is found by the next replay as well."""
    journaled(tmp_path, range(3))
    replay(tmp_path)
    monkeypatch.setattr(Store, "address", lambda self: {})
    for _ in range(2):
        replay(tmp_path)
        assert Store.made[-1]["run_id"] == "seven"


def test_only_the_header_names_a_place(tmp_path: Path) -> None:
    """What notes the acknowledged rows cannot send them, and with them the user's credentials, to another server."""
    journaled(tmp_path, range(3), {"tracking_uri": "http://127.0.0.1:1", "place": "here"})
    address = {"tracking_uri": "http://127.0.0.1:2", "place": "there", "directory": "/", "run_id": "http://host/abc"}
    offsets = {"gradtrack_offsets": 1, "backends": {"store": {"next": 0, "refused": [], "address": address}}}
    offsets_path(tmp_path / "journal-000.jsonl").write_text(json.dumps(offsets))
    replay(tmp_path)
    assert Store.made == [{"tracking_uri": "http://127.0.0.1:1", "place": "here", "api_key": ""}]


FOREIGN = [
    "https://tracking.example",
    "http://localhost.example",
    "http://localhost@tracking.example",
    "http://tracking.example\\@127.0.0.1/",
    "http://127.0.0.1:80@tracking.example",
    "http://127.1.evil/",
    " https://tracking.example",
    "//tracking.example",
    "tracking.example",
    "databricks",
    "postgresql://127.0.0.1/db",
    "file://tracking.example/share",
]


@pytest.mark.parametrize("uri", FOREIGN)
def test_server_that_only_the_journal_names_gets_nothing(tmp_path: Path, uri: str) -> None:
    """Credentials of the user would go to a server that the user has not chosen, so it is not even asked."""
    told: list[str] = []
    (found,) = replay(journaled(tmp_path, range(3), {"tracking_uri": uri}), tell=told.append)
    assert (found.delivered, found.complete, Store.made, told) == (0, False, [], [])
    assert found.fault is not None
    assert "If you trust it: --tracking-uri" in found.fault
    (found,) = replay(tmp_path, tracking_uri=uri)
    assert found.delivered == 3


@pytest.mark.parametrize("uri", ["http://localhost:5000", "http://127.0.0.1/a", "http://[::1]:5000/"])
def test_server_on_this_machine_is_used(tmp_path: Path, uri: str) -> None:
    """The journal is enough there."""
    replay(journaled(tmp_path, range(3), {"tracking_uri": uri}))
    assert (Store.made[-1]["tracking_uri"], stored()) == (uri, [0, 1, 2])


OUTSIDE = [
    {"place": "{}/logs"},
    {"place": "{}/run/../logs"},
    {"place": "{}/run/way/logs"},
    {"tracking_uri": "sqlite:///{}/store.db"},
    {"tracking_uri": "sqlite:///relative.db"},
    {"tracking_uri": "sqlite:///{}/run/a%2f..%2f..%2fb"},
    {"tracking_uri": "sqlite:///{}/run/%2e%2e/b"},
    {"tracking_uri": "file://{}/run/%2e%2e/b"},
    {"tracking_uri": "{}/run/a%2f..%2f..%2fb"},
    {"tracking_uri": "file://{}/store"},
    {"tracking_uri": "{}/store"},
    {"api_key": "~/key"},
]


@pytest.mark.parametrize("options", OUTSIDE)
def test_place_outside_that_only_the_journal_names_is_not_written_to(tmp_path: Path, options: dict[str, str]) -> None:
    """However it is spelled, files there may be another run's; the user can allow a directory, or name the place."""
    named = {name: value.format(tmp_path) for name, value in options.items()}
    journaled(tmp_path / "run", range(3), named)
    (tmp_path / "run" / "way").symlink_to(tmp_path)
    (found,) = replay(tmp_path / "run")
    assert (found.complete, Store.made) == (False, [])
    assert found.fault is not None
    assert "If you trust it: --allow" in found.fault
    assert replay(tmp_path / "run", options=named)[0].complete


UNTOLD = ["sqlite:///{}/run/a?x=../../b", "sqlite:///file:{}/b?uri=true", "file://{}/run/a#b", "sqlite:////"]


@pytest.mark.parametrize("uri", UNTOLD)
def test_everything_is_never_what_is_to_be_allowed(tmp_path: Path, uri: str) -> None:
    """Of an address that names no file for certain, and of a root, the user has to say it all."""
    named = uri.format(tmp_path)
    (found,) = replay(journaled(tmp_path / "run", range(3), {"tracking_uri": named}))
    assert (found.complete, Store.made) == (False, [])
    assert found.fault is not None
    assert "--allow" not in found.fault
    assert "If you trust it: --tracking-uri" in found.fault
    assert replay(tmp_path / "run", tracking_uri=named)[0].complete
    reset()
    (found,) = replay(journaled(tmp_path / "other", range(3), {"place": "/"}))
    assert found.fault is not None
    assert "--allow" not in found.fault
    assert "If you trust it, pass place yourself" in found.fault


def test_what_is_to_be_allowed_is_the_file_of_an_encoded_address(tmp_path: Path) -> None:
    """SQLAlchemy decodes it, and MLflow makes the directory without that."""
    decoded, literal = tmp_path / "my runs" / "store.db", tmp_path / "my%20runs" / "store.db"
    (found,) = replay(journaled(tmp_path / "run", range(3), {"tracking_uri": f"sqlite:///{literal}"}))
    assert found.fault is not None
    assert found.fault.endswith(f"If you trust it: --allow '{decoded}' --allow {literal}")
    assert replay(tmp_path / "run", allowed=[decoded, literal])[0].complete


@pytest.mark.parametrize("text", ["a\x1b]0;owned\x07b", "a\nb", "a\x9b31m", "a\u202eb", "a%1b]0;owned%07b"])
def test_text_that_controls_a_terminal_reaches_no_tracker(tmp_path: Path, text: str) -> None:
    """The package of a tracker may print what it is given."""
    told: list[str] = []
    (found,) = replay(journaled(tmp_path, range(3), {"place": text}), tell=told.append)
    assert (found.complete, Store.made, told) == (False, [], [])
    assert found.fault is not None
    assert "expected a text without control characters" in found.fault
    assert found.fault.isprintable()
    assert replay(tmp_path, options={"place": text})[0].complete


def test_place_outside_is_written_to_where_it_is_allowed(tmp_path: Path) -> None:
    """And one inside of the run's directory at once."""
    journaled(tmp_path / "run", range(3), {"place": str(tmp_path / "run" / "logs")})
    assert replay(tmp_path / "run")[0].complete
    journaled(tmp_path / "other", range(3), {"place": str(tmp_path / "logs")})
    assert not replay(tmp_path / "other", allowed=[tmp_path / "run"])[0].complete
    assert replay(tmp_path / "other", allowed=[tmp_path / "logs"])[0].complete


def test_file_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """A journal cannot have the statistics of another run replaced by its own."""
    victim = tmp_path / "victim" / "gradient_statistics.json"
    victim.parent.mkdir()
    victim.write_text("mine")
    journal = Journal(tmp_path / "run", RUN, backends=[{"name": "json", "options": {"directory": str(victim.parent)}}])
    journal.append(0, row(1))
    journal.close(10.0)
    assert not replay(tmp_path / "run")[0].complete
    assert [path.name for path in victim.parent.iterdir()] == [victim.name]
    assert victim.read_text() == "mine"


def test_link_out_of_the_directory_of_a_tracker_is_not_followed(tmp_path: Path) -> None:
    """It would have event files written elsewhere."""
    journal = Journal(tmp_path / "run", RUN, backends=[{"name": "tensorboard", "options": {}}])
    journal.append(0, row(1))
    journal.close(10.0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    (found,) = replay(tmp_path / "run")
    assert found.fault is not None
    assert "is a link out of the run's directory" in found.fault
    assert list((tmp_path / "elsewhere").iterdir()) == []


def store_with(tmp_path: Path, *links: tuple[str, str]) -> Path:
    """Write a run whose header names a place inside of it, and lay links in the run's directory."""
    run = journaled(tmp_path / "run", range(3), {"place": str(tmp_path / "run" / "x")})
    (tmp_path / "elsewhere").mkdir()
    for name in ("x/deep", "y"):
        (run / name).mkdir(parents=True)
    for name, target in links:
        (run / name).symlink_to(target.format(tmp_path))
    return run


LEADING_OUT = [
    [("x/deep/own", "{}/elsewhere")],
    [("x/deep/tag", "{}/elsewhere/profile")],
    [("x/deep/tag", "../../../elsewhere")],
    [("x/own", "../y"), ("y/more", "{}/elsewhere")],
    [(".store", "{}/elsewhere")],
    [("store", "y"), ("y/more", "{}/elsewhere")],
]


@pytest.mark.parametrize("links", LEADING_OUT)
def test_no_link_of_a_named_place_leads_out(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    """Neither to a file nor to a directory, nor by way of another link, wherever a tracker would write."""
    run = store_with(tmp_path, *links)
    (found,) = replay(run)
    assert (found.complete, Store.made) == (False, [])
    assert found.fault is not None
    assert "is a link out of the run's directory" in found.fault
    assert f"If you trust it: --allow {tmp_path}/elsewhere" in found.fault
    assert replay(run, allowed=[tmp_path / "elsewhere"])[0].complete


@pytest.mark.parametrize("header", [{}, {"place": "{}/run/x"}])
def test_place_that_a_tracker_takes_by_itself_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    """A store in the working directory lies in the run's where a user goes there to replay it."""
    monkeypatch.setattr(Store, "configured", classmethod(lambda cls: {"place": str(tmp_path / "run" / "x")}))
    journaled(tmp_path / "run", range(3), {name: value.format(tmp_path) for name, value in header.items()})
    (tmp_path / "run" / "x").mkdir()
    (tmp_path / "run" / "x" / "own").symlink_to(tmp_path)
    (found,) = replay(tmp_path / "run")
    assert (found.complete, Store.made) == (False, [])


def test_link_to_everything_is_to_be_removed(tmp_path: Path) -> None:
    """To allow a root would allow every place."""
    (found,) = replay(store_with(tmp_path, ("x/own", "/")))
    assert found.fault is not None
    assert found.fault.endswith("Remove it.")


def test_links_that_stay_or_that_no_tracker_meets_are_left_alone(tmp_path: Path) -> None:
    """A run directory has links to data, and its user may reach it by one."""
    links = ("data", "{}/elsewhere"), ("x/latest", "deep"), ("x/deep/up", "../.."), ("x/gone", "never-there")
    run = store_with(tmp_path, *links[:2], links[3])
    (tmp_path / "way").symlink_to(run)
    assert replay(tmp_path / "way")[0].complete
    (run / links[2][0]).symlink_to(links[2][1])  # which leads to `data` as well
    assert not replay(run)[0].complete


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
def test_files_beside_a_store_are_no_links(tmp_path: Path, ending: str) -> None:
    """SQLite writes them, and empties the one that a link leads to."""
    run = journaled(tmp_path / "run", range(3), {"tracking_uri": f"sqlite:///{tmp_path}/run/store.db"})
    (run / f"store.db{ending}").symlink_to(tmp_path / "profile")
    (found,) = replay(run)
    assert (found.complete, Store.made) == (False, [])
    assert found.fault is not None
    assert "is a link out of the run's directory" in found.fault


def test_directory_that_cannot_be_looked_through_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with too many files for that, or whose path is too long."""
    run = store_with(tmp_path)
    for number in range(10):
        (run / "x" / f"{number}").touch()
    monkeypatch.setattr(destinations, "_MOST_ENTRIES", 10)
    (found,) = replay(run)
    assert found.fault is not None
    assert "hold more than 10 files" in found.fault
    monkeypatch.undo()
    handle = os.open(run / "x" / "deep", os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=handle)
        handle, last = os.open("d" * 250, os.O_RDONLY, dir_fd=handle), handle
        os.close(last)
    os.close(handle)
    (found,) = replay(run)
    assert found.fault is not None
    assert "cannot be looked into" in found.fault
    assert Store.made == []


def test_server_of_the_environment_is_used_with_its_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the journal names the same one, whose credentials it never has."""
    uri = "https://user:s3cr3t@Tracking.example/base"
    monkeypatch.setattr(Store, "configured", classmethod(lambda cls: {"tracking_uri": uri}))
    told: list[str] = []
    replay(journaled(tmp_path, range(3), {"tracking_uri": "https://tracking.example/base/"}), tell=told.append)
    assert (Store.made[-1]["tracking_uri"], stored()) == (uri, [0, 1, 2])
    assert told == ["store: sending to tracking_uri https://***@Tracking.example/base"]


def test_destination_is_told_before_a_row_is_sent(tmp_path: Path) -> None:
    """On one line that controls no terminal."""
    told: list[tuple[str, int]] = []
    options = {"tracking_uri": "http://127.0.0.1:1"}
    (found,) = replay(
        journaled(tmp_path, range(3), options),
        options={"place": "a\x1b[31m\nb"},
        tell=lambda text: told.append((text, len(stored()))),
    )
    assert told == [("store: sending to tracking_uri http://127.0.0.1:1, place a [31m b", 0)]
    assert found.destination == told[0][0]


def test_trackers_without_the_option_are_replayed_as_well(tmp_path: Path) -> None:
    """A tracking address is for those that have one."""
    backends: list[dict[str, Any]] = [{"name": name, "options": {}} for name in ("store", "json")]
    journal = Journal(tmp_path, RUN, backends=backends)
    journal.append(0, row(1))
    journal.close(10.0)
    found = replay(tmp_path, tracking_uri="http://host")
    assert [(one.backend, one.delivered, one.fault) for one in found] == [("store", 1, None), ("json", 1, None)]


def test_outage_is_waited_for(tmp_path: Path) -> None:
    """A tracker that comes back during the replay gets everything once."""
    Store.faults.extend([OSError("down"), BackendError("down")])
    (found,) = replay(journaled(tmp_path, range(5)))
    assert (stored(), found.fault) == (list(range(5)), None)


def test_dead_tracker_is_reported_without_secrets(tmp_path: Path) -> None:
    """What cannot be delivered is said, and nothing is lost for the next attempt."""
    Store.faults.extend(OSError("http://user:s3cr3t@host refused") for _ in range(3))
    (found,) = replay(journaled(tmp_path, range(5)))
    assert (found.delivered, found.complete) == (0, False)
    assert found.fault == "OSError: http://***@host refused"
    assert replay(tmp_path)[0].delivered == 5


@given(st.integers(0, 12), st.integers(0, 12), st.sets(st.integers(0, 11)), st.booleans())
def test_rows_that_wait_are_counted(reached: int, acknowledged: int, refused: set[int], can_tell: bool) -> None:
    """Wherever a tracker dies, the numbers of an answer add up, and what waits is what a further replay brings."""
    import tempfile

    reset()
    Store.can_tell, Store.limit = can_tell, reached
    refused = {number for number in refused if number < acknowledged}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_ROWS", 4)
        path = journaled(Path(name), range(12)) / "journal-000.jsonl"
        Store.records.extend(row(step) for step in range(acknowledged) if step not in refused)
        entry = {"next": acknowledged, "refused": sorted(refused), "address": {}}
        offsets_path(path).write_text(json.dumps({"gradtrack_offsets": 1, "backends": {"store": entry}}))
        (found,) = replay(name)
        assert (found.rows, found.waiting + found.present + found.delivered) == (12, 12)
        assert f"{found.waiting} wait" in str(found) or found.complete
        Store.limit = 12
        assert replay(name)[0].delivered == found.waiting
    assert sorted(stored()) == list(range(12))


def test_rows_that_no_tracker_could_be_asked_for_wait(tmp_path: Path) -> None:
    """A tracker that cannot be made, or that is refused as a place of the journal alone, is told the number too."""
    (found,) = replay(journaled(tmp_path, range(8), {"tracking_uri": "https://elsewhere.example"}))
    assert (found.rows, found.present, found.waiting, found.complete) == (8, 0, 8, False)
    assert "store: 8 rows, 0 were there, 0 delivered, 0 refused, 8 wait (UsageError" in str(found)


def test_refused_rows_are_counted(tmp_path: Path) -> None:
    """A row that the destination will never take does not keep the others."""
    Store.refuses = frozenset({3})
    (found,) = replay(journaled(tmp_path, range(8)))
    assert stored() == [0, 1, 2, 4, 5, 6, 7]
    assert (found.refused, found.complete) == (1, False)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (None, "killed"),
        (RunEnd(run_id="another", summary=TrainingSummary()), "killed"),
        (RunEnd(run_id="run-1", summary=TrainingSummary()), "finished"),
        (RunEnd(run_id="run-1", summary=TrainingSummary(), failed=True), "failed"),
    ],
)
def test_tracker_is_told_how_the_training_ended(tmp_path: Path, end: RunEnd | None, outcome: str) -> None:
    """It learns it with the time of the last row, and the answer has what became of its run."""
    journaled(tmp_path, range(3))
    if end is not None:
        end.save(tmp_path / RUN_END)
    (found,) = replay(tmp_path)
    assert Store.ends == [(outcome, row(2).time)]
    assert str(found).endswith(f"its run is now {outcome}")


def test_run_that_misses_rows_goes_on(tmp_path: Path) -> None:
    """Neither a dead nor a refusing tracker is told of an end, nor is one where the end cannot be read."""
    journaled(tmp_path, range(3))
    Store.faults.extend(OSError("down") for _ in range(9))
    replay(tmp_path)
    Store.faults.clear()
    Store.refuses = frozenset({1})
    replay(tmp_path)
    Store.refuses = frozenset()
    (tmp_path / RUN_END).write_text("{}")
    (found,) = replay(tmp_path)
    assert Store.ends == []
    assert (found.status, found.complete, len(stored())) == ("", True, 3)


def test_damaged_lines_are_reported(tmp_path: Path) -> None:
    """What could not be read is part of the answer."""
    journaled(tmp_path, range(3))
    with (tmp_path / "journal-000.jsonl").open("a") as stream:
        stream.write("garbage\n")
    (found,) = replay(tmp_path)
    assert (found.delivered, len(found.damaged)) == (3, 1)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """A caller that draws a bar hears of every part and of the whole."""
    told: list[tuple[str, int, int]] = []
    replay(journaled(tmp_path, range(1200)), progress=lambda *found: told.append(found))
    assert told == [("store", 500, 1200), ("store", 1000, 1200), ("store", 1200, 1200)]


def test_live_run_is_refused(tmp_path: Path) -> None:
    """A run whose process still records delivers by itself; two writers would send rows twice."""
    journal = Journal(tmp_path, RUN, backends=[{"name": "store", "options": {}}])
    journal.append(0, row(1))
    with pytest.raises(JournalError, match="still being written"):
        replay(tmp_path)
    journal.close(10.0)
    assert replay(tmp_path)[0].delivered == 1


def test_every_run_of_a_directory_is_replayed(tmp_path: Path) -> None:
    """A directory that was used twice has two runs, each with its own rows."""
    journaled(tmp_path, [1])
    second = Journal(tmp_path, RunInfo(run_id="run-2"), backends=[{"name": "store", "options": {}}])
    second.append(0, row(2))
    second.close(10.0)
    assert [(one.run_id, one.delivered) for one in replay(tmp_path)] == [("run-1", 1), ("run-2", 1)]


def test_rows_of_other_ranks_stay(tmp_path: Path) -> None:
    """Every rank reports the same; only those of rank 0 are delivered."""
    journaled(tmp_path, [1])
    other = Journal(tmp_path, RUN, rank=1, backends=[{"name": "store", "options": {}}])
    other.append(0, row(2))
    other.close(10.0)
    replay(tmp_path)
    assert stored() == [1]


def test_what_an_interrupted_run_left_is_completed(tmp_path: Path) -> None:
    """After a close that met its deadline, delivery and replay together bring each row once."""
    backend = Store()
    Store.faults.extend(OSError("down") for _ in range(3))
    journal = Journal(tmp_path, RUN, backends=[{"name": "store", "options": {}}])
    delivery = Delivery({"store": backend}, run=RUN, journal=journal, close_timeout_seconds=0.0)
    for step in range(10):
        delivery.write(row(step))
    delivery.close()
    Store.faults.clear()
    Store.ends.clear()
    join_worker("store")
    replay(tmp_path)
    assert sorted(stored()) == list(range(10))
    assert read_offsets(offsets_path(tmp_path / "journal-000.jsonl"))["store"]["next"] == 10


def test_tracker_that_is_not_installed_does_not_stop_the_others(tmp_path: Path) -> None:
    """A backend that was an object of the run's own process is reported, and the next one gets its rows."""
    journal = Journal(tmp_path, RUN, backends=[{"name": name, "options": {}} for name in ("own", "store")])
    journal.append(0, row(1))
    journal.close(10.0)
    own, store = replay(tmp_path, tracking_uri="http://host")
    assert own.fault is not None
    assert "unknown backend 'own'" in own.fault
    assert store.complete


def test_misuse_is_explained(tmp_path: Path) -> None:
    """A wrong directory, a journal without trackers and an unknown name each say what to do."""
    with pytest.raises(JournalError, match="is not a directory"):
        replay(tmp_path / "nowhere")
    journal = Journal(tmp_path, RUN)
    journal.append(0, row(1))
    journal.close(10.0)
    with pytest.raises(UsageError, match="no tracker is known"):
        replay(tmp_path)
    with pytest.raises(UnknownPluginError, match="Did you mean 'json'"):
        replay(tmp_path, to="jsn")
    with pytest.raises(UsageError, match="Its options: tracking_uri, place, api_key"):
        replay(tmp_path, to="store", options={"colour": 1})


@pytest.mark.parametrize("to", [None, "store"])
def test_journal_without_a_row_is_told(tmp_path: Path, to: str | None) -> None:
    """Where a process ended before its header was whole, or only other ranks have left rows, that is the reason."""
    (tmp_path / "journal-000.jsonl").write_text('{"gradtrack_jour')
    other = Journal(tmp_path, RUN, rank=1, backends=[{"name": "store", "options": {}}])
    other.append(0, row(1))
    other.close(10.0)
    with pytest.raises(JournalError, match="holds no row for a tracker"):
        replay(tmp_path, to=to)


def test_two_replays_do_not_meet(tmp_path: Path) -> None:
    """A second replay of a directory would write what the first is about to write, so it is refused."""
    refused: list[str] = []

    def again(*_: object) -> None:
        with pytest.raises(JournalError, match="another replay reads it") as caught:
            replay(tmp_path)
        refused.append(str(caught.value))

    journaled(tmp_path, range(3))
    assert replay(tmp_path, progress=again)[0].complete
    assert (stored(), len(refused)) == ([0, 1, 2], 1)
    assert replay(tmp_path)[0].present == 3


def test_moved_run_finds_what_lay_in_its_directory(tmp_path: Path) -> None:
    """A tracker's files inside of a run's directory move with it, whatever kind of address names them."""
    old, new = tmp_path / "old", tmp_path / "new"
    options = {"place": f"{old}/logs", "tracking_uri": f"sqlite:///{old}/store.db", "api_key": f"{old}er/x"}
    run = RunInfo(run_id="run-1", run_dir=str(old))
    journal = Journal(old, run, backends=[{"name": "store", "options": options}])
    journal.append(0, row(1))
    journal.close(10.0)
    old.rename(new)
    replay(new, allowed=[tmp_path])
    assert Store.made == [
        {"place": f"{new}/logs", "tracking_uri": f"sqlite:///{new}/store.db", "api_key": f"{old}er/x"}
    ]


def test_address_since_the_move_stays_as_it_is(tmp_path: Path) -> None:
    """Where a run lies within its old place, what the first replay has noted is not moved once more by the second."""
    new = journaled(tmp_path / "old" / "new", [1])
    header, rest = (new / "journal-000.jsonl").read_text().split("\n", 1)
    values = json.loads(header)
    values["run"]["run_dir"] = str(tmp_path / "old")
    values["backends"][0]["options"] = {"place": str(tmp_path / "old" / "logs")}
    (new / "journal-000.jsonl").write_text(f"{json.dumps(values)}\n{rest}")
    for _ in range(3):
        replay(new)
        assert Store.made[-1]["place"] == str(new / "logs")


def test_interrupted_replay_lets_the_tracker_go_and_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who interrupts a replay keeps what it delivered, and the next one brings the rest."""
    closed: list[bool] = []

    def close(store: Store, *, failed: bool = False) -> None:
        closed.append(failed)

    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "close", close)
    journaled(tmp_path, range(1200))
    with pytest.raises(KeyboardInterrupt):
        replay(tmp_path, progress=stop)
    assert (len(stored()), closed) == (500, [False])
    assert replay(tmp_path)[0].delivered == 700
    assert stored() == list(range(1200))
