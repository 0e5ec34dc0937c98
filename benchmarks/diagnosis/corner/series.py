"""Healthy runs on sequences: recurrent nets, attention, experts."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import pretrain, schedule
from benchmarks.diagnosis.corner.book import (
    Batch,
    adam,
    counting,
    dense,
    dice,
    echo,
    entropy,
    fit,
    groups,
    healthy,
    normal,
    sgd,
)
from benchmarks.diagnosis.run import Run


class Reader(nn.Module):
    """Reads tokens with a recurrent net and tells the next one."""

    def __init__(
        self, cell: str = "LSTM", width: int = 48, base: int = 24, tied: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(base, width)
        self.core = getattr(nn, cell)(width, width, batch_first=True, **options)
        self.head = nn.Linear(width, base, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
            nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.words(x))[0])


@healthy("series/letters_by_an_lstm")
def letters() -> Run:
    model = Reader()
    return fit(model, adam(model, 5e-3), counting, steps=60)


@healthy("series/two_lstm_layers_tied_and_dropped")
def tied_lstm() -> Run:
    model = Reader(tied=True, num_layers=2, dropout=0.3)
    run = fit(model, adam(model, 5e-3), counting, steps=60)
    run.after.append(lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.25))
    run.scalable = False
    return run


class Ends(nn.Module):
    """Reads packed sequences of unlike lengths with a GRU, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(3, 24, batch_first=True, bidirectional=True), nn.Linear(48, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        last = self.core(packed)[1]
        return self.head(last.transpose(0, 1).flatten(1))


@healthy("series/gru_both_ways_over_packed_input")
def packed() -> Run:
    model = Ends()

    def forward(step: int) -> Tensor:
        x = normal(step, 24, 20, 3)
        lengths = torch.randint(3, 21, (24,), generator=dice(1_600_000 + step))
        x = x * (torch.arange(20)[None] < lengths[:, None])[..., None]
        return F.cross_entropy(model(x, lengths), (x[..., 0].sum(1) > 0).long())

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=60)


@healthy("series/plain_rnn_echo_of_two_steps")
def plain() -> Run:
    model = nn.ModuleDict({"core": nn.RNN(3, 32, batch_first=True), "head": nn.Linear(32, 2)})

    def forward(step: int) -> Tensor:
        x, y = echo(step, lag=2)
        return F.cross_entropy(model["head"](model["core"](x)[0][:, -1]), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=60, horizon=2)


@healthy("series/cell_in_a_loop_state_carried_over")
def carried() -> Run:
    model = nn.ModuleDict({"cell": nn.LSTMCell(4, 24), "head": nn.Linear(24, 1)})
    state = [torch.zeros(8, 24), torch.zeros(8, 24)]

    def forward(step: int) -> Tensor:
        hidden, memory = (part.detach() for part in state)
        total = torch.zeros(())
        for tick in range(10):
            x = normal(10 * step + tick, 8, 4)
            hidden, memory = model["cell"](x, (hidden, memory))
            total = total + F.mse_loss(model["head"](hidden)[:, 0], x[:, 0] - 0.5 * x[:, 1])
        state[:] = [hidden, memory]
        return total / 10

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3))


@healthy("series/dilated_convolutions_with_gates")
def dilated() -> Run:
    class Gated(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.both, self.mix, self.dilation = nn.Conv1d(16, 32, 2, dilation=dilation), nn.Conv1d(16, 16, 1), dilation

        def forward(self, x: Tensor) -> Tensor:
            filtered, gate = self.both(F.pad(x, (self.dilation, 0))).chunk(2, 1)
            return x + self.mix(torch.tanh(filtered) * torch.sigmoid(gate))

    model = nn.Sequential(nn.Conv1d(1, 16, 1), *(Gated(2**index) for index in range(5)), nn.Conv1d(16, 1, 1))

    def batches(step: int) -> Batch:
        phase = 6 * torch.rand(16, 1, 1, generator=dice(1_700_000 + step))
        wave = torch.sin(phase + 0.4 * torch.arange(33))
        return wave[..., :-1], wave[..., 1:]

    return fit(model, adam(model, 2e-3), batches, F.mse_loss)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, after: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.after = nn.LayerNorm(width), nn.LayerNorm(width), after
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        hide = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        if self.after:
            x = self.norm1(x + self.attend(x, x, x, attn_mask=hide, need_weights=False)[0])
            return self.norm2(x + self.think(x))
        y = self.norm1(x)
        x = x + self.attend(y, y, y, attn_mask=hide, need_weights=False)[0]
        return x + self.think(self.norm2(x))


class Teller(nn.Module):
    """Tells the next token by attention."""

    def __init__(
        self, depth: int = 2, width: int = 32, heads: int = 4, after: bool = False, tied: bool = False, base: int = 24
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(base, width), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, heads, after) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, base, bias=False)
        if tied:
            nn.init.normal_(self.words.weight, std=0.02)
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@healthy("attention/norm_after_with_warm_up")
def norm_after() -> Run:
    model = Teller(4, after=True)
    return schedule(fit(model, adam(model, 2e-3), counting, steps=60), lambda step: min(1.0, (step + 1) / 20))


