"""The typed report on a policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradtrack.reports import Issue, Report
from gradtrack.reports.base import measured

Risk = Literal["LOW", "MEDIUM", "HIGH"]
Adequacy = Literal["TOO_LOW", "ADEQUATE", "TOO_HIGH"]


class PolicyReport(Report):
    """The action distributions of a policy; fields are None where they mean nothing for its kind.

    `discrete_entropy_mean` and the continuous, marginal and conditional entropies are in nats (differential ones can be
    negative), those called normalized are from 0 to 1. `state_information` is what the state tells about the action.
    It and the marginal and conditional entropies are those of the discrete parts where an action has both kinds.
    `entropy_level`, from which the verdicts follow, is the lowest normalised entropy of the newest quarter of what was
    observed.
    """

    discrete_entropy_mean: float | None = measured(
        "rl/discrete_entropy_mean", "Entropy of the action, mean over states.", unit="nats", when="discrete actions"
    )
    discrete_entropy_normalized: float | None = measured(
        "rl/discrete_entropy_normalized",
        "The same over that of a uniform choice.",
        unit="share",
        when="discrete actions",
    )
    discrete_entropy_min: float | None = measured(
        "rl/discrete_entropy_min", "The same of the most certain choice.", unit="share", when="discrete actions"
    )
    continuous_entropy_mean: float | None = measured(
        "rl/continuous_entropy_mean", "Differential entropy, may be negative.", unit="nats", when="continuous actions"
    )
    continuous_entropy_normalized: float | None = measured(
        "rl/continuous_entropy_normalized", "Coverage of the action range.", unit="share", when="known range"
    )
    continuous_range_min: float | None = measured(
        "rl/continuous_range_min", "Coverage in the narrowest dimension.", unit="share", when="known range"
    )
    continuous_std_mean: float | None = measured(
        "rl/continuous_std_mean", "Standard deviation before squashing.", when="continuous actions"
    )
    continuous_std_min: float | None = measured(
        "rl/continuous_std_min", "The same of the narrowest dimension.", when="continuous actions"
    )
    continuous_relative_std_mean: float | None = measured(
        "rl/continuous_relative_std_mean", "Standard deviation over half of the action range.", when="known range"
    )
    squashed: bool = False
    marginal_entropy: float | None = measured(
        "rl/marginal_entropy", "Entropy of the action over all states together.", unit="nats"
    )
    marginal_entropy_normalized: float | None = measured(
        "rl/marginal_entropy_normalized", "The same over a uniform choice's.", unit="share", when="discrete actions"
    )
    conditional_entropy: float | None = measured(
        "rl/conditional_entropy", "Entropy of the action given the state.", unit="nats"
    )
    state_information: float | None = measured(
        "rl/state_information", "What the state tells about the action.", unit="nats"
    )
    entropy_level: float | None = measured(
        "rl/entropy_level", "Normalised entropy that is judged: lowest part, newest quarter.", unit="share"
    )
    entropy_slope: float | None = measured(
        "rl/entropy_slope", "Trend of the normalised entropy.", unit="per observation", when="a trend is known"
    )
    entropy_collapse_risk: Risk | None = measured(
        "rl/entropy_collapse_risk", "Risk that exploration ends: LOW, MEDIUM, HIGH.", unit="0 to 2"
    )
    exploration_adequacy: Adequacy | None = measured(
        "rl/exploration_adequacy", "Exploration: TOO_LOW, ADEQUATE, TOO_HIGH.", unit="0 to 2"
    )
    confidence: Literal["low", "high"] = "low"
    episode_return: float | None = measured(
        "rl/episode_return", "The episode return that was passed.", when="episode_return="
    )
    kl_k1: float | None = measured(
        "rl/kl_k1", "Divergence from the old policy, unbiased.", unit="nats", when="log_ratio="
    )
    kl_k2: float | None = measured(
        "rl/kl_k2", "Divergence from the old policy, biased.", unit="nats", when="log_ratio="
    )
    kl_k3: float | None = measured(
        "rl/kl_k3", "Divergence from the old policy, unbiased, ≥ 0.", unit="nats", when="log_ratio="
    )
    clip_fraction: float | None = measured(
        "rl/clip_fraction", "Ratios outside the clipping range of PPO.", unit="share", when="log_ratio="
    )
    explained_variance: float | None = measured(
        "rl/explained_variance", "Share of the returns' variance that the critic explains.", when="values= and returns="
    )
    actor_critic_gradient_ratio: float | None = measured(
        "rl/actor_critic_gradient_ratio", "Gradient norm, actor over critic.", when="names tell them apart"
    )
    dormant_share: float | None = measured(
        "rl/dormant_share", "Units below 2.5 % of their layer's mean size.", unit="share", when="offline"
    )
    dormant_units: dict[str, float] = Field(default_factory=dict)
    gradient_coherence: float | None = measured(
        "rl/gradient_coherence", "Mean cosine of consecutive gradients.", when="enable_vector_analysis"
    )
    input_sensitivity: float | None = measured(
        "rl/input_sensitivity", "Gradient norm of the loss by its input.", when="offline, enable_jacobian"
    )
    issues: list[Issue] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    num_observations: int = measured("rl/num_observations", "Observations behind these numbers.", default=0)
    num_states: int = measured("rl/num_states", "States behind these numbers.", default=0)
