"""The analyzer of policies: entropy, exploration and collapse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, DefaultThreshold, Picture, Snapshot, model_of, panel
from gradtrack.analyzers.rl_policy.distributions import read_actions
from gradtrack.analyzers.rl_policy.history import PolicyHistory
from gradtrack.analyzers.rl_policy.observation import (
    doubts_about,
    measure_policy,
    read_critic,
    read_log_ratio,
    read_return,
)
from gradtrack.analyzers.rl_policy.picture import pictures_of
from gradtrack.analyzers.rl_policy.report import PolicyReport
from gradtrack.analyzers.rl_policy.update_metrics import (
    DormantUnits,
    clip_fraction,
    explained_variance,
    followed,
    head_gradient_ratio,
    input_gradient_norm,
    kl_estimates,
)
from gradtrack.analyzers.rl_policy.verdict import EXPLAINED_BY, PolicyVerdict, sum_up
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps, untouched
from gradtrack.analyzers.tools.spectra import GradientCoherence
from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.shards import local_part
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueSeverity, IssueType, Report
from gradtrack.support.state import Stateful
from gradtrack.support.statistics import mean

_EAGER_LOOKS: Final = 64
_PATIENCE: Final = 16
_NAMES: Final = re.compile(r"(?i:policy)|Actor|Agent|(?<![A-Za-z])(?:actor|agent)")
"""Words in the name of a class; an extractor and a reactor are no actors."""

ActionExtractor = Callable[[Any], tuple[Any, Tensor | float | None, Tensor | None, Tensor | None]]
Sample = dict[str, Tensor]


@final
class RLPolicyAnalyzer(Stateful, Analyzer):
    """A policy's entropy, normalised for its kind, and whether its exploration collapses.

    - discrete: H(p)/ln(allowed actions); several choices: the sum of H over the sum of ln n, and the least of them;
      states with a single allowed action count for nothing. Bernoulli components are choices of two.
    - Gaussian: ln(2 pi e sigma^2)/2 in nats, which is never normalised by itself; with `action_range` the share of the
      range that the policy covers, min(1, sigma sqrt(2 pi e)/(high - low)).
    - tanh of a Gaussian: its differential entropy h by Gauss-Hermite quadrature, normalised as exp(h)/2. A wide
      Gaussian piles up at both ends, so a large sigma is a collapse here too.
    - the entropy of the whole action given the state and over all states; their difference is the information that the
      policy takes from the state, at most ln of their number. Low and high together are a good deterministic policy.

    `entropy_collapse_risk` is HIGH when the normalised entropy is below 0.1, or falls so fast (Theil-Sen slope over 50
    observations) that it will be there within 25; MEDIUM within 100; LOW when returns rise (Mann-Kendall) or stay at
    their best after having risen: entropy that buys return is no fault. It is LOW too for a policy that was sure from
    the first while returns stay at their best, if its actions depend on the state. Without returns `confidence` is low.
    The thresholds judge by themselves only where they are passed; without returns they open LOW issues at most.

    In a training loop, call `manager.analyzer("rl_policy").observe(distribution, ...)` before `manager.step`. The step
    reports what was observed since the last look: at once for the first 64, then every 16 steps at the most often.

    References: Sokar et al. 2023 (dormant units); Schulman, approximating KL divergence (k1, k2, k3).
    Cost: one pass over the action distribution per observation, with no number from torch's generators and no
    synchronisation before the step; tanh policies 128 points, and what states tell of continuous actions 32 points by
    at most 128 states per dimension.

    >>> import torch
    >>> from gradtrack import GradientManager, RLPolicyAnalyzer
    >>> analyzer = RLPolicyAnalyzer()
    >>> analyzer.observe(torch.tensor([[0.5, 0.25, 0.25]]).log())
    >>> stats = analyzer.report()
    >>> round(stats.discrete_entropy_normalized, 6), round(stats.discrete_entropy_mean, 4)
    (0.946395, 1.0397)
    """

    report_type: ClassVar[type[Report]] = PolicyReport
    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = EXPLAINED_BY
    observes_actions: ClassVar[bool] = True
    kept_in_checkpoints = ("_history", "_looks", "_last_look")
    panels: ClassVar[tuple[Panel, ...]] = (
        panel(
            "Policy entropy (share of the largest)",
            *("rl/discrete_entropy_normalized", "rl/continuous_entropy_normalized", "rl/discrete_entropy_min"),
        ),
        panel(
            "Action given state, and over all states",
            *("rl/conditional_entropy", "rl/marginal_entropy", "rl/state_information"),
        ),
        panel("Action standard deviation", "rl/continuous_std_mean", "rl/continuous_std_min", log_scale=True),
        panel("Episode return", "rl/episode_return"),
        panel("Risk of collapse (0 to 2)", "rl/entropy_collapse_risk"),
        panel("Divergence from the old policy", "rl/kl_k3", "rl/clip_fraction"),
    )
    picture = Picture("policy_entropy", "entropy of the policy, and returns", is_charted=True)
    pictures = staticmethod(pictures_of)

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        min_entropy_threshold: float = DefaultThreshold(0.5),
        min_std_threshold: float = DefaultThreshold(0.1),
        max_std_threshold: float = DefaultThreshold(2.0),
        track_distributions: bool = True,
    ) -> None:
        self.model = model
        self.enable_jacobian, self.enable_vector_analysis = enable_jacobian, enable_vector_analysis
        self.min_entropy_threshold = min_entropy_threshold
        self.min_std_threshold, self.max_std_threshold = min_std_threshold, max_std_threshold
        self.track_distributions = track_distributions
        self._verdict = PolicyVerdict(min_entropy_threshold, min_std_threshold, max_std_threshold)
        self._history = PolicyHistory()
        self._pending: list[tuple[Sample, float | None]] = []
        self._coherence = GradientCoherence()
        self._found: list[Issue] = []
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self._looks = self._last_look = 0

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        for name, module in model.named_modules():
            kind = type(module).__name__
            if _NAMES.search(kind):
                return f"module {name or 'itself'!r} is {kind}; it reports what observe() is given"
        return None

    def observe(
        self,
        distribution: Any,
        *,
        mask: Any = None,
        action_range: tuple[Any, Any] | None = None,
        episode_return: float | None = None,
        log_ratio: Tensor | None = None,
        clip_range: float = 0.2,
        values: Tensor | None = None,
        returns: Tensor | None = None,
    ) -> None:
        """Take in the action distribution of a batch of states, and what else the loop knows.

        `distribution` is a torch distribution, logits, (mean, std), or a list of distributions or logits for several
        choices; `mask` is true for allowed actions; `action_range` is (low, high) of continuous actions;
        `episode_return` a mean over recent episodes; `log_ratio` is ln(new/old) of the actions taken; `values` are the
        critic's for states whose `returns` are known.
        """
        parts, earned = read_actions(distribution, mask), read_return(episode_return)
        sample = measure_policy(parts, action_range=action_range, marginals=self.track_distributions)
        sample |= doubts_about(distribution, parts)
        if log_ratio is not None:
            ratios = read_log_ratio(log_ratio, parts)
            sample |= {f"kl_{name}": torch.tensor(value) for name, value in kl_estimates(ratios)._asdict().items()}
            sample["clip_fraction"] = torch.tensor(clip_fraction(ratios, clip_range))
        if values is not None and returns is not None:
            sample["explained_variance"] = torch.tensor(explained_variance(*read_critic(values, returns)))
        self._pending.append((sample, earned))

    def report(self, *, step: int = 0) -> PolicyReport:
        """Return the report on the observations since the last report, and forget them."""
        pending, self._pending = self._pending, []
        report = sum_up([sample for sample, _ in pending], self._history, [found for _, found in pending])
        return self._verdict.judge(report, self._history, step)

    def analyze(
        self,
        input_fn: InputFunction,
        loss_fn: LossFunction,
        steps: int = 20,
        action_extractor: ActionExtractor | None = None,
        optimizer: Any = None,
    ) -> tuple[list[Issue], PolicyReport]:
        """Look at the policy on batches of `input_fn`; return the issues and the report on all of them.

        `action_extractor` takes the model's output to (logits, std, mean, value), each of which may be None. Without it
        the output must be a distribution, logits, a (mean, std) pair or a mapping with those names. The model is left
        as it was, unless an optimizer is passed, which then trains it.
        """
        model, extract = model_of(self, self.model), action_extractor or _extract
        samples: list[Sample] = []
        ratios: list[float | None] = []
        coherence, units = GradientCoherence(), DormantUnits(model)
        batches = (lambda: followed(input_fn())) if self.enable_jacobian else input_fn
        slopes: list[float | None] = []
        with untouched(model, optimizer), units.watched() if self.track_distributions else nullcontext():
            for _, inputs, output, _ in offline_steps(model, batches, loss_fn, steps, optimizer):
                samples.append(self._extracted(extract(output)))
                ratios.append(head_gradient_ratio(_norms(model)))
                slopes.append(input_gradient_norm(inputs) if self.enable_jacobian else None)
                if self.enable_vector_analysis:
                    coherence.add(model)
        history = PolicyHistory()
        report = sum_up(samples, history, [None] * len(samples)).model_copy(
            update={
                "actor_critic_gradient_ratio": mean(ratio for ratio in ratios if ratio is not None),
                "gradient_coherence": coherence.mean(),
                "input_sensitivity": mean(slope for slope in slopes if slope is not None),
                "dormant_units": units.shares,
                "dormant_share": mean(units.shares.values()),
            }
        )
        report = self._verdict.judge(report, history, steps)
        return report.issues, report

    def print_summary(self, issues: Sequence[Issue], stats: PolicyReport) -> None:
        """Print the issues and the numbers that are known."""
        known = {name.removeprefix("rl/"): value for name, value in stats.metrics().items()}
        lines = [f"policy over {stats.num_states} states, {len(issues)} issues"]
        lines += [f"  {name}: {value:.4g}" for name, value in known.items()]
        lines += [f"  note: {note}" for note in stats.notes]
        lines.append(
            f"  entropy collapse risk: {stats.entropy_collapse_risk or 'unknown'} ({stats.confidence} confidence)"
        )
        lines.append(f"  exploration: {stats.exploration_adequacy or 'unknown'}")
        print("\n".join([*lines, *(str(issue) for issue in issues)]))  # noqa: T201

    def due(self, step: int) -> bool:
        if self.looks_every is not None:
            return bool(self._pending) and self.scheduled(step)
        return bool(self._pending) and (self._looks < _EAGER_LOOKS or step - self._last_look >= _PATIENCE)

    def inspect(self, snapshot: Snapshot) -> Report | None:
        if not self._pending:
            return None
        self._looks, self._last_look = self._looks + 1, snapshot.step
        report = self.report(step=snapshot.step)
        self._found = report.issues
        self._notes = [note for note in report.notes if note not in self._noted]
        self._noted.update(self._notes)
        if self.enable_vector_analysis:
            self._coherence.add(snapshot.model)
        return report.model_copy(
            update={
                "actor_critic_gradient_ratio": head_gradient_ratio(snapshot.norms),
                "gradient_coherence": self._coherence.mean(),
            }
        )

    def notes(self) -> list[str]:
        return [*(issue.message for issue in self._found if _is_remark(issue)), *self._notes]

    def issues(self) -> list[Issue]:
        return [issue for issue in self._found if not _is_remark(issue)]

    def _extracted(self, found: Any) -> Sample:
        if not isinstance(found, (tuple, list)) or len(found) != 4:
            size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
            raise UsageError(
                f"action_extractor returned {type(found).__name__}{size}: expected (logits, std, mean, value), "
                "each of which may be None."
            )
        logits, std, mean, _ = found
        if logits is None and std is None:
            raise UsageError("action_extractor returned neither logits nor std: expected (logits, std, mean, value).")
        parts = [] if logits is None else read_actions(logits)
        if std is not None:
            std = torch.as_tensor(std).detach()
            parts += read_actions((torch.zeros_like(std) if mean is None else mean, std))
        return measure_policy(parts, marginals=self.track_distributions) | doubts_about(logits, parts)


def _is_remark(issue: Issue) -> bool:
    """Whether a policy may simply be sure of what it does in each state, which only returns could tell."""
    return issue.issue_type is IssueType.ENTROPY_COLLAPSE and issue.severity is IssueSeverity.LOW


def _norms(model: nn.Module) -> dict[str, float]:
    named = model.named_parameters()
    return {name: float(local_part(param.grad).norm()) for name, param in named if param.grad is not None}


def _extract(output: Any) -> tuple[Any, Any, Any, Any]:
    """Read an output of a known form: a distribution, logits or a mapping."""
    if isinstance(output, Mapping):
        logits, std, mean, value = (output.get(name) for name in ("logits", "std", "mean", "value"))
        if logits is not None or std is not None:
            return logits, std, mean, value
    elif isinstance(output, Tensor) or hasattr(output, "entropy") or hasattr(output, "distribution"):
        return output, None, None, None
    raise UsageError(
        f"model output {type(output).__name__}: expected a distribution, logits or a mapping with 'logits' or 'std'. "
        "Pass action_extractor, a function of the output that returns (logits, std, mean, value)."
    )
