"""The lab document: its example as written but for the import, and its two pictures."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrack.functional import visualize_layer_gradients

EXAMPLE = """
import numpy as np
from gradtrack.functional import (
    compute_gradient_norm,
    compute_gradient_stats,
    detect_gradient_issues,
    clip_gradients
)

# Simulated gradients from a 6-layer network
layer_gradients = {
    'layer_0': np.random.randn(100, 100) * 0.01,
    'layer_1': np.random.randn(100, 100) * 0.01,
    'layer_2': np.random.randn(100, 100) * 0.001,  # Getting smaller
    'layer_3': np.random.randn(100, 100) * 0.0001,
    'layer_4': np.random.randn(100, 100) * 0.00001,
    'layer_5': np.random.randn(100, 100) * 0.000001,  # Very small!
}

# Analyze each layer
for name, grad in layer_gradients.items():
    stats = compute_gradient_stats(grad)
    print(f"{name}: norm={stats['norm']:.6f}, mean={stats['mean']:.6f}")

# Detect issues
all_grads = list(layer_gradients.values())
issues = detect_gradient_issues(all_grads)
print(f"Detected issues: {issues['status']}")
# Output: "Detected issues: vanishing"

# Apply gradient clipping
clipped, original_norm = clip_gradients(all_grads, max_norm=1.0)
print(f"Original norm: {original_norm:.4f}, clipping applied: {original_norm > 1.0}")
"""

HEALTHY = """\
Layer 6 (output):   |████████████| norm: 0.10
Layer 5:            |████████████| norm: 0.09
Layer 4:            |████████████| norm: 0.11
Layer 3:            |████████████| norm: 0.10
Layer 2:            |████████████| norm: 0.10
Layer 1:            |████████████| norm: 0.09
Layer 0 (input):    |████████████| norm: 0.10
                    Stable gradient flow!"""

VANISHING = """\
Layer 6 (output):   |████████████| norm: 0.10
Layer 5:            |████████    | norm: 0.05
Layer 4:            |████        | norm: 0.01
Layer 3:            |██          | norm: 0.001
Layer 2:            |            | norm: 0.0001
Layer 1:            |            | norm: 0.00001
Layer 0 (input):    |            | norm: 0.000001
                    Vanishing gradients!"""


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Six arrays that shrink are vanishing, and the global norm is that of all of them."""
    np.random.seed(0)
    names: dict[str, object] = {}
    exec(EXAMPLE, names)
    lines = capsys.readouterr().out.splitlines()
    arrays = names["all_grads"]
    assert isinstance(arrays, list)
    norm = float(np.linalg.norm(np.concatenate([array.reshape(-1) for array in arrays])))
    assert lines[-2] == "Detected issues: vanishing"
    assert lines[-1] == f"Original norm: {norm:.4f}, clipping applied: True"
    assert [line.split(":")[0] for line in lines[:6]] == [f"layer_{index}" for index in range(6)]


@pytest.mark.parametrize(
    ("norms", "picture"),
    [
        ([0.10, 0.09, 0.11, 0.10, 0.10, 0.09, 0.10], HEALTHY),
        ([0.10, 0.05, 0.01, 0.001, 0.0001, 0.00001, 0.000001], VANISHING),
    ],
)
def test_the_pictures_come_out_character_by_character(norms: list[float], picture: str) -> None:
    """Norms listed from the output down give the picture of the document."""
    layers = {f"layer_{index}": norm for index, norm in enumerate(reversed(norms))}
    assert str(visualize_layer_gradients(layers)) == picture
