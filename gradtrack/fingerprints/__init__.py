"""Fingerprints of training steps: hash and norm of every weight and gradient, to find where two trainings part."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from pydantic import BaseModel

from gradtrack.capture import Forwards, Training
from gradtrack.errors import JournalError, UsageError
from gradtrack.gradients.distributed.shards import local_part, unwrapped
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.checksums import SavedFingerprints, fingerprint, hash_of_batch, with_checksum
from gradtrack.support.interrupts import pass_on
from gradtrack.support.rank import num_ranks, process_rank
from gradtrack.support.regular_files import MEBIBYTE, check_json, is_regular

_FILE: Final = "fingerprints-{:03d}.jsonl"
_IS_FILE: Final = re.compile(r"fingerprints-(\d{3,6})\.jsonl")
_MOST_MEMORY: Final = 64 * MEBIBYTE
"""Of a row. One of 100,000 tensors has as much; pydantic collects every fault of what is none."""
_KEPT: Final = 8
"""How many steps rank 0 keeps to compare them with those of ranks that are late."""
_logger = logging.getLogger("gradtrack")
Print = tuple[str, float]
"""The hash of a tensor, and its norm."""


class Row(BaseModel):
    """The fingerprints of a step, before its optimizer has stepped; at the end of a run those of the weights alone."""

    step: int
    source: str = ""
    lr: dict[str, float] = {}
    batch: str | None = None
    rng: dict[str, str] | None = None
    weights: list[Print]
    gradients: list[Print | None]


class Fingerprints:
    """Writes the fingerprints of every Nth step into the run directory, up to a number of bytes.

    The first rank of the replicas that DistributedDataParallel keeps equal reads those of the others, and opens an
    issue where they differ: nothing is sent, so no rank waits for another.
    """

    def __init__(self, training: Training, place: Callable[[], tuple[Path, str] | None]) -> None:
        self._training, self._place = training, place
        self._every = training.config.fingerprints
        self._ended = False
        self._last, self._session = 0, 0
        self._forwards = Forwards(training, due=self.due)
        self._rank, self._process = process_rank(), os.getpid()
        self._stream: BinaryIO | None = None
        self._run_id = ""
        self._names: list[str] = []
        self._replicas: Replicas | None = None

    def due(self, step: int) -> bool:
        """Whether a step gets fingerprints: the first one and every Nth."""
        return not self._ended and (step == 1 or step % self._every == 0)

    def next_step(self, step: int) -> int:
        """Return the next step that gets fingerprints."""
        return step if self.due(step) else 2**63 if self._ended else step + -step % self._every

    def end_batch(self, batch: object) -> None:
        """Note that the backward pass of a micro-batch is over."""
        self._forwards.end_batch(batch)

    def measured(self, grads: Any, batch: object, data: Any) -> None:
        """Write the fingerprints of a step, if it gets some; issues of the replicas stay open on all steps."""
        if self.due(data.step) and not data.repeated:
            try:
                if data.step <= self._last:  # the training has gone back
                    self._session += 1
                    self._begin()
                self._last = data.step
                row = self._row(grads, batch, data)
                self._add(row.model_dump())
                if self._replicas is not None:
                    self._replicas.compare(row, self._names, self._session)
            except Exception as fault:
                pass_on(fault)
                self._stop(f"fingerprints end before step {data.step}: {fault}.", data)
        if self._replicas is not None:
            data.drift = self._replicas.issues

    def judged(self, *_: object) -> None:
        """Do nothing: what counts is what the step was computed from."""

    def close(self) -> None:
        """Write the fingerprints of the last weights, remove the hook, and close the file."""
        self._forwards.close()
        if self._stream is not None and self._process == os.getpid():  # not in a forked copy
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                weights, training = list(self._weights().values()), self._training
                last = Row(step=training.step_count + 1, source=training.name, weights=weights, gradients=[])
                self._add(last.model_dump())
            self._stream.close()
        self._stream, self._ended = None, True

    def _weights(self) -> dict[str, Print]:
        named = unwrapped(self._training.model).named_parameters()
        return {name: fingerprint(local_part(param)) for name, param in named}

    def _row(self, grads: Any, batch: object, data: Any) -> Row:
        weights, forwards = self._weights(), self._forwards
        found = dict(zip(grads.layout.names, grads.tensors, strict=True)) if grads.tensors else {}
        calls = list(forwards.calls) if forwards.of_step(data.step) else []
        batches = [*(one for one, _ in forwards.groups), batch]
        inputs = [(call.args, call.kwargs) for call in calls]
        known = calls or any(one is not None for one in batches)
        if list(weights) != self._names:
            self._names = list(weights)
            self._add({"names": data.source, "parameters": self._names})
        return Row(
            step=data.step,
            source=data.source,
            lr=data.learning_rates(),
            batch=hash_of_batch((batches, inputs)) if known else None,
            rng=_hashes_of_rng(calls[0].rng) if calls else None,
            weights=list(weights.values()),
            gradients=[fingerprint(found[name]) if name in found else None for name in weights],
        )

    def _add(self, values: Mapping[str, Any]) -> None:
        line = with_checksum(f"{json.dumps(values)}\n".encode())
        if self._stream is None:
            self._open()
        assert self._stream is not None
        most = self._training.config.fingerprints_max_bytes
        if os.fstat(self._stream.fileno()).st_size + len(line) > most:
            raise ValueError(f"they would have more than {most:,} bytes. Raise fingerprints_max_bytes")
        self._stream.write(line)

    def _open(self) -> None:
        place = self._place()
        if place is None:
            raise ValueError("this rank has no directory of rank 0, and is not compared. Set run_dir on every rank")
        directory, self._run_id = place
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / _FILE.format(self._rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._stream = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        model: Any = self._training.model
        if type(model).__name__ == "DistributedDataParallel":
            replicas = list(torch.distributed.get_process_group_ranks(model.process_group))
            if self._rank == min(replicas):
                self._replicas = Replicas(directory, self._rank, replicas, self._run_id)
        self._stream.write(b"\n")  # a process that was killed may have left half a line
        self._begin()

    def _begin(self) -> None:
        """Begin a session: rows of the same step are compared between ranks within one only."""
        own = {"run_id": self._run_id, "source": self._training.name, "session": self._session}
        self._add({"fingerprints": 1, **own, "rank": self._rank, "ranks": num_ranks(), "every": self._every})

    def _stop(self, text: str, data: Any) -> None:
        data.notes = [*data.notes, text]
        _logger.warning("%s", text)
        if self._stream is not None:
            self._stream.close()
        self._stream, self._ended = None, True
        self._forwards.close()


def _hashes_of_rng(states: Mapping[str, Any]) -> dict[str, str]:
    """Hash the states of generators; that of Python's is a tuple of hundreds of numbers."""
    return {name: hash_of_batch(repr(state) if name == "python" else state) for name, state in states.items()}


