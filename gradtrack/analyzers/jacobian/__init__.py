"""The analyzer of Jacobians: how much the blocks of a model stretch their inputs, and how evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, model_of, panel, rarely
from gradtrack.analyzers.jacobian.inputs import BlockCall, BlockInputs
from gradtrack.analyzers.jacobian.report import (
    EXACT_LIMIT,
    BlockJacobian,
    JacobianReport,
    measure_jacobian,
    middle,
    sum_up,
)
from gradtrack.analyzers.tools.linear_maps import differentiable_twice
from gradtrack.analyzers.tools.modules import Blocks, evaluating, find_chain, first_floating
from gradtrack.analyzers.tools.offline import InputFunction, call, kept, untouched
from gradtrack.analyzers.tools.samples import Pending, Reading
from gradtrack.errors import UsageError
from gradtrack.records import Panel
from gradtrack.reports import Report
from gradtrack.support.interrupts import Changes
from gradtrack.support.progress import counted

_NO_CHAIN = "the model has no chain of three or more blocks of one type: name them with blocks=."
_NOT_CALLED = "none of the {} blocks {} to {} ran: name those that the forward pass calls with blocks=."


@final
class JacobianAnalyzer(Analyzer):
    """An analyzer of the Jacobian J = ∂f(x)/∂x of each block of a model, per sample and as in evaluation.

    Its largest and smallest singular values, condition number, effective rank exp(H(σ/Σσ)) (Roy and Vetterli 2007),
    ‖J‖²/num_outputs and spectral radius. Where the smaller side has at most `exact_limit` elements, J is taken in full;
    beyond, σ_max comes from Golub-Kahan bidiagonalisation, the norm from random signs, the rank from a randomised
    range finder (Halko et al. 2011) and the spectral radius from Arnoldi's method. Reference: Pennington et al. 2017,
    arXiv 1711.04735.

    Cost: in full, as many backward passes of one sample through a block as its smaller side has elements; beyond, about
    230. Live it runs at steps 2, 8, 32, 128, 512 and every 1000th, on one sample.

    >>> layer = nn.Linear(3, 3, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([3.0, 1.0, 0.1]).diag())
    >>> report = JacobianAnalyzer().analyze(lambda: torch.ones(1, 3), blocks=layer)
    >>> found = report.blocks["Linear"]
    >>> round(found.sigma_max, 4), round(found.condition, 3), round(found.spectral_radius, 4)
    (3.0, 30.0, 3.0)
    """

    report_type: ClassVar[type[Report]] = JacobianReport
    needs_whole_parameters: ClassVar[bool] = True
    schedule: ClassVar[Schedule] = staticmethod(rarely)
    panels: ClassVar[tuple[Panel, ...]] = (
        panel("Largest singular value", "jacobian/sigma_max/*"),
        panel("Mean square gain", "jacobian/mean_square_gain/*", log_scale=True),
        panel("Condition (log10, worst block)", "jacobian/log10_condition"),
        panel("Effective rank (share, worst block)", "jacobian/rank_share"),
        panel("Gain per block", "jacobian/gain_per_block"),
    )

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        blocks: Blocks = None,
        num_samples: int = 1,
        exact_limit: int = EXACT_LIMIT,
        seed: int = 0,
    ) -> None:
        if num_samples < 1:
            raise UsageError(f"num_samples {num_samples}: expected at least 1.")
        self._model, self._blocks = model, blocks
        self._num_samples, self._exact_limit, self._seed = num_samples, exact_limit, seed
        self._changes = Changes()
        self._inputs: BlockInputs | None = None
        self._chain: dict[str, nn.Module] = {}
        self._limitation: str | None = None

    def analyze(
        self, input_fn: InputFunction, blocks: Blocks | nn.Module | Iterable[nn.Module] = None
    ) -> JacobianReport:
        """Measure the Jacobians of blocks at the inputs that they get from one batch of `input_fn`.

        With a model, `blocks` names some of its modules (a list of names, or a regular expression); by default they are
        its chain of blocks, or its children where it has none. Without a model, `blocks` is a module, or several that
        are run one after the other.
        """
        model, chosen = self._choose(blocks)
        with Changes() as changes, untouched(model), evaluating(model), torch.enable_grad():
            inputs = BlockInputs(chosen, changes, self._num_samples)
            call(model, input_fn())
            return self._measure(chosen, inputs.calls)

    def arm(self, model: nn.Module) -> None:
        self.disarm()
        chain = find_chain(model, self._blocks)
        if not chain:
            self._limitation = _NO_CHAIN
            return
        self._limitation, self._chain = None, chain
        self._inputs = BlockInputs(chain, self._changes, self._num_samples)

    def inspect(self, snapshot: Snapshot) -> JacobianReport | None:
        if self._inputs is None:
            return None
        if not self._inputs.calls:
            names = list(self._chain)
            self._limitation = _NOT_CALLED.format(len(names), names[0], names[-1])
            return None
        with kept(snapshot.model), evaluating(snapshot.model), torch.enable_grad():
            return self._measure(self._chain, self._inputs.calls)

    def disarm(self) -> None:
        self._changes.undo()
        self._inputs = None

    def limitation(self) -> str | None:
        return self._limitation

    def _choose(self, blocks: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
        given: Any = list(blocks) if isinstance(blocks, nn.ModuleList) else blocks
        given = [given] if isinstance(given, nn.Module) else given
        own = None if self._model is None else model_of(self, self._model)
        if own is not None and (given is None or _names(given)):
            chain = find_chain(own, given if given is not None else self._blocks)
            return own, chain or dict(own.named_children()) or {type(own).__name__: own}
        if given is None or _names(given):
            raise UsageError("blocks without a model: expected modules. Pass modules, or make JacobianAnalyzer(model).")
        modules = list(given)
        names = {} if own is None else {module: name for name, module in own.named_modules()}
        if own is not None and all(module in names for module in modules):
            return own, {names[module]: module for module in modules}
        single = len(modules) == 1
        named = {
            type(module).__name__ if single else f"{index}.{type(module).__name__}": module
            for index, module in enumerate(modules)
        }
        return modules[0] if single else _Chain(modules), named

    def _measure(self, blocks: Mapping[str, nn.Module], calls: Mapping[str, BlockCall]) -> JacobianReport:
        found: dict[str, BlockJacobian] = {}
        skipped: dict[str, str] = {}
        reading = Reading()

        def take(name: str, finish: Callable[..., BlockJacobian], *values: Tensor) -> None:
            try:
                found[name] = finish(*values)
            except (UsageError, RuntimeError) as fault:
                skipped[name] = str(fault).splitlines()[0]

        for name, block in counted(blocks.items(), "Measuring blocks", total=len(blocks)):
            if name not in calls:
                skipped[name] = "it was not called"
                continue
            try:
                pending = self._block(block, calls[name])
            except (UsageError, RuntimeError) as fault:
                skipped[name] = str(fault).splitlines()[0]
            else:
                reading.add(pending.tensors, partial(take, name, pending.finish))
        reading.read()
        return sum_up(found, skipped)

    def _block(self, block: nn.Module, inputs: BlockCall) -> Pending[BlockJacobian]:
        numbers = []
        with differentiable_twice(block):
            for sample in range(inputs.num_samples):
                function, at = inputs.function(block, sample)
                generator = torch.Generator().manual_seed(self._seed)
                numbers.append(measure_jacobian(function, at, generator, exact_limit=self._exact_limit))
        return Pending.joined(numbers, middle)


class _Chain(nn.Module):
    """Modules run one after the other, each on the tensor that the one before it returned."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
            x = first_floating(x) if first_floating(x) is not None else x
        return x


def _names(blocks: Any) -> bool:
    return isinstance(blocks, str) or (
        not isinstance(blocks, nn.Module) and all(isinstance(one, str) for one in blocks)
    )
