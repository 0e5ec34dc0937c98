"""Gradient flow: what comes back through the layers, which units respond, and what the optimizer makes of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from gradtrack import registry
from gradtrack.analyzers.base import Analyzer, Schedule, Series, Snapshot, often
from gradtrack.diagnose.absolute import Thresholds, judge_absolutely
from gradtrack.diagnose.doctor import diagnose
from gradtrack.diagnose.sample import Case, ParameterSample, Sample, median
from gradtrack.diagnose.stale import StaleWatch
from gradtrack.errors import UsageError
from gradtrack.measure.elements import Elements
from gradtrack.measure.measurer import Measurer
from gradtrack.measure.moments import finite_norm
from gradtrack.measure.probe import Probe
from gradtrack.measure.shards import local_part, unwrapped
from gradtrack.measure.table import ParameterTable
from gradtrack.measure.untouched import offline_steps, untouched
from gradtrack.records import Metric, Panel
from gradtrack.reports import Issue, Report

_KEPT = 64


class FlowReport(Report):
    """The flow of a sampled step: gradients over that of the last layer, and how the step before it went on.

    `gain_min` and `gain_max` are the smallest and largest ‖δ‖ over ‖δ of the last layer‖ along the model's edges;
    `update_ratio` is ‖Δw‖/‖w‖ of the median weight and `cosine` that of successive gradients, at the previous sample;
    `subnormal` is the share of float16 gradients there that were too small for all of their digits.
    """

    gain_min: float | None = None
    gain_max: float | None = None
    update_ratio: float | None = None
    cosine: float | None = None
    subnormal: float | None = None

    described: ClassVar[tuple[Metric, ...]] = (
        Metric("flow/gain_min", "Smallest gradient at a layer's output, over that at the last layer."),
        Metric("flow/gain_max", "Largest gradient at a layer's output, over that at the last layer."),
        Metric(
            "flow/update_ratio", "Relative change of the median weight at the sample before.", when="second sample on"
        ),
        Metric(
            "flow/gradient_cosine", "Cosine of two successive gradients at the sample before.", when="second sample on"
        ),
    )

    def metrics(self) -> dict[str, float]:
        values = {
            "gain_min": self.gain_min,
            "gain_max": self.gain_max,
            "update_ratio": self.update_ratio,
            "gradient_cosine": self.cosine,
            "subnormal_fraction": self.subnormal,
        }
        return {f"flow/{name}": value for name, value in values.items() if value is not None}


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
    schedule: ClassVar[Schedule] = staticmethod(often)
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            title="Gradient gain",
            section="flow",
            metrics=("flow/gain_min", "flow/gain_max"),
            kind="multi-line",
            log_scale=True,
        ),
        Panel(title="Update ratio", section="flow", metrics=("flow/update_ratio",), log_scale=True),
        Panel(title="Cosine of successive gradients", section="flow", metrics=("flow/gradient_cosine",)),
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
        self._start()

    def _start(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._series = Series()
        self._probe: Probe | None = None
        self._stale: StaleWatch | None = None
        self._elements: Elements | None = None
        self._step_hooks: list[Any] = []
        self._watching = False

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        return "gradients flow through every model"

    def due(self, step: int) -> bool:
        return often(step) or self._elements is not None

    def arm(self, model: nn.Module) -> None:
        if self._elements is None:
            self._probe = Probe(model)
            self._stale = StaleWatch(model)

    def inspect(self, snapshot: Snapshot) -> Report | None:
        if snapshot.series is not None:
            self._series = snapshot.series
        self._follow(snapshot)
        if self._probe is None:
            return None
        if self._probe.fault is not None:
            raise self._probe.fault
        sample = self._sample(snapshot)
        self._samples.append(sample)
        if not snapshot.skipped and math.isfinite(sum(snapshot.norms.values())):
            self._elements = Elements(_named(snapshot.model), snapshot.gradients)
            self._watch_step(snapshot, sample)
        return self._report()

    def disarm(self) -> None:
        for watch in (self._probe, self._stale):
            if watch is not None:
                watch.close()
        if not self._watching:  # disarmed for good, and not after the look that set the watch up
            self._let_go()
        self._watching = False
        self._probe = self._stale = None

    def issues(self) -> list[Issue]:
        return diagnose(self.case)

    @property
    def case(self) -> Case:
        """Return the evidence gathered so far."""
        return Case(self._series, self._samples)

    def analyze(
        self,
        input_fn: Callable[[], Any],
        loss_fn: Callable[[Any], Tensor],
        steps: int = 20,
        optimizer: Any = None,
    ) -> list[Issue]:
        """Run forward and backward passes and return what is wrong; the model trains only where an optimizer is passed.

        `input_fn()` gives a batch and `loss_fn(output)` the loss of the model's output.
        """
        model = self._model()
        self._start()
        self.details = {}
        with untouched(model, optimizer):
            try:
                self._run(model, input_fn, loss_fn, steps, optimizer)
            finally:
                self.disarm()
                self._elements = None
        found = diagnose(self.case)
        found += judge_absolutely(self.case, self._thresholds)
        return found + self._others(input_fn, loss_fn, steps)

    def print_summary(self, issues: Sequence[Issue]) -> None:
        """Print the issues, the root causes first, or that there are none."""
        print(summary(issues, self._series.num_steps))  # noqa: T201

    def _run(self, model: nn.Module, input_fn: Any, loss_fn: Any, steps: int, optimizer: Any) -> None:
        measurer, table = Measurer(), ParameterTable(model)
        optimizers = () if optimizer is None else (optimizer,)
        running = offline_steps(model, input_fn, loss_fn, steps, optimizer)
        for step in range(1, steps + 1):
            self._probe, self._stale = Probe(unwrapped(model)), None
            *_, loss = next(running)
            grads = table.gradients()
            layout = grads.layout
            moments = measurer.measure(grads.tensors, layout.group_of, len(layout.group_names))
            norm = moments.norm
            log_norm = math.log(norm) if math.isfinite(norm) and norm > 0 else (-math.inf if norm == 0 else math.nan)
            self._series.append(log_norm, float(loss.detach()), layout.missing, finite=moments.finite)
            norms = {
                name: finite_norm(row, moments.exponent)
                for name, row in zip(layout.names, moments.rows.tolist(), strict=True)
            }
            self.inspect(
                Snapshot(
                    step=step,
                    model=model,
                    loss=float(loss.detach()),
                    optimizers=optimizers,
                    gradients=dict(zip(layout.names, grads.tensors, strict=True)),
                    norms=norms,
                    series=self._series,
                    skipped=not moments.finite,
                )
            )
            self._probe.close()
        next(running, None)  # the optimizer step of the last sample, where there is one

    def _others(self, input_fn: Any, loss_fn: Any, steps: int) -> list[Issue]:
        """Run the analyzers that were switched on; what they return beside issues is kept in `details`."""
        wanted = {
            "jacobian": self.enable_jacobian,
            "vector": self.enable_vector_analysis or self.enable_circular_flow_analyser,
            "recurrent": self.enable_rnn_analyzer,
        }
        found: list[Issue] = []
        for name in (name for name, on in wanted.items() if on):
            analyzer = registry.analyzers.load(name)(self._model())
            result = analyzer.analyze(input_fn, loss_fn, steps=steps)
            issues, details = result if isinstance(result, tuple) else (result, None)
            self.details[name] = details
            found += [issue for issue in issues if issue.key not in {known.key for known in found}]
        return found

    def _model(self) -> nn.Module:
        if self.model is None:
            raise UsageError("GradientFlowAnalyzer has no model: expected one to analyze. Pass it to the constructor.")
        return self.model

    def _follow(self, snapshot: Snapshot) -> None:
        """Complete the last sample with what the optimizer step made of it."""
        if self._elements is None:
            return
        elements, self._elements = self._elements, None
        self._let_go()
        params = _named(snapshot.model)
        self._samples[-1].changes = elements.changes(params) if snapshot.optimizers else None
        self._samples[-1].cosine = elements.cosine(params, snapshot.gradients)

    def _watch_step(self, snapshot: Snapshot, sample: Sample) -> None:
        """See what is left of the gradients when the optimizer takes them: others may clip in between."""
        self._let_go()
        self._watching = True
        elements = self._elements
        assert elements is not None

        def before_step(*_: object) -> None:
            if math.isnan(sample.clip):
                named = _named(snapshot.model).items()
                grads = {name: local_part(param.grad) for name, param in named if param.grad is not None}
                sample.clip = elements.left(grads)

        for optimizer in snapshot.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._step_hooks.append(optimizer.register_step_pre_hook(before_step))

    def _let_go(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []

    def _sample(self, snapshot: Snapshot) -> Sample:
        assert self._probe is not None
        owned = {id(param) for one in snapshot.optimizers for group in one.param_groups for param in group["params"]}
        named = {name: param for name, param in _named(snapshot.model).items() if param.requires_grad}
        weights = _norms(named.values())
        params = {
            name: ParameterSample(
                norm=snapshot.norms.get(name, 0.0),
                weight=weight,
                ndim=param.ndim,
                count=param.numel(),
                owned=id(param) in owned if snapshot.optimizers else None,
                has_grad=name in snapshot.norms,
                zeros=self._zeros(snapshot.gradients.get(name)),
                coarse=param.dtype in (torch.float16, torch.bfloat16),
            )
            for (name, param), weight in zip(named.items(), weights, strict=True)
        }
        return Sample(
            step=snapshot.step,
            nodes=self._probe.nodes,
            params=params,
            without_grad=self._probe.without_grad,
            stale=self._stale.found if self._stale is not None else [],
            lr=_rate(snapshot.lr),
            skipped=snapshot.skipped,
        )

    def _zeros(self, gradient: Tensor | None) -> float:
        """Return the share of zeros, where a threshold on it was passed."""
        if gradient is None or self._thresholds.dead is None:
            return 0.0
        return float((gradient == 0).double().mean())

    def _report(self) -> FlowReport:
        graph = self._samples[-1].graph
        gains = [gain for path in graph.paths.values() for gain in graph.gammas(path).values()]
        before = self._samples[-2] if len(self._samples) > 1 else None
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


def summary(issues: Sequence[Issue], num_steps: int) -> str:
    """Return the issues as text, the root causes first."""
    if not issues:
        return f"Gradient flow over {num_steps} steps: no issues."
    lines = [f"Gradient flow over {num_steps} steps: {len(issues)} issue{'s' * (len(issues) > 1)}."]
    return "\n".join(lines + [f"  {issue}" for issue in issues])


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def _norms(params: Iterable[Tensor]) -> list[float]:
    """Return the norms of parameters, estimated from what this rank holds where they are spread over ranks."""
    pairs = [(param.numel(), local_part(param.detach())) for param in params]
    if not pairs:
        return []
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for _, part in pairs]).tolist()
    return [norm * math.sqrt(size / max(1, part.numel())) for norm, (size, part) in zip(norms, pairs, strict=True)]


def _rate(rates: Mapping[str, float]) -> float:
    known = [float(rate) for rate in rates.values()]
    return max(known) if known else math.nan