@dataclass(slots=True, kw_only=True)
class Difference:
    """Where two runs, or two ranks of one, part: the step, the parameter, why, and by how much."""

    step: int
    cause: str
    """`data`, `random numbers`, `gradient`, `update` or `initial weights`."""
    source: str = ""
    rank: int = 0
    parameter: str = ""
    num_parameters: int = 0
    norms: tuple[float, float] = (0.0, 0.0)
    relative: float = 0.0
    """By how much the norms differ, as a share of the larger one; NaN where either is not finite."""
    text: str = ""


def difference_of_rows(
    first: Row, second: Row, names: Sequence[str], earlier: Sequence[Row], *, replicas: bool = False
) -> Difference | None:
    """Return what two rows of the same step differ in, causes before effects; `earlier` are those before."""
    step = first.step
    causes = []
    if not replicas:
        if None not in (first.batch, second.batch) and first.batch != second.batch:
            causes.append("data")
        one, other = first.rng or {}, second.rng or {}
        causes += [f"random numbers ({name})" for name in one if name in other and one[name] != other[name]]
    for kind in ("weights", "gradients"):
        pairs = zip(names, getattr(first, kind), getattr(second, kind), strict=False)
        apart = [(name, a, b) for name, a, b in pairs if (a or ("", 0))[0] != (b or ("", 0))[0]]
        if not apart:
            continue
        parameter, a, b = apart[0]
        norms = (a or ("", 0.0))[1], (b or ("", 0.0))[1]
        relative = abs(norms[0] - norms[1]) / max(*norms, 5e-324)
        if kind == "weights":
            cause = "update" if earlier else "initial weights"
            when = "at its beginning"
            why = _why_updated(first, earlier) if earlier else "nothing was compared before"
        else:
            cause, when = causes[0].partition(" (")[0] if causes else "gradient", "in its backward pass"
            same = "weights" if replicas else "weights, inputs and random numbers, as far as they are known,"
            why = f"{' and '.join(causes)} differ" if causes else f"the same {same} gave other gradients"
        more = f", as do {len(apart) - 1} more" if len(apart) > 1 else ""
        text = (
            f"Step {step}, {when}: the {kind[:-1]} of {parameter} differs (norm {norms[0]!r} and {norms[1]!r}, "
            f"relative difference {relative:.2g}){more}. Cause: {cause}; {why}."
        )
        return Difference(
            step=step,
            cause=cause,
            source=first.source,
            parameter=parameter,
            num_parameters=len(apart),
            norms=norms,
            relative=relative,
            text=text,
        )
    if causes:
        text = f"Step {step}: {' and '.join(causes)} differ, and no weight and no gradient does."
        return Difference(step=step, cause=causes[0].partition(" (")[0], source=first.source, text=text)
    return None


