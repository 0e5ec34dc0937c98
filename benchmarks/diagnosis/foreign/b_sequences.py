"""Healthy recurrent nets, convolutions in time and losses over alignments."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn, randn, sgd, waves
from benchmarks.diagnosis.foreign.b_book import (
    LETTERS,
    adding,
    chain,
    clipped,
    decayed,
    falling,
    healthy,
    letters,
    recall,
    sorting,
)
from benchmarks.diagnosis.run import Run


class Reader(nn.Module):
    """A recurrent net, and a linear map of its last state or of all of them."""

    def __init__(self, kind: type[nn.RNNBase], before: int, after: int, width: int = 32, **options: object) -> None:
        super().__init__()
        self.whole = bool(options.pop("whole", False))
        self.rnn = kind(before, width, batch_first=True, **options)
        self.head = nn.Linear(width * (2 if self.rnn.bidirectional else 1), after)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        found: Tensor = self.head(states if self.whole else states[:, -1])
        return found


class Speller(nn.Module):
    """Letters in, a recurrent net, letters out."""

    def __init__(
        self, kind: type[nn.RNNBase] = nn.LSTM, layers: int = 1, width: int = 48, drop: float = 0.0, base: int = 0
    ) -> None:
        super().__init__()
        base = base or len(LETTERS)
        self.embed = nn.Embedding(base, 24)
        self.rnn = kind(24, width, layers, batch_first=True, dropout=drop if layers > 1 else 0.0)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(width, base)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(self.rnn(self.embed(x))[0]))
        return found


def smooth(step: int) -> tuple[Tensor, Tensor]:
    """Return noise, and its exponential average."""
    x = randn(610_000 + step, 24, 24, 2)
    state, found = torch.zeros(24, 2), []
    for time in range(24):
        state = 0.7 * state + 0.3 * x[:, time]
        found.append(state)
    return x, torch.stack(found, 1)


@healthy("sequences/tanh_rnn_averages")
def averages() -> Run:
    model = Reader(nn.RNN, 2, 2, whole=True)
    return clipped(learn(model, smooth, adam(model, 3e-3), F.mse_loss, steps=120))


@healthy("sequences/relu_rnn_from_identity_adds")
def identity() -> Run:
    model = Reader(nn.RNN, 2, 1, nonlinearity="relu", width=48)
    nn.init.eye_(model.rnn.weight_hh_l0)
    nn.init.normal_(model.rnn.weight_ih_l0, std=0.05)
    nn.init.zeros_(model.rnn.bias_hh_l0)
    nn.init.zeros_(model.rnn.bias_ih_l0)
    return clipped(learn(model, adding, adam(model, 2e-3), F.mse_loss, steps=300))


@healthy("sequences/lstm_adds")
def lstm_adds() -> Run:
    model = Reader(nn.LSTM, 2, 1, width=32)
    with torch.no_grad():
        model.rnn.bias_hh_l0[32:64] = 1.0
    return clipped(learn(model, adding, adam(model, 1e-2), F.mse_loss, steps=300))


def parity(step: int) -> tuple[Tensor, Tensor]:
    bits = torch.randint(0, 2, (64, 8), generator=generator(620_000 + step))
    return 2.0 * bits[..., None] - 1, bits.cumsum(1) % 2


@healthy("sequences/gru_running_parity")
def gru_parity() -> Run:
    model = Reader(nn.GRU, 1, 2, width=32, whole=True)
    return learn(model, parity, adam(model, 1e-2), steps=250)


def neighbours(step: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 4, (24, 14), generator=generator(630_000 + step))
    return F.one_hot(found, 4).float(), (found.roll(1, 1) + found.roll(-1, 1) >= 4).long()


@healthy("sequences/bidirectional_lstm_tags")
def tags() -> Run:
    model = Reader(nn.LSTM, 4, 2, bidirectional=True, whole=True)
    return learn(model, neighbours, adam(model, 5e-3), steps=120)


class Packed(nn.Module):
    """A recurrent reader of sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16, padding_idx=0)
        self.rnn, self.head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.head(self.rnn(packed)[1][-1])
        return found


def ragged(step: int) -> tuple[Tensor, Tensor]:
    source = generator(640_000 + step)
    found = torch.randint(1, 12, (32, 14), generator=source)
    lengths = torch.randint(3, 15, (32, 1), generator=source)
    found = found.masked_fill(torch.arange(14) >= lengths, 0)
    return found, ((found == 1) | (found == 2)).sum(1).clamp_max(3)


