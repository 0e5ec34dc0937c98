"""The verdict on how a loss is computed: mistakes that its graph shows with certainty.

Each check is one function of one operation of the graph. It returns the issue without its step, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from gradtrack.analyzers.loss_graph.graph import Operation, layer_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

CLASSES: Final = frozenset(("NllLoss", "NllLoss2D"))
DISTANCES: Final = frozenset(("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss"))
_LOGITS: Final = "BinaryCrossEntropyWithLogits"
_NORMALISED: Final = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_ACTIVATIONS: Final = frozenset(("Softmax", "Sigmoid", "Tanh", "Relu", "Gelu", "Silu"))
_DIFFERENCES: Final = frozenset(("Sub", "Rsub"))
_NEGATIONS: Final = frozenset(("Neg", "Rsub"))
_REDUCTIONS: Final = frozenset(("Mean", "Sum"))

Finding = dict[str, Any]
Check = Callable[[Operation, Mapping[str, nn.Parameter]], Finding | None]


def judge(found: Iterable[Operation], params: Mapping[str, nn.Parameter], step: int) -> list[Issue]:
    """Return the issues of a loss's graph, one for each type and layer."""
    issues: dict[str, Issue] = {}
    root: Operation | None = None
    for operation in found:
        root = root or operation
        for check in _CHECKS:
            finding = check(operation, params)
            if finding is not None:
                issue = _issue(finding, step)
                issues.setdefault(issue.key, issue)
    finding = None if root is None else _negated(root, params)
    return [*issues.values(), *([] if finding is None else [_issue(finding, step)])]


def _issue(finding: Finding, step: int) -> Issue:
    return Issue(**{"severity": IssueSeverity.HIGH, "confidence": 0.95, "step": step, **finding})


def _activated_twice(operation: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find probabilities where a loss expects logits: it applies its own softmax or sigmoid to them."""
    logits = _logits_of(operation)
    if logits is None or logits.name not in _NORMALISED:
        return None
    activation = _NORMALISED[logits.name]
    loss = "cross-entropy" if operation.name in CLASSES else "binary cross-entropy with logits"
    layer = layer_of(logits, params)
    return {
        "issue_type": IssueType.ACTIVATED_TWICE,
        "layer": layer,
        "message": f"The {activation} over the output of {layer or 'the model'} goes into a {loss}, which applies its "
        "own: the loss cannot come near zero, and gradients shrink.",
        "recommendation": f"Give the loss the logits: remove the {activation}, or use it for predictions alone.",
    }


def _rectified(operation: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find logits that a ReLU has cut off."""
    logits = _logits_of(operation)
    if logits is None or logits.name != "Relu":
        return None
    layer = layer_of(logits, params)
    return {
        "issue_type": IssueType.RECTIFIED_LOGITS,
        "layer": layer,
        "severity": IssueSeverity.MEDIUM,
        "message": f"A ReLU follows {layer or 'the last layer'}, and the loss takes its output as logits: no logit can "
        "be negative, and a class whose logit is cut off gets no gradient.",
        "recommendation": "Remove the activation behind the last layer.",
    }


def _without_logarithm(operation: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find a negative log-likelihood of numbers that are no logarithms of probabilities."""
    if operation.name not in CLASSES:
        return None
    source = operation.source
    if source is None or not (source.is_layer or source.name in _ACTIVATIONS):
        return None
    layer = layer_of(source, params)
    return {
        "issue_type": IssueType.MISSING_LOG_SOFTMAX,
        "layer": layer,
        "message": f"The negative log-likelihood takes the output of {layer or 'the model'} as logarithms of "
        "probabilities, but no log-softmax computed it: the loss is minus one output, and falls without bound.",
        "recommendation": "Use cross_entropy, or nll_loss over log_softmax.",
    }


def _over_wrong_dimension(operation: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find a softmax over the examples of a batch, or over a single class."""
    if operation.name not in CLASSES:
        return None
    source = operation.source
    softmax = source.source if source is not None and source.name == "Log" else source
    if softmax is None or softmax.name not in ("LogSoftmax", "Softmax") or softmax.dim is None:
        return None
    shape, dim = softmax.shape, softmax.dim
    layer = layer_of(softmax, params)
    if shape[dim] == 1:
        what, remedy = "over a single class, so that it is always 1", "Use a loss with a sigmoid for one output."
    elif len(shape) == 2 and dim == 0 and operation.name == "NllLoss":
        what, remedy = f"over the {shape[0]} examples of a batch instead of their {shape[1]} classes", "Use dim=1."
    else:
        return None
    return {
        "issue_type": IssueType.SOFTMAX_DIMENSION,
        "layer": layer,
        "message": f"The softmax over the output of {layer or 'the model'} runs {what}.",
        "recommendation": remedy,
    }


def _broadcast(operation: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find predictions [B] or [B, 1] that broadcasting compares with every target of a batch: [B, B]."""
    if operation.name in DISTANCES:
        expanded = operation.inputs[0]
        if expanded is None or expanded.name != "Expand":
            return None
        given, compared = expanded.inputs[0], expanded.shape
    elif operation.name in _DIFFERENCES:
        known = [one for one in operation.inputs if one is not None]
        if len(known) != 1 or len(operation.inputs) != 2:
            return None
        given, compared = known[0], operation.shape
    else:
        return None
    if given is None or not _is_square_of(given.shape, compared):
        return None
    layer = layer_of(given, params)
    return {
        "issue_type": IssueType.BROADCAST_LOSS,
        "layer": layer,
        "message": f"The loss compares each of {compared[0]} predictions of {layer or 'the model'} with the targets of "
        f"all: broadcasting made {list(compared)} of {list(given.shape)}. The model learns the mean of the targets.",
        "recommendation": "Give predictions and targets one shape: output.squeeze(1), or target.unsqueeze(1).",
    }


def _is_square_of(shape: tuple[int, ...], compared: tuple[int, ...]) -> bool:
    if len(compared) != 2 or compared[0] != compared[1] or compared[0] < 2:
        return False
    return shape in ((compared[0],), (compared[0], 1))


def _negated(root: Operation, params: Mapping[str, nn.Parameter]) -> Finding | None:
    """Find a loss that is nothing but a loss function with the wrong sign."""
    negative = False
    operation: Operation | None = root
    while operation is not None and (operation.is_reshape or operation.name in _REDUCTIONS | _NEGATIONS):
        negative ^= operation.name in _NEGATIONS
        known = [one for one in operation.inputs if one is not None]
        operation = known[0] if len(known) == 1 else None
    if operation is None or not negative or operation.name not in CLASSES | DISTANCES:
        return None
    layer = layer_of(operation, params)
    return {
        "issue_type": IssueType.NEGATED_LOSS,
        "layer": layer,
        "severity": IssueSeverity.HIGH if operation.name in CLASSES else IssueSeverity.MEDIUM,
        "message": "The loss is a loss function with the opposite sign: the training makes predictions worse, and the "
        "loss falls without bound.",
        "recommendation": "Remove the minus before the loss. Where that is on purpose, mute NEGATED_LOSS.",
    }


def _logits_of(operation: Operation) -> Operation | None:
    """Return what a loss that normalises by itself takes as logits; None for any other operation."""
    if operation.name == _LOGITS:
        return operation.source
    if operation.name in CLASSES and (source := operation.source) is not None and source.name == "LogSoftmax":
        return source.source
    return None


_CHECKS: Final[tuple[Check, ...]] = (
    _activated_twice,
    _rectified,
    _without_logarithm,
    _over_wrong_dimension,
    _broadcast,
)
