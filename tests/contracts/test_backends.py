"""What every backend promises, whichever tracker it writes to."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrack import registry
from gradtrack.errors import ClosedError
from gradtrack.records import Histogram, Panel, Record, RunInfo
from tests.contracts.harness import Harness, harness_of

RUN = RunInfo(run_id="contract", created=1.0, config={"max_grad_norm": 1.0}, environment={"python": "3"})
PANEL = Panel(title="norms", section="gradients", metrics=("train/grad_norm", "train/grad_clip_threshold"))
NORM, HEALTHY = "train/grad_norm", "train/grad_healthy"
HOSTILE = (
    "a[0]",
    "a_0_",
    "a|b",
    "a,b",
    "a//b",
    "../x",
    "/x",
    "x/",
    ".",
    "line\nbreak",
    "tab\there",
    " ",
    'quote"s',
    "<script>alert(1)</script>",
    "grüße/中",
    "n" * 251,
    "n" * 252,
    "n" * 500,
    "🔥 layer",
    "\u202egnp.\u202c",
    "'\"`${x}\\",
    "_step",
    "dots.in.name",
)


@pytest.fixture(params=registry.backends.builtin())
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Give the harness of each backend that the registry finds."""
    made = harness_of(request.param)(tmp_path)
    yield made
    made.release()


def row(step: int, metrics: Mapping[str, float] | None = None, **parts: Any) -> Record:
    """Make a record of a step; the first one carries the run."""
    values = {NORM: float(step), HEALTHY: 1.0} if metrics is None else metrics
    return Record(
        step=step, time=1_700_000_000.0 + step % 1000, metrics=values, run=RUN if step == 1 else None, **parts
    )


