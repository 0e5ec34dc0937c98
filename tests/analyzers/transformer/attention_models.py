"""Small models with attention, called in all the ways that people call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gradtrack import GradientManager, TransformerAnalyzer
from gradtrack.analyzers.base import Schedule, always


class ImportedAttention(nn.Module):
    """Causal attention through a name that was imported from torch."""

    def __init__(self, width: int = 16, heads: int = 4, *, groups: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.groups, self.dropout = heads, groups or heads, dropout
        size = width // heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, size * self.groups)
        self.value, self.out = nn.Linear(width, size * self.groups), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend to what came before."""
        query = self.query(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (part(tokens).unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=self.groups != self.heads
        )
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class HandWrittenAttention(ImportedAttention):
    """The same attention, written out with a softmax."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend to what came before."""
        query, key, value = (
            part(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        logits = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        found: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, attention: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Add attention and a feed-forward part."""
        tokens = tokens + self.attention(self.norm(tokens))
        found: Tensor = tokens + self.feed(tokens)
        return found


class SmallGPT(nn.Module):
    """A language model over 23 tokens."""

    def __init__(self, kind: type[ImportedAttention] = ImportedAttention, *, depth: int = 2, **options: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(23, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(kind(**options)) for _ in range(depth))
        self.head = nn.Linear(16, 23)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token."""
        found = self.tokens(ids) + self.places(torch.arange(ids.shape[-1]))
        for block in self.blocks:
            found = block(found)
        logits: Tensor = self.head(found)
        return logits


class Bare(nn.Module):
    """Layers of attention with neither skips nor anything else."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after every layer."""
        for layer in self.layers:
            tokens = layer(tokens, tokens, tokens, need_weights=False)[0]
        return tokens


def ids(step: int = 0, batch: int = 3, length: int = 12) -> Tensor:
    """Return a batch of token numbers that depends on the step only."""
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(step))


def language_loss(logits: Tensor) -> Tensor:
    """Return the loss of predicting a token that depends on the place."""
    target = (torch.arange(logits.shape[1]) * 7 % 23).expand(logits.shape[0], -1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def every_step(monkeypatch: Any, analyzer: type = TransformerAnalyzer) -> None:
    """Let an analyzer look at every step."""
    schedule: Schedule = always
    monkeypatch.setattr(analyzer, "schedule", staticmethod(schedule))


def train(model: nn.Module, manager: GradientManager | None, steps: int, *, start: int = 0) -> None:
    """Train a language model, with or without a manager."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if manager is not None:
        manager.attach(model, optimizer)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = language_loss(model(ids(step)))
        if manager is None:
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        else:
            manager.step(model, optimizer, loss)
        optimizer.step()
