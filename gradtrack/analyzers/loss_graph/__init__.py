"""The analyzer of the loss: mistakes in how it is computed from the model's outputs, from the graph of autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from pydantic import Field
from torch import nn

from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, rarely
from gradtrack.analyzers.loss_graph.verdict import judge, operations
from gradtrack.reports import Issue, Report
from gradtrack.reports.base import measured


class LossGraphReport(Report):
    """The operations that compute the loss from the outputs of the last layers, those next to the loss first."""

    operations: list[str] = Field(default_factory=list)
    num_issues: float | None = measured("loss_graph/issues", "Mistakes in how the loss is computed.")


@final
class LossGraphAnalyzer(Analyzer):
    """An analyzer of how the loss is computed.

    It finds, with certainty and at its first look: a softmax or sigmoid before a loss that applies its own, a ReLU
    behind the logits, a negative log-likelihood without a log-softmax, a softmax over the batch, a loss that broadcasts
    [B] against [B, 1], and a loss with the wrong sign. Gradients alone show none of these. A type that is on purpose is
    muted by the setting `mute`. It needs the loss as a tensor: from `safe_backward` or `manager.step`, not from
    `watch`. For [B, 1] = B outputs and B targets a broadcast loss is a mean over B² differences: its least is at the
    mean of the targets.

    References: Karpathy 2019, A Recipe for Training Neural Networks; the documentation of the losses of torch.

    Cost: on its steps one walk over the operations between the loss and the last layers, and no memory.

    >>> import torch
    >>> from gradtrack import GradientManager
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with GradientManager(analyzers=["loss_graph"]) as manager:
    ...     for step in range(2):
    ...         optimizer.zero_grad()
    ...         loss = nn.functional.cross_entropy(model(torch.ones(4, 2)), torch.zeros(4, dtype=torch.long))
    ...         report = manager.step(model, optimizer, loss)
    ...         optimizer.step()
    >>> [issue.key for issue in manager.diagnose()]
    ['ACTIVATED_TWICE:0']
    """

    report_type: ClassVar[type[Report]] = LossGraphReport
    schedule: ClassVar[Schedule] = staticmethod(rarely)
    foresees: ClassVar[bool] = True

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        return "every training has a loss"

    def __init__(self) -> None:
        self._issues: list[Issue] = []

    def inspect(self, snapshot: Snapshot) -> Report | None:
        if snapshot.loss_graph is None:
            return None
        found = list(operations(snapshot.loss_graph))
        known = {issue.key: issue.step for issue in self._issues}
        judged = judge(found, snapshot.params(), snapshot.step)
        self._issues = [one.model_copy(update={"step": known.get(one.key, one.step)}) for one in judged]
        return LossGraphReport(operations=[operation.name for operation in found], num_issues=len(judged))

    def issues(self) -> list[Issue]:
        return list(self._issues)

    def state_dict(self) -> dict[str, Any]:
        return {"issues": [issue.model_dump(mode="json") for issue in self._issues]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._issues = [Issue.model_validate(issue) for issue in state["issues"]]
