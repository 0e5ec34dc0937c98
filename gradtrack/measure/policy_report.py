"""The typed report on a policy."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from gradtrack.reports import Issue, Report

Risk = Literal["LOW", "MEDIUM", "HIGH"]
Adequacy = Literal["TOO_LOW", "ADEQUATE", "TOO_HIGH"]
_RISKS = ("LOW", "MEDIUM", "HIGH")
_ADEQUACIES = ("TOO_LOW", "ADEQUATE", "TOO_HIGH")


class PolicyReport(Report):
    """What a policy's action distributions look like; fields are None where they mean nothing for its kind.

    `discrete_entropy_mean` and the continuous, marginal and conditional entropies are in nats (differential ones can be
    negative), those called normalized are from 0 to 1. `state_information` is what the state tells about the action.
    `entropy_level`, from which the verdicts follow, is the lowest normalised entropy of the newest quarter of what was
    observed.
    """

    discrete_entropy_mean: float | None = None
    discrete_entropy_normalized: float | None = None
    discrete_entropy_min: float | None = None
    continuous_entropy_mean: float | None = None
    continuous_entropy_normalized: float | None = None
    continuous_range_min: float | None = None
    continuous_std_mean: float | None = None
    continuous_std_min: float | None = None
    continuous_relative_std_mean: float | None = None
    squashed: bool = False
    marginal_entropy: float | None = None
    marginal_entropy_normalized: float | None = None
    conditional_entropy: float | None = None
    state_information: float | None = None
    entropy_level: float | None = None
    entropy_slope: float | None = None
    entropy_collapse_risk: Risk | None = None
    exploration_adequacy: Adequacy | None = None
    confidence: Literal["low", "high"] = "low"
    episode_return: float | None = None
    kl_k1: float | None = None
    kl_k2: float | None = None
    kl_k3: float | None = None
    clip_fraction: float | None = None
    explained_variance: float | None = None
    actor_critic_gradient_ratio: float | None = None
    dormant_share: float | None = None
    dormant_units: dict[str, float] = Field(default_factory=dict)
    gradient_coherence: float | None = None
    input_sensitivity: float | None = None
    issues: list[Issue] = Field(default_factory=list)
    num_observations: int = 0
    num_states: int = 0

    def metrics(self) -> dict[str, float]:
        """Return every number under `rl/`; risks and adequacy count from 0 to 2."""
        values = {}
        for name in type(self).__pydantic_fields__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                values[f"rl/{name}"] = float(value)
        if self.entropy_collapse_risk is not None:
            values["rl/entropy_collapse_risk"] = float(_RISKS.index(self.entropy_collapse_risk))
        if self.exploration_adequacy is not None:
            values["rl/exploration_adequacy"] = float(_ADEQUACIES.index(self.exploration_adequacy))
        return values
