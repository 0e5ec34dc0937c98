"""The gain document: its code as written but for the import, the lines of its report, and its seven examples."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Scaled

EXAMPLES = Path(__file__).parents[2] / "examples" / "example_gradient_monitor.py"

PLACEHOLDERS = """
import torch
import torch.nn as nn
from gradtrack import GradientGainMonitor

class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([TransformerBlock(dim=16) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def run_forward(blocks, inputs):
    for block in blocks:
        inputs = block(inputs)
    return inputs

def run_model(blocks):
    return run_forward(blocks, torch.ones(2, 16)).square().mean()

def compute_loss(batch, targets=None):
    output = batch if targets is not None else model(batch)
    return (output - (0 if targets is None else targets)).square().mean()

model = Model()
inputs, targets = torch.ones(2, 512), torch.zeros(2, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataloader = list(torch.ones(3, 2, 16))
micro_batches = list(torch.ones(4, 2, 16))
num_epochs, step, epoch = 2, 100, 0
pre_ln_blocks, post_ln_blocks = Model().blocks, Model().blocks
blocks = model.blocks
loss = compute_loss(torch.ones(2, 16))
"""

CODE = {
    "quick start": """
model_blocks = nn.ModuleList([
    TransformerBlock(dim=512) for _ in range(12)
])
with GradientGainMonitor(model_blocks) as monitor:
    output = run_forward(model_blocks, inputs)
    loss = compute_loss(output, targets)
    loss.backward()
    print(monitor.report())
""",
    "constructor": """
monitor = GradientGainMonitor(
    blocks,
    norm_type='l2',
    strict_single_backward=True,
    eps=1e-30
)
monitor.close()
""",
    "basic diagnostic": """
with GradientGainMonitor(model.blocks) as monitor:
    loss.backward()
    print(monitor.report())
""",
    "training loop": """
monitor = GradientGainMonitor(model.blocks, strict_single_backward=False)

for epoch in range(num_epochs):
    for batch in dataloader:
        optimizer.zero_grad()
        loss = compute_loss(batch)
        loss.backward()

        if step % 100 == 0:
            stats = monitor.summary_stats()
            if stats['num_damping'] > len(model.blocks) // 2:
                print("Warning: Many damping transitions!")

        optimizer.step()
        monitor.reset()

monitor.close()
""",
    "accumulation": """
monitor = GradientGainMonitor(model.blocks, strict_single_backward=False)
optimizer.zero_grad()

for i, micro_batch in enumerate(micro_batches):
    loss = compute_loss(micro_batch) / len(micro_batches)
    loss.backward()

    print(f"Micro-batch {i}: {monitor.summary_stats()['mean_gain']:.4f}")
    monitor.reset()

optimizer.step()
monitor.close()
""",
    "comparison": """
architectures = {
    'Pre-LN': pre_ln_blocks,
    'Post-LN': post_ln_blocks,
}

for name, blocks in architectures.items():
    with GradientGainMonitor(blocks) as monitor:
        loss = run_model(blocks)
        loss.backward()
        stats = monitor.summary_stats()
        print(f"{name}: mean_gain={stats['mean_gain']:.4f}")
""",
    "early training": """
with GradientGainMonitor(blocks) as monitor:
    run_model(blocks).backward()
if epoch < 3:
    print(monitor.report())
log_gains = monitor.log_gains()
""",
}

EXPECTED = {
    "quick start": r"Transition 10 to 11: gamma=\d",
    "constructor": r"^$",
    "basic diagnostic": r"saw no forward pass",
    "training loop": r"^$",
    "accumulation": r"(Micro-batch \d: \d\.\d{4}\n){4}",
    "comparison": r"Pre-LN: mean_gain=\d\.\d{4}\nPost-LN: mean_gain=\d",
    "early training": r"Transition  0 to  1: gamma=\d",
}


@pytest.mark.parametrize("name", CODE)
def test_the_code_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every code block runs with only its import changed, and prints what it is there for."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(PLACEHOLDERS + CODE[name], names)
    assert re.search(EXPECTED[name], capsys.readouterr().out)
    assert not any(module._forward_hooks for module in names["model"].modules())


@pytest.mark.parametrize(
    ("gamma", "line"),
    [
        (0.95424, "  Transition  0 to  1: gamma=0.9542, log_gamma=-0.0468 [Healthy]"),
        (1.02340, "  Transition  0 to  1: gamma=1.0234, log_gamma=0.0231 [Healthy]"),
        (0.34216, "  Transition  0 to  1: gamma=0.3422, log_gamma=-1.0725 [DAMPING]"),
        (3.45120, "  Transition  0 to  1: gamma=3.4512, log_gamma=1.2387 [AMPLIFYING]"),
    ],
)
def test_the_lines_of_the_report(gamma: float, line: str) -> None:
    """A transition is one line of fixed layout, under the heading of the document."""
    from gradtrack import GradientGainMonitor

    blocks = [Scaled(1.0), Scaled(gamma)]
    with GradientGainMonitor(blocks) as monitor:
        h = blocks[1](blocks[0](torch.ones(2, 2, dtype=torch.float64, requires_grad=True)))
        h.sum().backward()
    lines = monitor.report().splitlines()
    assert lines[lines.index("Gradient Gains (ratio of consecutive norms):") + 1] == line
    assert monitor.gains() == pytest.approx([gamma])
    assert monitor.log_gains() == pytest.approx([math.log(gamma)])


def test_the_seven_examples_run() -> None:
    """The script of examples runs as it is, and shows each of the seven."""
    command = [sys.executable, str(EXAMPLES)]
    environment = {"PYTHONPATH": str(EXAMPLES.parents[1]), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert [int(number) for number in re.findall(r"^--- (\d)\.", printed, flags=re.M)] == list(range(1, 8))
    assert re.search(r"Pre-LN: mean_gain=\d", printed)
    assert re.search(r"^vanishing: \d damping transitions", printed, flags=re.M)
    assert printed.count("micro-batch") == 4
    assert len(runpy.run_path(str(EXAMPLES))["EXAMPLES"]) == 7
