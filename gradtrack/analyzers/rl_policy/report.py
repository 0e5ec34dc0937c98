"""The typed report on a policy."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from gradtrack.records import Metric
from gradtrack.reports import Issue, Report

Risk = Literal["LOW", "MEDIUM", "HIGH"]
Adequacy = Literal["TOO_LOW", "ADEQUATE", "TOO_HIGH"]
_RISKS = ("LOW", "MEDIUM", "HIGH")
_ADEQUACIES = ("TOO_LOW", "ADEQUATE", "TOO_HIGH")


class PolicyReport(Report):
    """What a policy's action distributions look like; fields are None where they mean nothing for its kind.

    `discrete_entropy_mean` and the continuous, marginal and conditional entropies are in nats (differential ones can be
    negative), those called normalized are from 0 to 1. `state_information` is what the state tells about the action.
    It and the marginal and conditional entropies are those of the discrete parts where an action has both kinds.
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

    described: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "rl/discrete_entropy_mean", "Entropy of the action, mean over states.", unit="nats", when="discrete actions"
        ),
        Metric(
            "rl/discrete_entropy_normalized",
            "The same over that of a uniform choice.",
            unit="share",
            when="discrete actions",
        ),
        Metric(
            "rl/discrete_entropy_min", "The same of the most certain choice.", unit="share", when="discrete actions"
        ),
        Metric(
            "rl/continuous_entropy_mean",
            "Differential entropy, may be negative.",
            unit="nats",
            when="continuous actions",
        ),
        Metric("rl/continuous_entropy_normalized", "Coverage of the action range.", unit="share", when="known range"),
        Metric("rl/continuous_range_min", "Coverage in the narrowest dimension.", unit="share", when="known range"),
        Metric("rl/continuous_std_mean", "Standard deviation before squashing.", when="continuous actions"),
        Metric("rl/continuous_std_min", "The same of the narrowest dimension.", when="continuous actions"),
        Metric(
            "rl/continuous_relative_std_mean", "Standard deviation over half of the action range.", when="known range"
        ),
        Metric("rl/marginal_entropy", "Entropy of the action over all states together.", unit="nats"),
        Metric(
            "rl/marginal_entropy_normalized", "The same over a uniform choice's.", unit="share", when="discrete actions"
        ),
        Metric("rl/conditional_entropy", "Entropy of the action given the state.", unit="nats"),
        Metric("rl/state_information", "What the state tells about the action.", unit="nats"),
        Metric("rl/entropy_level", "Normalised entropy that is judged: lowest part, newest quarter.", unit="share"),
        Metric("rl/entropy_slope", "Trend of the normalised entropy.", unit="per observation", when="a trend is known"),
        Metric("rl/entropy_collapse_risk", "Risk that exploration ends: LOW, MEDIUM, HIGH.", unit="0 to 2"),
        Metric("rl/exploration_adequacy", "Exploration: TOO_LOW, ADEQUATE, TOO_HIGH.", unit="0 to 2"),
        Metric("rl/episode_return", "The episode return that was passed.", when="episode_return="),
        Metric("rl/kl_k1", "Divergence from the old policy, unbiased.", unit="nats", when="log_ratio="),
        Metric("rl/kl_k2", "Divergence from the old policy, biased.", unit="nats", when="log_ratio="),
        Metric("rl/kl_k3", "Divergence from the old policy, unbiased, ≥ 0.", unit="nats", when="log_ratio="),
        Metric("rl/clip_fraction", "Ratios outside the clipping range of PPO.", unit="share", when="log_ratio="),
        Metric(
            "rl/explained_variance",
            "Share of the returns' variance that the critic explains.",
            when="values= and returns=",
        ),
        Metric("rl/actor_critic_gradient_ratio", "Gradient norm, actor over critic.", when="names tell them apart"),
        Metric("rl/dormant_share", "Units below 2.5 % of their layer's mean size.", unit="share", when="offline"),
        Metric("rl/gradient_coherence", "Mean cosine of consecutive gradients.", when="enable_vector_analysis"),
        Metric("rl/input_sensitivity", "Gradient norm of the loss by its input.", when="offline, enable_jacobian"),
        Metric("rl/num_observations", "Observations behind these numbers."),
        Metric("rl/num_states", "States behind these numbers."),
    )

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
