"""Print how well diagnosis is right, on the runs that no rule was tuned on: python -m benchmarks.diagnosis."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.diagnosis import scenarios
from benchmarks.diagnosis.driver import diagnose, hits
from benchmarks.diagnosis.naive import alarms
from benchmarks.diagnosis.table import Result, render


def judge(task: tuple[str, float, bool, bool]) -> Result:
    name, scale, with_naive, clipped = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    scenario = scenarios.load()[name]
    start = time.perf_counter()
    try:
        issues = diagnose(scenario, scale, clipped=clipped)
        seconds = time.perf_counter() - start
        naive = alarms(scenario, scale) if with_naive else []
    except Exception as fault:
        raise RuntimeError(f"scenario {name}: {fault}") from fault
    right = hits(scenario, issues) if scenario.expected else not issues
    naive_right = hits(scenario, naive) if scenario.expected else not naive
    texts = [f"{issue.issue_type.value}:{issue.layer}" for issue in issues]
    return Result(
        name,
        scenario.family,
        scenario.expected is not None,
        right,
        naive_right,
        bool(naive),
        texts,
        seconds,
        bool(issues),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--half", choices=("tuned", "held", "fresh", "blind", "unseen", "foreign", "corner", "all"), default="held"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--clipped", action="store_true", help="with the clipping that a manager does by itself")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out the baseline")
    parser.add_argument("--wrong", action="store_true", help="list what is not right")
    options = parser.parse_args()
    chosen = [
        (name, options.scale, options.scale == 1.0 and not options.quick, options.clipped)
        for name, scenario in scenarios.load().items()
        if name.startswith(options.only)
        and (options.half == "all" or scenario.part == options.half)
        and (options.scale == 1.0 or scenario.build().scalable)
    ]
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers) as pool:
            results = list(pool.map(judge, chosen, chunksize=8))
    else:
        results = [judge(task) for task in chosen]
    print(render(results, options.half))
    if options.wrong:
        for result in results:
            if not result.right:
                expected = scenarios.load()[result.name].expected
                print(
                    result.name,
                    "expected",
                    expected and (expected.kind, expected.where),
                    "got",
                    result.issues,
                    file=sys.stderr,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
