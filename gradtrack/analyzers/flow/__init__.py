"""The analyzer of gradient flow: gradients at each layer, units that respond, and the updates that result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import nn

from gradtrack import registry
from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, model_of, often, panel
from gradtrack.analyzers.flow.rules.precision import judge_origin_ever
from gradtrack.analyzers.flow.sampler import FlowSampler, sample_offline
from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.analyzers.flow.verdict import EXPLAINED_BY, Thresholds, diagnose, judge_absolutely
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, untouched
from gradtrack.errors import UsageError
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueType, Report
from gradtrack.reports.base import declared_values, measured

_ALL = 1000
_NO_LAYER = (
    "no module of the model ran with gradients in the forward pass, as where a program calls functions on the "
    "parameters themselves (functional MAML): only the gradients of the parameters are judged. Call modules, or "
    "torch.func.functional_call."
)


class FlowReport(Report):
    """The gradient flow of a sampled step, relative to the last layer, and the update of the sample before it.

    `gain_min` and `gain_max` are the smallest and largest ‖δ‖ over ‖δ of the last layer‖ along the model's edges;
    `update_ratio` is ‖Δw‖/‖w‖ of the median weight, with the larger ‖w‖ of before and after, and `cosine` that of
    successive gradients, at the previous sample;
    `subnormal` is the share of float16 gradients there that were too small for all of their digits.
    """

    gain_min: float | None = measured(
        "flow/gain_min", "Smallest gradient at a layer's output, over that at the last layer.", when="several layers"
    )
    gain_max: float | None = measured(
        "flow/gain_max", "Largest gradient at a layer's output, over that at the last layer.", when="several layers"
    )
    update_ratio: float | None = measured(
        "flow/update_ratio", "Relative change of the median weight at the sample before.", when="second sample on"
    )
    cosine: float | None = measured(
        "flow/gradient_cosine", "Cosine of two successive gradients at the sample before.", when="second sample on"
    )
    subnormal: float | None = measured(
        "flow/subnormal_fraction",
        "Gradients too small for all digits of float16, at the sample before.",
        unit="share",
        when="float16",
    )

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are known, infinite gains among them."""
        return {name: value for name, value in declared_values(self).items() if value is not None}


