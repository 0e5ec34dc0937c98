"""The elements that are followed through an optimizer step."""

import math

import numpy as np
import torch
from torch import nn

from gradtrack.measure.elements import Elements


def test_what_is_not_finite_stays_in_the_numbers() -> None:
    """Infinite weights and gradients make NaN of what they touch, also where numpy is told to raise."""
    weight = nn.Parameter(torch.tensor([math.inf, 1.0, 2.0]))
    grad = torch.tensor([math.inf, 1.0, 0.0])
    with np.errstate(all="raise"):
        elements = Elements({"w": weight}, {"w": grad})
        (change,) = elements.changes({"w": weight}).values()
        found = [elements.left({"w": grad}), elements.cosine({"w": weight}, {"w": grad}), elements.cosine_to(elements)]
    assert all(map(math.isnan, [change.ratio, *found]))
