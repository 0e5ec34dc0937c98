"""Trainings under random faults, round after round until the time is over: `python -m benchmarks.faults --seconds 60`.

Each round is a training in a process of its own with a journal, the files of JSON and TensorBoard, and with `--mlflow`
a server of MLflow's on this machine. It is killed, its disk fails, or exceptions strike it from signal handlers; then
`gradtrack replay` delivers what is missing, and every row whose step ended has to be at each destination once, with the
norm and the weights of the same training without gradtrack. A round and its faults follow from its seed; the moment of
a kill or a signal is a time, and differs by microseconds when a round is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.faults.processes import Processes, Running
from benchmarks.faults.rows import NORM, Rows, in_json, in_mlflow, in_tensorboard
from benchmarks.faults.training import HARMS, MODELS, Plan
from benchmarks.servers import mlflow_server
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.errors import JournalError

KINDS = {
    "kill": "SIGKILLs",
    "interrupt: exception": "exceptions",
    "killed replay": "SIGKILLs",
    "interrupt: KeyboardInterrupt": "exceptions",
    "disk: full": "faults",
    "disk: limit": "faults",
    "disk: read-only": "faults",
    "disk: fsync": "faults",
    "disk: removed": "removals",
}
"""The kinds of rounds, and what is counted of each."""
MOST_STEPS = 600
ROUND_SECONDS = 120.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "MLFLOW_DISABLE_TELEMETRY": "true"}


@dataclass(kw_only=True)
class Outcome:
    """What came of a round, or of all rounds of a kind."""

    rounds: int = 0
    faults: int = 0
    steps: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    raised: int = 0
    weights: int = 0
    why: list[str] = field(default_factory=list)

    def tell(self, what: str, why: str, times: int = 1) -> None:
        """Count something that must not be, and keep the first reasons."""
        setattr(self, what, getattr(self, what) + times)
        if len(self.why) < 8:
            self.why.append(f"{what}: {why}")

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.doubled or self.wrong or self.raised or self.weights)

    def add(self, other: Outcome) -> None:
        """Add another one's figures."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Torture:
    """Makes rounds, and knows what each training does without gradtrack."""

    def __init__(self, directory: Path, processes: Processes, server: str | None) -> None:
        self._directory, self._processes, self._server = directory, processes, server
        self._plain: dict[str, list[tuple[int, float]]] = {}
        self._replay_seconds = 0.3

    def round(self, seed: int, kind: str | None = None, harm: str = "") -> tuple[str, Outcome, Path]:
        """Make one round, and hold what it left to the law."""
        chance = random.Random(seed)
        kind = kind or list(KINDS)[seed % len(KINDS)]
        directory = self._directory / f"{seed}-{time.monotonic_ns()}"
        directory.mkdir()
        plan = dataclasses.replace(self._plan(directory, kind, seed, chance), harm=harm)
        outcome = Outcome(rounds=1)
        norms = self._train(plan, chance, outcome)
        every = plan.settings["grad_log_every_n_steps"]
        due = {step: norm for step, norm in norms.items() if step % every == 0}
        outcome.rows = len(due)
        journaled = self._read_journal(plan, due, outcome)
        if journaled is not None:
            self._replay(plan, chance, outcome)
            self._check_destinations(plan, due, journaled, outcome)
        return kind, outcome, directory

    def _plan(self, directory: Path, kind: str, seed: int, chance: random.Random) -> Plan:
        elsewhere = kind == "disk: removed" or chance.random() < 0.3
        place = directory / "elsewhere"
        backends: list[dict[str, Any]] = [
            {"name": "json", **({"directory": str(place / "json")} if elsewhere else {})},
            {"name": "tensorboard", **({"log_dir": str(place / "logs")} if elsewhere else {})},
        ]
        if self._server is not None:
            backends.append({"name": "mlflow", "tracking_uri": self._server, "experiment": directory.name})
        if kind == "killed replay" and self._server is None:
            backends = []
        settings: dict[str, Any] = {
            "run_dir": str(directory / "run"),
            "backends": backends,
            "grad_log_every_n_steps": chance.choice([1, 1, 1, 1, 3, 20]),
            "engine": chance.choice(["native", "native", "torch"]),
            "grad_track_per_weight_matrix": chance.random() < 0.4,
            "log_histograms": chance.random() < 0.15,
            "analyzers": chance.choice([[], [], [], ["flow"], ["updates"]]),
            "max_grad_norm": 1e9,
            "close_timeout_seconds": 60.0,
            "save_gradient_plots": False,
        }
        end = {"kill": "kill", "killed replay": "kill"}.get(kind) or chance.choice(["close", "close", "exit"])
        return Plan(
            directory=str(directory),
            kind=kind,
            seed=seed,
            model=chance.choice(list(MODELS)),
            steps=chance.randint(20, MOST_STEPS),
            way=chance.choice(["safe_backward", "watch"]),
            end="close" if kind.startswith("disk") else end,
            settings=settings,
        )

    def _train(self, plan: Plan, chance: random.Random, outcome: Outcome) -> dict[int, float]:
        """Train, kill it where that is planned, and return the norm of each step of the plain training by its row."""
        running = self._processes.train(plan)
        if plan.kind == "kill":
            # From before the first step to beyond the last one; the line before them says that the training begins.
            running.await_lines(max(1 + int(plan.steps * chance.uniform(-0.15, 1.15)), 1), ROUND_SECONDS)
            running.join(chance.choice([0.0, 0.0005, 0.002, 0.02]) * chance.random())
            running.kill()
            outcome.faults += 1
        code = self._await(running, outcome)
        if code is not None and code not in ((-signal.SIGKILL,) if plan.end == "kill" else (0,)):
            outcome.tell("raised", f"the training ended with {code}: {_ends(running.errors)}")
        elif "Traceback" in running.errors:
            outcome.tell("raised", _ends(running.errors))
        plain, norms = self._without_gradtrack(plan.model), dict[int, float]()
        for what, *told in running.told:
            if what == "raised":
                outcome.tell("raised", f"{told[0]}\n{''.join(told[1])}")
            elif what == "struck":
                outcome.faults += told[0]
            elif what == "step":
                number, step, checksum = told
                outcome.steps += 1
                norms[step] = plain[number][1]
                if checksum != plain[number][0]:
                    outcome.tell("weights", f"other weights after step {number}")
        return norms

    def _await(self, running: Running, outcome: Outcome) -> int | None:
        """Wait for the end of a process, and return its code; one that hangs is killed and has none."""
        code = running.join(ROUND_SECONDS)
        if code is None:
            running.kill()
            running.join(ROUND_SECONDS)
            outcome.tell("raised", f"it did not end within {ROUND_SECONDS:g} seconds")
        return code

    def _without_gradtrack(self, model: str) -> list[tuple[int, float]]:
        """Return checksums of the weights and norms of the training without gradtrack."""
        if model not in self._plain:
            directory = self._directory / f"plain-{model}"
            directory.mkdir()
            plan = Plan(directory=str(directory), kind="plain", seed=0, model=model, steps=MOST_STEPS)
            running = self._processes.train(plan)
            if running.join(ROUND_SECONDS) != 0:
                raise RuntimeError(f"{model}: {running.errors}")
            steps = [told for what, *told in running.told if what == "step"]
            self._plain[model] = [(checksum, norm) for _, _, checksum, norm in steps]
        return self._plain[model]

    def _read_journal(self, plan: Plan, due: dict[int, float], outcome: Outcome) -> Counter[int] | None:
        """Return how often the journal has which step, or None where no row was due and it has none."""
        try:
            journals = [journal for journal in find_journals(plan.run_dir) if journal.rank == 0]
        except JournalError as fault:
            journals = []
            if due and plan.kind != "disk: removed":
                outcome.tell("lost", str(fault), len(due))
        found, numbers = list[tuple[int, float]](), Counter[tuple[str, int]]()
        for journal in journals:
            for number, record in journal.rows():
                if NORM in record.metrics:  # others are what an analyzer knew one step later
                    found.append((record.step, record.metrics[NORM]))
                numbers[journal.run.run_id, number] += 1
            if journal.damaged and plan.end != "kill":  # whose last row may be half a row
                outcome.tell("wrong", f"damaged: {journal.damaged}")
        _compare("the journal", found, due, outcome)
        if not plan.kind.startswith("disk"):
            _find_lost("the journal", found, due, outcome)
        _find_doubled("the journal", found, outcome)
        if numbers and max(numbers.values()) > 1:
            outcome.tell("doubled", "the journal has a number twice")
        return Counter(step for step, _ in found) if journals else None

    def _replay(self, plan: Plan, chance: random.Random, outcome: Outcome) -> None:
        """Deliver what is missing; a replay that is to be killed begins several times."""
        directory = Path(plan.directory)
        words = ["replay", str(plan.run_dir), "--allow", str(directory)]
        targets = [[]] if plan.settings["backends"] else [["--to", "json"], ["--to", "tensorboard"]]
        for target in targets:
            for _ in range(chance.randint(1, 4) if plan.kind == "killed replay" else 0):
                running = self._processes.command([*words, *target], directory)
                running.join(chance.uniform(0.0, 1.1) * self._replay_seconds)
                running.kill()
                code = self._await(running, outcome)
                outcome.faults += code == -signal.SIGKILL
                if code not in (-signal.SIGKILL, 0):
                    outcome.tell("raised", f"replay {target} ended with {code}: {running.errors[-1500:]}")
            for _ in range(2):
                started = time.monotonic()
                running = self._processes.command([*words, *target], directory)
                code = self._await(running, outcome)
                if plan.kind == "killed replay":
                    self._replay_seconds += 0.3 * (time.monotonic() - started - self._replay_seconds)
                if code != 0 or "Traceback" in running.errors:
                    said = f"{running.out[-1000:]}{running.errors[-1500:]}"
                    outcome.tell("raised", f"replay {target} ended with {code}: {said}")

    def _check_destinations(self, plan: Plan, due: dict[int, float], journaled: Counter[int], outcome: Outcome) -> None:
        """Each destination has every row once."""
        directory = Path(plan.directory)
        places = {"json": in_json(directory), "tensorboard": in_tensorboard(directory)}
        if self._server is not None:
            places["mlflow"] = in_mlflow(self._server, directory.name)
        for name, rows in places.items():
            _compare(name, rows, due, outcome)
            _find_lost(name, rows, {**dict.fromkeys(journaled, 0.0), **due}, outcome)
            _find_doubled(name, rows, outcome)
            strange = {step for step, _ in rows} - set(journaled) - set(due)
            if strange and not plan.kind.startswith("disk"):
                outcome.tell("wrong", f"{name} has steps that the journal lacks: {sorted(strange)[:9]}")


