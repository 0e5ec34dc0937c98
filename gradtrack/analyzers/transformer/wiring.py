"""How attention is wired: the scale of its scores, the axis of its softmax, its mask, and what goes past a block.

Each rule reads what the forward pass did, not how well the training goes, so that it is sure at the first look:

- ATTN_SCALE: the scores that go into the softmax are the product of queries and keys times √d (or d) where it should be
  over √d. Queries and keys of one length, as in cosine attention, may be scaled by anything.
- SOFTMAX_DIMENSION: the softmax runs over one axis of the scores, and the values are summed over another.
- ATTN_MASK: in self-attention each place sees exactly one later one, sees all but itself of what came before, or sees
  later places only; or all that is seen of a sequence is its padding.
- NO_SKIP: nothing but matrix products leads from the input of a block to its output. Only blocks with a feed-forward
  part are judged, of which the model has several, since pooling by attention needs no skip connection.
- NO_PROJECTION: the values of several heads go into the sum with the block's input without a matrix in between.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import Pending, Reading
from gradtrack.analyzers.transformer.statistics import AttentionRows, are_constant
from gradtrack.reports import Issue, IssueSeverity, IssueType, usual_confidence

KINDS: Final = (
    IssueType.ATTN_SCALE,
    IssueType.ATTN_MASK,
    IssueType.SOFTMAX_DIMENSION,
    IssueType.NO_SKIP,
    IssueType.NO_PROJECTION,
)
"""The types of issues that are about wiring, which count as soon as a forward pass shows them."""

_EXACT: Final = 0.01
_FEWEST: Final = 8
_LARGE: Final = 1.5
_REACHABLE: Final = 5000.0


@dataclass(slots=True)
class _Product:
    """A product of two tensors: its shape, its first plane, the size that was summed over, and its operands."""

    shape: torch.Size
    plane: Tensor
    size: int
    operands: tuple[Tensor, Tensor]
    axes: tuple[int, int]


@dataclass(slots=True)
class _Weights:
    """The result of a softmax over a product: the axis that it ran over, its shape and its first plane."""

    layer: str
    dim: int
    shape: torch.Size
    plane: Tensor


@dataclass(slots=True)
class Wiring:
    """What a forward pass shows of how attention is wired; `issues` has the first of each type."""

    issues: dict[IssueType, Issue] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    ids: Tensor | None = None
    _product: _Product | None = None
    _weights: _Weights | None = None

    def add(self, found: Issue | None) -> None:
        """Keep an issue, unless one of its type was found in an earlier layer."""
        if found is not None:
            self.issues.setdefault(found.issue_type, found)

    def wait(self, found: Pending[Issue | None]) -> None:
        """Keep an issue once its tensors are read."""
        self.reading.add(found.tensors, lambda *values: self.add(found.finish(*values)))

    def release(self) -> None:
        """Let go of the tensors of the pass."""
        self._product = self._weights = self.ids = None

    def on_product(self, operands: tuple[Tensor, Tensor], axes: tuple[int, int], result: Tensor) -> None:
        """Take a product that was summed over one axis of each operand."""
        weights, self._weights = self._weights, None
        if weights is not None:
            self.add(_wrong_axis(weights, operands, axes))
        if result.ndim >= 3 and min(result.shape[-2:]) > 1:
            self._product = _Product(result.shape, _plane(result), operands[0].shape[axes[0]], operands, axes)

    def matches(self, logits: Tensor) -> bool:
        """Whether logits were made of the last product, element by element."""
        product = self._product
        return product is not None and _is_same(product.shape, logits.shape)

    def on_logits(self, layer: str, logits: Tensor) -> None:
        """Take what goes into a softmax, and compare its scale with that of the product that it was made of."""
        product = self._product
        if product is None or not _is_same(product.shape, logits.shape):
            return
        raw, scores = product.plane.double(), _plane(logits).double()
        seen = scores.isfinite() & (scores.abs() < _REACHABLE) & (raw.abs() > 1e-3 * raw.abs().amax())
        count = seen.sum()
        if count.is_cpu and int(count) < _FEWEST:
            return
        ratios = torch.where(seen, scores / raw, math.nan)
        factor = ratios.nanmedian()
        gap = torch.where(seen, (ratios - factor).abs(), 0.0).amax()
        heads = logits.shape[1] if logits.ndim == 4 else 1
        if count.is_cpu and not float(gap) <= _EXACT * abs(float(factor)):
            return
        lengths = [operand.norm(dim=axis) for operand, axis in zip(product.operands, product.axes, strict=True)]
        constant = torch.stack([are_constant(length) for length in lengths])
        judge = partial(_judge_scale, layer, product.size, heads)
        self.wait(Pending([count, factor, gap, constant], judge))

    def on_weights(self, layer: str, dim: int | None, result: Tensor) -> None:
        """Take the result of a softmax over the last product."""
        product, self._product = self._product, None
        if product is not None and _is_same(product.shape, result.shape):
            dim = (0 if result.ndim == 3 else 1) if dim is None else dim % result.ndim
            self._weights = _Weights(layer, dim, result.shape, _plane(result))


def _judge_scale(
    layer: str, size: int, heads: int, count: Tensor, factor: Tensor, gap: Tensor, constant: Tensor
) -> Issue | None:
    if int(count) < _FEWEST or not float(gap) <= _EXACT * abs(float(factor)):
        return None
    return None if bool(constant.all()) else _wrong_factor(layer, float(factor), size, heads)


def wrong_scale(layer: str, factor: float, size: int, heads: int, lengths: Sequence[Tensor]) -> Issue | None:
    """Judge the factor of scores that were summed over `size` features; `lengths` are those of queries and keys."""
    found = _wrong_factor(layer, factor, size, heads)
    return None if found is None or all(bool(are_constant(length)) for length in lengths) else found


def _wrong_factor(layer: str, factor: float, size: int, heads: int) -> Issue | None:
    root = math.sqrt(size)
    wrong = (root, size, math.sqrt(size * heads), size * heads)
    if size < 4 or not any(abs(factor - one) <= _EXACT * one and one > _LARGE for one in wrong):
        return None
    return Issue(
        issue_type=IssueType.ATTN_SCALE,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=(
            f"Attention scores are multiplied by {factor:.3g}, where their {size} features ask for {1 / root:.3g}: "
            "the softmax looks at one key, and its gradient vanishes."
        ),
        statistic="score_scale",
        value=factor,
        threshold=1 / root,
        confidence=usual_confidence(IssueType.ATTN_SCALE),
        recommendation="Divide the scores by the root of the number of features of a head.",
    )


def judge_mask(layer: str, rows: AttentionRows, ids: Tensor | None) -> Pending[Issue | None]:
    """Judge which keys the rows of a self-attention see."""
    if rows.index is None:
        return Pending([], lambda: None)
    shown = rows.visible.any(1)
    num_keys = shown.shape[-1]
    tokens = []
    if ids is not None and ids.ndim == 2 and num_keys in ids.shape:
        tokens = [(ids if ids.shape[1] == num_keys else ids.T)[: len(shown)]]
    return Pending([rows.index, shown.any(0), shown.any(1), *tokens], partial(_judge_mask, layer))


def _judge_mask(layer: str, index: Tensor, seen: Tensor, keys: Tensor, tokens: Tensor | None = None) -> Issue | None:
    odd = seen.all(-1) if not bool(seen.all()) else torch.zeros_like(seen[:, 0])  # a finite mask that hides all
    place = torch.arange(seen.shape[-1])
    told = ~odd & (index >= 2) & (index < len(place) - 1)
    if int(told.sum()) < 3:
        return None
    rest, gap = seen[told], place - index[told].unsqueeze(-1)
    before, itself, following, later = (bool(rest[where].all()) for where in (gap < 0, gap == 0, gap == 1, gap > 1))
    none = [not bool(rest[where].any()) for where in (gap < 0, gap == 0, gap == 1, gap > 1)]
    behind = bool(rest[(gap < -1) & (gap > -3)].all())
    if itself and following and none[3] and not none[0] and (before or behind):
        return _mask(
            layer,
            "Every place sees itself and the next one, and nothing later: the mask is off by one diagonal, and what "
            "is to be predicted can be copied.",
            "Hide everything above the main diagonal: triu(diagonal=1) is what is hidden, tril() what is seen.",
            IssueSeverity.HIGH,
        )
    if before and none[1] and none[2] and none[3]:
        return _mask(
            layer,
            "Every place sees all that came before it and not itself, and the first sees nothing: the mask is off by "
            "one diagonal.",
            "Let each place see itself: triu(diagonal=1) is what is hidden, tril() what is seen.",
            IssueSeverity.MEDIUM,
        )
    if none[0] and following and later:
        return _mask(
            layer,
            "Every place sees later ones and nothing that came before: the mask is the wrong way round.",
            "Invert the mask. True means hidden in nn.MultiheadAttention, seen in scaled_dot_product_attention.",
            IssueSeverity.HIGH,
        )
    return None if tokens is None else _only_padding(layer, keys, tokens)


def _only_padding(layer: str, keys: Tensor, tokens: Tensor) -> Issue | None:
    """Judge keys that all rows of a sequence share: one token repeated, while all others are hidden, is padding."""
    hides = [
        (set(token[~key].tolist()), set(token[key].tolist()))
        for token, key in zip(tokens, keys, strict=False)
        if bool(key.any()) and not bool(key.all())
    ]
    kept = {one for _, seen in hides for one in seen}
    if not hides or len(kept) != 1 or not all(len(hidden) > 1 and not hidden & kept for hidden, _ in hides):
        return None
    return _mask(
        layer,
        f"Attention sees only the keys of the token {kept.pop()}, which is repeated, and hides all others: the mask of "
        "the padding is the wrong way round.",
        "Invert the mask: True means hidden in key_padding_mask, seen in scaled_dot_product_attention.",
        IssueSeverity.HIGH,
    )


def _mask(layer: str, message: str, recommendation: str, severity: IssueSeverity) -> Issue:
    return Issue(
        issue_type=IssueType.ATTN_MASK,
        severity=severity,
        layer=layer,
        message=message,
        confidence=usual_confidence(IssueType.ATTN_MASK),
        recommendation=f"{recommendation} Where that is on purpose, mute ATTN_MASK.",
    )


def judge_blind(layer: str, rows: AttentionRows) -> Pending[Issue | None]:
    """Judge rows whose every key is hidden by minus infinity: their softmax is NaN."""
    blind = ~rows.visible.any(-1)
    return Pending([blind.sum()], partial(_judge_blind, layer, blind.numel()))


def _judge_blind(layer: str, num_rows: int, blind: Tensor) -> Issue | None:
    count = int(blind)
    if not count:
        return None
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.CRITICAL,
        layer=layer,
        message=f"{count} of {num_rows} rows of attention see no key: a softmax over nothing but -inf is NaN.",
        statistic="rows_without_keys",
        value=float(count),
        threshold=0.0,
        confidence=usual_confidence(IssueType.NUMERICAL),
        recommendation="Let every row see one key, or mask with a large finite number: padding that hides a whole "
        "sequence, or a mask that is the wrong way round, hides all.",
    )


_HEAVY: Final = re.compile(r"(mm|Mm|Bmm|Linear|Convolution|Attention\w*|Softmax|Embedding|Mv)Backward\d*$")
_PRODUCT: Final = re.compile(r"(Bmm|Attention\w*)Backward\d*$")
_TURNED: Final = re.compile(
    r"(T|View|UnsafeView|ReshapeAlias|Transpose|Permute|Unsqueeze|Squeeze|Expand|ToCopy|Clone|AsStrided)Backward\d*$"
)
_MOST: Final = 2000


def judge_block(
    name: str, module: nn.Module, attended: Mapping[str, int], before: Tensor, after: Tensor
) -> list[Issue]:
    """Judge the way past the parts of a block; `attended` has the number of heads by the name of each attention.

    A way through a single matrix is one, as the shortcuts of residual networks and of Set Transformers are.
    """
    owned = {id(param): part for part, param in module.named_parameters() if param.ndim > 1}
    inner = [one.removeprefix(name).lstrip(".") for one in attended]
    others = [part for part in owned.values() if not any(_is_within(part, one) for one in inner)]
    first, last = before.grad_fn, after.grad_fn
    if first is None or last is None or (len(others) < 2 and not ("" in inner and len(owned) >= 5)):
        return []
    passed = _num_products(last, first, owned)
    if passed[first] > 1:
        of_attention = {key: part for key, part in owned.items() if part not in others}
        near = {_param_of(node) for node, count in passed.items() if count == 1}
        if "" in inner:
            around = "its attention or its feed-forward part"
        elif _num_products(last, first, of_attention)[first] == 0:
            around = "its feed-forward part"
        else:
            around = "its attention" if near & of_attention.keys() else "any of its parts"
        return [
            Issue(
                issue_type=IssueType.NO_SKIP,
                severity=IssueSeverity.MEDIUM,
                layer=name,
                message=f"No skip connection leads around {around}: the block's input comes through matrices alone.",
                confidence=usual_confidence(IssueType.NO_SKIP),
                recommendation="Add the input of each part to its output: x + attention(norm(x)), x + feed(norm(x)).",
            )
        ]
    direct = [node for node, count in passed.items() if count == 1 and _PRODUCT.search(node.name())]
    if passed[first] == 0 and max(attended.values()) > 1 and any(_param_of(node) is None for node in direct):
        return [
            Issue(
                issue_type=IssueType.NO_PROJECTION,
                severity=IssueSeverity.MEDIUM,
                layer=next(iter(attended)),
                message=f"The values of {max(attended.values())} heads are added to the block's input side by side: no "
                "output projection mixes them.",
                confidence=0.8,
                recommendation="Pass the heads together through a linear layer before they are added.",
            )
        ]
    return []


def _num_products(start: Any, end: Any, counted: Mapping[int, str]) -> dict[Any, int]:
    """Return for each operation the least number of products on a way to it, its own among them; `end` is one of them.

    Only products with the parameters in `counted` count, and those without any.
    """
    found, waiting = {end: 2}, deque([(start, 0)])  # unless a way is found that has fewer
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST:
        node, before = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        param = _param_of(node) if node is not end and _HEAVY.search(node.name()) else 0
        count = before + (param is None or param in counted)
        found[node] = count if node is not end else min(count, 2)
        if node is end or count > 1:
            continue
        further = [(one, count) for one, _ in node.next_functions if one is not None and one not in seen]
        for one in further:  # the least number first
            if count:
                waiting.append(one)
            else:
                waiting.appendleft(one)
    return found


def _param_of(node: Any) -> int | None:
    """Return the id of the parameter that an operation takes, as it is or turned round; None without one."""
    for further, _ in node.next_functions:
        while further is not None and _TURNED.search(further.name()) and further.next_functions:
            further = further.next_functions[0][0]
        variable = getattr(further, "variable", None)
        if variable is not None and variable.ndim > 1:
            return id(variable)
    return None


def _wrong_axis(weights: _Weights, operands: tuple[Tensor, Tensor], axes: tuple[int, int]) -> Issue | None:
    """Judge the product of attention weights with values: what it is summed over is what the softmax runs over."""
    for operand, axis in zip(operands, axes, strict=True):
        if operand.shape == weights.shape and axis % operand.ndim != weights.dim:
            break
    else:
        return None
    used, plane = _plane(operand).double(), weights.plane.double()
    kept = (used != 0) & used.isfinite() & plane.isfinite()  # over another axis it may be NaN where all is hidden
    ratios = used[kept] / plane[kept]
    if not len(ratios) or not bool(((ratios - ratios[0]).abs() <= _EXACT * ratios[0].abs()).all()):
        return None  # changed since: turned round, or made to sum up to one again
    over = {operand.ndim - 2: "queries", operand.ndim - 1: "keys", 0: "examples of a batch"}.get(weights.dim, "heads")
    return Issue(
        issue_type=IssueType.SOFTMAX_DIMENSION,
        severity=IssueSeverity.HIGH,
        layer=weights.layer,
        message=f"The softmax of attention runs over its {over}, and values are summed over another axis: the weights "
        "of a query do not sum up to one.",
        confidence=usual_confidence(IssueType.SOFTMAX_DIMENSION),
        recommendation="Take the softmax over the keys: dim=-1 of scores whose rows are queries.",
    )


def _plane(values: Tensor) -> Tensor:
    """Return a copy of the first (rows, columns) of a tensor."""
    return values.detach()[(0,) * (values.ndim - 2)].clone()


def _is_same(first: Iterable[int], second: Iterable[int]) -> bool:
    """Whether two shapes have the same rows and columns, and as many of them."""
    one, other = list(first), list(second)
    return one[-2:] == other[-2:] and math.prod(one) == math.prod(other)


def _is_within(part: str, module: str) -> bool:
    return not module or part == module or part.startswith(f"{module}.")
