"""Five functions on gradients that need no model: norm, statistics, issues, clipping and a picture.

They take numpy arrays, torch tensors, numbers, and lists, tuples and dicts of these, nested as one likes.
"""

from gradtrack.functional.clipping import clip_gradients
from gradtrack.functional.picture import GradientProfile, LayerGradient, visualize_layer_gradients
from gradtrack.functional.statistics import GradientStats, compute_gradient_norm, compute_gradient_stats
from gradtrack.functional.verdict import GradientVerdict, detect_gradient_issues

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
