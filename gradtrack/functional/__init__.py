"""Five functions on gradients that need no model: norm, statistics, issues, clipping and a picture.

They take numpy arrays, torch tensors, numbers, and lists, tuples and dicts of these, nested as one likes.
"""

from gradtrack.functional.statistics import GradientStats as GradientStats
from gradtrack.functional.statistics import clip_gradients as clip_gradients
from gradtrack.functional.statistics import compute_gradient_norm as compute_gradient_norm
from gradtrack.functional.statistics import compute_gradient_stats as compute_gradient_stats
from gradtrack.functional.verdict import GradientProfile as GradientProfile
from gradtrack.functional.verdict import GradientVerdict as GradientVerdict
from gradtrack.functional.verdict import LayerGradient as LayerGradient
from gradtrack.functional.verdict import detect_gradient_issues as detect_gradient_issues
from gradtrack.functional.verdict import visualize_layer_gradients as visualize_layer_gradients
