"""The memory that one step needs beyond the gradients, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.timing import Row

BAR_MEGABYTES = 16.0
SCRIPT = """
import sys, torch
from benchmarks.shapes import SHAPES, Parameters
from gradtrack import GradientManager
def peak():  # the process's own: what getrusage tells is inherited from the parent
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
small = Parameters([(64, 64)] * 12)
GradientManager(engine=sys.argv[1]).step(small, torch.optim.SGD(small.parameters(), lr=0.1), None, backward=False)
model = Parameters(SHAPES["gpt2_124m"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch._foreach_mul_([p.grad for p in model.parameters()], 1.0)
before = peak()
if sys.argv[2] == "ours":
    GradientManager(engine=sys.argv[1]).step(model, optimizer, None, backward=False)
else:
    torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
print(peak() - before)
"""


def run(quick: bool = False) -> Iterator[Row]:
    """Compare both engines with flattening everything into one vector."""
    for engine, what, label in (
        ("native", "ours", "gradtrack (native)"),
        ("torch", "ours", "gradtrack (torch)"),
        ("native", "flat", "flattening"),
    ):
        done = subprocess.run([sys.executable, "-c", SCRIPT, engine, what], check=True, capture_output=True, text=True)
        yield Row(
            benchmark="memory",
            case="gpt2_124m, one step",
            what=label,
            ratio=float(done.stdout),
            bar=BAR_MEGABYTES if what == "ours" else None,
            unit=" MB",
        )
