"""The analyzer of the field that a training follows: its divergence and rotation, and how gradients agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
from pydantic import Field
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, model_of, panel, rarely
from gradtrack.analyzers.tools.linear_maps import differentiable_twice
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, call, check_functions, kept, untouched
from gradtrack.analyzers.tools.samples import weighed_sample
from gradtrack.analyzers.tools.spectra import gradient_cosine
from gradtrack.analyzers.vector.field import FieldLook, Loss, Player, players_of
from gradtrack.analyzers.vector.noise import MicroBatches
from gradtrack.errors import UsageError
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueSeverity, IssueType, Report
from gradtrack.reports.base import measured
from gradtrack.support.interrupts import Changes
from gradtrack.support.progress import counted

_LIVE_SAMPLE: Final = 4096
_ROTATION: Final = 0.5
_PURE: Final = 0.95
_SHRUNK: Final = 0.7
_STEPS: Final = 8


class VectorReport(Report):
    """The field v(θ) around the weights; None where a number is undefined or was not measured.

    v is the gradient of the loss, or for a game each player's gradient of its own loss; training moves along -v.
    `coherence` is ‖mean g‖² over mean ‖g_i‖² of the gradients of several batches at the same weights, `noise_scale`
    their tr Σ/‖G‖², `directional_sharpness` vᵀJv/‖v‖². `step_sharpness` is ηλ for gradient descent, which on a
    quadratic overshoots above 2 (and hovers there in full-batch training: Cohen et al. 2021).
    """

    divergence: float | None = measured(
        "vector/divergence", "Trace of the field's Jacobian, of the Hessian for one loss.", when="offline or observe()"
    )
    divergence_standard_error: float | None = None
    rotation: float | None = measured(
        "vector/rotation", "Antisymmetric share of the squared Jacobian.", unit="share", when="games and fields"
    )
    rotation_standard_error: float | None = None
    antisymmetric_norm: float | None = None
    symmetric_norm: float | None = None
    coherence: float | None = measured(
        "vector/coherence", "Squared mean gradient over the mean square.", unit="share", when="several batches"
    )
    temporal_coherence: float | None = measured(
        "vector/temporal_coherence", "Cosine between one gradient and the next."
    )
    noise_scale: float | None = measured(
        "vector/noise_scale", "Variance between batches over the squared mean.", unit="batches", when="several batches"
    )
    directional_sharpness: float | None = measured(
        "vector/directional_sharpness", "Curvature along the gradient.", when="offline or observe()"
    )
    step_sharpness: float | None = measured(
        "vector/step_sharpness", "Curvature along a step over its slope.", when="offline, with an optimizer"
    )
    issues: list[Issue] = Field(default_factory=list)
    exact: bool = False
    num_parameters: int = 0
    num_steps: int = 0
    num_probes: int = 0


@final
class VectorAnalyzer(Analyzer):
    """An analyzer of training as a flow in the space of the weights.

    With J = ∂v/∂θ, A and S its antisymmetric and symmetric parts: divergence tr J from wᵀJw over random signs w
    (Hutchinson 1990), rotation ‖A‖²/(‖A‖² + ‖S‖²) from ‖Jw ∓ Jᵀw‖²/4 (Balduzzi et al. 2018, arXiv 1802.05642). Fields
    of up to 64 dimensions give exact numbers. One smooth loss has a symmetric Hessian, so its rotation is 0 and is not
    computed; what can rotate are games, temporal-difference learning and preconditioned gradients. Both products come
    from one forward pass, so that dropout cannot pass for rotation.

    Live it gives the cosine of consecutive gradients and, under accumulation, coherence and noise scale over the
    micro-batches; after `observe(...)` also what needs a loss to differentiate.

    Cost: offline about two gradients per probe, four for a game; live a sample of 4096 elements per tensor at steps
    2, 8, 32, 128, 512 and every 1000th, and the steps before them.

    >>> x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> report = VectorAnalyzer().analyze_game(
    ...     {"min": ([x], lambda: (x * y).sum()), "max": ([y], lambda: -(x * y).sum())}
    ... )
    >>> report.rotation, report.divergence, round(report.antisymmetric_norm, 4)
    (1.0, 0.0, 1.4142)
    """

    report_type: ClassVar[type[Report]] = VectorReport
    schedule: ClassVar[Schedule] = staticmethod(rarely)
    foresees: ClassVar[bool] = True
    panels: ClassVar[tuple[Panel, ...]] = (
        panel("Rotation of the field", "vector/rotation"),
        panel("Divergence of the field", "vector/divergence"),
        panel("Agreement of gradients", "vector/coherence", "vector/temporal_coherence"),
        panel("Noise scale (batches)", "vector/noise_scale", log_scale=True),
        panel("Sharpness along the step", "vector/directional_sharpness", "vector/step_sharpness"),
    )

    def __init__(self, model: nn.Module | None = None, *, num_probes: int = 4, seed: int = 0) -> None:
        if num_probes < 1:
            raise UsageError(f"num_probes {num_probes}: expected at least 1.")
        self._model, self._num_probes, self._seed = model, num_probes, seed
        self._observed: Loss | dict[str, tuple[list[Tensor], Loss]] | None = None
        self._changes = Changes()
        self._micro: MicroBatches | None = None
        self._before: tuple[int, dict[str, Tensor]] | None = None
        self._found: list[Issue] = []

    def analyze(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, *, optimizer: Any = None
    ) -> VectorReport:
        """Measure the gradient field of one loss over several batches.

        Without an optimizer the weights stay where they are, and coherence and noise scale are those of the batches.
        With one it trains, and the sharpness along its steps is measured instead.
        """
        model, look = model_of(self, self._model), self._look(steps)
        check_functions(input_fn, loss_fn)
        with untouched(model, optimizer), torch.enable_grad(), differentiable_twice(model):
            for _ in counted(range(steps), "Analyzing", total=steps):
                inputs = input_fn()
                loss = partial(_loss, model, inputs, loss_fn)
                look.add_loss(loss, list(model.parameters()), optimizer)
        return VectorReport(**look.numbers())

    def analyze_game(self, players: Mapping[str, Player], *, steps: int = 1) -> VectorReport:
        """Measure the field of a game: each player's gradient of the loss that it minimises by its own parameters.

        `players` maps a name to (parameters, loss_fn), or to (module, loss_fn); `loss_fn()` returns the loss. In one
        step every player draws the same random numbers. Buffers are put back of the modules that are given, and of the
        analyzer's model.
        """
        game, look = players_of(players), self._look(steps)
        given = [player[0] for player in players.values() if isinstance(player[0], nn.Module)]
        model = nn.ModuleList([*given, *([] if self._model is None else [self._model])])
        with kept(model), torch.enable_grad(), differentiable_twice(model if self._model is not None else None):
            for _ in counted(range(steps), "Analyzing", total=steps):
                look.add_game(game)
        numbers = look.numbers()
        return VectorReport(**numbers, issues=judge(numbers["rotation"]))

    def analyze_field(self, field: Callable[[Tensor], Tensor], at: Tensor) -> VectorReport:
        """Measure a field that is given as a function of a flat tensor, at a point."""
        look = self._look()
        point = torch.as_tensor(at).reshape(-1)
        with kept(self._model), differentiable_twice():
            look.add_field(field, point if point.is_floating_point() else point.to(torch.get_default_dtype()))
        return VectorReport(**look.numbers())

    def observe(self, loss: Loss | Mapping[str, Player]) -> None:
        """Differentiate a loss, or the losses of a game, on the live steps too.

        A loss is a function without arguments, called at the weights of the step; a game is as in `analyze_game`.
        """
        self._observed = loss if callable(loss) else players_of(loss)

    def due(self, step: int) -> bool:
        return self.scheduled(step) or self.scheduled(step + 1)

    def arm(self, model: nn.Module) -> None:
        self.disarm()
        self._micro = MicroBatches(model, self._changes, _LIVE_SAMPLE)

    def inspect(self, snapshot: Snapshot) -> VectorReport | None:
        gradients = {
            name: weighed_sample(gradient, _LIVE_SAMPLE)
            for name, gradient in snapshot.gradients.items()
            if type(gradient) is Tensor and gradient.layout is torch.strided
        }
        before, self._before = self._before, (snapshot.step, gradients)
        if not self.scheduled(snapshot.step):
            return None
        numbers = {"num_parameters": sum(map(len, gradients.values())), **self._differentiate(snapshot.model)}
        if before is not None and before[0] == snapshot.step - 1:
            temporal = gradient_cosine(before[1], gradients)
            numbers["temporal_coherence"] = None if math.isnan(temporal) else temporal
        noise = self._micro.noise() if self._micro is not None else None
        if noise is not None:
            numbers |= {"coherence": noise.coherence, "noise_scale": noise.noise_scale, "num_steps": noise.count}
        norms = () if snapshot.series is None else list(snapshot.series.log_norms)
        is_game = isinstance(self._observed, Mapping)
        self._found = judge(numbers["rotation"], norms, snapshot.step) if is_game else []
        report = VectorReport(**numbers, issues=self._found)
        return report if report.metrics() else None

    def issues(self) -> list[Issue]:
        return list(self._found)

    def disarm(self) -> None:
        self._changes.undo()
        self._micro = None

    def _differentiate(self, model: nn.Module) -> dict[str, Any]:
        if self._observed is None:
            return {}
        look = self._look()
        with kept(model), torch.enable_grad(), differentiable_twice(model):
            if callable(self._observed):
                look.add_loss(self._observed, list(model.parameters()))
            else:
                look.add_game(self._observed)
        return look.numbers()

    def _look(self, steps: int = 1) -> FieldLook:
        if steps < 1:
            raise UsageError(f"steps {steps}: expected at least 1.")
        return FieldLook(torch.Generator().manual_seed(self._seed), self._num_probes)


def _loss(model: nn.Module, inputs: Any, loss_fn: LossFunction) -> Tensor:
    return loss_fn(call(model, inputs))


def judge(rotation: float | None, log_norms: Sequence[float] = (), step: int = 0) -> list[Issue]:
    """Open where rotation outweighs the rest and the norm does not fall; without norms, where there is little else.

    Rotation alone is no fault: a game whose players approach each other on a spiral gets there.
    """
    if rotation is None or not rotation > _ROTATION:
        return []
    norms = [norm for norm in log_norms if math.isfinite(norm)]
    known = len(norms) >= _STEPS
    if known and statistics.median(norms[-len(norms) // 4 :]) < norms[0] + math.log(_SHRUNK):
        return []
    if not known and not rotation > _PURE:
        return []
    return [
        Issue.found(
            IssueType.ROTATION,
            "",
            ("rotation", rotation, _ROTATION if known else _PURE),
            (
                f"{rotation:.0%} of the players' field is rotation"
                + (", and its norm does not fall: they go round each other." if known else ": they may go in circles.")
            ),
            "Let the players step in turn, use extragradient or averaging, or add a penalty on both.",
            severity=IssueSeverity.HIGH if known else IssueSeverity.MEDIUM,
            window=max(1, len(norms)),
            step=step,
            confidence=0.9 if known else 0.6,
        )
    ]
