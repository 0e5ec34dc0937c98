"""Faults of models over time and of attention; each is mended when it is built with True."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, generator, learn, randn, sgd, waves
from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.foreign.b_book import adding, blobs, chain, clipped, faulty, letters, marked, recall
from benchmarks.diagnosis.foreign.b_sequences import Diagonal, Reader, Sorter, Speller, sorter
from benchmarks.diagnosis.foreign.b_transformers import (
    Adapter,
    Writer,
    other,
    taught,
    write,
)
from benchmarks.diagnosis.run import Run


@faulty("sequences_fault/chaotic_over_100_steps", "SUPERCRITICAL", r"^rnn", "EXPLODING")
def chaotic(mended: bool = False) -> Run:
    """A recurrent map of spectral radius three."""
    model = Reader(nn.RNN, 3, 2, width=64)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(randn(940_000, 64, 64) / 8 * (0.9 if mended else 3.0))
    run = learn(model, lambda t: recall(t, 24, 100), adam(model, 1e-3), steps=60, horizon=100)
    if mended:
        nn.init.orthogonal_(model.rnn.weight_hh_l0)
    return run


@faulty("sequences_fault/relu_recurrence_explodes", "EXPLODING", r"^rnn|^$", "SUPERCRITICAL")
def relu_explodes(mended: bool = False) -> Run:
    """A rectified recurrence of gain 1.5 without clipping."""
    model = Reader(nn.RNN, 2, 1, nonlinearity="relu", width=48)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_((1.0 if mended else 1.5) * torch.eye(48))
        model.rnn.weight_ih_l0.normal_(std=0.02)
    return learn(model, lambda t: adding(t, length=30), sgd(model, 3e-4), F.mse_loss, steps=60)


@faulty("sequences_fault/forgets_over_60_steps", "SHORT_MEMORY", r"^rnn", "VANISHING")
def forgets(mended: bool = False) -> Run:
    """A small recurrent map on a task whose cue is 60 steps back."""
    model = Reader(nn.RNN, 3, 2, width=32)
    if mended:
        nn.init.orthogonal_(model.rnn.weight_hh_l0)
    else:
        nn.init.normal_(model.rnn.weight_hh_l0, std=0.05)
    return learn(model, lambda t: recall(t, 32, 60), adam(model, 2e-3), steps=120, horizon=59)


@faulty("sequences_fault/forget_gates_shut", "SHORT_MEMORY", r"^rnn", "SATURATION", "VANISHING")
def shut(mended: bool = False) -> Run:
    """An LSTM whose forget gates start at sigmoid(-6)."""
    model = Reader(nn.LSTM, 3, 2, width=32)
    with torch.no_grad():
        model.rnn.bias_hh_l0[32:64] = 3.0 if mended else -6.0
    return learn(model, lambda t: recall(t, 32, 40), adam(model, 2e-3), steps=120, horizon=39)


class Cells(nn.Module):
    """A gated cell unrolled by hand, whose state may lose its history."""

    def __init__(self, cut: bool, width: int = 32) -> None:
        super().__init__()
        self.cell, self.head, self.cut = nn.GRUCell(3, width), nn.Linear(width, 2), cut

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state.detach() if self.cut else state)
        found: Tensor = self.head(state)
        return found


@faulty("sequences_fault/history_detached", "SHORT_MEMORY", r"^cell", "DISCONNECTED", "VANISHING")
def history(mended: bool = False) -> Run:
    """A loop that detaches the state at every step, so that the cue is never credited."""
    model = Cells(not mended)
    return learn(model, lambda t: recall(t, length=12), adam(model, 1e-2), steps=100, horizon=11)


@faulty("sequences_fault/encoder_detached", "DISCONNECTED", r"^(encoder|source)", "UNCHANGED", "DEAD")
def encoder_detached(mended: bool = False) -> Run:
    """A translator whose memory is detached before its decoder reads it."""
    model = Sorter()
    model.cut = not mended
    return sorter(model, steps=120)


@faulty("sequences_fault/letters_rate_huge", "LR_TOO_HIGH", ".*")
def letters_huge(mended: bool = False) -> Run:
    """Adam at five on an LSTM."""
    model = Speller(nn.LSTM)
    return clipped(learn(model, letters, adam(model, 5e-3 if mended else 5.0), steps=80))


@faulty("sequences_fault/lstm_rate_tiny", "LR_TOO_LOW", ".*")
def lstm_tiny(mended: bool = False) -> Run:
    """Adam at 1e-7 on an LSTM."""
    model = Speller(nn.LSTM)
    return clipped(learn(model, letters, adam(model, 5e-3 if mended else 1e-7), steps=80))


@faulty("sequences_fault/letters_sgd_tiny", "LR_TOO_LOW", ".*")
def sgd_tiny(mended: bool = False) -> Run:
    """SGD at 1e-5 on a GRU whose gradient is of order one."""
    model = Speller(nn.GRU)
    return learn(model, letters, sgd(model, 0.5 if mended else 1e-5, momentum=0.9), steps=80)


@faulty("sequences_fault/gradients_never_zeroed", "STALE_GRAD", ".*")
def never_zeroed(mended: bool = False) -> Run:
    """A loop that forgets zero_grad."""
    model = Speller(nn.GRU)
    return learn(model, letters, adam(model, 5e-3), steps=100, zero=mended)


@faulty("sequences_fault/clipped_to_nothing", "CLIP_SATURATED", ".*")
def clipped_away(mended: bool = False) -> Run:
    """SGD whose gradient is clipped at 1e-4."""
    model = Speller(nn.GRU)
    run = learn(model, letters, sgd(model, 0.5, momentum=0.9), steps=80, scalable=False)
    run.settings = {"enable_gradient_clipping": True, "max_grad_norm": 1.0 if mended else 1e-4}
    return run


class Switch(nn.Module):
    """A gated cell with gates as modules."""

    def __init__(self, shift: float, width: int = 24) -> None:
        super().__init__()
        self.keep, self.new = nn.Linear(width + 1, width), nn.Linear(width + 1, width)
        self.gate, self.act = nn.Sigmoid(), nn.Tanh()
        self.head, self.width = nn.Linear(width, 1), width
        nn.init.constant_(self.keep.bias, shift)

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(len(x), self.width), []
        for time in range(x.shape[1]):
            both = torch.cat([x[:, time], state], 1)
            keep = self.gate(self.keep(both))
            state = keep * state + (1 - keep) * self.act(self.new(both))
            found.append(self.head(state))
        return torch.stack(found, 1)


@faulty("sequences_fault/gates_stuck_open", "SATURATION", r"keep|gate", "VANISHING", "DEAD")
def stuck(mended: bool = False) -> Run:
    """Gates at sigmoid(12), so that the state stays at zero."""
    model = Switch(1.0 if mended else 12.0)
    return learn(model, waves, adam(model, 3e-3), F.mse_loss, steps=120)


@faulty("sequences_fault/inputs_in_raw_units", "SATURATION", r"^rnn", "VANISHING")
def raw(mended: bool = False) -> Run:
    """Inputs of five digits saturate a vanilla net."""
    model = Reader(nn.RNN, 1, 1, width=32, whole=True)
    scale = 1.0 if mended else 2000.0

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = waves(step)
        return scale * x + (0.0 if mended else 10000.0), y

    return learn(model, batch, adam(model, 3e-3), F.mse_loss, steps=100)


@faulty("sequences_fault/rate_jumps_late", "LR_TOO_HIGH", ".*", "UNSTABLE", "EXPLODING")
def jumps(mended: bool = False) -> Run:
    """A schedule that counts in the wrong unit multiplies the rate by 300 at step 90 of 120."""
    model = Speller(nn.GRU)
    run = learn(model, letters, adam(model, 3e-3), steps=120)
    return run if mended else schedule(run, lambda step: 1.0 if step < 90 else 300.0)


@faulty("sequences_fault/decays_rate_too_high", "LR_TOO_HIGH", r"decays|^$")
def decays(mended: bool = False) -> Run:
    """The decays of a state space have a group of their own, with a rate of five."""
    model = Diagonal()
    named = dict(model.named_parameters())
    groups = [
        {"params": [param for name, param in named.items() if "decays" not in name]},
        {"params": [param for name, param in named.items() if "decays" in name], "lr": 3e-3 if mended else 5.0},
    ]
    return learn(model, waves, torch.optim.Adam(groups, 3e-3), F.mse_loss, steps=120)


@faulty("transformers_fault/post_norm_without_warm_up", "LR_TOO_HIGH", ".*")
def unwarmed(mended: bool = False) -> Run:
    """A post-norm model at a rate of 0.1 from the first step."""
    model = Writer(depth=3, post=True)
    return learn(model, chain, adam(model, 2e-3 if mended else 0.1), steps=80)


class Pooled(nn.Module):
    """Words weighed by how much each matters, and a map of their sum."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(20, width), nn.Linear(width, 1), nn.Linear(width, 4)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.embed(x)
        share = self.score(x)[..., 0].masked_fill(hidden, -torch.inf).softmax(-1)
        found: Tensor = self.head((share[..., None] * x).sum(1))
        return found


