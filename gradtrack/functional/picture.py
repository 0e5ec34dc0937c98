"""The bar picture of the gradient norms of all layers, from the output down to the input."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gradtrack.functional.verdict import GradientVerdict, judge, named_norms

BAR_CELLS: Final = 12
_STEPS: Final = BAR_CELLS // 2
_VERDICTS: Final = {
    "stable": "Stable gradient flow!",
    "vanishing": "Vanishing gradients!",
    "exploding": "Exploding gradients!",
}


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """One layer of a profile: name as given, label in the picture, norm and length of the bar."""

    name: str
    label: str
    norm: float
    bar_cells: int


@dataclass(frozen=True, slots=True)
class GradientProfile:
    """The layers of a model, output first, with a verdict over depth; the text is a bar picture."""

    layers: tuple[LayerGradient, ...]
    verdict: GradientVerdict

    def __iter__(self) -> Iterator[LayerGradient]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return "No gradients to show."
        width = max(len(layer.label) for layer in self.layers) + 3
        lines = [_line(layer, width) for layer in self.layers]
        return "\n".join([*lines, " " * width + _VERDICTS[self.verdict.status]])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def visualize_layer_gradients(layer_gradients: object) -> GradientProfile:
    """Return the layers with norms, bars and a verdict, ready to be printed.

    Give a dict from layer name to gradients, or a list of gradients, from the input to the output. The
    longest bar is the largest norm; a bar's length goes with the square root of its norm, in steps of two
    cells that are drawn from a third on. Names such as `layer_3` are printed as `Layer 3`, other names as
    they are. The verdict is that of `detect_gradient_issues` over depth. Layers without a gradient are left
    out.

    >>> print(visualize_layer_gradients({"layer_0": 0.01, "layer_1": 0.02, "layer_2": 0.04}))
    Layer 2 (output):   |████████████| norm: 0.04
    Layer 1:            |████████    | norm: 0.02
    Layer 0 (input):    |██████      | norm: 0.01
                        Stable gradient flow!
    """
    named = named_norms(layer_gradients)
    norms = tuple(norm for _, norm in named)
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    layers = [
        LayerGradient(_name(key), _label(_name(key), index, len(named)), norm, _bar_cells(norm, largest))
        for index, (key, norm) in enumerate(named)
    ]
    return GradientProfile(tuple(reversed(layers)), judge(norms, "depth"))


def _name(key: object) -> str:
    return f"layer_{key}" if isinstance(key, int) else str(key)


def _label(name: str, index: int, count: int) -> str:
    numbered = re.fullmatch(r"layer[_ ]?(\d+)", name, re.IGNORECASE)
    shown = f"Layer {numbered[1]}" if numbered else name
    if count > 1 and index in (0, count - 1):
        shown += " (input)" if index == 0 else " (output)"
    return shown + ":"


def _bar_cells(norm: float, largest: float) -> int:
    if math.isinf(norm):
        return BAR_CELLS
    if math.isnan(norm) or largest == 0.0:
        return 0
    return 2 * math.floor(_STEPS * math.sqrt(norm / largest) + 2 / 3)


def _line(layer: LayerGradient, width: int) -> str:
    bar = ("█" * layer.bar_cells).ljust(BAR_CELLS)
    return f"{layer.label:<{width}}|{bar}| norm: {_number(layer.norm)}"


def _number(norm: float) -> str:
    """Write two decimals, more where the first digit lies further behind, and exponents at the extremes."""
    if not math.isfinite(norm) or norm == 0.0:
        return f"{norm:.2f}"
    exponent = int(f"{norm:.0e}".split("e")[1])
    return f"{norm:.{max(2, -exponent)}f}" if -6 <= exponent < 6 else f"{norm:.2e}"
