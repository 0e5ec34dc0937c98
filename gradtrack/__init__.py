"""Safe gradients, typed step reports and gradient panels for the experiment tracker that you already use.

>>> import torch
>>> from gradtrack import GradientManager, safe_backward
>>> model = torch.nn.Linear(4, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> with GradientManager(backends=["memory"], max_grad_norm=1.0) as manager:
...     for step in range(3):
...         optimizer.zero_grad()
...         loss = model(torch.ones(8, 4)).square().mean()
...         report = safe_backward(loss, model, optimizer, manager)
...         optimizer.step()
>>> report.step, report.health.healthy
(3, True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradtrack._version import __version__

if TYPE_CHECKING:
    from gradtrack.analyzers.base import Analyzer
    from gradtrack.analyzers.flow import GradientFlowAnalyzer
    from gradtrack.analyzers.gain.monitor import GradientGainMonitor
    from gradtrack.analyzers.jacobian import JacobianAnalyzer
    from gradtrack.analyzers.recurrent import RecurrentAnalyzer
    from gradtrack.analyzers.rl_policy import RLPolicyAnalyzer
    from gradtrack.analyzers.transformer import TransformerAnalyzer
    from gradtrack.analyzers.updates import UpdatesAnalyzer
    from gradtrack.analyzers.vector import VectorAnalyzer
    from gradtrack.backends.base import Backend
    from gradtrack.config import GradientConfig
    from gradtrack.functional import (
        clip_gradients,
        compute_gradient_norm,
        compute_gradient_stats,
        detect_gradient_issues,
        visualize_layer_gradients,
    )
    from gradtrack.health.monitor import GradientMonitor
    from gradtrack.loop import create_gradient_manager, safe_backward, watch
    from gradtrack.manager import GradientManager
    from gradtrack.protection.clipping import GradientClipper
    from gradtrack.protection.nonfinite import NaNInfHandler
    from gradtrack.records import Metric, Panel, Record
    from gradtrack.reports import (
        ClippingReport,
        GradientStatistics,
        GroupStatistics,
        HealthReport,
        Issue,
        IssueSeverity,
        IssueType,
        NanInfReport,
        ParameterStatistics,
        StepReport,
        TrainingSummary,
    )

_HOMES = {
    "Analyzer": "analyzers.base",
    "GradientFlowAnalyzer": "analyzers.flow",
    "JacobianAnalyzer": "analyzers.jacobian",
    "RLPolicyAnalyzer": "analyzers.rl_policy",
    "TransformerAnalyzer": "analyzers.transformer",
    "UpdatesAnalyzer": "analyzers.updates",
    "VectorAnalyzer": "analyzers.vector",
    "Backend": "backends.base",
    "GradientConfig": "config",
    "clip_gradients": "functional",
    "compute_gradient_norm": "functional",
    "compute_gradient_stats": "functional",
    "detect_gradient_issues": "functional",
    "visualize_layer_gradients": "functional",
    "GradientManager": "manager",
    "create_gradient_manager": "loop",
    "safe_backward": "loop",
    "watch": "loop",
    "GradientGainMonitor": "analyzers.gain.monitor",
    "GradientMonitor": "health.monitor",
    "GradientClipper": "protection.clipping",
    "NaNInfHandler": "protection.nonfinite",
    "Metric": "records",
    "Panel": "records",
    "RecurrentAnalyzer": "analyzers.recurrent",
    "Record": "records",
    "ClippingReport": "reports",
    "GradientStatistics": "reports",
    "GroupStatistics": "reports",
    "HealthReport": "reports",
    "Issue": "reports",
    "IssueSeverity": "reports",
    "IssueType": "reports",
    "NanInfReport": "reports",
    "ParameterStatistics": "reports",
    "StepReport": "reports",
    "TrainingSummary": "reports",
}

__all__ = [
    "Analyzer",
    "Backend",
    "ClippingReport",
    "GradientClipper",
    "GradientConfig",
    "GradientFlowAnalyzer",
    "GradientGainMonitor",
    "GradientManager",
    "GradientMonitor",
    "GradientStatistics",
    "GroupStatistics",
    "HealthReport",
    "Issue",
    "IssueSeverity",
    "IssueType",
    "JacobianAnalyzer",
    "Metric",
    "NaNInfHandler",
    "NanInfReport",
    "Panel",
    "ParameterStatistics",
    "RLPolicyAnalyzer",
    "Record",
    "RecurrentAnalyzer",
    "StepReport",
    "TrainingSummary",
    "TransformerAnalyzer",
    "UpdatesAnalyzer",
    "VectorAnalyzer",
    "__version__",
    "clip_gradients",
    "compute_gradient_norm",
    "compute_gradient_stats",
    "create_gradient_manager",
    "detect_gradient_issues",
    "safe_backward",
    "visualize_layer_gradients",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use, so that importing the package costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
