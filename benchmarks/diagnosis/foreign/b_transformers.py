"""Healthy attention models, trained as language models and their kin are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn
from benchmarks.diagnosis.common import pretrain
from benchmarks.diagnosis.foreign.b_book import (
    LETTERS,
    chain,
    clipped,
    decayed,
    falling,
    healthy,
    letters,
    marked,
    sorting,
    warmed,
)
from benchmarks.diagnosis.run import Run

BASE = 24


class RMSNorm(nn.Module):
    """A norm without mean and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of channels by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 0.1 ** (2 * torch.arange(half) / half)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class Attention(nn.Module):
    """Causal attention of several heads, with the variants of current models as options."""

    def __init__(self, width: int = 48, heads: int = 4, **options: object) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.few = heads // int(options.get("share", 1))
        size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, self.few * size, bias=False) for _ in range(2))
        self.out, self.drop = nn.Linear(width, width, bias=False), nn.Dropout(float(options.get("drop", 0.0)))
        if options.get("qk_norm"):
            self.query_norm, self.key_norm = RMSNorm(size), RMSNorm(size)
        self.sharpness = float(options.get("sharpness", size**-0.5))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def scores(self, x: Tensor) -> Tensor:
        query, key = self._split(self.query(x), self.heads), self._split(self.key(x), self.few)
        if self.options.get("qk_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        if self.options.get("rotary"):
            query, key = rotate(query), rotate(key)
        return query @ key.repeat_interleave(self.heads // self.few, 1).mT * self.sharpness

    def forward(self, x: Tensor) -> Tensor:
        length, score = x.shape[1], self.scores(x)
        place = torch.arange(length)
        if self.options.get("alibi"):
            slope = 2.0 ** -(8 * torch.arange(1, self.heads + 1) / self.heads)
            score = score - slope[:, None, None] * (place[:, None] - place[None]).clamp_min(0)
        if self.options.get("cap"):
            score = 20 * torch.tanh(score / 20)
        if self.options.get("causal", True):
            score = score.masked_fill(place[None] > place[:, None], -torch.inf)
        value = self._split(self.value(x), self.few).repeat_interleave(self.heads // self.few, 1)
        found = self.drop(score.softmax(-1)) @ value
        return self.out(found.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The feed-forward part of current language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plain(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention and a feed-forward part, with their norms before them or after them."""

    def __init__(self, width: int = 48, **options: object) -> None:
        super().__init__()
        norm = RMSNorm if options.get("rms") else nn.LayerNorm
        self.attention, self.post = Attention(width, **options), bool(options.get("post"))
        make = options.get("make") or (Gated if options.get("rms") else plain)
        self.feed = make(width)
        self.first, self.second = norm(width), norm(width)
        self.skip, self.drop = bool(options.get("skip", True)), nn.Dropout(float(options.get("drop", 0.0)))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.drop(self.attention(x)))
            return self.second(x + self.drop(self.feed(x)))
        if not self.skip:
            return self.feed(self.attention(x))
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.feed(self.second(x)))


class Writer(nn.Module):
    """A decoder language model."""

    def __init__(self, depth: int = 2, width: int = 48, base: int = BASE, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(base, width)
        self.place = None if options.get("rotary") or options.get("alibi") else nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(depth))
        self.norm = RMSNorm(width) if options.get("rms") else nn.LayerNorm(width)
        self.head = nn.Linear(width, base, bias=False)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=0.1 if "embed" not in name else 0.5)
        if options.get("tied"):
            self.head.weight = self.embed.weight
            nn.init.normal_(self.head.weight, std=0.08)

    def trunk(self, x: Tensor) -> Tensor:
        x = self.embed(x) + (0 if self.place is None else self.place.weight[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.trunk(x))
        return found


def write(model: nn.Module, rate: float = 3e-3, steps: int = 120, batches: object = chain) -> Run:
    """Train a language model as its authors would: AdamW, warm-up, cosine, clipping at one."""
    return falling(clipped(learn(model, batches, decayed(model, rate), steps=steps)), warm=10)


@healthy("transformers/gpt_tied")
def gpt() -> Run:
    return write(Writer(tied=True))


@healthy("transformers/llama")
def llama() -> Run:
    return write(Writer(rms=True, rotary=True))


@healthy("transformers/alibi")
def alibi() -> Run:
    return write(Writer(alibi=True))


@healthy("transformers/shared_keys_normed_and_capped")
def shared() -> Run:
    return write(Writer(rms=True, rotary=True, share=4, qk_norm=True, cap=True))


@healthy("transformers/post_norm_warmed")
def post() -> Run:
    model = Writer(depth=3, post=True, drop=0.05)
    return warmed(learn(model, chain, adam(model, 4e-3), steps=160), 30)


@healthy("transformers/letters_gpt_dropout")
def spelling() -> Run:
    return write(Writer(base=len(LETTERS), drop=0.1), batches=lambda t: letters(t, size=12))


@healthy("transformers/accumulated_autocast")
def accumulated() -> Run:
    model = Writer(rms=True, rotary=True)

    def forward(step: int) -> Tensor:
        x, y = chain(step, size=8)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        return entropy(logits, y)

    run = Run(model=model, forward=forward, optimizer=decayed(model, 4e-3), steps=50, accumulate=4)
    return falling(clipped(run), warm=5)


@healthy("transformers/residual_gains_from_zero")
def rezero() -> Run:
    model = Writer(depth=4)
    for block in model.blocks:
        nn.init.zeros_(block.attention.out.weight)
        nn.init.zeros_(block.feed[2].weight)
    return write(model, steps=100)


class Experts(nn.Module):
    """A feed-forward part for each kind of token, two of which every token visits."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.balance = torch.zeros(())
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x) if self.bias is None else self.router(x) + self.bias
        share = logits.softmax(-1)
        best, chosen = share.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        weight = torch.zeros_like(share).scatter(-1, chosen, best)
        self.balance = len(self.experts) * ((weight > 0).float().mean((0, 1)) * share.mean((0, 1))).sum() / 2
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (weight[..., index] > 0).nonzero(as_tuple=True)
            if len(rows[0]):
                found = found.index_put(rows, expert(x[rows]) * weight[rows][:, index, None], accumulate=True)
        return found


def mixture(model: Writer, weight: float = 0.01, steps: int = 100) -> Run:
    def forward(step: int) -> Tensor:
        x, y = chain(step)
        loss = entropy(model(x), y)
        return loss + weight * sum(block.feed.balance for block in model.blocks)

    return falling(clipped(Run(model=model, forward=forward, optimizer=decayed(model, 3e-3), steps=steps)), warm=10)


@healthy("transformers/experts_top_two")
def experts() -> Run:
    return mixture(Writer(make=Experts))


class Linearised(nn.Module):
    """Attention whose cost grows with the length only."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key = F.elu(self.query(y)) + 1, F.elu(self.key(y)) + 1
        state = torch.einsum("btk,btv->btkv", key, self.value(y)).cumsum(1)
        found = torch.einsum("btk,btkv->btv", query, state) / (query * key.cumsum(1)).sum(-1, keepdim=True)
        return x + self.out(found)


@healthy("transformers/linear_attention")
def linear() -> Run:
    model = nn.Sequential(nn.Embedding(BASE, 32), Linearised(), Linearised(), nn.LayerNorm(32), nn.Linear(32, BASE))
    return write(model, 5e-3)


class Encoder(nn.Module):
    """torch's own encoder with a token that classifies, over text with padding."""

    def __init__(self, width: int = 32, depth: int = 2, base: int = 20, before: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(base + 1, width), nn.Parameter(0.1 * torch.randn(17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True, norm_first=before)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head, self.base = nn.Linear(width, 4), base

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 0), value=self.base)
        found = self.layers(self.embed(x) + self.place, src_key_padding_mask=x < 0)
        logits: Tensor = self.head(found[:, 0])
        return logits


@healthy("transformers/encoder_finds_a_token")
def encoder() -> Run:
    model = Encoder(before=True)
    return falling(clipped(learn(model, marked, decayed(model, 3e-3, 0.01), steps=200)), warm=10)


@healthy("transformers/masked_language_model")
def masked() -> Run:
    model = Writer(causal=False, base=BASE + 1, rms=True, rotary=True)

    def forward(step: int) -> Tensor:
        x, _ = chain(step)
        hide = torch.rand(x.shape, generator=generator(680_000 + step)) < 0.2
        return F.cross_entropy(model(x.masked_fill(hide, BASE))[hide], x[hide])

    return falling(clipped(Run(model=model, forward=forward, optimizer=decayed(model, 8e-3), steps=200)), warm=20)


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self, width: int = 32, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 3, 3)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(17, width))
        self.blocks = nn.ModuleList(Block(width, causal=False, drop=0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.cut(x).flatten(2).mT], 1) + self.place
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x)[:, 0])
        return found


