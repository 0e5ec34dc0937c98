"""The sampler of the gradient flow, in a training or over batches of an offline analysis."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
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
from gradtrack.analyzers.tools.samples import Reading, read_together
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

    def __init__(self, model: nn.Module, changes: Changes, reading: Reading) -> None:
        self._stale: dict[str, None] = {}
        self._fresh: set[str] = set()
        self._reading = reading
        for name, param in model.named_parameters():
            if param.requires_grad:
                changes.hook(param.register_hook, self._hook(name, param))

    @property
    def found(self) -> list[str]:
        """Name the parameters whose old gradients were added to and never cleared, once `reading` is done."""
        return list(self._stale)

    def _hook(self, name: str, param: nn.Parameter) -> Callable[[Tensor], None]:
        version = param._version

        def hook(_: Tensor) -> None:
            if name not in self._fresh:
                old = [] if param.grad is None else [_values(param.grad).any()]
                self._reading.add(old, partial(self._note, name, param._version != version))

        return hook

    def _note(self, name: str, changed: bool, *old: Tensor) -> None:
        if name in self._fresh:
            return
        if not any(map(bool, old)):
            self._fresh.add(name)
            self._stale.pop(name, None)
        elif changed:
            self._stale[name] = None


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


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
        self._tables: set[str] = set()
        """The weights of embeddings, whose units are the columns."""
        self._maybe_alike: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def waiting(self) -> bool:
        """Whether the last sample still lacks what the optimizer step did."""
        return self._elements is not None

    @property
    def case(self) -> Case:
        """Return the evidence gathered so far."""
        return Case(
            self.series, self.samples, self._unit_verdicts.standing(self.series), self._unit_verdicts.from_start
        )

    def arm(self, model: nn.Module, *, stale: bool = True) -> None:
        """Hook a model for the coming step."""
        if self._elements is None or not stale:
            self._probe = Probe(model, self._changes)
            self._stale = StaleWatch(model, self._changes, self._probe.reading) if stale else None

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
        reading = Reading() if self._probe is None else self._probe.reading
        finite = not snapshot.skipped and math.isfinite(sum(snapshot.norms.values()))
        elements = Elements(params, snapshot.gradients, reading) if finite else None
        sample = self._sample(snapshot, params, reading)
        self._keep(sample)
        if elements is not None:
            self._elements = elements
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
        changes, cosine, left = elements.follow(snapshot.params(), snapshot.gradients)
        self.samples[-1].changes = changes if snapshot.optimizers else None
        self.samples[-1].cosine = cosine
        if not math.isnan(left):
            self.samples[-1].clip = left

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

    def _sample(self, snapshot: Snapshot, params: Params, reading: Reading) -> Sample:
        """Read what the hooks and the parameters have on an accelerator, and return all of it."""
        probe, stale = self._probe, self._stale
        found = self._parameters(snapshot, params, reading)
        modes = _modes(snapshot.model, reading)
        reading.read()
        for name in self._alike_names() & found.keys():
            found[name].alike = True
        return Sample(
            step=snapshot.step,
            nodes=[] if probe is None else list(probe.nodes),
            params=found,
            without_grad=set() if probe is None else probe.without_grad,
            stale=[] if stale is None else stale.found,
            lr=max((float(rate) for rate in snapshot.lr.values()), default=math.nan),
            loss=math.nan if snapshot.loss is None else snapshot.loss,
            skipped=snapshot.skipped,
            scaled=snapshot.scaled,
            lowest_lr=_lowest_rate(snapshot.optimizers),
            **modes,
        )

    def _find_alike(self, named: Params, gradients: Mapping[str, Tensor], reading: Reading) -> None:
        """Find the matrices with equal units whose gradients are equal too, among those that always had them."""
        before, self._alike, self._maybe_alike = self._alike, set(), {}
        for name, param in named.items():
            both = _rows_of_both(param, gradients.get(name)) if before is None or name in before else None
            if both is None:
                continue
            if name in self._tables and both[0].shape[1] > 1:
                both = both[0].t(), both[1].t()
            if both[0].is_cpu:
                if all(bool(_begin_equal(rows)) and bool(_are_equal(rows)) for rows in both):
                    self._alike.add(name)
            else:
                reading.add(map(_begin_equal, both), partial(self._suspect, name, both))

    def _suspect(self, name: str, both: tuple[Tensor, Tensor], *begin: Tensor) -> None:
        if all(map(bool, begin)):
            self._maybe_alike[name] = both

    def _alike_names(self) -> set[str]:
        """Return the names of what `_find_alike` found, and look at all rows of the few that begin alike."""
        flags = iter(read_together(_are_equal(rows) for both in self._maybe_alike.values() for rows in both))
        found = {name for name in self._maybe_alike if all([bool(next(flags)), bool(next(flags))])}
        self._alike, self._maybe_alike = (self._alike or set()) | found, {}
        return self._alike

    def _parameters(self, snapshot: Snapshot, params: Params, reading: Reading) -> dict[str, ParameterSample]:
        owned = {id(param) for one in snapshot.optimizers for group in one.param_groups for param in group["params"]}
        named = {name: param for name, param in params.items() if param.requires_grad}
        found = {
            name: ParameterSample(
                norm=snapshot.norms.get(name, 0.0),
                weight=math.nan,
                ndim=param.ndim,
                count=param.numel(),
                owned=id(param) in owned if snapshot.optimizers else None,
                has_grad=name in snapshot.norms,
                coarse=param.dtype in (torch.float16, torch.bfloat16),
            )
            for name, param in named.items()
        }
        if self._alike is None:
            tables = {id(module.weight) for module in snapshot.model.modules() if isinstance(module, nn.Embedding)}
            self._tables = {name for name, param in named.items() if id(param) in tables}
        self._find_alike(named, snapshot.gradients, reading)
        _weigh([*zip(found.values(), named.values(), strict=True)], reading)
        for name, sample in found.items() if self._with_zeros else ():  # the threshold of dead parameters needs them
            if name in snapshot.gradients:
                share = (snapshot.gradients[name] == 0).double().mean()
                reading.add([share], lambda zeros, sample=sample: setattr(sample, "zeros", float(zeros)))
        return found


_EQUAL: Final = 1e-3


_STACKED: Final = (1, 3, 4)
"""How many matrices lie above each other: the gates of a GRU or an LSTM; queries, keys and values."""


def _rows_of_both(param: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the rows of a matrix and those of its gradient, where they can be compared."""
    if param.ndim < 2 or len(param) < 2 or gradient is None or gradient.layout is not torch.strided:
        return None
    both = local_numbers(param.detach()), local_numbers(gradient)
    return both if min(map(len, both)) > 1 else None


