"""What the rules see of one step: dimensionless where it can be, and never the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtrack.config import GradientConfig
from gradtrack.measure.gradients import Layout
from gradtrack.measure.moments import Moments, log_norm


class CalmSteps:
    """Steps on which nothing can open, for the rules to take in together: of each its numbers that a rule remembers."""

    __slots__ = ("clipped", "limits", "log_norms", "losses")

    def __init__(self) -> None:
        self.log_norms: list[float] = []
        self.losses: list[float | None] = []
        self.limits: list[float | None] = []
        """The limit that the norm was clipped to, where somebody chose it."""
        self.clipped: list[bool] = []


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