def glyphs(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return pictures of fixed glyphs at one of several places, and which glyph."""
    source = generator(690_000 + step)
    shapes = (torch.randn(5, 6, 6, generator=generator(691_000)) > 0).float() * 2 - 1
    labels = torch.randint(0, 5, (size,), generator=source)
    x = 0.5 * torch.randn(size, 1, 12, 12, generator=source)
    for picture, label, (row, column) in zip(
        x, labels.tolist(), (3 * torch.randint(0, 3, (size, 2), generator=source)).tolist(), strict=True
    ):
        picture[0, row : row + 6, column : column + 6] += shapes[label]
    return x, labels


@healthy("transformers/patches_smoothed_labels")
def patches() -> Run:
    model = Patches()

    def forward(step: int) -> Tensor:
        x, y = glyphs(step)
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    return falling(clipped(Run(model=model, forward=forward, optimizer=decayed(model, 3e-3, 0.05), steps=120)), warm=10)


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self, width: int = 32, base: int = 10) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(base, width), nn.Parameter(0.3 * torch.randn(6, width))
        self.transformer = nn.Transformer(width, 4, 1, 1, 64, 0.0, batch_first=True)
        self.head = nn.Linear(width, base)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        before = self.embed(F.pad(y[:, :-1], (1, 0))) + self.place
        found: Tensor = self.head(self.transformer(self.embed(x) + self.place, before, tgt_mask=mask))
        return found


@healthy("transformers/encoder_decoder_sorts")
def translator() -> Run:
    model = Translator()

    def forward(step: int) -> Tensor:
        x, y = sorting(step)
        return entropy(model(x, y), y)

    return falling(clipped(Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=180)), warm=15)


class Perceiver(nn.Module):
    """A few latent vectors that read a long input over and over."""

    def __init__(self, width: int = 32, latents: int = 6) -> None:
        super().__init__()
        self.embed, self.latents = nn.Embedding(20, width), nn.Parameter(0.2 * torch.randn(latents, width))
        self.read = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.feeds = nn.ModuleList(plain(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.embed(x), self.latents.expand(len(x), -1, -1)
        for index in range(2):
            state = state + self.read[index](self.norms[2 * index](state), x, x, need_weights=False)[0]
            state = state + self.feeds[index](self.norms[2 * index + 1](state))
        found: Tensor = self.head(state.mean(1))
        return found


@healthy("transformers/perceiver")
def perceiver() -> Run:
    model = Perceiver()
    return learn(model, marked, decayed(model, 3e-3, 0.01), steps=120)


class Adapter(nn.Module):
    """A frozen linear map and a trained correction of low rank."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + 2.0 * (x @ self.down.T @ self.up.T)
        return found


def other(step: int) -> tuple[Tensor, Tensor]:
    """Return the chain's text with its alphabet shifted, as another language is."""
    x, y = chain(step)
    return (5 * x + 7) % BASE, (5 * y + 7) % BASE


def taught(steps: int = 80, **options: object) -> Writer:
    """Return a language model that knows the chain."""
    model = Writer(**options)
    pretrain(learn(model, chain, adam(model, 3e-3)), steps)
    return model


def adapted() -> Writer:
    model = taught().requires_grad_(False)
    for block in model.blocks:
        block.attention.query, block.attention.value = Adapter(block.attention.query), Adapter(block.attention.value)
        block.feed[0], block.feed[2] = Adapter(block.feed[0]), Adapter(block.feed[2])
    return model


@healthy("transformers/low_rank_adapters")
def lora() -> Run:
    model = adapted()
    return clipped(learn(model, other, decayed(model, 1e-2, 0.0), steps=120))


@healthy("transformers/fine_tuned_whole")
def tuned() -> Run:
    model = taught(tied=True)
    return write(model, 1e-3, 80, other)


@healthy("transformers/fine_tuned_on_what_it_knows")
def known() -> Run:
    model = taught(150)
    return write(model, 2e-4, 60)


class Prefixed(nn.Module):
    """A frozen writer whose text begins with trained vectors."""

    def __init__(self, writer: Writer, count: int = 8) -> None:
        super().__init__()
        self.writer = writer.requires_grad_(False)
        self.prefix = nn.Parameter(0.5 * torch.randn(count, writer.embed.embedding_dim))

    def forward(self, x: Tensor) -> Tensor:
        writer, count = self.writer, len(self.prefix)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), writer.embed(x)], 1)
        for block in writer.blocks:
            x = block(x)
        found: Tensor = writer.head(writer.norm(x[:, count:]))
        return found


def two_tongues(step: int) -> tuple[Tensor, Tensor]:
    """Return text of either language by the parity of the step."""
    return chain(step) if step % 2 else other(step)


@healthy("transformers/prefix_picks_a_language")
def prefix() -> Run:
    writer = Writer(rms=True, rotary=True)
    pretrain(learn(writer, two_tongues, adam(writer, 3e-3)), 120)
    model = Prefixed(writer)
    return clipped(learn(model, other, adam(model, 2e-2), steps=80))


@healthy("transformers/student_of_a_taught_writer")
def student() -> Run:
    teacher, model = taught(width=48).requires_grad_(False), Writer(depth=1, width=24)

    def forward(step: int) -> Tensor:
        x, y = chain(step)
        wanted, found = teacher(x).flatten(0, 1) / 2, model(x).flatten(0, 1)
        soft = F.kl_div((found / 2).log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
        return 0.7 * 4 * soft + 0.3 * F.cross_entropy(found, y.flatten())

    return Run(model=model, forward=forward, optimizer=decayed(model, 5e-3), steps=120)
