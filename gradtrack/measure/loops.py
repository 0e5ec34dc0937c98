"""The compiled loops of a look, where there are any."""

from __future__ import annotations

import importlib
import logging
import sys
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure.samples import small_array
from gradtrack.signals import pass_on

_MOST: Final = 1 << 22
"""The most elements that one thread looks at: beyond it all of torch's threads are faster."""
_ENGINE: Final = "gradtrack.measure.kernels"
_LOOPS: Final = "gradtrack.measure.look_kernels"
_logger = logging.getLogger("gradtrack")


def loops_over(tensor: Tensor) -> tuple[Any, NDArray[np.float32]] | None:
    """Return the compiled loops and a view of a tensor for them; None where its elements need other means.

    The loops are there where the native engine has loaded the compiler, which takes half a second.
    """
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or _ENGINE not in sys.modules:
        return None
    values = small_array(tensor, _MOST)
    loops = None if values is None else _loops()
    return None if values is None or loops is None else (loops, values)


@cache
def _loops() -> Any:
    """Compile the loops or load them; a compiler that cannot do it leaves the looks to numpy and torch."""
    try:
        return importlib.import_module(_LOOPS)
    except Exception as fault:
        pass_on(fault)
        _logger.warning("the loops for looks could not be compiled: looks take longer", exc_info=True)
        return None
