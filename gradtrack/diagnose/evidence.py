"""What the rules see of one step: dimensionless where it can be, and never the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gradtrack.config import GradientConfig
from gradtrack.measure.layout import Layout
from gradtrack.measure.moments import Moments, log_norm

LEAST_LEFT: Final = 0.01
"""What clipping leaves of a norm that is judged at once, since it may decide too many steps."""


class CalmStep(NamedTuple):
    """What rules remember of a step on which nothing can open."""

    log_norm: float
    loss: float | None
    limit: float | None
    """The limit of the norm, where somebody chose it."""
    clipped: bool


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One step as the rules see it: its norm, its loss, its clipping, and the sums of every tensor."""

    step: int
    norm: float
    moments: Moments
    layout: Layout
    loss: float | None = None
    clipped: bool = False
    clip_threshold: float | None = None
    nonfinite_action: str = "none"
    critical: bool = False
    log_norm: float = field(init=False)
    """ln of the norm: -inf for a norm of zero, NaN for one that is not finite."""

    def __post_init__(self) -> None:
        self.log_norm = log_norm(self.norm)


def has_chosen_limit(config: GradientConfig) -> bool:
    """Say whether norms are limited, and by a limit that somebody chose."""
    return "max_grad_norm" in config.model_fields_set and config.effective_clip_type not in ("value", "agc")
