"""Run the benchmarks: `python -m benchmarks [names] [--quick] [--write] [--device cuda]`."""

from __future__ import annotations

import argparse
import importlib
import sys

import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.timing import Row

NAMES = (
    "step_cost",
    "reading",
    "accuracy",
    "memory",
    "imports",
    "growth",
    "training_cost",
    "analyzers",
    "diagnosis_cost",
    "emission",
    "dead_server",
    "faults",
    "accelerator",
    "recorders",
)
SHORT = {"step": "step_cost"}
ON_DEVICES = ("step_cost",)
"""The benchmarks that run on an accelerator, too."""


def main() -> int:
    """Run what is asked for, print a table, and say by the exit code whether every bar was kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones ({', '.join(NAMES)}); default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument(
        "--write", action="store_true", help="write docs/benchmarks.md, its picture and the README's table"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--device", default="cpu", help="where the gradients are, such as cuda (step_cost only)")
    options = parser.parse_args()
    names = [SHORT.get(name, name) for name in options.names]
    unknown = set(names) - set(NAMES)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: expected {', '.join(NAMES)}")
    if options.device != "cpu" and (not names or set(names) - set(ON_DEVICES)):
        parser.error(f"--device {options.device}: expected {', '.join(ON_DEVICES)}, which runs there")
    elsewhere = {} if options.device == "cpu" else {"device": options.device}
    torch.set_num_threads(options.threads)
    console = Console()
    rows: list[Row] = []
    for name in names or NAMES:
        with console.status(f"{name} ..."):
            rows += importlib.import_module(f"benchmarks.{name}").run(quick=options.quick, **elsewhere)
        console.print(f"{name}: done", style="dim", highlight=False)
    console.print(tables.terminal(rows))
    if options.write:
        for path in tables.write(rows):
            console.print(f"wrote {path.relative_to(tables.ROOT)}")
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
