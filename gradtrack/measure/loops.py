"""The compiled loops of a look, where there are any."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure.samples import small_array

_MOST: Final = 1 << 22
"""The most elements that one thread looks at: beyond it all of torch's threads are faster."""
_ENGINE: Final = "gradtrack.measure.kernels"


def loops_over(tensor: Tensor) -> tuple[Any, NDArray[np.float32]] | None:
    """Return the compiled loops and a view of a tensor for them; None where its elements need other means.

    The loops are there where the native engine has loaded the compiler, which takes half a second.
    """
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or _ENGINE not in sys.modules:
        return None
    values = small_array(tensor, _MOST)
    if values is None:
        return None
    from gradtrack.measure import look_kernels

    return look_kernels, values