def _why_updated(row: Row, earlier: Sequence[Row]) -> str:
    """Say between which steps the weights began to differ."""
    step = earlier[0].step
    if step != row.step - 1:
        return f"step {step} was the same, and the steps after it have no fingerprints: take every step"
    if earlier[0].lr != earlier[-1].lr:
        return f"the gradients of step {step} were the same, and its learning rate {earlier[0].lr} and {earlier[-1].lr}"
    return f"the gradients of step {step} were the same: its update differs, or a change after it"


def _read(saved: SavedFingerprints, source: str, step: int) -> tuple[Row, list[str]] | None:
    """Return the row of a step with the names of its parameters; None where it is damaged."""
    found = saved.read(source, step)
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        if found is not None:
            row = Row.model_validate_json(check_json(found[0], most_memory=_MOST_MEMORY))
            return row, [str(name) for name in json.loads(check_json(found[1]))["parameters"]]
    return None


class Replicas:
    """The ranks that are to have the same weights, compared with the first of them by what each has written."""

    def __init__(self, directory: Path, rank: int, ranks: Iterable[int], run_id: str) -> None:
        self._others = {one: SavedFingerprints(directory / _FILE.format(one)) for one in ranks if one != rank}
        self._session = run_id, 0
        self._begin()

    def _begin(self) -> None:
        self._rows: list[tuple[Row, list[str]]] = []
        self._compared = dict.fromkeys(self._others, 0)
        self._open: dict[int, Issue] = {}

    @property
    def issues(self) -> list[Issue]:
        """Return the issue of the first rank that differs, until its rows are the same again."""
        return [*self._open.values()][:1]

    def compare(self, row: Row, names: list[str], session: int) -> None:
        """Compare the last rows with those of the other ranks, as far as they have written them in this session."""
        if session != self._session[1]:
            self._session = self._session[0], session
            self._begin()
        self._rows = [*self._rows[-_KEPT:], (row, names)]
        pairs = list(zip([(), *([kept] for kept, _ in self._rows)], self._rows, strict=False))
        for rank, other in self._others.items():
            with contextlib.suppress(JournalError):  # a directory that the ranks do not share
                other.refresh()
                for earlier, (one, known) in pairs[-_KEPT:]:
                    place = other.rows.get((one.source, one.step))
                    if place is not None and place[2] == self._session and one.step > self._compared[rank]:
                        self._compared[rank] = one.step
                        self._tell(rank, one, known, earlier, _read(other, one.source, one.step))
                least = self._session[1], self._compared[rank]
                other.keep(lambda step, run: run[0] == self._session[0] and (run[1], step) > least)  # noqa: B023

    def _tell(self, rank: int, one: Row, known: list[str], earlier: Sequence[Row], found: Any) -> None:
        if found is None or found[1] != known:
            return
        difference = difference_of_rows(one, found[0], known, earlier, replicas=True)
        if difference is None:
            self._open.pop(rank, None)
        else:
            self._open.setdefault(rank, _drift(difference, rank))


