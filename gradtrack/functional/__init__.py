"""Five functions on gradients that need no model: norm, statistics, issues, clipping and a picture.

They take numpy arrays, torch tensors, numbers, and lists, tuples and dicts of these, nested as one likes.
"""

from gradtrack.functional.statistics import GradientStats, clip_gradients, compute_gradient_norm, compute_gradient_stats
from gradtrack.functional.verdict import (
    GradientProfile,
    GradientVerdict,
    LayerGradient,
    detect_gradient_issues,
    visualize_layer_gradients,
)

__all__ = [
    "GradientProfile",
    "GradientStats",
    "GradientVerdict",
    "LayerGradient",
    "clip_gradients",
    "compute_gradient_norm",
    "compute_gradient_stats",
    "detect_gradient_issues",
    "visualize_layer_gradients",
]