def _ends(text: str, each: int = 1500) -> str:
    """Return a text, or its beginning and its end: the first fault and the last."""
    return text if len(text) <= 2 * each else f"{text[:each]}\n...\n{text[-each:]}"


def _find_lost(name: str, rows: Rows, due: Iterable[int], outcome: Outcome) -> None:
    missing = sorted(set(due) - {step for step, _ in rows})
    if missing:
        outcome.tell("lost", f"{name} lacks {len(missing)} rows: {missing[:9]} ...", len(missing))


def _find_doubled(name: str, rows: Rows, outcome: Outcome) -> None:
    several = {step: times for step, times in Counter(step for step, _ in rows).items() if times > 1}
    if several:
        outcome.tell("doubled", f"{name} has rows several times: {list(several.items())[:9]}", len(several))


def _compare(name: str, rows: Rows, due: dict[int, float], outcome: Outcome) -> None:
    """Hold the norms to those of the training without gradtrack."""
    for step, norm in rows:
        wanted = due.get(step, norm)
        if not (math.isclose(norm, wanted, rel_tol=1e-4) or (not math.isfinite(norm) and not math.isfinite(wanted))):
            outcome.tell("wrong", f"{name}: the norm of step {step} is {norm}, not {wanted}")


def table(found: dict[str, Outcome]) -> Table:
    """Return a row for each kind."""
    columns = ["kind", "rounds", "tried", "steps", "rows", "lost", "doubled", "wrong", "raised", "weights"]
    shown = Table(*columns, box=SIMPLE)
    total = Outcome()
    for outcome in found.values():
        total.add(outcome)
    for kind, one in [*found.items(), ("all", total)]:
        tried = f"{one.faults:,} {KINDS.get(kind, 'faults')}"
        numbers = [one.steps, one.rows, one.lost, one.doubled, one.wrong, one.raised, one.weights]
        style = "bold red" if one.failed else ""
        shown.add_row(kind, f"{one.rounds:,}", tried, *(f"{number:,}" for number in numbers), style=style)
    return shown


