"""Healthy runs on sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn, randn, sgd, tokens
from benchmarks.diagnosis.run import Run
from benchmarks.diagnosis.unseen.book import adamw, cosine, digits, healthy, signals


class Dilated(nn.Module):
    """Causal convolutions at growing distances, with skips."""

    def __init__(self, depth: int = 4, width: int = 16, act: type[nn.Module] = nn.ReLU, skip: bool = True) -> None:
        super().__init__()
        wrap = torch.nn.utils.parametrizations.weight_norm
        self.enter = nn.Conv1d(2, width, 1)
        self.convs = nn.ModuleList(wrap(nn.Conv1d(width, width, 2, dilation=2**i)) for i in range(depth))
        self.acts = nn.ModuleList(act() for _ in range(depth))
        self.drop, self.skip = nn.Dropout(0.1), skip
        self.leave = nn.Conv1d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.mT)
        for index, (conv, act) in enumerate(zip(self.convs, self.acts, strict=True)):
            y = self.drop(act(conv(F.pad(x, (2**index, 0)))))
            x = x + y if self.skip else y
        found: Tensor = self.leave(x).mT
        return found


@healthy("sequences/tcn")
def tcn() -> Run:
    model = Dilated()
    return learn(model, signals, adam(model, 2e-3), F.mse_loss, steps=80)


class NormedGru(nn.Module):
    """A gated cell with layer norm on its sums, unrolled by hand."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width, bias=False), nn.Linear(2, 3 * width)
        self.norm_in, self.norm_out = nn.LayerNorm(3 * width), nn.LayerNorm(3 * width)
        self.read, self.width = nn.Linear(width, 2), width

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(len(x), self.width), []
        for step in range(x.shape[1]):
            keep, reset, new = self.norm_out(self.outer(x[:, step])).chunk(3, -1)
            was_keep, was_reset, was = self.norm_in(self.inner(state)).chunk(3, -1)
            share = torch.sigmoid(keep + was_keep)
            state = share * state + (1 - share) * torch.tanh(new + torch.sigmoid(reset + was_reset) * was)
            found.append(self.read(state))
        return torch.stack(found, 1)


@healthy("sequences/gru_layer_norm")
def normed_gru() -> Run:
    model = NormedGru()
    return learn(model, signals, adam(model, 3e-3), F.mse_loss, steps=60)


class Translate(nn.Module):
    """A recurrent encoder, and a decoder that looks back at it."""

    def __init__(self, width: int = 32, base: int = 12) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(base, width), nn.Embedding(base, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.decoder = nn.GRUCell(3 * width, width)
        self.key, self.query, self.score = nn.Linear(2 * width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.out, self.width = nn.Linear(3 * width, base), width
        self.cut = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        read, _ = self.encoder(self.source(x))
        read = read.detach() if self.cut else read
        keys, state, found = self.key(read), read.new_zeros(len(x), self.width), []
        told = torch.cat([torch.ones_like(y[:, :1]), y[:, :-1]], 1)
        for step in range(y.shape[1]):
            score = self.score(torch.tanh(keys + self.query(state)[:, None])).softmax(1)
            seen = (score * read).sum(1)
            state = self.decoder(torch.cat([self.target(told[:, step]), seen], 1), state)
            found.append(self.out(torch.cat([state, seen], 1)))
        return torch.stack(found, 1)


def translate(model: Translate, optimizer: torch.optim.Optimizer, **options: int) -> Run:
    def forward(step: int) -> Tensor:
        x, y = digits(step)
        return entropy(model(x, y), y)

    return Run(model=model, forward=forward, optimizer=optimizer, **options)


@healthy("sequences/seq2seq_attention")
def seq2seq() -> Run:
    model = Translate()
    return translate(model, adam(model, 3e-3), steps=120)


@healthy("sequences/encoder_decoder_transformer")
def encoder_decoder() -> Run:
    body = nn.Transformer(32, 4, 2, 2, 64, 0.1, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(12, 32), "body": body, "out": nn.Linear(32, 12)})
    model.places = nn.Parameter(0.1 * torch.randn(6, 32))

    def forward(step: int) -> Tensor:
        x, y = digits(step)
        told = torch.cat([torch.ones_like(y[:, :1]), y[:, :-1]], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        mixed = body(model["embed"](x) + model.places, model["embed"](told) + model.places, tgt_mask=mask)
        return entropy(model["out"](mixed), y)

    return cosine(Run(model=model, forward=forward, optimizer=adamw(model, 2e-3), steps=120), 20)


class Latents(nn.Module):
    """A few learned vectors that look at a long input, and then at each other."""

    def __init__(self, width: int = 32, count: int = 6, rounds: int = 2) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(count, width))
        self.enter = nn.Linear(2, width)
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.pairs = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * rounds))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(rounds)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.enter(x) + torch.sin(torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(32))
        state = self.latents.expand(len(x), -1, -1)
        for index, (query, pair, mix) in enumerate(zip(self.queries, self.pairs, self.mixers, strict=True)):
            key, value = pair(seen).chunk(2, -1)
            heads = [
                part.unflatten(-1, (4, -1)).transpose(1, 2)
                for part in (query(self.norms[2 * index](state)), key, value)
            ]
            state = state + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            state = state + mix(self.norms[2 * index + 1](state))
        found: Tensor = self.head(state.mean(1))
        return found


