"""Spikes: finite steps whose norm or loss is far above those before, and what is done about them; listed steps."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gradtrack.config import GradientConfig
from gradtrack.errors import UsageError
from gradtrack.reports import StepReport
from gradtrack.support.rank import process_rank

Rollback = Callable[[int, StepReport], object]
_logger = logging.getLogger("gradtrack")
_VERSION: Final = 1
_LEAST_SPREAD: Final = 1e-3
"""The smallest deviation, as a share of the centre: a run whose values stay the same has no spikes by rounding."""
_NORMAL: Final = 1.4826
"""What makes the median absolute deviation of normal values their standard deviation."""
SKIPPED_SPIKES: Final = frozenset({"skip", "rollback", "listed"})
"""The outcomes, as `SpikeReport.action` has them, of a spike whose step is left out."""
_LOSS_OF_RANK: Final = (
    "spikes are judged by the norm alone: each process has a loss of its own, by which they would decide differently. "
    "Pass process_group to have the losses of its ranks averaged."
)


class SpikeLimits(NamedTuple):
    """The largest values that are no spike, and the centre and deviation of each window; infinite while it is short."""

    norm: float = math.inf
    loss: float = math.inf
    of_norms: tuple[float, float] | None = None
    of_losses: tuple[float, float] | None = None


class _Memory(NamedTuple):
    """What later steps depend on. It is replaced as a whole, so that an exception leaves the old or the new one."""

    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    held: tuple[tuple[float, float | None], ...] = ()
    """The norms and losses of the present run of spikes, which are in no window."""
    num_spikes: int = 0
    rollbacks: int = 0
    """How often the training was taken back since a step after `furthest` was made that is no spike."""
    furthest: int = 0

    def plus(self, values: Sequence[tuple[float, float | None]], size: int) -> _Memory:
        """Return the memory with values in its windows."""
        losses = tuple(loss for _, loss in values if loss is not None and math.isfinite(loss))
        norms = tuple(norm for norm, _ in values)
        return self._replace(norms=(*self.norms, *norms)[-size:], losses=(*self.losses, *losses)[-size:])


class SpikeDetector:
    """Judges each finite step before it is made, by the windows of norms and losses of the steps before it.

    A spike that is left out or clipped enters no window, so that one cannot hide the next. After so many in a row as
    the setting allows the next one is let through, and the windows begin anew with that run: it is the level of the
    training then. Values that are not finite, and norms of zero, never enter.
    """

    def __init__(self, config: GradientConfig, functions: Sequence[Rollback] = ()) -> None:
        self._config, self._functions = config, functions
        self._memory = _Memory()
        self._limits: tuple[Any, ...] = ()
        self.checkpoint = 0
        """The last step whose state was saved outside of a run of spikes; 0 before any."""
        self.coming_notes: list[str] = []
        self._told = False
        self.losses_are_shared = False
        """Whether the ranks that share the parameters have averaged the loss."""

    @property
    def active(self) -> bool:
        """Whether spikes are looked for."""
        return self._config.spike_action != "report"

    def check(self) -> None:
        """Refuse to roll back without a function that does so."""
        if self._config.spike_action == "rollback" and not self._functions:
            raise UsageError(
                "spike_action 'rollback' without a function: expected one that loads a checkpoint. "
                "Call manager.on_rollback(function) before the first step."
            )

    def lists(self, step: int) -> bool:
        """Say whether a step is one of those that `skip_steps` leaves out."""
        return any(first <= step <= last for first, last in self._config.skip_steps)

    def next_listed(self, step: int) -> float:
        """Return the first step from `step` on that is left out; infinite where there is none."""
        found = (max(first, step) for first, last in self._config.skip_steps if last >= step)
        return min(found, default=math.inf)

    def limits(self) -> SpikeLimits:
        """Return the largest norm and loss that are no spike; infinite ones where a spike would be let through."""
        found = SpikeLimits() if self._is_to_accept else self._found_limits()
        return found._replace(loss=math.inf) if self._has_own_loss() else found

    def judge(
        self, step: int, norm: float, loss: float | None, *, flagged: bool | None = None
    ) -> dict[str, Any] | None:
        """Return the fields of a `SpikeReport` for a finite step that is listed or a spike, else None.

        A device has decided by the `limits` whether it is `flagged`.
        """
        if self.lists(step):
            return {"action": "listed", "count": self._memory.num_spikes}
        if not self.active:
            return None
        found, loss = self._found_limits(), self._judged(loss)
        is_spike = norm > found.norm or (loss is not None and loss > found.loss)
        if flagged is not None and not self._is_to_accept:
            is_spike = flagged
        if not is_spike:
            return None
        return {
            "action": "accepted" if self._is_to_accept else self._config.spike_action,
            "norm_deviations": _deviations(norm, found.of_norms),
            "norm_limit": found.norm,
            "loss_deviations": None if loss is None else _deviations(loss, found.of_losses),
            "loss_limit": found.loss,
            "in_a_row": len(self._memory.held) + 1,
            "count": self._memory.num_spikes + 1,
        }

    def remember(self, step: int, norm: float, loss: float | None, spike: Mapping[str, Any] | None) -> None:
        """Remember a finite step that was judged."""
        if not self.active or (spike is not None and spike["action"] == "listed"):
            return
        memory, size, value = self._memory, self._config.spike_window, (norm, self._judged(loss))
        if spike is None:
            memory = memory.plus([value] if norm > 0 else [], size)._replace(held=())
            if step > memory.furthest:
                memory = memory._replace(rollbacks=0)
        else:
            held, furthest = (*memory.held, value), max(memory.furthest, step)
            memory = memory._replace(held=held, num_spikes=memory.num_spikes + 1, furthest=furthest)
            if spike["action"] == "accepted":
                memory = memory._replace(norms=(), losses=(), held=()).plus(held, size)
            elif spike["action"] == "rollback":
                memory = memory._replace(rollbacks=memory.rollbacks + 1)
        self._memory = memory

    def target(self) -> float:
        """Return the norm that a spike is clipped to: the centre of the window."""
        found = self._found_limits().of_norms
        return math.inf if found is None else found[0]

    def roll_back(self, report: StepReport, optimizers: Sequence[Any], agree: Callable[[int], int]) -> None:
        """Call the user's functions with the step to go back to, then cut the learning rates.

        `agree` returns the step that all ranks take.
        """
        step = agree(self.checkpoint)
        for function in self._functions:
            function(step, report)
        factor = self._config.spike_lr_factor
        for group in (group for optimizer in optimizers for group in optimizer.param_groups) if factor < 1.0 else ():
            if isinstance(group.get("lr"), Tensor):
                group["lr"].mul_(factor)
            elif group.get("lr") is not None:
                group["lr"] *= factor

    def tell(self, step: int, spike: Mapping[str, Any], source: str = "") -> str:
        """Return the note on a spike, and log it."""
        of = f" of {source}" if source else ""
        if spike["action"] == "listed":
            text = f"step {step}{of} was left out: skip_steps lists it."
        else:
            parts = [
                f"the {name} is {spike[f'{name}_deviations']:.3g} deviations above its window"
                for name in ("norm", "loss")
                if (spike[f"{name}_deviations"] or 0.0) > self._config.spike_threshold
            ]
            done = _DONE[spike["action"]].format(spike["in_a_row"])
            text = f"step {step}{of} is a spike ({' and '.join(parts) or 'above its window'}): {done}."
        if process_rank() == 0:
            _logger.warning("%s", text)
        return text

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data.

        A `step` whose state is saved is the one to go back to from now on, unless it is within a run of spikes.
        """
        memory = self._memory
        if step is not None and not memory.held:
            self.checkpoint = step
        held = [list(value) for value in memory.held]
        state = {"version": _VERSION, **memory._asdict(), "held": held}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore what `state_dict` returned at a step, which is the one to go back to now; None changes no window.

        How often this process was taken back stays, or a training could go back for ever.
        """
        self.checkpoint = step
        if state is None:  # which is what older versions have written
            return
        if state.get("version") != _VERSION:
            raise UsageError(
                f"state of spikes of version {state.get('version')!r}: expected {_VERSION}. "
                "Load it with the gradtrack that wrote it."
            )
        now, held = self._memory, tuple((norm, loss) for norm, loss in state["held"])
        self._memory = _Memory(
            tuple(state["norms"]),
            tuple(state["losses"]),
            held,
            state["num_spikes"],
            rollbacks=max(state["rollbacks"], now.rollbacks),
            furthest=max(state["furthest"], now.furthest),
        )

    @property
    def _is_to_accept(self) -> bool:
        """Whether a spike would be let through, after as many as are left out or clipped."""
        return max(len(self._memory.held), self._memory.rollbacks) >= self._config.spike_max_in_a_row

    def _judged(self, loss: float | None) -> float | None:
        """Return a loss that every process has, or None."""
        if loss is None or not math.isfinite(loss):
            return None
        if self._has_own_loss():
            if not self._told:
                self._told = True
                self.coming_notes.append(_LOSS_OF_RANK)
            return None
        return loss

    def _has_own_loss(self) -> bool:
        if self.losses_are_shared or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        return torch.distributed.get_world_size() > 1

    def _found_limits(self) -> SpikeLimits:
        config, memory = self._config, self._memory
        facts = memory.norms, memory.losses, config.spike_threshold, config.spike_window, config.spike_robust
        if self._limits[1:] != facts:
            bands = [_band(values[-config.spike_window :], config) for values in (memory.norms, memory.losses)]
            norm, loss = (math.inf if band is None else band[0] + config.spike_threshold * band[1] for band in bands)
            self._limits = (SpikeLimits(norm, loss, *bands), *facts)
        found: SpikeLimits = self._limits[0]
        return found


_DONE: Final = {
    "skip": "it was left out, {} in a row",
    "clip": "it was scaled down to the norm of its window, {} in a row",
    "rollback": "it was left out, and the training goes back",
    "accepted": "as many in a row as are allowed came before it, so it was made",
}


def _band(values: Sequence[float], config: GradientConfig) -> tuple[float, float] | None:
    """Return the centre and the deviation of a window; None until it is half full."""
    count = len(values)
    if count < max(2, config.spike_window // 2):
        return None
    if config.spike_robust:
        centre = statistics.median(values)
        spread = _NORMAL * statistics.median(abs(value - centre) for value in values)
    else:
        centre = math.fsum(values) / count
        spread = math.hypot(*(value - centre for value in values)) / math.sqrt(count - 1)
    return centre, max(spread, _LEAST_SPREAD * abs(centre))


def _deviations(value: float, band: tuple[float, float] | None) -> float | None:
    return None if band is None or not band[1] else (value - band[0]) / band[1]