def _begin_equal(rows: Tensor) -> Tensor:
    """Say whether the first two rows are equal, which tells of most matrices that not all are."""
    return _is_small(rows[1] - rows[0], rows[0])


def _are_equal(rows: Tensor) -> Tensor:
    """Say whether all rows are equal, in the whole or within each of the matrices that are stacked there."""
    parts = [
        rows.reshape(count, len(rows) // count, -1)
        for count in _STACKED
        if len(rows) % count == 0 and len(rows) > count
    ]
    return torch.stack([_is_small(part - part[:, :1], part) for part in parts]).any()


def _is_small(difference: Tensor, values: Tensor) -> Tensor:
    found: Tensor = difference.norm() <= _EQUAL * values.norm()
    return found


def _lowest_rate(optimizers: Iterable[Any]) -> float:
    """Return the lowest learning rate of those groups whose loss is to become smaller."""
    groups = (group for one in optimizers for group in one.param_groups if not group.get("maximize"))
    return min((float(group["lr"]) for group in groups if group.get("lr") is not None), default=math.nan)


_RANDOM: Final = (nn.modules.dropout._DropoutNd,)
_BATCHES: Final = (nn.modules.batchnorm._BatchNorm,)


def _modes(model: nn.Module, reading: Reading) -> dict[str, Any]:
    """Return whether a model is in training mode, and which of the parts that depend on that are."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, (*_RANDOM, *_BATCHES))]
    untrained: list[str] = []

    def note(name: str, batches: Tensor, *moved: Tensor) -> None:
        if not (int(batches) or any(map(bool, moved))):
            untrained.append(name)

    for name, part in parts:
        if isinstance(part, _BATCHES) and not part.training and part.num_batches_tracked is not None:
            moved = [] if part.running_mean is None else [part.running_mean.any()]
            reading.add([part.num_batches_tracked, *moved], partial(note, name))
    return {
        "training": model.training,
        "in_training": [name for name, part in parts if part.training and getattr(part, "p", 1.0) > 0],
        "untrained": untrained,
    }


def _weigh(samples: Sequence[tuple[ParameterSample, Tensor]], reading: Reading) -> None:
    """Note the norms of parameters, estimated from what this rank holds where they are spread over ranks."""
    parts = [local_numbers(param.detach()) for _, param in samples]
    shares = [math.sqrt(param.numel() / max(1, local_part(param).numel())) for _, param in samples]

    def note(*norms: float | Tensor) -> None:
        for (sample, _), norm, share in zip(samples, norms, shares, strict=True):
            sample.weight = float(norm) * share

    if all(part.is_cpu for part in parts):
        note(*_norms(parts))
    else:
        reading.add([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts], note)


def _norms(parts: Sequence[Tensor]) -> list[float]:
    if not parts:
        return []
    measurer = Measurer("auto" if _NATIVE in sys.modules else "torch")  # loading the compiler takes half a second
    moments = measurer.measure(parts, np.zeros(len(parts), dtype=np.int64), 1)
    return [true_norm(row, moments.exponent) for row in moments.rows.tolist()]


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