def total(step: int) -> tuple[Tensor, Tensor]:
    """Return series and how many of their values stand out."""
    x = randn(180_000 + step, 24, 40, 2)
    return x, ((x[..., 0] > 1) & (x[..., 1] > 0)).float().sum(1, keepdim=True) - 3


@healthy("sequences/perceiver")
def perceiver() -> Run:
    model = Latents()
    return cosine(learn(model, total, adamw(model, 2e-3), F.mse_loss, steps=100))


@healthy("sequences/speech_ctc")
def ctc() -> Run:
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(6, 24, 3, padding=1), "core": nn.LSTM(24, 24, batch_first=True, bidirectional=True),
         "out": nn.Linear(48, 7)}
    )  # fmt: skip
    marks = randn(3, 7, 6)

    def forward(step: int) -> Tensor:
        labels = torch.randint(1, 7, (12, 4), generator=generator(step))
        heard = marks[labels].repeat_interleave(5, 1) + 0.5 * randn(step, 12, 20, 6)
        read, _ = model["core"](F.gelu(model["conv"](heard.mT)).mT)
        logs = model["out"](read).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, labels, torch.full((12,), 20), torch.full((12,), 4))

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=100)


class Diagonal(nn.Module):
    """A linear state space with a decay per channel, and a gate."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter, self.gate = nn.Linear(2, width), nn.Linear(2, width)
        self.decay = nn.Parameter(torch.linspace(0.5, 4.0, width))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        drive, keep = self.enter(x), torch.sigmoid(self.decay)
        state, found = torch.zeros_like(drive[:, 0]), []
        for step in range(x.shape[1]):
            state = keep * state + (1 - keep) * drive[:, step]
            found.append(state)
        out: Tensor = self.out(self.norm(torch.stack(found, 1) * F.silu(self.gate(x))))
        return out


@healthy("sequences/state_space")
def state_space() -> Run:
    model = Diagonal()
    return learn(model, signals, adamw(model, 5e-3), F.mse_loss, steps=80)


class Modern(nn.Module):
    """A decoder layer with rotated, normalised queries and keys, and a gated branch."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.qn, self.kn = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.up, self.gate, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        self.heads = heads

    def _turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        one, two = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self._turned(self.qn(q)), self._turned(self.kn(k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


class Decoder(nn.Module):
    """A tied language model of such layers."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers, self.norm = nn.ModuleList(Modern(width) for _ in range(depth)), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


@healthy("sequences/decoder_tied_z_loss")
def decoder() -> Run:
    model = Decoder()

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return entropy(logits, y) + 1e-4 * logits.logsumexp(-1).square().mean()

    return cosine(learn(model, tokens, adamw(model, 3e-3, 0.1), loss, steps=160))


@healthy("sequences/decoder_checkpointed_accumulated")
def checkpointed() -> Run:
    model = Decoder(2)

    def forward(step: int) -> Tensor:
        x, y = tokens(step)
        x = model.embed(x)
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return entropy(model.norm(x) @ model.embed.weight.T, y)

    return Run(model=model, forward=forward, optimizer=adamw(model, 3e-3), steps=48, accumulate=3)


@healthy("sequences/masked_language")
def masked_language() -> Run:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True)
    model = nn.Sequential(nn.Embedding(31, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 30))

    def forward(step: int) -> Tensor:
        x, _ = tokens(step, 16)
        length = torch.randint(9, 19, (16, 1), generator=generator(step))
        pad = torch.arange(x.shape[1]) >= length
        hide = (torch.rand(x.shape, generator=generator(step + 1)) < 0.2) & ~pad
        read = model[1](model[0](torch.where(hide, 30, x)), src_key_padding_mask=pad)
        return F.cross_entropy(model[2](read)[hide], x[hide])

    return cosine(Run(model=model, forward=forward, optimizer=adamw(model, 1e-3), steps=80))


@healthy("sequences/frozen_reservoir")
def reservoir() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.RNN(2, 64, batch_first=True).requires_grad_(False)
            with torch.no_grad():
                weight = torch.randn(64, 64) / 8
                self.core.weight_hh_l0.copy_(0.9 * weight / torch.linalg.eigvals(weight).abs().max())
            self.read = nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.read(self.core(x)[0])
            return found

    model = Model()
    return learn(model, signals, sgd(model, 0.05, momentum=0.9), F.mse_loss, steps=60)


@healthy("sequences/lstm_projected_clipped")
def clipped_lstm() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.core = (
                nn.Embedding(30, 24),
                nn.LSTM(24, 48, 2, batch_first=True, dropout=0.2, proj_size=24),
            )
            self.out = nn.Linear(24, 30)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.core(self.embed(x))[0])
            return found

    model = Model()
    run = learn(model, tokens, adam(model, 5e-3), steps=80, scalable=False)
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return run


@healthy("sequences/fourier_scene")
def scene() -> Run:
    scale = 2.0 ** torch.arange(5) * math.pi
    body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid())

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(128, 2, generator=generator(190_000 + step)) * 2 - 1
        angle = (x[..., None] * scale).flatten(1)
        wanted = torch.stack([(x[:, 0] > 0).float(), (3 * x[:, 1]).sin() / 2 + 0.5, x.square().sum(1).clamp_max(1)], 1)
        return torch.cat([angle.sin(), angle.cos()], 1), wanted

    return learn(body, batch, adam(body, 3e-3), F.mse_loss, steps=150)