@final
class GradientFlowAnalyzer(Analyzer):
    """The gradient on its way back, along the edges that the model really has, judged without absolute thresholds.

    Gradients at the layers' outputs are compared with that of the last layer, Γ = ‖δ_l‖/‖δ_last‖; units, effective
    ranks, update ratios ‖Δw‖/‖w‖ and cosines of successive gradients are all free of the scale of the loss. The
    absolute thresholds show their usual values and act only where they are passed. References: Glorot and Bengio 2010
    (gradients over depth), Roy and Vetterli 2007 (effective rank), Sokar et al. 2023 (units that do not respond).

    Cost: on every 4th step up to 64, then on every 64th, a few reductions of each layer's output and its gradient.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    >>> _ = nn.init.constant_(model[0].bias, -50.0)
    >>> analyzer = GradientFlowAnalyzer(model)
    >>> issues = analyzer.analyze(lambda: torch.randn(32, 8), lambda output: output.pow(2).mean(), steps=5)
    >>> [(issue.issue_type.value, issue.layer) for issue in issues]
    [('DEAD', '0')]
    """

    report_type: ClassVar[type[Report]] = FlowReport
    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = EXPLAINED_BY
    schedule: ClassVar[Schedule] = staticmethod(often)
    foresees: ClassVar[bool] = True
    panels: ClassVar[tuple[Panel, ...]] = (
        panel("Gradient gain", "flow/gain_min", "flow/gain_max", log_scale=True),
        panel("Update ratio", "flow/update_ratio", log_scale=True),
        panel("Cosine of successive gradients", "flow/gradient_cosine"),
    )

    def __init__(
        self,
        model: nn.Module | None = None,
        enable_rnn_analyzer: bool = False,
        enable_circular_flow_analyser: bool = False,
        vanishing_threshold: float | None = None,
        exploding_threshold: float | None = None,
        dead_threshold: float | None = None,
        unstable_cv_threshold: float | None = None,
        *,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
    ) -> None:
        self.model = model
        self.enable_rnn_analyzer = enable_rnn_analyzer
        self.enable_circular_flow_analyser = enable_circular_flow_analyser
        self.enable_jacobian, self.enable_vector_analysis = enable_jacobian, enable_vector_analysis
        self._thresholds = Thresholds(vanishing_threshold, exploding_threshold, dead_threshold, unstable_cv_threshold)
        self.vanishing_threshold = 1e-6 if vanishing_threshold is None else vanishing_threshold
        self.exploding_threshold = 10.0 if exploding_threshold is None else exploding_threshold
        self.dead_threshold = 0.9 if dead_threshold is None else dead_threshold
        self.unstable_cv_threshold = 3.0 if unstable_cv_threshold is None else unstable_cv_threshold
        self.details: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self._sampler = self._new_sampler()
        self._saw_no_layer = False

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        return "gradients flow through every model"

    def due(self, step: int) -> bool:
        return step == 1 or self.scheduled(step) or self._sampler.waiting

    def arm(self, model: nn.Module) -> None:
        self._sampler.arm(model)

    def inspect(self, snapshot: Snapshot) -> Report | None:
        sample = self._sampler.look(snapshot)
        self._saw_no_layer = sample is not None and not sample.nodes and bool(snapshot.norms)
        return None if sample is None or not sample.nodes else _report(self._sampler.samples)

    def disarm(self) -> None:
        self._sampler.disarm()

    def limitation(self) -> str | None:
        return _NO_LAYER if self._saw_no_layer else None

    def issues(self) -> list[Issue]:
        return diagnose(self.case, _ALL)  # the manager leaves out what is muted and chooses among the rest

    @property
    def case(self) -> Case:
        """Return the evidence gathered so far."""
        return self._sampler.case

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)

    def analyze(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, optimizer: Any = None
    ) -> list[Issue]:
        """Run forward and backward passes and return what is wrong; the model trains only where an optimizer is passed.

        `input_fn()` gives a batch and `loss_fn(output)` the loss of the model's output. What is switched on runs after
        it: its reports are in `details`, and where it has nothing to look at the reason is in `skipped`.
        """
        model = model_of(self, self.model)
        self._sampler = self._new_sampler()
        self.details, self.skipped = {}, {}
        with untouched(model, optimizer):
            try:
                sample_offline(self._sampler, model, input_fn, loss_fn, steps, optimizer)
            finally:
                self._sampler.disarm(for_good=True)
        found = diagnose(self.case)
        if all(issue.issue_type is not IssueType.NUMERICAL for issue in found):
            found += judge_origin_ever(self.case)
        found += judge_absolutely(self.case, self._thresholds)
        known = {issue.key for issue in found}
        return found + [issue for issue in self._others(input_fn, loss_fn, steps) if issue.key not in known]

    def print_summary(self, issues: Sequence[Issue]) -> None:
        """Print the issues, the root causes first, or that there are none."""
        found = f"{len(issues)} issue{'s' * (len(issues) > 1)}." if issues else "no issues."
        title = f"Gradient flow over {self.case.series.num_steps} steps: {found}"
        print("\n".join([title, *(f"  {issue}" for issue in issues)]))  # noqa: T201

    def _others(self, input_fn: InputFunction, loss_fn: LossFunction, steps: int) -> list[Issue]:
        """Run the analyzers that were switched on; their reports are kept in `details`."""
        wanted = {
            "jacobian": self.enable_jacobian,
            "vector": self.enable_vector_analysis or self.enable_circular_flow_analyser,
            "recurrent": self.enable_rnn_analyzer or (self.enable_jacobian and self._is_recurrent()),
        }
        found: list[Issue] = []
        for name in (name for name, on in wanted.items() if on):
            analyzer: Any = registry.analyzers.load(name)(self.model)
            analyze = analyzer.analyze_dynamics if name == "recurrent" else analyzer.analyze
            rest = () if name == "jacobian" else (loss_fn, steps)
            try:
                self.details[name] = analyze(input_fn, *rest)
            except (UsageError, RuntimeError) as fault:  # also what torch can neither hook nor differentiate twice
                self.skipped[name] = str(fault)
                continue
            found += getattr(self.details[name], "issues", [])
        return found

    def _is_recurrent(self) -> bool:
        """Say whether the Jacobians that matter are those from one state to the next."""
        return self.model is not None and registry.analyzers.load("recurrent").suits(self.model) is not None

    def _new_sampler(self) -> FlowSampler:
        return FlowSampler(with_zeros=self._thresholds.dead is not None)


def _report(samples: Sequence[Sample]) -> FlowReport:
    graph = samples[-1].graph
    along = [graph.gammas(path) for path in graph.paths.values()]
    gains = [gain for found in along if len(found) > 1 for gain in found.values()]  # one layer alone is its own measure
    before = samples[-2] if len(samples) > 1 else None
    ratios = list(before.ratios.values()) if before is not None else []
    changes = (before.changes or {}).values() if before is not None else ()
    tiny = [change.subnormal for change in changes if not math.isnan(change.subnormal)]
    return FlowReport(
        gain_min=min(gains, default=None),
        gain_max=max(gains, default=None),
        update_ratio=median(ratios) if ratios else None,
        cosine=None if before is None or math.isnan(before.cosine) else before.cosine,
        subnormal=sum(tiny) / len(tiny) if tiny else None,
    )
