"""Whether gradients vanish, explode or stay, over time or over depth, and the bar picture of all layers."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import InputTypeError, UsageError
from gradtrack.functional.statistics import leaves, norm_of

Axis: TypeAlias = Literal["time", "depth"]
Status: TypeAlias = Literal["vanishing", "exploding", "stable"]

_LONG: Final = 10
_LIMIT: Final = 1000.0
_LIMIT_SHORT_TIME: Final = 100.0  # in good health a norm changes that much too, but not within a few steps
_STANDARD_ERRORS: Final = 4.0
_NORMAL_CONSISTENCY: Final = 1.4826
_MOST_TREND_POINTS: Final = 300
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class GradientVerdict(Mapping[str, object]):
    """A judgement on a series of norms, whose fields are read as attributes or by key.

    `norms` are in the order given: over time from the first to the last, over depth from input to output.
    `ratio` is the factor by which the norm changes in the direction judged: last to first over time, input to
    output over depth. `slope` is the typical change of the natural logarithm of the norm per step that way.
    """

    status: Status
    axis: Axis
    norms: tuple[float, ...]
    ratio: float
    slope: float
    message: str

    def __getitem__(self, key: str) -> object:
        if key not in tuple(self):
            raise KeyError(f"{key!r}: expected one of {', '.join(self)}.")
        value: object = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


def detect_gradient_issues(gradient_history: object, *, axis: Axis | None = None) -> GradientVerdict:
    """Judge whether gradients are vanishing, exploding or stable.

    A sequence is a history over time; its entries are norms, arrays, or any nesting of the gradients of one
    step. A dict is a profile over depth, from the input (first key) to the output (last key). `axis`
    overrides this, with the same order of entries.

    Over time the norms are followed from first to last; over depth from the output back to the input, the way
    a gradient travels. So a profile that shrinks towards the input vanishes, and one that shrinks towards the
    output explodes. Only ratios count: gradients multiplied by a constant get the same verdict.

    - Two changes are measured, in logarithms. The trend: the Theil-Sen slope times the length. The level,
      with five entries or more: from the median of the first ones to that of the last, three each, five each
      from ten entries on.
    - From ten entries on a change must also stand out from the scatter of the entries around it.
    - A change of at least a factor of 1000 is vanishing or exploding; over time, in fewer than ten entries,
      one of 100 is enough. The level decides before the trend, since it knows how things stand now.
    - Any NaN or infinity is exploding. Zeros in most of the last entries are vanishing; other zeros are left
      out.
    - Fewer than two norms that are not zero show no change: stable.

    A single outlier in a history of six or more changes no verdict, and neither does noise around a constant.

    >>> detect_gradient_issues([1.0, 0.1, 0.01, 0.001])["status"]
    'vanishing'
    >>> detect_gradient_issues({"input": 0.001, "middle": 0.1, "output": 5.0}).status
    'vanishing'
    """
    chosen: Axis = axis if axis is not None else ("depth" if isinstance(gradient_history, Mapping) else "time")
    if chosen not in get_args(Axis):
        raise UsageError(f"axis={axis!r}: expected 'time' or 'depth'. Leave it out to go by the container.")
    return judge(tuple(norm for _, norm in named_norms(gradient_history)), chosen)


def named_norms(gradients: object) -> list[tuple[object, float]]:
    """Return key or index and norm of every entry that holds a gradient."""
    if isinstance(gradients, Mapping):
        entries: Iterable[tuple[object, object]] = gradients.items()
    elif (
        isinstance(gradients, Iterable) and not isinstance(gradients, str | bytes) and getattr(gradients, "ndim", 1) > 0
    ):
        entries = enumerate(gradients)
    else:
        kind = type(gradients).__name__
        raise InputTypeError(f"{kind} as a series of gradients: expected several. Pass a list or a dict.")
    unpacked = ((key, list(leaves(entry))) for key, entry in entries)
    return [(key, norm_of(arrays)) for key, arrays in unpacked if arrays]


def judge(norms: tuple[float, ...], axis: Axis) -> GradientVerdict:
    """Judge norms that are given over time, or over depth from input to output."""
    travelled = np.array(norms if axis == "time" else norms[::-1], dtype=np.float64)
    short = axis == "time" and len(norms) < _LONG
    limit = _LIMIT_SHORT_TIME if short else _LIMIT
    status, change, slope = _follow(travelled, math.log(limit))
    ratio = _factor(change)
    message = _sentence(travelled, status, ratio, axis)
    return GradientVerdict(status, axis, norms, ratio, slope, message)


def _factor(change: float) -> float:
    """Return the factor of a logarithmic change, kept away from an overflow or a zero that are not there."""
    if not math.isfinite(change):
        return math.nan if math.isnan(change) else 0.0
    return math.exp(min(max(change, -700.0), 700.0))


def _follow(travelled: NDArray[np.float64], limit: float) -> tuple[Status, float, float]:
    """Return status, logarithmic change and slope of norms in the order in which they are followed."""
    if not np.isfinite(travelled).all():
        return "exploding", math.nan, math.nan
    ending = travelled[-_window(travelled.size) :]
    if travelled.size and np.count_nonzero(ending) * 2 < ending.size:
        return "vanishing", -math.inf, math.nan
    positions = np.flatnonzero(travelled)
    if positions.size < 2:
        return "stable", math.nan, math.nan
    logs = np.log(travelled[positions])
    trend, slope, trend_floor = _trend(positions.astype(np.float64), logs)
    level, level_floor = _level(logs)
    for change, floor in ((level, level_floor), (trend, trend_floor)):
        if abs(change) >= max(limit * (1.0 - _ROUNDING), floor):
            return ("vanishing" if change < 0.0 else "exploding"), change, slope
    return "stable", trend, slope


def _window(count: int) -> int:
    """Return how many entries make an end: an odd number, so that the median outvotes outliers."""
    return 1 if count < 5 else 3 if count < _LONG else 5


def _level(logs: NDArray[np.float64]) -> tuple[float, float]:
    """Return the change from the first entries to the last, and what it must exceed to be more than noise."""
    window = _window(logs.size)
    if window == 1:
        return 0.0, 0.0
    change = float(np.median(logs[-window:]) - np.median(logs[:window]))
    if logs.size < _LONG:
        return change, 0.0
    # The jumps that one entry in ten makes: a series that jumps so far and back all the time has not moved.
    return change, 2.0 * float(np.quantile(np.abs(np.diff(logs)), 0.9))


def _trend(positions: NDArray[np.float64], logs: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the change along the Theil-Sen line, its slope, and what the change must exceed."""
    if logs.size > _MOST_TREND_POINTS:  # the slopes of all pairs are many: take medians of neighbours first
        positions = np.array([np.median(part) for part in np.array_split(positions, _MOST_TREND_POINTS)])
        logs = np.array([np.median(part) for part in np.array_split(logs, _MOST_TREND_POINTS)])
    earlier, later = np.triu_indices(logs.size, k=1)
    slope = float(np.median((logs[later] - logs[earlier]) / (positions[later] - positions[earlier])))
    change = slope * float(positions[-1] - positions[0])
    if logs.size < _LONG:
        return change, slope, 0.0
    residuals = logs - slope * positions
    scatter = _NORMAL_CONSISTENCY * float(np.median(np.abs(residuals - np.median(residuals))))
    # The change along a line through n points errs by sqrt(12 / n) times their scatter.
    return change, slope, _STANDARD_ERRORS * scatter * math.sqrt(12.0 / logs.size)


