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

from gradtrack._version import __version__ as __version__

if TYPE_CHECKING:
    from gradtrack.alerts.base import Alert as Alert
    from gradtrack.analyzers.base import Analyzer as Analyzer
    from gradtrack.analyzers.flow import GradientFlowAnalyzer as GradientFlowAnalyzer
    from gradtrack.analyzers.gain.monitor import GradientGainMonitor as GradientGainMonitor
    from gradtrack.analyzers.jacobian import JacobianAnalyzer as JacobianAnalyzer
    from gradtrack.analyzers.loss_graph import preflight as preflight
    from gradtrack.analyzers.precision import PrecisionAnalyzer as PrecisionAnalyzer
    from gradtrack.analyzers.recurrent import RecurrentAnalyzer as RecurrentAnalyzer
    from gradtrack.analyzers.rl_policy import RLPolicyAnalyzer as RLPolicyAnalyzer
    from gradtrack.analyzers.transformer import TransformerAnalyzer as TransformerAnalyzer
    from gradtrack.analyzers.updates import UpdatesAnalyzer as UpdatesAnalyzer
    from gradtrack.analyzers.vector import VectorAnalyzer as VectorAnalyzer
    from gradtrack.backends.base import Backend as Backend
    from gradtrack.config import GradientConfig as GradientConfig
    from gradtrack.functional import clip_gradients as clip_gradients
    from gradtrack.functional import compute_gradient_norm as compute_gradient_norm
    from gradtrack.functional import compute_gradient_stats as compute_gradient_stats
    from gradtrack.functional import detect_gradient_issues as detect_gradient_issues
    from gradtrack.functional import visualize_layer_gradients as visualize_layer_gradients
    from gradtrack.health.monitor import GradientMonitor as GradientMonitor
    from gradtrack.loop import create_gradient_manager as create_gradient_manager
    from gradtrack.loop import safe_backward as safe_backward
    from gradtrack.loop import watch as watch
    from gradtrack.manager import GradientManager as GradientManager
    from gradtrack.pages.tables import read_run as read_run
    from gradtrack.protection.clipping import GradientClipper as GradientClipper
    from gradtrack.protection.nonfinite import NaNInfHandler as NaNInfHandler
    from gradtrack.records import Metric as Metric
    from gradtrack.records import Panel as Panel
    from gradtrack.records import Record as Record
    from gradtrack.reports import ClippingReport as ClippingReport
    from gradtrack.reports import GradientStatistics as GradientStatistics
    from gradtrack.reports import GroupStatistics as GroupStatistics
    from gradtrack.reports import HealthReport as HealthReport
    from gradtrack.reports import Issue as Issue
    from gradtrack.reports import IssueSeverity as IssueSeverity
    from gradtrack.reports import IssueType as IssueType
    from gradtrack.reports import NanInfReport as NanInfReport
    from gradtrack.reports import ParameterStatistics as ParameterStatistics
    from gradtrack.reports import StepReport as StepReport
    from gradtrack.reports import TrainingSummary as TrainingSummary

_NAMES = {
    "alerts.base": "Alert",
    "analyzers.base": "Analyzer",
    "analyzers.flow": "GradientFlowAnalyzer",
    "analyzers.gain.monitor": "GradientGainMonitor",
    "analyzers.jacobian": "JacobianAnalyzer",
    "analyzers.loss_graph": "preflight",
    "analyzers.precision": "PrecisionAnalyzer",
    "analyzers.recurrent": "RecurrentAnalyzer",
    "analyzers.rl_policy": "RLPolicyAnalyzer",
    "analyzers.transformer": "TransformerAnalyzer",
    "analyzers.updates": "UpdatesAnalyzer",
    "analyzers.vector": "VectorAnalyzer",
    "backends.base": "Backend",
    "config": "GradientConfig",
    "functional": "clip_gradients compute_gradient_norm compute_gradient_stats detect_gradient_issues "
    "visualize_layer_gradients",
    "health.monitor": "GradientMonitor",
    "loop": "create_gradient_manager safe_backward watch",
    "manager": "GradientManager",
    "pages.tables": "read_run",
    "protection.clipping": "GradientClipper",
    "protection.nonfinite": "NaNInfHandler",
    "records": "Metric Panel Record",
    "reports": "ClippingReport GradientStatistics GroupStatistics HealthReport Issue IssueSeverity IssueType "
    "NanInfReport ParameterStatistics StepReport TrainingSummary",
}
"""The public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers take the public names from the imports above
    __all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    """Load a public name on its first use, so that importing the package costs next to nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
