"""Singular values of the Jacobians between blocks, and the report of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import torch
from pydantic import Field
from torch import Tensor

from gradtrack.analyzers.tools.linear_maps import (
    LinearMap,
    condensed,
    largest_singular_value,
    leading_singular_values,
    squared_frobenius,
)
from gradtrack.analyzers.tools.samples import Pending
from gradtrack.analyzers.tools.spectra import arnoldi, condition_number, effective_rank, spectral_radius
from gradtrack.records import Metric
from gradtrack.reports import Report
from gradtrack.reports.base import measured

EXACT_LIMIT: Final = 512
_CAP: Final = 16.0
_PROBES, _VALUES = 16, 32


class BlockJacobian(Report):
    """The Jacobian of one block's output by its input, median over the samples.

    `mean_square_gain` is the squared Frobenius norm over the number of outputs: by that factor the squared norm of a
    random gradient changes on its way back, the χ of mean-field theory. `sigma_min` and `condition` are None where only
    products with the Jacobian were taken (`exact` is False), and `effective_rank` is then completed with the Frobenius
    norm: exact for a decaying and for a flat spectrum, an upper estimate in between. `condition` is infinite where some
    direction is lost, as behind the dead half of a ReLU. `spectral_radius` exists for square matrices only.
    """

    num_inputs: int
    num_outputs: int
    num_samples: int
    exact: bool
    sigma_max: Annotated[
        float, Metric("jacobian/sigma_max/<block>", "The most that one block stretches a direction of its input.")
    ]
    sigma_min: float | None = None
    condition: float | None = None
    log10_condition: float | None = None
    effective_rank: float
    mean_square_gain: Annotated[
        float,
        Metric("jacobian/mean_square_gain/<block>", "Change of a random gradient's squared norm on its way back."),
    ]
    mean_square_gain_error: float = 0.0
    spectral_radius: float | None = None


def measure_jacobian(
    function: Callable[[Tensor], Tensor],
    at: Tensor,
    generator: torch.Generator,
    *,
    exact_limit: int = EXACT_LIMIT,
) -> Pending[BlockJacobian]:
    """Measure the Jacobian of a function: all of it up to a limit on the smaller side, by products beyond."""
    linear = LinearMap.of(function, at)
    if min(linear.num_inputs, linear.num_outputs) <= exact_limit:
        return _from_matrix(linear)
    return _from_products(linear, generator)


def _from_matrix(linear: LinearMap) -> Pending[BlockJacobian]:
    sizes = linear.num_inputs, linear.num_outputs
    return Pending([condensed(linear.matrix().double())], partial(_exact, sizes))


def _exact(sizes: tuple[int, int], matrix: Tensor) -> BlockJacobian:
    if not torch.isfinite(matrix).all():
        names = ("sigma_max", "sigma_min", "condition", "effective_rank", "mean_square_gain")
        return _report(sizes, exact=True, **dict.fromkeys(names, math.nan))
    values = torch.linalg.svdvals(matrix)
    return _report(
        sizes,
        exact=True,
        sigma_max=float(values.max()),
        sigma_min=float(values.min()),
        condition=condition_number(values),
        effective_rank=effective_rank(values),
        mean_square_gain=float(values.square().sum()) / sizes[1],
        spectral_radius=spectral_radius(matrix) if sizes[0] == sizes[1] else None,
    )


def _from_products(linear: LinearMap, generator: torch.Generator) -> Pending[BlockJacobian]:
    squares = squared_frobenius(linear, generator, num_probes=_PROBES)
    values = leading_singular_values(linear, generator, count=_VALUES)
    largest = largest_singular_value(linear, generator)
    start = linear.random(linear.num_outputs, generator)
    sizes = linear.num_inputs, linear.num_outputs
    spectrum = [arnoldi(linear.pull, start)] if sizes[0] == sizes[1] else []
    return Pending.joined([squares, values, largest, *spectrum], partial(_estimated, sizes))


def _estimated(
    sizes: tuple[int, int], found: tuple[float, float], values: Tensor, largest: float, spectrum: Tensor | None = None
) -> BlockJacobian:
    squares, error = found
    return _report(
        sizes,
        exact=False,
        sigma_max=max(largest, float(values.max())),
        effective_rank=_completed_rank(values, squares, min(sizes)),
        mean_square_gain=squares / sizes[1],
        mean_square_gain_error=error / sizes[1],
        spectral_radius=None if spectrum is None else float(spectrum[0].abs()),
    )


def _report(sizes: tuple[int, int], **numbers: Any) -> BlockJacobian:
    return BlockJacobian(
        num_inputs=sizes[0],
        num_outputs=sizes[1],
        num_samples=1,
        log10_condition=_log10(numbers.get("condition")),
        **numbers,
    )


def _log10(condition: float | None) -> float | None:
    """Return the order of magnitude of a condition number, at most 16."""
    return None if condition is None or math.isnan(condition) else min(math.log10(condition), _CAP)


def _completed_rank(values: Tensor, squares: float, count: int) -> float:
    """Return the effective rank with what the leading values leave of the squares spread evenly over all others."""
    left = max(squares - float(values.square().sum()), 0.0)
    others = count - len(values)
    if others <= 0 or left <= 0:
        return effective_rank(values)
    rest = min(math.sqrt(left / others), float(values.min()))
    return effective_rank(torch.cat([values, values.new_full((others,), rest)]))


class JacobianReport(Report):
    """The Jacobians of the blocks by name, from input to output, and what they come to together.

    `gain_per_block` is the geometric mean of the roots of the blocks' `mean_square_gain`; `skipped` says why a block is
    missing.
    """

    blocks: dict[str, BlockJacobian]
    sigma_max: float | None = measured(
        "jacobian/sigma_max", "The most that any block stretches a direction of its input."
    )
    log10_condition: float | None = measured(
        "jacobian/log10_condition",
        "Largest over smallest singular value.",
        unit="decades",
        when="taken in full, none is 0",
    )
    rank_share: float | None = measured(
        "jacobian/rank_share", "Effective rank over the full rank, of the worst block.", unit="share"
    )
    gain_per_block: float | None = measured(
        "jacobian/gain_per_block", "Geometric mean over the blocks of the gain of a random gradient."
    )
    spectral_radius: float | None = measured(
        "jacobian/spectral_radius", "Largest eigenvalue by magnitude of any block.", when="a block is square"
    )
    skipped: dict[str, str] = Field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{'block':24} {'in':>6} {'out':>6} {'σ max':>9} {'cond':>9} {'eff. rank':>9} {'gain':>7} {'ρ':>7}"]
        for name, found in self.blocks.items():
            lines.append(
                f"{name[-24:]:24} {found.num_inputs:6d} {found.num_outputs:6d} {found.sigma_max:9.3g} "
                f"{_text(found.condition):>9} {found.effective_rank:9.1f} {math.sqrt(found.mean_square_gain):7.3f} "
                f"{_text(found.spectral_radius):>7}"
            )
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.skipped.items())])


def middle(*samples: BlockJacobian) -> BlockJacobian:
    """Return the median of every number over the samples of one block."""
    known = [name for name, value in dict(samples[0]).items() if isinstance(value, float)]
    values = {name: statistics.median(one[name] for one in samples) for name in known}
    values["log10_condition"] = _log10(values.get("condition"))
    return samples[0].model_copy(update={**values, "num_samples": len(samples)})


def sum_up(blocks: dict[str, BlockJacobian], skipped: dict[str, str]) -> JacobianReport:
    """Return the report on blocks; the extremes are over those whose numbers are known."""
    every = list(blocks.values())
    gains = _known(block.mean_square_gain for block in every)
    sizes = [min(block.num_inputs, block.num_outputs) for block in every]
    shares = [block.effective_rank / size for block, size in zip(every, sizes, strict=True) if size]
    return JacobianReport(
        blocks=blocks,
        skipped=skipped,
        sigma_max=max(_known(block.sigma_max for block in every), default=None),
        log10_condition=max(_known(block.log10_condition for block in every), default=None),
        rank_share=min(_known(shares), default=None),
        gain_per_block=_root_of_mean(gains) if gains else None,
        spectral_radius=max(_known(block.spectral_radius for block in every), default=None),
    )


def _root_of_mean(squares: Sequence[float]) -> float:
    """Return the geometric mean of the roots of numbers, which is zero where one of them is."""
    return math.exp(statistics.fmean(map(math.log, squares)) / 2) if min(squares) > 0 else 0.0


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}"