def main() -> int:
    """Make rounds, print a table, and return whether anything in it is not zero."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long rounds are begun; 0 is one round")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first round; each has the next one")
    parser.add_argument("--same", action="store_true", help="every round has that seed")
    parser.add_argument("--kind", choices=KINDS, help="one kind only")
    parser.add_argument("--mlflow", action="store_true", help="deliver to a server of MLflow's on this machine too")
    parser.add_argument(
        "--harm", choices=HARMS, default="", help="do this once in each training, which has to be found"
    )
    parser.add_argument("--keep", action="store_true", help="keep the files of failing rounds")
    options = parser.parse_args()
    console, found = Console(width=max(Console().width, 140)), {kind: Outcome() for kind in KINDS}
    end, failing = time.monotonic() + options.seconds, 0
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="gradtrack-torture-"))
        server = None if not options.mlflow else stack.enter_context(mlflow_server(home)).address
        processes = Processes(ENVIRONMENT)
        stack.callback(processes.close)
        torture = Torture(home, processes, server)
        for seed in itertools.count(options.seed, 0 if options.same else 1):
            kind, outcome, directory = torture.round(seed, options.kind, options.harm)
            found[kind].add(outcome)
            if outcome.failed:
                failing += 1
                console.print(f"SEED={seed} {kind}: {'; '.join(outcome.why)}", markup=False, highlight=False)
            if not (outcome.failed and options.keep):
                shutil.rmtree(directory)
            if time.monotonic() >= end:
                break
        if not (failing and options.keep):
            shutil.rmtree(home)
        else:
            console.print(f"kept in {home}", highlight=False)
    console.print(table(found))
    return int(failing > 0)


if __name__ == "__main__":
    sys.exit(main())
