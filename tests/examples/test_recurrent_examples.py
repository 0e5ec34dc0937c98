"""The example of the recurrent analyzer runs, and its curve is the one that was published."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.analyzers.recurrent.recurrent_goldens import L4_GAINS

EXAMPLE = Path(__file__).parents[2] / "examples" / "random_rnn_lyapunov.py"


def load() -> dict[str, Any]:
    """Return what the example defines, without running it."""
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("gain", [0.5, 1.5, 3.0])
def test_the_exponents_are_those_of_the_theory(gain: float) -> None:
    """L4: below and above the transition the analyzer measures what mean-field theory says."""
    assert load()["exponent"](gain) == pytest.approx(L4_GAINS[gain], abs=0.05)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """The example writes its picture."""
    load()["main"](tmp_path / "picture.png", size=40)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
