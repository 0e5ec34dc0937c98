"""The two models whose training steps are timed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = x + self.out(F.gelu(self.fc(self.ln_2(x))))
        return after


class SmallGPT(nn.Module):
    """A language model of about seven million parameters."""

    def __init__(self, vocabulary: int = 4096, width: int = 256, depth: int = 6, length: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class Training:
    """A model with its optimizer and batches; `forward` gives the loss of the next batch."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        if name == "gpt":
            self.model: nn.Module = SmallGPT()
            self._batches = [torch.randint(0, 4096, (4, 64)) for _ in range(8)]
        else:
            self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            self._batches = [torch.randn(64, 32) for _ in range(8)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._turn = 0

    def forward(self) -> Tensor:
        """Return the loss of the next batch."""
        self._turn += 1
        batch = self._batches[self._turn % len(self._batches)]
        if self.name == "gpt":
            logits = self.model(batch)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        return F.cross_entropy(self.model(batch), batch[:, 0].gt(0).long())