@faulty("transformers_fault/row_fully_masked_late", "NUMERICAL", ".*")
def masked_row(mended: bool = False) -> Run:
    """At step 60 of 80 one text is empty, and its padding mask hides all of it."""
    model = Pooled()

    def forward(step: int) -> Tensor:
        x, y = marked(step)
        hidden = torch.zeros(x.shape, dtype=torch.bool)
        hidden[3] = step >= 60 and not mended
        return F.cross_entropy(model(x, hidden), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-2), steps=80)


class Routed(nn.Module):
    """Experts of which each serves the tokens of one residue."""

    def __init__(self, width: int = 24, count: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, width), nn.Linear(width, 24)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        every = torch.stack([expert(self.embed(x)) for expert in self.experts], -1)
        chosen = (x % len(self.experts))[..., None, None].expand(*x.shape, every.shape[-2], 1)
        found: Tensor = self.head(every.gather(-1, chosen)[..., 0])
        return found


@faulty("transformers_fault/expert_dies_late", "DEAD", r"experts\.1", "UNCHANGED", "VANISHING", "DISCONNECTED")
def expert_dies(mended: bool = False) -> Run:
    """At step 50 of 120 a merge writes a bias into one expert that no rectifier passes."""
    model = Routed()
    run = learn(model, chain, adam(model, 5e-3), steps=120)

    def write_bias(step: int) -> None:
        if step == 50 and not mended:
            with torch.no_grad():
                model.experts[1][0].bias.fill_(-30.0)

    run.before.append(write_bias)
    return run


