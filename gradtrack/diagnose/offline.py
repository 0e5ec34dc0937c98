"""Samples of a model that nobody trains at the moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from torch import Tensor, nn

from gradtrack.analyzers.base import Snapshot
from gradtrack.diagnose.sampler import FlowSampler
from gradtrack.measure.measurer import Measurer
from gradtrack.measure.moments import finite_norm, log_norm
from gradtrack.measure.shards import unwrapped
from gradtrack.measure.step_watch import StepWatch
from gradtrack.measure.table import ParameterTable
from gradtrack.measure.untouched import offline_steps


def sample_offline(
    sampler: FlowSampler,
    model: nn.Module,
    input_fn: Callable[[], Any],
    loss_fn: Callable[[Any], Tensor],
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