def _drift(found: Difference, rank: int) -> Issue:
    return Issue.found(
        IssueType.REPLICA_DRIFT,
        found.parameter,
        ("relative_difference", found.relative, 0.0),
        f"Rank {rank} no longer has the numbers of the first rank. {found.text}",
        "Look for what only some ranks do: a seed, a branch on the rank, weights changed outside of the optimizer, or "
        "a step that one rank left out. gradtrack diff RUN --first compares all ranks.",
        severity=IssueSeverity.HIGH,
        step=found.step,
    )


def first_difference(
    first: Path, second: Path | None = None, *, run_ids: Sequence[Collection[str] | None] = (None, None)
) -> tuple[Difference | None, int]:
    """Return where two runs part first, or the ranks of one run, and how many steps were compared.

    Differences of weights and gradients come first; only where there are none, others are told. Of a directory with
    several runs only those with such `run_ids` count.
    """
    if second is not None and first.resolve() == second.resolve() and run_ids[0] == run_ids[1]:
        raise UsageError(f"{str(first)!r} is named twice: expected two runs. Name another one.")
    ours = _files_with_rows(first, run_ids[0])
    theirs = _files_with_rows(second, run_ids[1]) if second is not None else {}
    pairs = [(rank, ours[rank], theirs[rank]) for rank in ours if rank in theirs]
    if second is None:
        least = min(ours)
        pairs = [(rank, ours[least], ours[rank]) for rank in ours if rank != least]
        if not pairs:
            raise UsageError(f"run {str(first)!r} has one rank: expected two runs, or ranks. Name another run.")
    found, count = list[Difference](), 0
    for rank, one, other in pairs:
        common = sorted(one.rows.keys() & other.rows.keys(), key=lambda key: key[1])
        count += len(common)
        earlier: dict[str, tuple[Row, Row]] = {}
        hint: Difference | None = None
        for source, step in common:
            a, b = _read(one, source, step), _read(other, source, step)
            if a is None or b is None:
                continue
            if a[1] != b[1]:
                raise UsageError(
                    f"step {step} of {str(second or first)!r} has other parameters: expected those of {str(first)!r}. "
                    "Compare runs of one model."
                )
            difference = difference_of_rows(a[0], b[0], a[1], earlier.get(source, ()), replicas=second is None)
            earlier[source] = a[0], b[0]
            if difference is not None:
                difference.rank = rank
                hint = hint or difference
                if difference.parameter:
                    hint = difference
                    break
        found += [hint] if hint is not None else []
    if not count:
        who = f"the ranks of {str(first)!r}" if second is None else f"{str(first)!r} and {str(second)!r}"
        raise UsageError(
            f"{who} have no step in common that has fingerprints: expected one at least. "
            "Train them with the same setting of fingerprints."
        )
    return min(found, key=_precedence, default=None), count


def _precedence(found: Difference) -> tuple[Any, ...]:
    """Put weights before gradients of the same step, since those of every rank follow from the weights of all."""
    return not found.parameter, found.step, found.cause not in ("update", "initial weights"), found.rank


def _files_with_rows(run: Path, run_ids: Collection[str] | None) -> dict[int, SavedFingerprints]:
    named = {_IS_FILE.fullmatch(path.name): path for path in sorted(run.glob("fingerprints-*.jsonl"))}
    found = {
        int(name[1]): SavedFingerprints(path, run_ids) for name, path in named.items() if name and is_regular(path)
    }
    for one in found.values():
        one.refresh()
    if not any(one.rows for one in found.values()):
        raise UsageError(
            f"run {str(run)!r} has no fingerprints: expected a run that was trained with them. "
            "Set fingerprints=10, which takes every tenth step, and train it again."
        )
    return found
