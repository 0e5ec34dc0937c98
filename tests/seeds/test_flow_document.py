"""The flow document: its code for GradientFlowAnalyzer as written but for the import."""

from __future__ import annotations

import pytest

PLACEHOLDERS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from gradtrack import GradientFlowAnalyzer, IssueSeverity, IssueType

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
targets = torch.arange(32) % 10
input_fn = lambda: torch.randn(32, 784)
loss_fn = lambda output: F.cross_entropy(output, targets)
"""

BLOCKS = {
    "quick start": """
analyzer = GradientFlowAnalyzer(model)
issues = analyzer.analyze(
    input_fn=lambda: torch.randn(32, 784),
    loss_fn=lambda output: F.cross_entropy(output, targets),
    steps=20
)
analyzer.print_summary(issues)
for issue in issues:
    print(issue)
""",
    "every option": """
analyzer = GradientFlowAnalyzer(
    model,
    enable_rnn_analyzer=False,
    enable_circular_flow_analyser=False,
    vanishing_threshold=1e-6,
    exploding_threshold=10.0,
    dead_threshold=0.9,
    unstable_cv_threshold=3.0
)
issues = analyzer.analyze(input_fn, loss_fn, steps=20)
""",
    "switches": """
GradientFlowAnalyzer(model, enable_jacobian=False, enable_vector_analysis=False)
GradientFlowAnalyzer(model, enable_jacobian=True, enable_vector_analysis=True)
GradientFlowAnalyzer(model, enable_jacobian=False, enable_vector_analysis=True)
GradientFlowAnalyzer(model, enable_jacobian=True, enable_vector_analysis=False)
""",
    "custom thresholds": """
analyzer = GradientFlowAnalyzer(
    model,
    vanishing_threshold=1e-7,
    exploding_threshold=5.0,
    dead_threshold=0.95,
    unstable_cv_threshold=2.0
)
issues = analyzer.analyze(input_fn, loss_fn, steps=20)
""",
    "filters": """
analyzer = GradientFlowAnalyzer(model)
issues = analyzer.analyze(input_fn, loss_fn, steps=20)
critical = [i for i in issues if i.severity == IssueSeverity.CRITICAL]
vanishing = [i for i in issues if i.issue_type == IssueType.VANISHING]
encoder_issues = [i for i in issues if 'encoder' in i.layer.lower()]
""",
    "progressive": """
analyzer = GradientFlowAnalyzer(model)

def check():
    issues = analyzer.analyze(input_fn, loss_fn, steps=5)
    if len(issues) == 0:
        return
    issues = analyzer.analyze(input_fn, loss_fn, steps=50)

check()
""",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str) -> None:
    """A block of the document runs as it is."""
    names: dict[str, object] = {}
    exec(PLACEHOLDERS + BLOCKS[name], names)
    assert names.get("issues", []) == [] or name == "custom thresholds"