@faulty(
    "transformers_fault/expert_dead_from_the_start", "DEAD", r"experts\.3", "UNCHANGED", "VANISHING", "DISCONNECTED"
)
def expert_dead(mended: bool = False) -> Run:
    """The last expert's rectifiers begin out of reach."""
    model = Routed()
    if not mended:
        nn.init.constant_(model.experts[3][0].bias, -15.0)
    return learn(model, chain, adam(model, 5e-3), steps=80)


def updated(model: nn.Module, rate: float, without: str) -> torch.optim.Optimizer:
    """Return AdamW over all parameters but those whose name holds a word."""
    return torch.optim.AdamW([p for name, p in model.named_parameters() if not without or without not in name], rate)


@faulty("transformers_fault/head_not_optimised", "UNCHANGED", r"^head", "DISCONNECTED")
def head_lost(mended: bool = False) -> Run:
    """A new head of a taught model never reaches the optimizer."""
    model = taught()
    nn.init.normal_(model.head.weight, std=0.02)
    return learn(model, other, updated(model, 1e-3, "" if mended else "head"), steps=80)


class Unit(nn.Module):
    """A linear map whose weights are of order one and whose output is scaled instead."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(after, before)), nn.Parameter(torch.zeros(after))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T / self.weight.shape[1] ** 0.5 + self.bias


@faulty("transformers_fault/weights_in_half_stand_still", "UNCHANGED", ".*", "LR_TOO_LOW")
def half(mended: bool = False) -> Run:
    """Weights of order one are kept in bfloat16, where steps of 3e-4 round away."""
    model = nn.Sequential(Unit(12, 128), nn.GELU(), Unit(128, 128), nn.GELU(), Unit(128, 6))
    kind = torch.float32 if mended else torch.bfloat16
    model = model.to(kind)

    def forward(step: int) -> Tensor:
        x, y = blobs(step)
        return F.cross_entropy(model(x.to(kind)).float(), y)

    return Run(model=model, forward=forward, optimizer=torch.optim.Adam(model.parameters(), 3e-4), steps=150)


@faulty("transformers_fault/queries_far_too_large", "ATTN_ENTROPY_COLLAPSE", r"blocks\.0", "SATURATION", "VANISHING")
def sharp(mended: bool = False) -> Run:
    """The first block's query and key weights are sixty times too large."""
    model = Writer(rms=True, rotary=True)
    if not mended:
        with torch.no_grad():
            model.blocks[0].attention.query.weight.mul_(60)
            model.blocks[0].attention.key.weight.mul_(60)
    return write(model, 3e-3, 100, distant)


