"""Healthy runs of models that are adapted, shared, generative or built in parts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import (
    adam,
    bars,
    entropy,
    generator,
    healthy,
    learn,
    randn,
    sgd,
    spirals,
    stack,
    table,
    tokens,
)
from benchmarks.diagnosis.blind.supervised import Conv, Small
from benchmarks.diagnosis.common import pretrain
from benchmarks.diagnosis.run import Run


@healthy("finetune/frozen_features")
def frozen_features() -> Run:
    model = pretrain(learn(Conv(), bars), 30).model
    model.features.requires_grad_(False).eval()
    model.classifier = nn.Linear(90, 6)
    return learn(model, bars, adam(model.classifier, 1e-3))


@healthy("finetune/frozen_but_in_the_optimizer")
def frozen_in_optimizer() -> Run:
    model = Conv(norm=False)
    model.features.requires_grad_(False)
    return learn(model, bars, torch.optim.Adam(model.parameters(), 1e-3))


@healthy("finetune/first_layers_frozen")
def first_frozen() -> Run:
    model = Small(3)
    for part in (model.embed, model.place, model.parts[0]):
        part.requires_grad_(False)
    return learn(model, tokens)


@healthy("finetune/three_rates")
def three_rates() -> Run:
    model = Conv()
    groups = [
        {"params": list(model.features[:3].parameters()), "lr": 1e-5},
        {"params": list(model.features[3:].parameters()), "lr": 1e-4},
        {"params": list(model.classifier.parameters()), "lr": 1e-3},
    ]
    return learn(model, bars, torch.optim.AdamW(groups))


@healthy("finetune/under_no_grad")
def under_no_grad() -> Run:
    body, head = stack(10, 64, 32), stack(32, 32, 1)
    model = nn.ModuleDict({"body": body.requires_grad_(False), "head": head})

    def forward(step: int) -> Tensor:
        x, y = table(step)
        with torch.no_grad():
            z = body(x)
        return F.mse_loss(head(z), y)

    return Run(model=model, forward=forward, optimizer=adam(head))


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank change of it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.scale, self.drop = base.requires_grad_(False), alpha / rank, nn.Dropout(dropout)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (self.drop(x) @ self.lora_a.T @ self.lora_b.T)


def _adapted(rank: int, alpha: float, dropout: float = 0.0) -> Small:
    model = pretrain(learn(Small(2), tokens), 25).model
    model.requires_grad_(False)
    for part in model.parts:
        part.query = Adapted(part.query, rank, alpha, dropout)
        part.value = Adapted(part.value, rank, alpha, dropout)
    assert isinstance(model, Small)
    return model


@healthy("lora/rank_one_adam")
def lora_adam() -> Run:
    return learn(_adapted(1, 1.0), tokens)


@healthy("lora/rank_eight_sgd")
def lora_sgd() -> Run:
    model = _adapted(8, 16.0)
    return learn(model, tokens, sgd(model, 0.05))


@healthy("lora/dropout")
def lora_dropout() -> Run:
    return learn(_adapted(4, 8.0, 0.2), tokens)


@healthy("lora/learned_scales")
def learned_scales() -> Run:
    class Scaled(nn.Module):
        def __init__(self, base: nn.Module, width: int) -> None:
            super().__init__()
            self.base, self.scale = base.requires_grad_(False), nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) * self.scale
            return out

    model = Small(2).requires_grad_(False)
    for part in model.parts:
        part.key, part.up = Scaled(part.key, 24), Scaled(part.up, 72)
    return learn(model, tokens, adam(model, 5e-3))


@healthy("embedding/zipf_sgd")
def zipf() -> Run:
    model = nn.Sequential(nn.Embedding(8000, 12), nn.Flatten(), nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 3))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = (torch.rand(24, 5, generator=generator(step)) ** 8 * 8000).long()
        return ids, ids[:, 0] % 3

    return learn(model, batch, sgd(model, 0.1))


@healthy("embedding/two_hashes")
def two_hashes() -> Run:
    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Embedding(997, 8), nn.Embedding(991, 8), stack(8, 24, 2)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.out(self.one(ids % 997) + self.two(ids % 991))
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 100_000, (48,), generator=generator(step))
        return ids, ids % 2

    return learn(Hashed(), batch)


@healthy("embedding/sparse_sgd")
def sparse_sgd() -> Run:
    words, topics = nn.Embedding(3000, 10, sparse=True), nn.Linear(10, 4)
    model = nn.Sequential(words, topics)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 3000, (32,), generator=generator(step))
        return ids, ids % 4

    return learn(model, batch, sgd(model, 0.5))


@healthy("embedding/frozen_table")
def frozen_table() -> Run:
    model = nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), stack(64, 48, 5))
    model[0].requires_grad_(False)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 500, (40, 4), generator=generator(step))
        return ids, ids.sum(1) % 5

    return learn(model, batch)


@healthy("shared/layers_of_one_block")
def one_block() -> Run:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = Small(1)
            self.embed, self.part, self.norm, self.decode = whole.embed, whole.parts[0], whole.norm, whole.decode

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            for _ in range(5):
                y = self.part(y)
            out: Tensor = self.decode(self.norm(y))
            return out

    return learn(Shared(), tokens)


@healthy("shared/tied_decoder")
def tied_decoder() -> Run:
    model = Small(2)
    model.decode = nn.Linear(24, 30, bias=False)
    model.decode.weight = model.embed.weight
    return learn(model, tokens)


@healthy("shared/siamese")
def siamese() -> Run:
    model = stack(2, 32, 8)

    def forward(step: int) -> Tensor:
        (x, a), (y, b) = spirals(step), spirals(step + 500)
        apart = (model(x) - model(y)).square().sum(-1)
        return torch.where(a == b, apart, F.relu(1 - apart)).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("shared/autoencoder_with_tied_weights")
def tied_autoencoder() -> Run:
    encode = nn.Linear(24, 6)
    model = nn.ModuleDict({"encode": encode})
    lift = randn(1, 6, 24)

    def forward(step: int) -> Tensor:
        x = randn(step, 40, 6) @ lift / 2
        return F.mse_loss(encode(x).tanh() @ encode.weight, x)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3))


def _code(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, width: int = 20) -> Run:
    lift = randn(2, 5, width)
    return learn(
        model,
        lambda t: ((randn(t, 40, 5) @ lift).tanh() + 0.05 * randn(t + 10**6, 40, width),) * 2,
        optimizer,
        F.mse_loss,
    )


@healthy("autoencoder/code_of_two_silu")
def code_two() -> Run:
    return _code(stack(20, 32, 2, 32, 20, act=nn.SiLU))


@healthy("autoencoder/code_of_three_relu")
def code_three() -> Run:
    return _code(stack(20, 48, 16, 3, 16, 48, 20))


@healthy("autoencoder/linear_code")
def linear_code() -> Run:
    model = nn.Sequential(nn.Linear(20, 2), nn.Linear(2, 20))
    return _code(model, sgd(model, 0.1, momentum=0.9))


@healthy("autoencoder/convolutions")
def conv_code() -> Run:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(100, 4)).append(nn.Linear(4, 100)).append(nn.ReLU()).append(nn.Unflatten(1, (4, 5, 5)))
    model.append(nn.ConvTranspose2d(4, 1, 2, 2))
    return learn(model, lambda t: (bars(t)[0],) * 2, loss=F.mse_loss)


@healthy("autoencoder/sparse_code")
def sparse_code() -> Run:
    encode, decode = nn.Linear(20, 64), nn.Linear(64, 20)
    model = nn.ModuleDict({"encode": encode, "decode": decode})
    lift = randn(3, 5, 20)

    def forward(step: int) -> Tensor:
        x = randn(step, 64, 5) @ lift
        code = F.relu(encode(x))
        return F.mse_loss(decode(code), x) + 1e-3 * code.abs().sum(-1).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("autoencoder/masked_pictures")
def masked() -> Run:
    model = stack(100, 64, 32, 64, 100, act=nn.GELU)

    def forward(step: int) -> Tensor:
        x = bars(step)[0].flatten(1)
        seen = torch.rand(x.shape, generator=generator(step)) < 0.25
        return (model(x * seen) - x)[~seen].square().mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("vae/annealed")
def annealed() -> Run:
    encode, decode = stack(20, 32, 8, act=nn.Tanh), stack(4, 32, 20, act=nn.Tanh)
    model = nn.ModuleDict({"encode": encode, "decode": decode})
    lift = randn(4, 5, 20)

    def forward(step: int) -> Tensor:
        x = randn(step, 40, 5) @ lift
        mean, log = encode(x).chunk(2, -1)
        z = mean + (log / 2).exp() * randn(step + 1, *mean.shape)
        return F.mse_loss(decode(z), x) + min(1, step / 30) * 0.5 * (mean.square() + log.exp() - 1 - log).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("vae/pixels")
def pixels() -> Run:
    encode, decode = stack(100, 48, 12), stack(6, 48, 100)
    model = nn.ModuleDict({"encode": encode, "decode": decode})

    def forward(step: int) -> Tensor:
        x = (bars(step, 32)[0].flatten(1) > 1).float()
        mean, log = encode(x).chunk(2, -1)
        z = mean + (log / 2).exp() * randn(step + 1, *mean.shape)
        lost = F.binary_cross_entropy_with_logits(decode(z), x, reduction="none").sum(-1)
        return (lost + 0.5 * (mean.square() + log.exp() - 1 - log).sum(-1)).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("vae/discrete")
def discrete() -> Run:
    encode, decode = stack(20, 32, 24), stack(24, 32, 20)
    model = nn.ModuleDict({"encode": encode, "decode": decode})
    lift = randn(5, 5, 20)

    def forward(step: int) -> Tensor:
        x = randn(step, 40, 5) @ lift
        logits = encode(x).unflatten(-1, (4, 6))
        noise = -torch.rand(logits.shape, generator=generator(step)).clamp_min(1e-6).log()
        soft = ((logits - noise.log()) / max(0.5, 1 - step / 40)).softmax(-1)
        return F.mse_loss(decode(soft.flatten(1)), x)

    return Run(model=model, forward=forward, optimizer=adam(model))


def _players(loss: str, optimizers: str) -> Run:
    maker, judge = stack(4, 32, 32, 2, act=nn.ReLU), stack(2, 32, 32, 1, act=nn.LeakyReLU)
    model = nn.ModuleDict({"maker": maker, "judge": judge})

    def forward(step: int) -> Tensor:
        real = spirals(step)[0]
        fake = maker(randn(step, 64, 4))
        if loss == "squares":
            told = (judge(real) - 1).square().mean() + judge(fake.detach()).square().mean()
            wanted = (judge_frozen(fake) - 1).square().mean()
        elif loss == "wasserstein":
            told, wanted = judge(fake.detach()).mean() - judge(real).mean(), -judge_frozen(fake).mean()
        else:
            told = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            wanted = F.softplus(-judge_frozen(fake)).mean()
        return told + wanted

    def judge_frozen(x: Tensor) -> Tensor:
        frozen = {name: param.detach() for name, param in judge.named_parameters()}
        return torch.func.functional_call(judge, frozen, (x,))

    def clip(_: int) -> None:
        if loss == "wasserstein":
            with torch.no_grad():
                for param in judge.parameters():
                    param.clamp_(-0.2, 0.2)

    makers = {
        "adam": lambda part: torch.optim.Adam(part.parameters(), 5e-4, betas=(0.5, 0.9)),
        "rmsprop": lambda part: torch.optim.RMSprop(part.parameters(), 2e-4),
    }
    run = Run(model=model, forward=forward, optimizer=[makers[optimizers](part) for part in (maker, judge)])
    run.before.append(clip)
    return run


@healthy("gan/least_squares")
def gan_squares() -> Run:
    return _players("squares", "adam")


@healthy("gan/wasserstein_clamped")
def gan_wasserstein() -> Run:
    return _players("wasserstein", "rmsprop")


@healthy("gan/saturating_not")
def gan_softplus() -> Run:
    return _players("softplus", "adam")


@healthy("contrastive/supervised")
def supervised_contrast() -> Run:
    model = stack(100, 48, 16)

    def forward(step: int) -> Tensor:
        x, labels = bars(step, 24)
        z = F.normalize(model(x.flatten(1)), dim=-1)
        scores = (z @ z.T / 0.2).masked_fill(torch.eye(24, dtype=torch.bool), -1e9)
        same = (labels[:, None] == labels) & ~torch.eye(24, dtype=torch.bool)
        return -(scores.log_softmax(-1) * same).sum(-1).div(same.sum(-1).clamp_min(1)).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("contrastive/stop_gradient")
def stop_gradient() -> Run:
    body, guess = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16)), stack(16, 8, 16)
    model = nn.ModuleDict({"body": body, "guess": guess})

    def forward(step: int) -> Tensor:
        x = randn(step, 48, 20)
        a, b = (body(x + 0.1 * randn(step + part, *x.shape)) for part in (10**5, 10**6))
        return -0.5 * (
            F.cosine_similarity(guess(a), b.detach()).mean() + F.cosine_similarity(guess(b), a.detach()).mean()
        )

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.05, momentum=0.9))


@healthy("contrastive/slow_teacher")
def slow_teacher() -> Run:
    student = Conv()
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = nn.ModuleDict({"student": student, "teacher": teacher})

    def forward(step: int) -> Tensor:
        x, labels = bars(step)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            wanted = teacher(x).softmax(-1)
        out = student(x + 0.1 * randn(step, *x.shape))
        return entropy(out, labels) + F.kl_div(out.log_softmax(-1), wanted, reduction="batchmean")

    return Run(model=model, forward=forward, optimizer=adam(student))


@healthy("contrastive/semi_hard_triplets")
def triplets() -> Run:
    model = stack(100, 64, 8)

    def forward(step: int) -> Tensor:
        x, labels = bars(step, 30)
        z = F.normalize(model(x.flatten(1)), dim=-1)
        apart = torch.cdist(z, z)
        same = labels[:, None] == labels
        worst = (apart * same).amax(1)
        nearest = apart.masked_fill(same, 1e3).amin(1)
        return F.relu(worst - nearest + 0.2).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("diffusion/small_net_over_time")
def diffusion() -> Run:
    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.enter, self.leave = stack(16, 32, 32, act=nn.SiLU), nn.Linear(2, 32), nn.Linear(32, 2)
            self.middle = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            nn.init.zeros_(self.leave.weight)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            phase = t * torch.exp(torch.arange(8) * 0.7)
            time = self.clock(torch.cat([phase.sin(), phase.cos()], -1))
            y = self.enter(x)
            for layer in self.middle:
                y = y + F.silu(layer(y + time))
            out: Tensor = self.leave(y)
            return out

    model = Denoise()

    def forward(step: int) -> Tensor:
        x = spirals(step)[0]
        t, noise = torch.rand(64, 1, generator=generator(step)), randn(step, 64, 2)
        return F.mse_loss(model((1 - t).sqrt() * x + t.sqrt() * noise, t), noise)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3))


@healthy("diffusion/modulated_blocks_from_zero")
def modulated() -> Run:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.body, self.modulate = nn.LayerNorm(24, elementwise_affine=False), stack(24, 48, 24), None
            self.modulate = nn.Linear(8, 72)
            nn.init.zeros_(self.modulate.weight)
            nn.init.zeros_(self.modulate.bias)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            scale, shift, gate = self.modulate(F.silu(t)).chunk(3, -1)
            return x + gate * self.body(self.norm(x) * (1 + scale) + shift)

    blocks = nn.ModuleList(Block() for _ in range(4))
    model = nn.ModuleDict({"time": nn.Linear(1, 8), "enter": nn.Linear(2, 24), "blocks": blocks})
    model["leave"] = nn.Linear(24, 2)

    def forward(step: int) -> Tensor:
        x, noise = spirals(step)[0], randn(step, 64, 2)
        t = torch.rand(64, 1, generator=generator(step))
        y, time = model["enter"]((1 - t) * x + t * noise), model["time"](t)
        for block in blocks:
            y = block(y, time)
        return F.mse_loss(model["leave"](y), noise - x)

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("diffusion/score_of_many_levels")
def scores() -> Run:
    model = stack(3, 64, 64, 2, act=nn.Softplus)

    def forward(step: int) -> Tensor:
        x, noise = spirals(step)[0], randn(step, 64, 2)
        level = 10 ** (-2 * torch.rand(64, 1, generator=generator(step)))
        out = model(torch.cat([x + level * noise, level.log()], -1)) / level
        return (level.square() * (out + noise / level).square()).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("distillation/hidden_layers")
def hidden_layers() -> Run:
    teacher = pretrain(learn(stack(10, 64, 64, 1), table, loss=F.mse_loss), 60).model.requires_grad_(False)
    student = stack(10, 24, 24, 1)
    bridge = nn.Linear(24, 64)
    model = nn.ModuleDict({"student": student, "bridge": bridge})

    def forward(step: int) -> Tensor:
        x, y = table(step)
        seen = teacher[:3](x)
        return F.mse_loss(bridge(student[:3](x)), seen) + F.mse_loss(student(x), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("many_tasks/learned_weights")
def learned_weights() -> Run:
    trunk = stack(10, 48, 48)
    heads = nn.ModuleList(nn.Linear(48, 1) for _ in range(3))
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    model.logs = nn.Parameter(torch.zeros(3))

    def forward(step: int) -> Tensor:
        x, y = table(step)
        targets = (y, 10 * x[:, 4:5], (y > 0).float())
        z = trunk(x).relu()
        lost = torch.stack([F.mse_loss(head(z), wanted) for head, wanted in zip(heads, targets, strict=True)])
        return (lost * (-model.logs).exp() + model.logs).sum()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("many_tasks/faint_auxiliary")
def faint_auxiliary() -> Run:
    trunk, main, aside = stack(2, 48, 48), nn.Linear(48, 3), nn.Linear(48, 2)
    model = nn.ModuleDict({"trunk": trunk, "main": main, "aside": aside})

    def forward(step: int) -> Tensor:
        x, labels = spirals(step)
        z = trunk(x).relu()
        return entropy(main(z), labels) + 0.01 * F.mse_loss(aside(z), x)

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("many_tasks/one_task_a_step")
def one_task() -> Run:
    trunk, heads = stack(10, 48, 48), nn.ModuleList(nn.Linear(48, 1) for _ in range(4))
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})

    def forward(step: int) -> Tensor:
        x, y = table(step)
        return F.mse_loss(heads[step % 4](trunk(x).relu()), y * (1 + step % 4))

    return Run(model=model, forward=forward, optimizer=adam(model))
