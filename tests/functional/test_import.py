"""What importing the functions loads."""

from __future__ import annotations

import subprocess
import sys


def test_numpy_arrays_need_no_torch() -> None:
    """The functions work on arrays in a process that never imports torch."""
    program = (
        "import sys, numpy; from gradtrack.functional import clip_gradients, visualize_layer_gradients; "
        "assert clip_gradients([numpy.ones(4)], 1.0)[1] == 2.0; str(visualize_layer_gradients([1.0])); "
        "sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