@healthy("attention/norm_before_eight_deep")
def norm_before() -> Run:
    model = Teller(8)
    return fit(model, torch.optim.AdamW(model.parameters(), 1e-3), counting)


@healthy("attention/words_and_head_tied")
def tied() -> Run:
    model = Teller(tied=True)
    return fit(model, adam(model, 2e-3), counting, steps=60)


@healthy("attention/one_sequence_at_a_time_autocast")
def one_sequence() -> Run:
    model = Teller()

    def forward(step: int) -> Tensor:
        x, y = counting(step, 1)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return entropy(out, y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=60)


@healthy("attention/single_head_single_block_sgd")
def single() -> Run:
    model = Teller(1, 16, 1)
    return fit(model, sgd(model, 0.3, momentum=0.9), counting)


@healthy("attention/learned_already")
def learned() -> Run:
    model = Teller()
    return pretrain(fit(model, adam(model, 1e-3), counting), 150)


class LowRank(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@healthy("attention/low_rank_pairs_in_a_learned_model")
def low_rank() -> Run:
    model = Teller()
    pretrain(fit(model, adam(model, 2e-3), counting), 80)
    model.requires_grad_(False)
    for block in model.blocks:
        block.think[0], block.think[2] = LowRank(block.think[0]), LowRank(block.think[2])
    return fit(model, adam(model, 5e-3), lambda step: tuple(23 - part for part in counting(step)))  # type: ignore[arg-type]


class Sparse(nn.Module):
    """Four experts of which each row is sent to one; the last is hardly ever asked at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(20, 4), nn.ModuleList(dense(20, 24, 4) for _ in range(4))
        nn.init.constant_(self.gate.bias[3:], -1.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        most, chosen = share.max(-1)
        out = x.new_zeros(len(x), 4)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                out[rows] = most[rows, None] * expert(x[rows])
        load = F.one_hot(chosen, 4).float().mean(0)
        return out, 4 * (load * share.mean(0)).sum()


@healthy("experts/one_idle_at_the_start")
def idle_expert() -> Run:
    model = Sparse()

    def forward(step: int) -> Tensor:
        x, y = groups(step, 96)
        out, even = model(x)
        return F.cross_entropy(out, y) + 0.1 * even

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=60)


@healthy("series/marked_words_by_a_sum_over_a_set")
def deep_sets() -> Run:
    model = nn.ModuleDict({"each": dense(4, 32, 32), "all": dense(32, 32, 1)})

    def forward(step: int) -> Tensor:
        x = normal(step, 32, 12, 4)
        return F.mse_loss(model["all"](model["each"](x).sum(1))[:, 0], x[..., 0].amax(1))

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@healthy("series/alignment_free_speech")
def aligned() -> Run:
    model = nn.ModuleDict({"core": nn.GRU(8, 32, batch_first=True), "head": nn.Linear(32, 6)})
    sounds = normal(8, 6, 8)

    def forward(step: int) -> Tensor:
        said = torch.randint(1, 6, (12, 4), generator=dice(1_800_000 + step))
        heard = sounds[said.repeat_interleave(4, 1)] + 0.3 * normal(1_810_000 + step, 12, 16, 8)
        logs = model["head"](model["core"](heard)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, said, torch.full((12,), 16), torch.full((12,), 4))

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=60)


@healthy("series/pupil_at_temperature_four")
def pupil() -> Run:
    teacher = Teller()
    pretrain(fit(teacher, adam(teacher, 2e-3), counting), 80)
    teacher = copy.deepcopy(teacher).requires_grad_(False)
    model = Reader("GRU", 32)

    def forward(step: int) -> Tensor:
        x, _ = counting(step)
        aim = (teacher(x) / 4).log_softmax(-1)
        return 16 * F.kl_div((model(x) / 4).log_softmax(-1), aim, log_target=True, reduction="batchmean") / x.shape[1]

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3))
