"""The sampler of the gradient flow, in a training or over batches of an offline analysis."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Series, Snapshot
from gradtrack.analyzers.flow.probe import Probe
from gradtrack.analyzers.flow.sampled_weights import Elements
from gradtrack.analyzers.flow.samples import Case, ParameterSample, Sample, pack, unpack
from gradtrack.analyzers.flow.verdict import UnitVerdicts
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps
from gradtrack.analyzers.tools.optimizer_hooks import StepWatch
from gradtrack.gradients.distributed.shards import local_numbers, local_part, unwrapped
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import finite_norm, log_norm, true_norm
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.support.interrupts import Changes


class StaleWatch:
    """Hooks on the parameters for the backward passes of one step, that see what a gradient is added to.

    Adding to a gradient is accumulation, and legal, unless the parameter has changed since the gradient was there. A
    parameter is innocent once a pass starts it afresh: the generator of a GAN and the actor of DDPG go back through
    another model, whose own old gradients are cleared only before its own pass.
    """

    def __init__(self, model: nn.Module, changes: Changes) -> None:
        self._stale: dict[str, None] = {}
        self._fresh: set[str] = set()
        for name, param in model.named_parameters():
            if param.requires_grad:
                changes.hook(param.register_hook, self._hook(name, param))

    @property
    def found(self) -> list[str]:
        """Name the parameters whose old gradients were added to and never cleared."""
        return list(self._stale)

    def _hook(self, name: str, param: nn.Parameter) -> Callable[[Tensor], None]:
        version = param._version

        def hook(_: Tensor) -> None:
            if name in self._fresh:
                return
            if _is_empty(param.grad):
                self._fresh.add(name)
                self._stale.pop(name, None)
            elif param._version != version:
                self._stale[name] = None

        return hook


def _is_empty(grad: Tensor | None) -> bool:
    return grad is None or not bool((grad.coalesce().values() if grad.is_sparse else grad).any())


_NATIVE: Final = "gradtrack.gradients.native.engine"
_KEPT: Final = 32
_PAST: Final = 8
Params = dict[str, nn.Parameter]


class FlowSampler:
    """The first and the last samples of a run, and the hooks that the next one needs.

    `arm` places hooks for one forward and backward pass and `disarm` takes them off. The step after a sample completes
    it, which `waiting` tells. Of the first step, whose forward pass may be over, at least the parameters are seen.
    """

    def __init__(self, *, with_zeros: bool = False) -> None:
        self.samples: list[Sample] = []
        self.series = Series()
        self._with_zeros = with_zeros
        self._unit_verdicts = UnitVerdicts()
        self._past: deque[Elements] = deque(maxlen=_PAST)
        self._changes = Changes()
        self._probe: Probe | None = None
        self._stale: StaleWatch | None = None
        self._elements: Elements | None = None
        self._alike: set[str] | None = None

    @property
    def waiting(self) -> bool:
        """Whether the last sample still lacks what the optimizer step did."""
        return self._elements is not None

    @property
    def case(self) -> Case:
        """Return the evidence gathered so far."""
        return Case(self.series, self.samples, self._unit_verdicts.issues(self.series), self._unit_verdicts.from_start)

    def arm(self, model: nn.Module, *, stale: bool = True) -> None:
        """Hook a model for the coming step."""
        if self._elements is None or not stale:
            self._probe = Probe(model, self._changes)
            self._stale = StaleWatch(model, self._changes) if stale else None

    def look(self, snapshot: Snapshot) -> Sample | None:
        """Complete the last sample, and return a new one where the model was hooked."""
        if snapshot.series is not None:
            self.series = snapshot.series
        self._follow(snapshot)
        if self._probe is None and snapshot.step > 1:
            return None
        if self._probe is not None:
            self._probe.faults.check()
        params = snapshot.params()
        sample = self._sample(snapshot, params)
        self._keep(sample)
        if not snapshot.skipped and math.isfinite(sum(snapshot.norms.values())):
            self._elements = Elements(params, snapshot.gradients)
            sample.turned = min((self._elements.cosine_to(one) for one in self._past), default=math.nan)
            self._past.append(self._elements)
            self._watch_step(snapshot, sample, params)
        return sample

    def disarm(self, *, for_good: bool = False) -> None:
        """Take the hooks off the model; the last sample still waits for its step, unless it is `for_good`."""
        self._changes.undo()
        self._probe = self._stale = None
        if for_good:
            self._elements = None

    def state_dict(self) -> dict[str, Any]:
        """Return the samples, the series and the standing verdicts as plain data."""
        return {
            "samples": [pack(sample) for sample in self.samples],
            "series": self.series.state_dict(),
            "standing": self._unit_verdicts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.samples = [unpack(sample) for sample in state["samples"]]
        self.series.load_state_dict(state["series"])
        self._unit_verdicts.load_state_dict(state["standing"])
        self._elements = None

    def _keep(self, sample: Sample) -> None:
        """Add a sample; between the first one and the last ones the oldest gives way."""
        self.samples.append(sample)
        if len(self.samples) > _KEPT:
            del self.samples[1]
        self._unit_verdicts.add(Case(self.series, self.samples))

    def _follow(self, snapshot: Snapshot) -> None:
        """Complete the last sample with what the optimizer step made of it."""
        if self._elements is None:
            return
        elements, self._elements = self._elements, None
        params = snapshot.params()
        self.samples[-1].changes = elements.changes(params) if snapshot.optimizers else None
        self.samples[-1].cosine = elements.cosine(params, snapshot.gradients)

    def _watch_step(self, snapshot: Snapshot, sample: Sample, params: Params) -> None:
        """See what is left of the gradients when the optimizer takes them: others may clip in between."""
        elements = self._elements
        if elements is None or snapshot.call_before_step is None:
            return

        def before_step() -> None:
            if self._elements is elements:
                there = {name: param.grad for name, param in params.items() if param.grad is not None}
                grads = {name: local_numbers(grad) for name, grad in there.items() if not grad.is_sparse}
                sample.clip = elements.left(grads)

        snapshot.call_before_step(before_step)

    def _sample(self, snapshot: Snapshot, params: Params) -> Sample:
        probe, stale = self._probe, self._stale
        return Sample(
            step=snapshot.step,
            nodes=[] if probe is None else list(probe.nodes),
            params=self._parameters(snapshot, params),
            without_grad=set() if probe is None else probe.without_grad,
            stale=[] if stale is None else stale.found,
            lr=max((float(rate) for rate in snapshot.lr.values()), default=math.nan),
            loss=math.nan if snapshot.loss is None else snapshot.loss,
            skipped=snapshot.skipped,
            scaled=snapshot.scaled,
            lowest_lr=_lowest_rate(snapshot.optimizers),
            **_modes(snapshot.model),
        )

    def _parameters(self, snapshot: Snapshot, params: Params) -> dict[str, ParameterSample]:
        owned = {id(param) for one in snapshot.optimizers for group in one.param_groups for param in group["params"]}
        named = {name: param for name, param in params.items() if param.requires_grad}
        alike = self._alike = {
            name
            for name, param in named.items()
            if (self._alike is None or name in self._alike) and _has_equal_units(param, snapshot.gradients.get(name))
        }
        return {
            name: ParameterSample(
                norm=snapshot.norms.get(name, 0.0),
                weight=weight,
                ndim=param.ndim,
                count=param.numel(),
                owned=id(param) in owned if snapshot.optimizers else None,
                has_grad=name in snapshot.norms,
                zeros=self._zeros(snapshot.gradients.get(name)),
                coarse=param.dtype in (torch.float16, torch.bfloat16),
                alike=name in alike,
            )
            for (name, param), weight in zip(named.items(), _norms(named.values()), strict=True)
        }

    def _zeros(self, gradient: Tensor | None) -> float:
        """Return the share of zeros of a gradient, where the absolute threshold of dead parameters needs it."""
        if gradient is None or not self._with_zeros:
            return 0.0
        return float((gradient == 0).double().mean())


_EQUAL: Final = 1e-3


def _has_equal_units(param: Tensor, gradient: Tensor | None) -> bool:
    """Whether a matrix has equal rows and so has its gradient, of which the first two tell that most have not."""
    if param.ndim < 2 or len(param) < 2 or gradient is None or gradient.layout is not torch.strided:
        return False
    weight, gradient = local_numbers(param.detach()), local_numbers(gradient)
    return all(
        len(rows) > 1 and _is_small(rows[1] - rows[0], rows[0]) and _is_small(rows - rows[0], rows)
        for rows in (weight, gradient)
    )


def _is_small(difference: Tensor, values: Tensor) -> bool:
    return bool(difference.norm() <= _EQUAL * values.norm())


def _lowest_rate(optimizers: Iterable[Any]) -> float:
    """Return the lowest learning rate of those groups whose loss is to become smaller."""
    groups = (group for one in optimizers for group in one.param_groups if not group.get("maximize"))
    return min((float(group["lr"]) for group in groups if "lr" in group), default=math.nan)


_RANDOM: Final = (nn.modules.dropout._DropoutNd,)
_BATCHES: Final = (nn.modules.batchnorm._BatchNorm,)


def _modes(model: nn.Module) -> dict[str, Any]:
    """Return whether a model is in training mode, and which of the parts that depend on that are."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, (*_RANDOM, *_BATCHES))]
    untrained = [
        name
        for name, part in parts
        if isinstance(part, _BATCHES)
        and not part.training
        and part.num_batches_tracked is not None
        and int(part.num_batches_tracked) == 0
        and not (part.running_mean is not None and bool(part.running_mean.any()))
    ]
    return {
        "training": model.training,
        "in_training": [name for name, part in parts if part.training and getattr(part, "p", 1.0) > 0],
        "untrained": untrained,
    }


