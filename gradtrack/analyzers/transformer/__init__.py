"""The analyzer of attention: entropy, heads and rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, final

from torch import nn

from gradtrack.analyzers.base import Analyzer, DefaultThreshold, Picture, Schedule, Snapshot, model_of, often, panel
from gradtrack.analyzers.tools.issue_memory import LastingIssues
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps, untouched
from gradtrack.analyzers.tools.spectra import GradientCoherence
from gradtrack.analyzers.transformer import wiring
from gradtrack.analyzers.transformer.picture import pictures_of
from gradtrack.analyzers.transformer.recorder import AttentionRecorder, ForwardPass
from gradtrack.analyzers.transformer.report import AttentionReport, report_attention
from gradtrack.analyzers.transformer.statistics import Limits
from gradtrack.analyzers.transformer.verdict import EXPLAINED_BY, judge
from gradtrack.errors import UsageError
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueType, Report

_ATTENTION_NAMES: Final = ("attention", "attn")
_HARMLESS: Final = (IssueType.RANK_COLLAPSE, IssueType.HEAD_REDUNDANCY)
_NOT_HEARD: Final = "the forward pass called no attention that can be heard."


@final
class TransformerAnalyzer(Analyzer):
    """Attention as it is computed, by layer and head, from the queries and keys of ordinary forward passes.

    For a query i with n visible keys and probabilities p before dropout (causal, boolean and additive masks, padding
    and grouped heads taken into account; rows that see fewer than two keys and padded queries left out):

    - entropy H(p)/ln n: 1 for uniform attention, 0 for attention to one key; the mean, the lowest head, and the 5th
      percentile over rows and heads. Its floor is the least entropy that logits of the same centred norm allow
      (Zhai et al. 2023, theorem 3.1, by row).
    - the largest logit, whose growth is the early warning of entropy collapse (Wortsman et al. 2023);
    - sparsity: the share of visible keys with p < 0.1/n, so that uniform attention has none however long it is;
    - head diversity: the generalised Jensen-Shannon divergence of the heads over ln min(heads, n), 0 for equal heads;
    - the residual |X - mean|/|X| of the tokens that leave each block, 0 when they are all equal (Dong et al. 2021).
      Low entropy and equal tokens are two different failures, so they are two fields.

    Unless `min_entropy_threshold` or `min_diversity_threshold` is passed, only collapse itself is an issue: a layer
    whose mean entropy is below 0.1, or heads that agree to 1 % of what they could differ while they do not look
    everywhere alike. Live it has to last for three looks, and not to have come while training went well: attention that
    has learned where to look is as sharp. `rank_collapse_risk` is judged from the last block and from how much depth
    took away; HIGH is an issue, MEDIUM alone is not, since tokens may well agree at the end on what they have to
    predict.

    `enable_jacobian` adds `softmax_jacobian` per layer: the trace 1 - sum p^2 of the derivative of the softmax, near 0
    where attention cannot learn any more. `enable_vector_analysis` adds `gradient_coherence`, the mean cosine between
    the gradients of consecutive steps, which needs one copy of them. `track_attention_weights=False` looks at tokens
    only.

    Cost: on a sampled step O(sequences x heads x rows x keys) per layer with at most 2 sequences and 64 rows, about
    half a training step of a very small model and less of a larger one; none on any other step. Live it looks at every
    4th step up to 64 and at every 64th from then on. Compiled models are looked at offline only. No output and no
    kernel changes on any step.

    >>> import torch
    >>> from gradtrack import TransformerAnalyzer
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> torch.nn.init.zeros_(attention.in_proj_weight).shape  # equal logits: uniform attention
    torch.Size([24, 8])
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.attention = attention
    ...
    ...     def forward(self, x):
    ...         return self.attention(x, x, x, need_weights=False)[0]
    >>> analyzer = TransformerAnalyzer(Model())
    >>> issues, stats = analyzer.analyze(lambda: torch.randn(2, 16, 8), lambda output: output.sum(), steps=2)
    >>> round(stats.attention_entropy_mean, 6), stats.attention_sparsity, round(stats.head_diversity, 6)
    (1.0, 0.0, 0.0)
    """

    report_type: ClassVar[type[Report]] = AttentionReport
    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = EXPLAINED_BY
    schedule: ClassVar[Schedule] = staticmethod(often)
    panels: ClassVar[tuple[Panel, ...]] = (
        panel(
            "Attention entropy (1 = uniform)",
            "attention/entropy_mean",
            "attention/entropy_min_head",
            "attention/entropy_p5",
        ),
        panel("Entropy by layer", "attention/entropy_mean/*"),
        panel("Largest attention logit", "attention/max_logit/*"),
        panel("Sparsity and head diversity", "attention/sparsity", "attention/head_diversity"),
        panel("Difference of tokens after each block", "attention/rank_residual/*", log_scale=True),
    )
    picture = Picture("attention_entropy", "entropy of every head")
    pictures = staticmethod(pictures_of)

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        min_entropy_threshold: float = DefaultThreshold(0.5),
        min_diversity_threshold: float = DefaultThreshold(0.3),
        track_attention_weights: bool = True,
        max_sequences: int = 2,
        max_rows: int = 64,
    ) -> None:
        if max_sequences < 1 or max_rows < 1:
            raise UsageError(f"max_sequences {max_sequences}, max_rows {max_rows}: expected at least 1 of each.")
        self.model = model
        self.enable_jacobian, self.enable_vector_analysis = enable_jacobian, enable_vector_analysis
        self.min_entropy_threshold = min_entropy_threshold
        self.min_diversity_threshold = min_diversity_threshold
        self.track_attention_weights = track_attention_weights
        self.max_sequences, self.max_rows = max_sequences, max_rows
        self._recorder: AttentionRecorder | None = None
        self._coherence = GradientCoherence()
        self._limitation: str | None = None
        self._history = LastingIssues(_HARMLESS)

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        for name, module in model.named_modules():
            kind = type(module).__name__
            if isinstance(module, nn.MultiheadAttention) or any(word in kind.lower() for word in _ATTENTION_NAMES):
                return f"module {name or 'itself'!r} is {kind}"
            if _calls_attention(type(module)):
                return f"module {name or 'itself'!r} calls scaled_dot_product_attention"
        return None

    def analyze(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, optimizer: Any = None
    ) -> tuple[list[Issue], AttentionReport]:
        """Look at forward passes on batches of `input_fn`; return the issues and the report on all of them.

        The model is left as it was, unless an optimizer is passed, which then trains it.
        """
        model = model_of(self, self.model)
        passes: list[ForwardPass] = []
        coherence = GradientCoherence()
        recorder = self._new_recorder(model)
        with untouched(model, optimizer), recorder.armed():
            for *_, loss in offline_steps(model, input_fn, loss_fn, steps, optimizer):
                found = recorder.take()
                passes += [] if found is None else [found]
                if found is not None and bool(loss.isfinite()):
                    found.wiring.issues.pop(IssueType.NUMERICAL, None)
                if self.enable_vector_analysis:
                    coherence.add(model)
        report = self._report(passes, coherence, step=steps)
        return report.issues, report

    def print_summary(self, issues: Sequence[Issue], stats: AttentionReport) -> None:
        """Print the issues and the report, one line per layer."""
        print(summary(issues, stats))  # noqa: T201

    def arm(self, model: nn.Module) -> None:
        self._recorder = self._new_recorder(model)
        self._recorder.arm()

    def inspect(self, snapshot: Snapshot) -> Report | None:
        found = None if self._recorder is None else self._recorder.take()
        if found is not None and found.num_calls == 0:
            self._limitation = _NOT_HEARD
            return None
        if found is None:
            return None
        self._limitation = None
        if self.enable_vector_analysis:
            self._coherence.add(snapshot.model)
        if snapshot.loss is not None and math.isfinite(snapshot.loss) and not snapshot.skipped:
            found.wiring.issues.pop(IssueType.NUMERICAL, None)  # what was NaN went nowhere
        report = self._report([found], self._coherence, step=snapshot.step)
        self._history.add(report.issues, snapshot.step, snapshot.series)
        return report

    def disarm(self) -> None:
        if self._recorder is not None:
            self._recorder.disarm()
            self._recorder = None

    def limitation(self) -> str | None:
        return self._limitation

    def issues(self) -> list[Issue]:
        limits = {
            IssueType.ATTN_ENTROPY_COLLAPSE: self.min_entropy_threshold,
            IssueType.HEAD_REDUNDANCY: self.min_diversity_threshold,
        }
        chosen = {kind for kind, limit in limits.items() if not isinstance(limit, DefaultThreshold)}
        return self._history.issues(firm=chosen | {*wiring.KINDS})

    def state_dict(self) -> dict[str, Any]:
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state)

    def _new_recorder(self, model: nn.Module) -> AttentionRecorder:
        limits = Limits(self.max_sequences, self.max_rows)
        return AttentionRecorder(model, limits=limits, weights=self.track_attention_weights)

    def _report(self, passes: Sequence[ForwardPass], coherence: GradientCoherence, *, step: int) -> AttentionReport:
        report = report_attention(passes, softmax_jacobian=self.enable_jacobian)
        wired = {key: issue for one in reversed(passes) for key, issue in one.wiring.issues.items()}
        judged = judge(report, list(wired.values()), self.min_entropy_threshold, self.min_diversity_threshold)
        issues = [issue.model_copy(update={"step": step, "window": len(passes)}) for issue in judged]
        return report.model_copy(update={"issues": issues, "gradient_coherence": coherence.mean()})


def summary(issues: Sequence[Issue], stats: AttentionReport) -> str:
    """Return the report as text."""
    lines = [f"attention over {stats.num_passes} passes, {len(issues)} issues"]
    for layer in stats.layers:
        diversity = "n/a" if layer.head_diversity is None else f"{layer.head_diversity:.3f}"
        lines.append(
            f"  {layer.name or 'model'}: entropy {layer.entropy_mean:.3f} (lowest head {layer.entropy_min_head:.3f}, "
            f"floor {layer.entropy_floor:.3f}), max logit {layer.max_logit:.3g}, sparsity {layer.sparsity:.3f}, "
            f"head diversity {diversity}"
        )
    lines += [] if stats.layers else ["  no attention was heard"]
    lines += [f"  {block.name or 'model'}: token difference {block.residual:.3g}" for block in stats.blocks]
    lines.append(f"  rank collapse risk: {stats.rank_collapse_risk or 'unknown'}")
    return "\n".join([*lines, *(str(issue) for issue in issues)])


def _calls_attention(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of a class, or a function that it names, is attention."""
    forward = getattr(kind, "forward", None)  # that of a ScriptModule cannot be had from its class
    code = getattr(forward, "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names