def distant(step: int) -> tuple[Tensor, Tensor]:
    """Return text in which each token follows from the two tokens one and three places before."""
    source = generator(950_000 + step)
    tokens = [torch.randint(0, 24, (24,), generator=source) for _ in range(3)]
    for _ in range(18):
        free = torch.randint(0, 24, (24,), generator=source)
        lucky = torch.rand(24, generator=source) < 0.8
        tokens.append(torch.where(lucky, (tokens[-1] % 5) * 5 % 24 + tokens[-3] % 5, free) % 24)
    text = torch.stack(tokens, 1)
    return text[:, :-1], text[:, 1:]


class Smoothing(nn.Module):
    """A deep stack of attention alone."""

    def __init__(self, depth: int, skip: bool, width: int = 32) -> None:
        super().__init__()
        self.embed, self.skip = nn.Embedding(20, width), skip
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(layer(x, x, x, need_weights=False)[0])
            x = x + y if self.skip else y
        found: Tensor = self.head(x)
        return found


@faulty("transformers_fault/tokens_become_one", "RANK_COLLAPSE", r"layers|norms|^$", "VANISHING", "LOW_EFFECTIVE_RANK")
def become_one(mended: bool = False) -> Run:
    """Ten attention layers without a skip give every place the same vector."""
    model = Smoothing(10, mended)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, _ = marked(step)
        return x, (x + 3) % 20

    return learn(model, batch, adam(model, 1e-3), steps=80)


@faulty("transformers_fault/adapters_zero_twice", "DEAD", r"down|up|attention|feed", "VANISHING", "UNCHANGED")
def adapters_zero(mended: bool = False) -> Run:
    """Both factors of every low-rank correction begin at zero."""
    model = taught().requires_grad_(False)
    for block in model.blocks:
        block.attention.query, block.attention.value = Adapter(block.attention.query), Adapter(block.attention.value)
        for layer in (block.attention.query, block.attention.value):
            if not mended:
                nn.init.zeros_(layer.down)
    return learn(model, other, adam(model, 1e-2), steps=80)


@faulty("transformers_fault/trunk_frozen_late", "UNCHANGED", r"blocks|embed|place|norm", "DISCONNECTED")
def frozen_late(mended: bool = False) -> Run:
    """At step 30 of 100 a schedule of freezing takes the rate of the blocks away instead of the head's."""
    model = Writer(rms=True, rotary=True)
    blocks = [param for name, param in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.AdamW([{"params": blocks}, {"params": model.head.parameters()}], 1e-3)

    def freeze(step: int) -> None:
        if step == 30 and not mended:
            optimizer.param_groups[0]["lr"] = 0.0

    run = learn(model, chain, optimizer, steps=100)
    run.before.append(freeze)
    return run


@faulty("transformers_fault/layer_scale_explodes", "EXPLODING", r"^[0-3]$|^[0-3]\.|^$", "GRAD_IMBALANCE")
def unscaled(mended: bool = False) -> Run:
    """Linear maps begin at a deviation of one, without norms or skips."""
    model = nn.Sequential(nn.Embedding(24, 32), *(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 24))
    for layer in list(model)[1:]:
        nn.init.normal_(layer.weight, std=32**-0.5 if mended else 1.0)
    return learn(model, chain, sgd(model, 0.1 if mended else 1e-6), steps=60)