def _sentence(travelled: NDArray[np.float64], status: Status, ratio: float, axis: Axis) -> str:
    count = travelled.size
    broken = count - int(np.count_nonzero(np.isfinite(travelled)))
    way = "over time" if axis == "time" else "from the output back to the input"
    if broken:
        return f"{broken} of {count} gradient norms are NaN or infinite."
    if ratio == 0.0 and status == "vanishing":
        return f"The gradient norm is zero at the end, followed {way} through {count} entries."
    if math.isnan(ratio):
        return f"{count} gradient norms, fewer than two of them above zero: no change to judge."
    if status == "stable":
        return f"The gradient norm keeps its order of magnitude {way} ({count} entries, factor {ratio:.3g})."
    word = "shrinks" if status == "vanishing" else "grows"
    return f"The gradient norm {word} {way} ({count} entries, factor {ratio:.3g})."


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
        lines = [
            f"{layer.label:<{width}}|{'█' * layer.bar_cells:<{BAR_CELLS}}| norm: {_number(layer.norm)}"
            for layer in self.layers
        ]
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
    names = [f"layer_{key}" if isinstance(key, int) else str(key) for key, _ in named]
    layers = [
        LayerGradient(name, _label(name, index, len(named)), norm, _bar_cells(norm, largest))
        for index, (name, norm) in enumerate(zip(names, norms, strict=True))
    ]
    return GradientProfile(tuple(reversed(layers)), judge(norms, "depth"))


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


def _number(norm: float) -> str:
    """Write two decimals, more where the first digit lies further behind, and exponents at the extremes."""
    if not math.isfinite(norm) or norm == 0.0:
        return f"{norm:.2f}"
    exponent = int(f"{norm:.0e}".split("e")[1])
    return f"{norm:.{max(2, -exponent)}f}" if -6 <= exponent < 6 else f"{norm:.2e}"
