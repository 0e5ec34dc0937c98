"""The analyzer of gains: how gradients grow or shrink along a chain of blocks while a model trains."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, final

from torch import nn

from gradtrack.analyzers.base import Analyzer, Picture, Schedule, Snapshot, often, panel
from gradtrack.analyzers.gain.monitor import GradientGainMonitor, NormType
from gradtrack.analyzers.gain.picture import pictures_of
from gradtrack.analyzers.gain.profile import GainProfile, SampleSpread, summarise
from gradtrack.analyzers.tools.modules import Blocks, describe_chain, find_chain
from gradtrack.records import Metric, Panel
from gradtrack.reports import Report
from gradtrack.reports.base import measured

_NO_CHAIN = "the model has no chain of three or more blocks of one type: name them with blocks=."
_NOT_CALLED = "none of the {} blocks {} to {} ran with gradients: name those that the forward pass calls with blocks=."
_APART = (
    "no block with a gradient takes the output of the one before it, as experts side by side do not; "
    "name those of one path with blocks=."
)


class GainReport(Report):
    """The gains along a chain of blocks, from input to output; all but the norms are free of the loss's scale.

    `gains` has one entry per transition, None where two neighbours are not connected. `cumulative_gain` is the norm at
    the first block over that at the last, `gain_per_block` the exponential of the slope of a line through the
    logarithms of the norms. `jump_at` is the block before the transition that stands out the most, `jump` its
    logarithmic distance from the median. `silent_fraction` is the largest share of samples, at any block, with under a
    thousandth of the largest gradient in the batch.
    """

    blocks: list[str]
    norms: list[float | None]
    rms_norms: list[float | None]
    gains: list[float | None]
    cumulative_gains: list[float | None]
    mean_gain: Annotated[float, Metric("gain/mean", "Mean gain of the transitions from each block to the one before.")]
    min_gain: Annotated[float, Metric("gain/min", "The smallest gain of a transition.")]
    max_gain: Annotated[float, Metric("gain/max", "The largest gain of a transition.")]
    num_vanishing: Annotated[
        int, Metric("gain/vanishing", "Transitions behind which no gradient is left.", unit="transitions")
    ]
    cumulative_gain: float | None = measured(
        "gain/cumulative", "Norm at the first block over that at the last.", when="both have a gradient"
    )
    gain_per_block: float | None = measured(
        "gain/per_block", "One gain for all, from a line through the log norms.", when="three blocks or more"
    )
    slope_standard_error: float | None = None
    jump: float | None = measured(
        "gain/jump", "Logarithm of the oddest gain over the median.", unit="nats", when="three transitions or more"
    )
    jump_at: str | None = None
    silent_fraction: float = measured(
        "gain/silent_fraction",
        "Samples under a thousandth of the largest gradient, at the worst block.",
        unit="share",
        default=0.0,
    )
    num_samples: int = 0


@final
class GainAnalyzer(Analyzer):
    """An analyzer of the backward gains between the blocks of a deep model.

    The gain of a transition is `‖∂L/∂h_{i-1}‖ / ‖∂L/∂h_i‖` with h_i the output of block i, and the cumulative gain is
    their product: 24 healthy gains of 0.6 leave 5e-6 of a gradient. In mean-field theory a gain of one is the edge of
    chaos (Schoenholz et al. 2017, arXiv 1611.01232). The blocks are the largest chain of modules of one type, or those
    that `blocks` names (a list of names, or a regular expression).

    Cost: one reduction of each block's output gradient on every 4th step up to 64, then on every 64th.

    >>> import torch
    >>> from gradtrack import GradientManager
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    >>> for layer in model:
    ...     _ = nn.init.orthogonal_(layer.weight, gain=0.5)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> with GradientManager(analyzers=["gain"]) as manager:
    ...     for step in range(4):
    ...         report = manager.step(model, optimizer, model(torch.ones(2, 8)).sum())
    >>> found = report.analyzers["gain"]
    >>> round(found.gain_per_block, 4), round(found.cumulative_gain, 4)
    (0.5, 0.0625)
    """

    report_type: ClassVar[type[Report]] = GainReport
    schedule: ClassVar[Schedule] = staticmethod(often)
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(title="Gain between blocks", section="gain", metrics=("gain/mean", "gain/min", "gain/max"), kind="band"),
        panel("Gain per block", "gain/per_block"),
        panel("Gain from the last to the first block", "gain/cumulative", log_scale=True),
        panel("Largest jump between neighbours (log)", "gain/jump"),
        panel("Share of silent samples", "gain/silent_fraction"),
    )
    picture = Picture("gradient_gain", "the gain from block to block")
    pictures = staticmethod(pictures_of)

    def __init__(self, *, blocks: Blocks = None, norm_type: NormType = "l2", eps: float = 1e-30) -> None:
        self._options: dict[str, Any] = {"norm_type": norm_type, "eps": eps}
        self._blocks = blocks
        self._names: list[str] = []
        self._monitor: GradientGainMonitor | None = None
        self._limitation: str | None = None

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        chain = find_chain(model)
        return f"the model has {describe_chain(chain)}" if chain else None

    def arm(self, model: nn.Module) -> None:
        self.disarm()
        chain = find_chain(model, self._blocks)
        if not chain:
            self._limitation = _NO_CHAIN
        else:
            self._limitation = None
            self._names = list(chain)
            self._monitor = GradientGainMonitor(chain.values(), strict_single_backward=False, **self._options)

    def inspect(self, snapshot: Snapshot) -> GainReport | None:
        monitor = self._monitor
        if monitor is None:
            return None
        profile = monitor.profile()
        if all(norm is None for norm in profile.norms):
            self._limitation = _NOT_CALLED.format(len(self._names), self._names[0], self._names[-1])
            return None
        report = _report(self._names, profile, monitor.rms_norms(), monitor.sample_spread())
        if report.gains and all(gain is None for gain in report.gains):
            self._limitation = _APART
        return report

    def disarm(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def limitation(self) -> str | None:
        return self._limitation


def _report(
    names: list[str], profile: GainProfile, rms_norms: list[float | None], spreads: list[SampleSpread | None]
) -> GainReport:
    gains, logs = profile.gains(), profile.log_gains()
    summary = summarise(gains, logs)
    cumulative, fit, jump = profile.cumulative_gains(), profile.fit(), profile.discontinuity()
    known = [spread for spread in spreads if spread is not None]
    return GainReport(
        blocks=names,
        norms=profile.norms,
        rms_norms=rms_norms,
        gains=gains,
        cumulative_gains=cumulative,
        mean_gain=summary["mean_gain"],
        min_gain=summary["min_gain"],
        max_gain=summary["max_gain"],
        num_vanishing=int(summary["num_vanishing"]),
        cumulative_gain=next((gain for gain in cumulative if gain is not None), None),
        gain_per_block=None if fit is None else fit.gain_per_block,
        slope_standard_error=None if fit is None else fit.standard_error,
        jump=None if jump is None else jump.deviation,
        jump_at=None if jump is None else names[jump.transition],
        silent_fraction=max(
            (spread.silent_fraction for spread in known if math.isfinite(spread.silent_fraction)), default=0.0
        ),
        num_samples=max((spread.num_samples for spread in known), default=0),
    )
