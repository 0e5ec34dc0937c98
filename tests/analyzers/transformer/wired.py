"""Small transformers in four styles of writing, each with mistakes of wiring that can be switched on."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH: Final = 32
HEADS: Final = 4
LENGTH: Final = 12
TOKENS: Final = 17


class ManyHeads(nn.Module):
    """Attention of a language model, written out: one projection for all heads, a buffer for the mask."""

    mask: Tensor

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        ones = torch.ones(LENGTH, LENGTH)
        masks = {"sees the next": ones.tril(1), "inverted": ones.triu(), "not itself": ones.tril(-1)}
        self.register_buffer("mask", masks.get(fault, ones.tril()))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scale = math.sqrt(q.shape[-1])
        scores = q @ k.transpose(-2, -1)
        scores = scores * scale if self.fault == "multiplied" else scores / scale
        scores = scores.masked_fill(self.mask == 0, -1e9 if self.fault == "not itself" else float("-inf"))
        weights = F.softmax(scores, dim={"over queries": -2, "over heads": 1}.get(self.fault, -1))
        mixed = (self.dropout(weights) @ v).transpose(1, 2).flatten(2)
        found: Tensor = mixed if self.fault == "no projection" else self.proj(mixed)
        return found


class OneHead(nn.Module):
    """Attention of an encoder with one head: three linear layers, bmm and nn.Softmax."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.normalise = nn.Softmax(dim=1 if fault == "over queries" else 2)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all."""
        scores = torch.bmm(self.to_q(x), self.to_k(x).transpose(1, 2))
        scores = scores * WIDTH**0.5 if self.fault == "multiplied" else scores * WIDTH**-0.5
        if self.fault == "nothing to see":
            hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
            hidden[-1] = True
            scores = scores.masked_fill(hidden, float("-inf"))
        found: Tensor = self.out(torch.bmm(self.normalise(scores), self.to_v(x)))
        return found


class Summed(nn.Module):
    """Attention by einsum, with heads on the third axis."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q, self.k, self.v))
        energy = torch.einsum("bqhd,bkhd->bhqk", q, k)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2 if self.fault == "sees the next" else 1)
        if self.fault == "inverted":
            hidden = ~hidden
        energy = energy.masked_fill(hidden, -1e20)
        root = (WIDTH // HEADS) ** 0.5
        energy = energy * root if self.fault == "multiplied" else energy / root
        attention = torch.softmax(energy, dim=2 if self.fault == "over queries" else 3)
        found: Tensor = self.o(torch.einsum("bhqk,bkhd->bqhd", attention, v).flatten(2))
        return found


class Library(nn.Module):
    """Attention of the library: torch's fused function."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        masks = {"inverted": ones.triu(), "sees the next": ones.tril(1), "nothing to see": ones.triu(1)}
        scale = q.shape[-1] ** 0.5 if self.fault == "multiplied" else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=masks.get(self.fault, ones.tril()), scale=scale)
        mixed = mixed.transpose(1, 2).flatten(2)
        found: Tensor = mixed if self.fault == "no projection" else self.proj(mixed)
        return found


class Torch(nn.Module):
    """torch's own module, whose mask says what is hidden."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before."""
        ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        hidden = {"inverted": ones.tril(-1), "sees the next": ones.triu(2), "nothing to see": ones.tril()}
        found: Tensor = self.inner(x, x, x, attn_mask=hidden.get(self.fault, ones.triu(1)), need_weights=False)[0]
        return found


