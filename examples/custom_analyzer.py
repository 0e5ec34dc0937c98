"""An analyzer of one's own: one class with one method, its report typed and its panel drawn by every tracker.

python examples/custom_analyzer.py
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from gradtrack import Analyzer, GradientManager, Metric, Panel, safe_backward
from gradtrack.analyzers.base import Snapshot, always
from gradtrack.reports import Report


class BalanceReport(Report):
    ratio: float
    described: ClassVar[tuple[Metric, ...]] = (
        Metric("balance/first_to_last", "Gradient norm of the first weight over that of the last one."),
    )

    def metrics(self) -> dict[str, float]:
        return {"balance/first_to_last": self.ratio}


class BalanceAnalyzer(Analyzer):
    """The gradient norm of the first weight over that of the last one."""

    report_type: ClassVar[type[Report]] = BalanceReport
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(title="First to last layer", section="balance", metrics=("balance/first_to_last",), log_scale=True),
    )
    schedule = staticmethod(always)

    def inspect(self, snapshot: Snapshot) -> BalanceReport | None:
        weights = [norm for name, norm in snapshot.norms.items() if name.endswith("weight")]
        return BalanceReport(ratio=weights[0] / weights[-1]) if weights and weights[-1] else None


def main(steps: int = 20) -> GradientManager:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(backends=["memory"], analyzers=[BalanceAnalyzer()], grad_log_every_n_steps=5) as manager:
        for _ in range(steps):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            report = safe_backward((model(x) - x.mean(1, keepdim=True)).square().mean(), model, optimizer, manager)
            optimizer.step()
        print(f"the first layer's gradient is {report.analyzers['balance'].ratio:.2g} of the last one's")
    return manager


if __name__ == "__main__":
    main()