@healthy("sequences/packed_gru_counts")
def packed() -> Run:
    model = Packed()
    return clipped(learn(model, ragged, adam(model, 5e-3), steps=250))


class Sorter(nn.Module):
    """A recurrent encoder, and a decoder that attends to its states by dot products."""

    def __init__(self, width: int = 48, base: int = 10) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(base, width), nn.Embedding(base, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query, self.join = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)
        self.out, self.cut = nn.Linear(width, base), False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(x))
        if self.cut:
            memory, last = memory.detach(), last.detach()
        states, _ = self.decoder(self.target(F.pad(y[:, :-1], (1, 0))), last)
        share = (self.query(states) @ memory.mT / memory.shape[-1] ** 0.5).softmax(-1)
        found: Tensor = self.out(torch.tanh(self.join(torch.cat([states, share @ memory], -1))))
        return found


def sorter(model: Sorter, rate: float = 5e-3, steps: int = 180) -> Run:
    def forward(step: int) -> Tensor:
        x, y = sorting(step)
        return entropy(model(x, y), y)

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, rate), steps=steps))


@healthy("sequences/seq2seq_sorts_with_attention")
def attention() -> Run:
    return sorter(Sorter())


class Turning(nn.Module):
    """A recurrent net whose recurrent map stays orthogonal."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(width, width, bias=False))
        self.head, self.width = nn.Linear(width, 2), width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        for time in range(x.shape[1]):
            state = torch.tanh(self.turn(state) + self.enter(x[:, time]))
        found: Tensor = self.head(state)
        return found


@healthy("sequences/orthogonal_rnn_recalls")
def turning() -> Run:
    model = Turning()
    return learn(model, lambda t: recall(t, length=20), adam(model, 6e-3), steps=150)


class Stateful(Speller):
    """A speller that carries its state from one piece of a long text to the next."""

    state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        found, state = self.rnn(self.embed(x), self.state)
        self.state = (state[0].detach(), state[1].detach())
        logits: Tensor = self.head(self.drop(found))
        return logits


@healthy("sequences/letters_lstm_carried_state")
def carried() -> Run:
    model = Stateful(layers=2, drop=0.1)
    whole = letters(0, size=12, length=16 * 40)

    def piece(step: int) -> tuple[Tensor, Tensor]:
        if step % 40 == 0:
            model.state = None
        start = 16 * (step % 40)
        return whole[0][:, start : start + 16], whole[1][:, start : start + 16]

    return clipped(learn(model, piece, adam(model, 4e-3), steps=160))


@healthy("sequences/letters_gru_sgd_one")
def letters_sgd() -> Run:
    model = Speller(nn.GRU)
    return falling(clipped(learn(model, letters, sgd(model, 1.0, momentum=0.9), steps=120)), warm=10)


@healthy("sequences/letters_gru_bf16_autocast")
def letters_bf16() -> Run:
    model = Speller(nn.GRU)

    def forward(step: int) -> Tensor:
        x, y = letters(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        return entropy(logits, y)

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=80))


class Diagonal(nn.Module):
    """Blocks of a diagonal linear recurrence with gates and skips."""

    def __init__(self, depth: int = 2, width: int = 24) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, width), nn.Linear(width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.decays = nn.ParameterList(nn.Parameter(torch.linspace(-3, 2, width)) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        time = torch.arange(x.shape[1])
        lag = (time[:, None] - time[None]).clamp_min(0)
        for norm, decay, gate in zip(self.norms, self.decays, self.gates, strict=True):
            keep = torch.sigmoid(decay)
            kernel = (1 - keep) * keep ** lag[..., None] * (time[:, None] >= time[None])[..., None]
            y = torch.einsum("tsw,bsw->btw", kernel, norm(x))
            x = x + F.glu(gate(F.gelu(y)), -1)
        found: Tensor = self.leave(x)
        return found


@healthy("sequences/diagonal_state_space")
def diagonal() -> Run:
    model = Diagonal()
    return falling(learn(model, waves, decayed(model, 3e-3, 0.01), F.mse_loss, steps=120), warm=10)


class Wave(nn.Module):
    """Gated dilated causal convolutions with a sum of skips, over quantised values."""

    def __init__(self, levels: int = 24, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Embedding(levels, width)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth))
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, levels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.enter(x).mT, torch.zeros(())
        for index, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            raw, share = gate(F.pad(x, (2**index, 0))).chunk(2, 1)
            more, skip = mix(torch.tanh(raw) * torch.sigmoid(share)).chunk(2, 1)
            x, total = x + more, total + skip
        found: Tensor = self.out(total).mT
        return found


def levels(step: int) -> tuple[Tensor, Tensor]:
    """Return sine waves in 24 levels, and the next levels."""
    x, y = waves(step)
    whole = torch.cat([x, y[:, -1:]], 1)[..., 0]
    found = ((whole.clamp(-1, 1) + 1) * 11.5).round().long()
    return found[:, :-1], found[:, 1:]


@healthy("sequences/wavenet")
def wavenet() -> Run:
    model = Wave()
    return learn(model, levels, adam(model, 3e-3), steps=150)


class Speech(nn.Module):
    """Convolutions and a recurrent net that name what they hear."""

    def __init__(self, width: int = 32, names: int = 6) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, width, 3, padding=1), nn.BatchNorm1d(width)
        self.rnn = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(width, names)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(F.relu(self.norm(self.conv(x.mT))).mT)[0])
        return found.log_softmax(-1)


def spoken(step: int) -> tuple[Tensor, Tensor]:
    """Return frames in which each of four names lasts three to five frames, and the names."""
    source = generator(650_000 + step)
    names = torch.randint(1, 6, (16, 4), generator=source)
    tone = randn(651_000, 6, 8)
    lasts = torch.randint(2, 5, (16, 4), generator=source).cumsum(1)
    slot = (torch.arange(20)[None, :, None] >= lasts[:, None]).sum(-1)
    heard = torch.where(slot < 4, names.gather(1, slot.clamp_max(3)), 0)
    return tone[heard] + 0.4 * torch.randn(16, 20, 8, generator=source), names


@healthy("sequences/speech_ctc")
def speech() -> Run:
    model = Speech()
    frames, names = torch.full((16,), 20), torch.full((16,), 4)

    def forward(step: int) -> Tensor:
        x, y = spoken(step)
        return F.ctc_loss(model(x).transpose(0, 1), y, frames, names, zero_infinity=True)

    return clipped(Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=150), 5.0)


class Chain(nn.Module):
    """A tagger whose tags depend on each other: a conditional random field over a recurrent net."""

    def __init__(self, tags: int = 4, width: int = 24) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, width, batch_first=True, bidirectional=True)
        self.emit, self.change = nn.Linear(2 * width, tags), nn.Parameter(torch.zeros(tags, tags))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        emit = self.emit(self.rnn(x)[0])
        score = emit.gather(2, y[..., None]).sum((1, 2)) + self.change[y[:, :-1], y[:, 1:]].sum(1)
        total = emit[:, 0]
        for time in range(1, x.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.change, 1) + emit[:, time]
        return (torch.logsumexp(total, 1) - score).mean()


@healthy("sequences/random_field_tagger")
def field() -> Run:
    model = Chain()

    def forward(step: int) -> Tensor:
        source = generator(660_000 + step)
        moves = torch.multinomial(torch.tensor([0.7, 0.25, 0.05]), 24 * 12, replacement=True, generator=source)
        y = moves.view(24, 12).cumsum(1) % 4
        x = randn(661_000, 4, 6)[y] + 1.2 * torch.randn(24, 12, 6, generator=source)
        found: Tensor = model(x, y)
        return found

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=100)


@healthy("sequences/reservoir_with_trained_readout")
def reservoir() -> Run:
    model = Reader(nn.RNN, 1, 1, width=96, whole=True)
    with torch.no_grad():
        weight = randn(670_000, 96, 96)
        model.rnn.weight_hh_l0.copy_(0.9 * weight / torch.linalg.eigvals(weight).abs().max())
    model.rnn.requires_grad_(False)
    return learn(model, waves, adam(model, 1e-2), F.mse_loss, steps=120)


@healthy("sequences/lstm_language_of_a_chain")
def markov() -> Run:
    model = Speller(nn.LSTM, base=24)
    return clipped(falling(learn(model, chain, decayed(model, 8e-3, 0.01), steps=150)))


@healthy("sequences/deep_gru_normed_residual")
def deep() -> Run:
    class Deep(nn.Module):
        """Recurrent layers with norms and skips."""

        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(1, 24), nn.Linear(24, 1)
            self.rnns = nn.ModuleList(nn.GRU(24, 24, batch_first=True) for _ in range(4))
            self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for rnn, norm in zip(self.rnns, self.norms, strict=True):
                x = x + rnn(norm(x))[0]
            found: Tensor = self.leave(x)
            return found

    model = Deep()
    return clipped(learn(model, waves, adam(model, 2e-3), F.mse_loss, steps=100))