class Block(nn.Module):
    """A block with norms before its two parts, or after them."""

    def __init__(self, attention: nn.Module, fault: str, *, post_norm: bool) -> None:
        super().__init__()
        self.attention, self.fault, self.post_norm = attention, fault, post_norm
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        if fault in ("constant weights", "zero weights"):
            for layer in (part for part in self.feed if isinstance(part, nn.Linear)):
                nn.init.constant_(layer.weight, 0.0 if fault == "zero weights" else 0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Run both parts."""
        around = self.fault not in ("no residual", "no residual around attention")
        beyond = self.fault not in ("no residual", "no residual around feed")
        first, second = (nn.Identity(), nn.Identity()) if self.post_norm else (self.norm1, self.norm2)
        found: Tensor = self.attention(first(x))
        x = x + found if around else found
        x = self.norm1(x) if self.post_norm else x
        found = self.feed(second(x))
        x = x + found if beyond else found
        return self.norm2(x) if self.post_norm else x


class Transformer(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, kind: type[nn.Module], fault: str = "", *, post_norm: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind(fault), fault, post_norm=post_norm) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits for each place."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Wiring(NamedTuple):
    """A style of attention, a fault in it, and the type and layer by which it is named."""

    kind: type[nn.Module]
    fault: str
    named: str
    layer: str
    post_norm: bool = False


FAULTY: Final = [
    Wiring(ManyHeads, "multiplied", "ATTN_SCALE", "blocks.0.attention"),
    Wiring(OneHead, "multiplied", "ATTN_SCALE", "blocks.0.attention"),
    Wiring(Summed, "multiplied", "ATTN_SCALE", "blocks.0.attention"),
    Wiring(Library, "multiplied", "ATTN_SCALE", "blocks.0.attention"),
    Wiring(ManyHeads, "over queries", "SOFTMAX_DIMENSION", "blocks.0.attention"),
    Wiring(ManyHeads, "over heads", "SOFTMAX_DIMENSION", "blocks.0.attention"),
    Wiring(OneHead, "over queries", "SOFTMAX_DIMENSION", "blocks.0.attention", True),
    Wiring(Summed, "over queries", "SOFTMAX_DIMENSION", "blocks.0.attention"),
    Wiring(ManyHeads, "sees the next", "ATTN_MASK", "blocks.0.attention"),
    Wiring(ManyHeads, "inverted", "ATTN_MASK", "blocks.0.attention"),
    Wiring(ManyHeads, "not itself", "ATTN_MASK", "blocks.0.attention"),
    Wiring(Summed, "sees the next", "ATTN_MASK", "blocks.0.attention", True),
    Wiring(Summed, "inverted", "ATTN_MASK", "blocks.0.attention"),
    Wiring(Library, "sees the next", "ATTN_MASK", "blocks.0.attention"),
    Wiring(Library, "inverted", "ATTN_MASK", "blocks.0.attention"),
    Wiring(Torch, "sees the next", "ATTN_MASK", "blocks.0.attention.inner"),
    Wiring(Torch, "inverted", "ATTN_MASK", "blocks.0.attention.inner"),
    Wiring(OneHead, "nothing to see", "NUMERICAL", "blocks.0.attention"),
    Wiring(Library, "nothing to see", "ATTN_MASK", "blocks.0.attention"),
    Wiring(Torch, "nothing to see", "ATTN_MASK", "blocks.0.attention.inner"),
    Wiring(ManyHeads, "no residual", "NO_SKIP", "blocks.0"),
    Wiring(Torch, "no residual", "NO_SKIP", "blocks.0", True),
    Wiring(ManyHeads, "no residual around attention", "NO_SKIP", "blocks.0"),
    Wiring(Library, "no residual around attention", "NO_SKIP", "blocks.0", True),
    Wiring(Summed, "no residual around feed", "NO_SKIP", "blocks.0"),
    Wiring(ManyHeads, "no projection", "NO_PROJECTION", "blocks.0.attention"),
    Wiring(Library, "no projection", "NO_PROJECTION", "blocks.0.attention", True),
    Wiring(ManyHeads, "constant weights", "EQUAL_UNITS", "blocks.0.feed.0"),
    Wiring(Library, "constant weights", "EQUAL_UNITS", "blocks.0.feed.0", True),
    Wiring(OneHead, "zero weights", "EQUAL_UNITS", "blocks.0.feed.0"),
    Wiring(Torch, "zero weights", "EQUAL_UNITS", "blocks.0.feed.0", True),
]
HEALTHY: Final = [
    Wiring(kind, "", "", "", post_norm)
    for kind in (ManyHeads, OneHead, Summed, Library, Torch)
    for post_norm in (False, True)
]


def batch_of(causal: bool) -> tuple[Tensor, Tensor]:
    """Return sequences that go on by a step of their own, and what to say at each place."""
    start, by = torch.randint(TOKENS, (8, 1)), torch.randint(1, 4, (8, 1))
    ids = (start + by * torch.arange(LENGTH + 1)) % TOKENS
    return (ids[:, :-1], ids[:, 1:]) if causal else (ids[:, :-1], ids[:, :-1].flip(1))