def deliver(harness: Harness, records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Write records to a new backend, close it and read the destination."""
    backend = harness.open()
    backend.write(records)
    backend.close()
    return harness.read()


def expected(harness: Harness, records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Say what a destination should hold after these records."""
    rows: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.metrics.items():
            kept = harness.kept(name, value)
            if kept is not None:
                rows.setdefault(name, []).append((record.step, kept))
    return rows


def only(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a tracker adds by itself."""
    return {name: rows for name, rows in found.items() if name in wanted}


def same(left: Mapping[str, list[tuple[int, float]]], right: Mapping[str, list[tuple[int, float]]]) -> bool:
    """Compare rows exactly; NaN equals NaN."""
    return repr({name: left[name] for name in sorted(left)}) == repr({name: right[name] for name in sorted(right)})


def test_rows_come_back_in_order_under_their_steps(harness: Harness) -> None:
    """What is written is what the destination holds: each step once, in the order of writing."""
    records = [row(step) for step in range(1, 21)]
    wanted = expected(harness, records)
    found = deliver(harness, records)
    assert same(only(found, wanted), wanted)


def test_batches_of_any_size_come_out_alike(harness: Harness) -> None:
    """Several writes, some of them empty, hold the same as one."""
    records = [row(step) for step in range(1, 8)]
    backend = harness.open()
    for part in (records[:1], [], records[1:5], records[5:]):
        backend.write(part)
    backend.close()
    wanted = expected(harness, records)
    assert same(only(harness.read(), wanted), wanted)


def test_extreme_values_survive(harness: Harness) -> None:
    """NaN, both infinities and the ends of the float range come back as the backend documents it."""
    extremes = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 3.4028234663852886e38, 0.1, -0.0, 0.0]
    records = [row(step, {NORM: value}) for step, value in enumerate(extremes, start=1)]
    wanted = expected(harness, records)
    assert same(only(deliver(harness, records), wanted), wanted)


def test_hostile_names_never_merge(harness: Harness) -> None:
    """Names that a tracker would refuse or rewrite keep rows of their own."""
    records = [row(step, {NORM: 1.0, **{name: float(at) for at, name in enumerate(HOSTILE)}}) for step in (1, 2)]
    wanted = expected(harness, records)
    assert same(only(deliver(harness, records), wanted), wanted)


def test_large_and_negative_steps_are_kept(harness: Harness) -> None:
    """A step of any 63-bit size keeps its value, and a step may go back."""
    records = [row(1), row(2**53 + 1), row(2**63 - 1), row(2)]
    wanted = expected(harness, records)
    found = only(deliver(harness, records), wanted)
    assert {name: sorted(rows) for name, rows in found.items()} == {n: sorted(rows) for n, rows in wanted.items()}


def test_pairs_keep_their_own_rows(harness: Harness) -> None:
    """Two pairs at the same step do not overwrite each other."""
    records = [
        row(1),
        row(1, {f"{NORM}/critic": 5.0, f"{HEALTHY}/critic": 0.0}, source="critic"),
        row(2),
        row(2, {f"{NORM}/critic": 6.0, f"{HEALTHY}/critic": 1.0}, source="critic"),
    ]
    wanted = expected(harness, records)
    assert same(only(deliver(harness, records), wanted), wanted)


def test_every_part_of_a_record_is_accepted(harness: Harness, tmp_path: Path) -> None:
    """Panels, issues, histograms, files and epochs never stop the metrics of their record."""
    picture = tmp_path / "picture.txt"
    picture.write_text("picture")
    issue = {"issue_type": "EXPLODING", "severity": "HIGH", "layer": "<b>", "message": "too large", "step": 1}
    full = row(
        1,
        epoch=3,
        panels=(PANEL,),
        issues=(issue,),
        histograms={"train/grad_hist/W": Histogram(edges=(0.0, 1.0, 2.0), counts=(3.0, 4.0))},
        files=(str(picture), str(tmp_path / "missing.png")),
    )
    wanted = expected(harness, [full, row(2)])
    assert same(only(deliver(harness, [full, row(2)]), wanted), wanted)


def test_second_close_does_nothing(harness: Harness) -> None:
    """Closing twice, also after a failure, leaves the rows alone."""
    backend = harness.open()
    backend.write([row(1)])
    backend.close(failed=True)
    backend.close()
    wanted = expected(harness, [row(1)])
    assert same(only(harness.read(), wanted), wanted)


def test_close_without_rows_is_allowed(harness: Harness) -> None:
    """A backend that never got a record closes without a fault."""
    harness.open().close()


def test_write_after_close_says_so(harness: Harness) -> None:
    """A closed backend refuses records with the error of this package."""
    backend = harness.open()
    backend.write([row(1)])
    backend.close()
    with pytest.raises(ClosedError, match="closed"):
        backend.write([row(2)])


def test_flush_makes_rows_durable(harness: Harness) -> None:
    """After a flush the destination holds what was written, before any close."""
    if not harness.flush_is_durable:
        pytest.skip("this tracker keeps rows back until its run ends; the journal holds them meanwhile")
    backend = harness.open()
    records = [row(step) for step in (1, 2, 3)]
    backend.write(records)
    backend.flush()
    wanted = expected(harness, records)
    assert same(only(harness.read(), wanted), wanted)
    backend.close()


def test_destination_tells_what_it_has(harness: Harness) -> None:
    """A backend that can tell names exactly the written rows, also from a second instance."""
    records = [row(step) for step in (1, 2, 3)]
    deliver(harness, records)
    again = harness.open()
    again.confine(harness.directory)  # as a replay does
    again.write([])
    found = again.present([*records, row(4)])
    again.close()
    assert found is None or found == {("", 1), ("", 2), ("", 3)}


def test_address_is_plain_and_fits_the_constructor(harness: Harness) -> None:
    """The address can go through the journal and back into the constructor."""
    backend = harness.open()
    backend.write([row(1)])
    address = backend.address()
    backend.close()
    assert json.loads(json.dumps(dict(address))) == dict(address)
    inspect.signature(type(backend)).bind(**address)


@pytest.mark.parametrize("name", registry.backends.builtin())
def test_import_is_light(name: str) -> None:
    """Loading a backend's module loads neither torch nor any tracker."""
    code = (
        f"import sys, gradtrack.backends.{name}\n"
        "heavy = {'torch', 'wandb', 'mlflow', 'opentelemetry', 'tensorboard', 'trackio'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
