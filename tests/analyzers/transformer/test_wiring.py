"""How attention is wired: each mistake is named with its layer in a single forward pass, and its mended twin is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention

from gradtrack import Issue, TransformerAnalyzer
from tests.analyzers.transformer.wired import (
    FAULTY,
    HEALTHY,
    LENGTH,
    WIDTH,
    Library,
    OneHead,
    Torch,
    Transformer,
    Wiring,
    batch_of,
)


def issues_of(model: nn.Module, causal: bool = True) -> list[Issue]:
    """Return the issues of one forward and backward pass."""
    given, targets = batch_of(causal)
    analyzer = TransformerAnalyzer(model)
    return analyzer.analyze(lambda: given, lambda out: cross_entropy(out.flatten(0, 1), targets.flatten()), steps=1)[0]


def named(issues: list[Issue]) -> list[tuple[str, str]]:
    """Return types and layers."""
    return [(issue.issue_type.value, issue.layer) for issue in issues]


def label(one: Wiring) -> str:
    """Return the name of a program."""
    return f"{one.kind.__name__} {one.fault or 'healthy'} {'post' if one.post_norm else 'pre'}"


@pytest.mark.parametrize("one", [one for one in FAULTY if one.named != "EQUAL_UNITS"], ids=label)
def test_a_mistake_is_named_with_its_layer(one: Wiring) -> None:
    """One forward pass of an untrained model is enough."""
    torch.manual_seed(0)
    model = Transformer(one.kind, one.fault, post_norm=one.post_norm)
    assert (one.named, one.layer) in named(issues_of(model))


@pytest.mark.parametrize("one", HEALTHY, ids=label)
def test_its_twin_is_left_alone(one: Wiring) -> None:
    """The same models without a mistake have no issue."""
    torch.manual_seed(0)
    assert issues_of(Transformer(one.kind, post_norm=one.post_norm)) == []


class Cosine(Library):
    """Attention by cosines, whose scores may be scaled by any number."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=8**0.5)
        found: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return found


class ByHand(Library):
    """A product whose rows are keys, so that the softmax runs over its second axis from the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        weights = (k @ q.transpose(-2, -1) / 8**0.5).softmax(dim=-2)
        found: Tensor = self.proj((weights.transpose(-2, -1) @ v).transpose(1, 2).flatten(2))
        return found


class Window(Torch):
    """A window of one place on either side, and the first as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the neighbours."""
        place = torch.arange(LENGTH)
        hidden = (place - place.unsqueeze(1)).abs() > 1
        found: Tensor = self.inner(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return found


class Padded(Torch):
    """The mask of the padding, of token 0, in the right way or the wrong one."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what is no padding."""
        hidden = PADDED == 0
        hidden = ~hidden if self.fault == "inverted" else hidden
        found: Tensor = self.inner(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return found


PADDED = torch.randint(1, 17, (8, LENGTH), generator=torch.Generator().manual_seed(0))
for row in range(8):
    PADDED[row, LENGTH - 3 - row % 3 :] = 0


@pytest.mark.parametrize("kind", [Cosine, ByHand, Window])
def test_what_only_looks_like_a_mistake_is_left_alone(kind: type[nn.Module]) -> None:
    """Cosines times √d, a product with keys as rows and a window of neighbours are meant."""
    torch.manual_seed(0)
    assert issues_of(Transformer(kind), causal=False) == []


@pytest.mark.parametrize(("fault", "found"), [("inverted", [("ATTN_MASK", "blocks.0.attention.inner")]), ("", [])])
def test_attention_to_padding_alone_is_named(fault: str, found: list[tuple[str, str]]) -> None:
    """The tokens that the embedding takes tell what is padding."""
    torch.manual_seed(0)
    model = Transformer(Padded, fault)
    analyzer = TransformerAnalyzer(model)
    assert named(analyzer.analyze(lambda: PADDED, lambda out: out.square().mean(), steps=1)[0]) == found


class Opened(OneHead):
    """Rows that see nothing, whose NaN is taken away before it does harm."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all, but for the last place."""
        scores = torch.bmm(self.to_q(x), self.to_k(x).transpose(1, 2)) * WIDTH**-0.5
        hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        hidden[-1] = True
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
        found: Tensor = self.out(torch.bmm(weights, self.to_v(x)))
        return found


class Induced(nn.Module):
    """A block of a Set Transformer: its skip connection goes through one matrix, and its heads are not mixed."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all."""
        q, k, v = (torch.cat(part(x).chunk(4, -1)) for part in (self.q, self.k, self.v))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / WIDTH**0.5, 2)
        found = torch.cat((q + weights.bmm(v)).chunk(4), -1)
        more: Tensor = self.more(self.o(found).relu())
        return found + more


def test_a_skip_connection_through_one_matrix_is_one() -> None:
    """The attention of sets has its own way of writing a residual sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Induced(""), Induced(""), nn.Linear(WIDTH, 2))
    given = torch.randn(4, LENGTH, WIDTH)
    assert TransformerAnalyzer(model).analyze(lambda: given, lambda out: out.square().mean(), steps=1)[0] == []


def test_rows_that_see_nothing_and_do_no_harm_are_left_alone() -> None:
    """Weights of NaN that are set to zero leave a finite loss."""
    torch.manual_seed(0)
    assert issues_of(Transformer(Opened), causal=False) == []


def test_pooling_needs_no_skip_connection() -> None:
    """A single attention that reads a sequence, and a stack of attentions without feed-forward parts, are no blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Library(""), Library(""), nn.Linear(WIDTH, 2))
    analyzer = TransformerAnalyzer(model)
    given = torch.randn(4, LENGTH, WIDTH)
    assert analyzer.analyze(lambda: given, lambda out: out.square().mean(), steps=1)[0] == []
