"""Handling of non-finite gradients and weights: skip, replace, report or raise; and where data hold such values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from gradtrack.config import GradientConfig
from gradtrack.errors import NonFiniteGradientError
from gradtrack.gradients.collected import Gradients
from gradtrack.gradients.distributed.shards import is_distributed
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import NAN, NEGINF, POSINF, Moments, replaced
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.reports import NanInfReport, NonFiniteParameter

_NAMED_IN_ERRORS: Final = 5


class NaNInfHandler:
    """Counts NaN and Inf per named parameter before anything is changed, and acts as its configuration says."""

    def __init__(self, config: GradientConfig | None = None, *, measurer: Measurer | None = None) -> None:
        self.config = config if config is not None else GradientConfig()
        self._measurer = measurer if measurer is not None else Measurer(self.config.engine)

    def check_and_fix_gradients(self, model: nn.Module) -> NanInfReport:
        """Measure the gradients that a model has now, and handle the non-finite ones."""
        grads = ParameterTable(model).gradients()
        moments = grads.measure(self._measurer)
        if moments.finite:
            return NanInfReport()
        found = self.act(grads, moments, grads.layout.params)
        if found["action"] == "raise":
            raise self.error(found)
        return NanInfReport(**found)

    def check_and_fix_parameters(self, model: nn.Module, replace_values: bool = True) -> NanInfReport:
        """Measure the weights, frozen ones too; with `replace_values` replace the non-finite ones."""
        named = [(name, one) for name, one in model.named_parameters() if one.is_floating_point() or one.is_complex()]
        weights = [param.detach() for _, param in named]
        tensors = [torch.view_as_real(one) if one.is_complex() else one for one in weights]
        moments = self._measurer.measure(tensors, torch.zeros(len(named), dtype=torch.int64).numpy(), 1)
        if moments.finite:
            return NanInfReport()
        found = count_nonfinite([name for name, _ in named], moments)
        if not replace_values:
            return NanInfReport(**found, action="report")
        self.replace(tensors[index] for index in moments.nonfinite_rows())
        return NanInfReport(**found, action="replace", replaced_count=moments.nonfinite_count)

    def act(self, grads: Gradients, moments: Moments, owned: Iterable[Tensor]) -> dict[str, Any]:
        """Handle gradients of which some are not finite; `skip` removes the gradients of the `owned` parameters.

        For `raise` gradients stay as they are, and the caller raises `error(found)` after recording the step.
        """
        found = count_nonfinite(grads.layout.names, moments)
        action = self.config.nonfinite_action
        if action == "skip":
            for param in owned:
                param.grad = None
        elif action == "replace":
            grads.own()
            self.replace(grads.tensors[index] for index in moments.nonfinite_rows())
            grads.install()
            return {**found, "action": action, "replaced_count": moments.nonfinite_count}
        return {**found, "action": action}

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Replace NaN and Inf in place; an infinity keeps its sign and stays within the range of its type."""
        for tensor in tensors:
            nan, limit = self.replacement(tensor.dtype)
            torch.nan_to_num_(tensor.detach(), nan=nan, posinf=limit, neginf=-limit)

    def replaced(self, layout: Layout, dtypes: Sequence[torch.dtype], moments: Moments) -> Moments:
        """Return the sums of gradients after `replace`, computed from the counts without measuring again."""
        pairs = {dtype: self.replacement(dtype) for dtype in set(dtypes)}
        nan, infinity = np.array([pairs[dtype] for dtype in dtypes]).reshape(-1, 2).T
        return replaced(moments, nan, infinity, layout.group_of, len(layout.group_names))

    @staticmethod
    def error(found: Mapping[str, Any]) -> NonFiniteGradientError:
        """Return the exception that names the worst parameters."""
        parameters = found["parameters"]
        worst = ", ".join(str(parameter) for parameter in parameters[:_NAMED_IN_ERRORS])
        more = len(parameters) - _NAMED_IN_ERRORS
        rest = f" and {more} more" if more > 0 else ""
        return NonFiniteGradientError(
            f"{found['nan_count'] + found['inf_count']} non-finite gradient elements in {worst}{rest}: "
            "expected finite gradients. Look at the loss and the data of this batch, "
            "or set nonfinite_action='skip' to leave such steps out."
        )

    def replacement(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the values that replace NaN and infinity in tensors of a type: those of the configuration, rounded."""
        return rounded(self.config.replace_nan_with, dtype), rounded(self.config.replace_inf_with, dtype)

    def is_critical(self, moments: Moments, count: int) -> bool:
        """Whether the share of non-finite elements is above `nan_inf_threshold`."""
        return moments.nonfinite_count > self.config.nan_inf_threshold * count


def count_nonfinite(names: Sequence[str], moments: Moments) -> dict[str, Any]:
    """Return the counts of a `NanInfReport`, in total and for each tensor that has any, the worst first."""
    total = moments.total
    rows = {index: [int(count) for count in moments.rows[index, NAN:]] for index in moments.nonfinite_rows()}
    worst = sorted(rows, key=lambda index: -sum(rows[index]))
    return {
        "nan_count": int(total[NAN]),
        "inf_count": int(total[POSINF] + total[NEGINF]),
        "positive_inf_count": int(total[POSINF]),
        "negative_inf_count": int(total[NEGINF]),
        "parameters": [
            NonFiniteParameter(
                name=names[index],
                nan_count=rows[index][0],
                positive_inf_count=rows[index][1],
                negative_inf_count=rows[index][2],
            )
            for index in worst
        ],
    }


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Set gradients to zero, which can still be read, and by which a loop that steps by hand moves nothing."""
    for param in params:
        if param.grad is not None:
            try:
                param.grad.detach().zero_()
            except RuntimeError:  # one whose elements share their memory
                param.grad = None


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a number as a type holds it; without torch, which may be tracing operations that read nothing."""
    edge = torch.finfo(dtype).max
    value = min(max(value, -edge), edge)
    if dtype == torch.bfloat16:  # the upper half of a float32, rounded to even
        bits = int(np.float32(value).view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    if dtype == torch.float16:
        return float(np.float16(value))
    return float(np.float32(value)) if dtype == torch.float32 else value


_DEEPEST: Final = 8


def nonfinite_parts(value: Any, name: str, path: str = "") -> Iterator[tuple[Any, str]]:
    """Yield each tensor or array in a nested value that holds NaN or infinities, with how many and where the first is.

    `name` is what the value is called, with {} for the keys that lead to a part of it.
    """
    if isinstance(value, (Tensor, np.ndarray, float)):
        if text := _nonfinite_elements(value):
            yield value, f"{name.format(path)} has {text}"
    elif path.count("[") < _DEEPEST:
        for key, part in _entries(value):
            yield from nonfinite_parts(part, name, f"{path}[{key!r}]")


def nonfinite_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], module: str) -> Iterator[tuple[Any, str]]:
    """Yield what `nonfinite_parts` does for the inputs of a module."""
    for key, value in chain(enumerate(args), kwargs.items()):
        yield from nonfinite_parts(value, f"input {key}{{}} of {module}")


def first_nonfinite(found: Iterable[tuple[Any, str]]) -> str:
    """Return what is said of the first part that holds NaN, else of the first at all; nothing where there is none."""
    texts = [text for _, text in found]
    return next((text for text in texts if " NaN" in text), texts[0] if texts else "")


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value):
        return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return ()


def _nonfinite_elements(value: Tensor | np.ndarray[Any, Any] | float) -> str:
    """Return "2 NaN, the first at [0, 1]", or nothing; a mask of zeros and -inf, which is added to scores, is none."""
    if isinstance(value, float) and math.isfinite(value):
        return ""
    if not isinstance(value, Tensor):
        kind = np.asarray(value).dtype.kind
        wide = np.complex128 if kind == "c" else np.float64
        value = torch.from_numpy(np.array(value, dtype=wide)) if kind in "fc" else torch.empty(0)
    value = value.detach()
    is_plain = value.layout is torch.strided and not (value.is_nested or value.is_meta or is_distributed(value))
    if not (is_plain and value.numel() and (value.is_floating_point() or value.is_complex())):
        return ""
    value = value.float() if value.element_size() == 1 else value
    found = {"NaN": value.isnan(), "Inf": value.isinf()}
    counts = {kind: int(there.sum()) for kind, there in found.items()}
    total = sum(counts.values())
    if not total:
        return ""
    if not (counts["NaN"] or value.is_complex()) and bool((value <= 0).all() and (value == 0).any()):
        return ""
    where = found["NaN"] if counts["NaN"] else found["Inf"]
    place = np.unravel_index(int(where.reshape(-1).to(torch.uint8).argmax()), value.shape)
    text = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    at = f"{', the first' if total > 1 else ''} at {[int(index) for index in place]}" if value.ndim else ""
    return f"{text}{at}"