def _norms(params: Iterable[Tensor]) -> list[float]:
    """Return the norms of parameters, estimated from what this rank holds where they are spread over ranks."""
    pairs = [(param.numel(), local_part(param)) for param in params]
    if not pairs:
        return []
    measurer = Measurer("auto" if _NATIVE in sys.modules else "torch")  # loading the compiler takes half a second
    moments = measurer.measure(
        [local_numbers(part.detach()) for _, part in pairs], np.zeros(len(pairs), dtype=np.int64), 1
    )
    return [
        true_norm(row, moments.exponent) * math.sqrt(size / max(1, part.numel()))
        for row, (size, part) in zip(moments.rows.tolist(), pairs, strict=True)
    ]


def sample_offline(
    sampler: FlowSampler,
    model: nn.Module,
    input_fn: InputFunction,
    loss_fn: LossFunction,
    steps: int,
    optimizer: Any = None,
) -> None:
    """Sample every one of some forward and backward passes; the model trains where an optimizer is passed."""
    measurer, table, series = Measurer(), ParameterTable(model), sampler.series
    running = offline_steps(model, input_fn, loss_fn, steps, optimizer)
    watch = StepWatch()
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        watch.add(optimizer)
    with closing(watch):
        for step in range(1, steps + 1):
            sampler.arm(unwrapped(model), stale=False)
            *_, loss = next(running)
            grads = table.gradients()
            layout = grads.layout
            moments = measurer.measure(grads.tensors, layout.group_of, len(layout.group_names))
            series.append(log_norm(moments.norm), float(loss.detach()), layout.missing, finite=moments.finite)
            rows = zip(layout.names, moments.rows.tolist(), strict=True)
            sampler.look(
                Snapshot(
                    step=step,
                    model=model,
                    loss=float(loss.detach()),
                    optimizers=() if optimizer is None else (optimizer,),
                    gradients=dict(zip(layout.names, grads.tensors, strict=True)),
                    norms={name: finite_norm(row, moments.exponent) for name, row in rows},
                    series=series,
                    skipped=not moments.finite,
                    call_before_step=watch.call_before_step,
                )
            )
            sampler.disarm()
        next(running, None)  # the optimizer step of the last sample, where there is one
