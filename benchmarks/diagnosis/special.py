"""Healthy runs: generative and contrastive models, policies, experts, adapters, embeddings and the like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis import models
from benchmarks.diagnosis.common import classify, make, pretrain, regress
from benchmarks.diagnosis.data import clusters, images, manifold, sequences, surface, text
from benchmarks.diagnosis.run import Run, add


def _plain(model: nn.Module, forward: Callable[[int], Tensor], optimizer: str = "adam") -> Run:
    return Run(model=model, forward=forward, optimizer=make(optimizer, model.parameters()))


def _noise(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(777 + step))


def autoencoders() -> None:
    for latent, act in product((2, 4, 8), ("relu", "tanh")):
        add(f"autoencoder/{latent}_{act}", lambda latent=latent, act=act: _autoencoder(latent, act))
        add(f"vae/{latent}_{act}", lambda latent=latent, act=act: _vae(latent, act, "adam"))
    add("autoencoder/denoising", lambda: _autoencoder(4, "relu", noise=0.5))
    add("autoencoder/sigmoid_output", lambda: _autoencoder(4, "relu", binary=True))
    add("vae/beta_sgd", lambda: _vae(4, "tanh", "momentum", beta=0.1))
    add("vae/conv", _conv_vae)
    add("autoencoder/vector_quantised", _vector_quantised)


def _autoencoder(latent: int, act: str, noise: float = 0.0, binary: bool = False) -> Run:
    model = nn.ModuleDict(
        {"encode": models.mlp([32, 32, 16, latent], act), "decode": models.mlp([latent, 16, 32, 32], act)}
    )
    out = nn.Sigmoid() if binary else nn.Identity()
    model["out"] = out
    batches = manifold(latent=8)

    def forward(step: int) -> Tensor:
        x = batches(step)
        target = (x > 0).float() if binary else x
        found = out(model["decode"](model["encode"](x + noise * _noise(step, *x.shape))))
        return F.binary_cross_entropy(found, target) if binary else F.mse_loss(found, target)

    return _plain(model, forward)


def _vae(latent: int, act: str, optimizer: str, beta: float = 1.0) -> Run:
    model = nn.ModuleDict(
        {"encode": models.mlp([32, 32, 2 * latent], act), "decode": models.mlp([latent, 32, 32], act)}
    )
    batches = manifold(latent=8)

    def forward(step: int) -> Tensor:
        x = batches(step)
        mean, log_variance = model["encode"](x).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * _noise(step, *mean.shape)
        kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return (model["decode"](z) - x).pow(2).sum(-1).mean() + beta * kl

    return _plain(
        model, forward, "adam" if optimizer == "adam" else lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9)
    )  # type: ignore[arg-type]


def _conv_vae() -> Run:
    model = nn.ModuleDict(
        {
            "encode": nn.Sequential(
                nn.Conv2d(3, 8, 4, 2, 1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 4, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(144, 16),
            ),
            "decode": nn.Sequential(
                nn.Linear(8, 144),
                nn.Unflatten(1, (16, 3, 3)),
                nn.ReLU(),
                nn.ConvTranspose2d(16, 8, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 3, 4, 2, 1),
            ),
        }
    )
    batches = images()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        mean, log_variance = model["encode"](x).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * _noise(step, *mean.shape)
        kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return (model["decode"](z) - x).pow(2).sum((1, 2, 3)).mean() + kl

    return _plain(model, forward)


def _vector_quantised() -> Run:
    model = nn.ModuleDict(
        {"encode": models.mlp([32, 32, 8]), "codes": nn.Embedding(16, 8), "decode": models.mlp([8, 32, 32])}
    )
    batches = manifold(latent=8)

    def forward(step: int) -> Tensor:
        x = batches(step)
        z = model["encode"](x)
        code = model["codes"](torch.cdist(z, model["codes"].weight).argmin(-1))
        passed = z + (code - z).detach()
        return (
            F.mse_loss(model["decode"](passed), x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        )

    return _plain(model, forward)


def adversaries() -> None:
    for kind, optimizer in product(("minimax", "hinge", "wasserstein", "penalty"), ("adam", "rmsprop")):
        add(f"gan/{kind}_{optimizer}", lambda kind=kind, optimizer=optimizer: _gan(kind, optimizer))
    add("gan/conv", lambda: _gan("hinge", "adam", conv=True))
    add("adversarial/domain", _domain)


def _gan(kind: str, optimizer: str, conv: bool = False) -> Run:
    act = "leaky"
    maker = models.mlp([8, 32, 32, 16], act)
    judge = models.mlp([16, 32, 32, 1], act)
    model = nn.ModuleDict({"generator": maker, "critic": judge})
    if conv:
        maker.append(nn.Tanh())
    batches = manifold(width=16)

    def forward(step: int) -> Tensor:
        real = batches(step)
        fake = maker(_noise(step, len(real), 8))
        for param in judge.parameters():
            param.requires_grad_(False)
        scored = judge(fake)
        for param in judge.parameters():
            param.requires_grad_(True)
        good, bad = judge(real), judge(fake.detach())
        if kind == "minimax":
            return F.softplus(-good).mean() + F.softplus(bad).mean() + F.softplus(-scored).mean()
        if kind == "hinge":
            return F.relu(1 - good).mean() + F.relu(1 + bad).mean() - scored.mean()
        loss = bad.mean() - good.mean() - scored.mean()
        if kind == "penalty":
            middle = (0.5 * (real + fake.detach())).requires_grad_()
            (slope,) = torch.autograd.grad(judge(middle).sum(), middle, create_graph=True)
            return loss + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        return loss + 1e-2 * (good**2).mean()

    makers = {
        "adam": lambda p: torch.optim.Adam(p, 2e-4, betas=(0.5, 0.999)),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 5e-5),
    }
    return Run(
        model=model,
        forward=forward,
        optimizer=[makers[optimizer](maker.parameters()), makers[optimizer](judge.parameters())],
    )


def _domain() -> Run:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -0.3 * grad

    model = models.Heads(models.mlp([24, 48, 32]), {"label": nn.Linear(32, 5), "domain": nn.Linear(32, 2)})
    batches = clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        shared = torch.relu(model.trunk(x))
        return F.cross_entropy(model.heads["label"](shared), y) + F.cross_entropy(
            model.heads["domain"](Reverse.apply(shared)), y % 2
        )

    return _plain(model, forward)


def contrasts() -> None:
    for temperature, optimizer in product((0.1, 0.5), ("adam", "momentum")):
        add(
            f"contrastive/info_nce_{temperature}_{optimizer}",
            lambda temperature=temperature, optimizer=optimizer: _info_nce(temperature, optimizer),
        )
    for optimizer in ("adam", "sgd"):
        add(f"contrastive/triplet_{optimizer}", lambda optimizer=optimizer: _triplet(optimizer))
    for reachable in (True, False):
        add(f"contrastive/momentum_target_{reachable}", lambda reachable=reachable: _momentum_target(reachable))
    add("contrastive/two_towers", _two_towers)
    add("contrastive/barlow", _barlow)


def _views(step: int) -> tuple[Tensor, Tensor]:
    x = manifold(width=32, latent=8)(step)
    return x + 0.2 * _noise(step, *x.shape), x + 0.2 * _noise(step + 10_000, *x.shape)


def _info_nce(temperature: float, optimizer: str) -> Run:
    model = nn.ModuleDict({"body": models.mlp([32, 64, 48]), "project": models.mlp([48, 48, 16])})

    def forward(step: int) -> Tensor:
        a, b = (F.normalize(model["project"](F.relu(model["body"](view))), dim=-1) for view in _views(step))
        return F.cross_entropy(a @ b.T / temperature, torch.arange(len(a)))

    return _plain(model, forward, optimizer)


def _triplet(optimizer: str) -> Run:
    model = models.mlp([24, 48, 16])
    batches = clusters(2, spread=4.0)

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        z = model(x)
        order = y.argsort()
        z, y = z[order], y[order]
        half = min(int((y == 0).sum()), int((y == 1).sum()))
        a, b = z[:half], z[-half:]
        return F.triplet_margin_loss(a, a.roll(1, 0), b, margin=1.0)

    return _plain(model, forward, optimizer)


def _momentum_target(reachable: bool) -> Run:
    online = models.mlp([32, 48, 16])
    target = copy.deepcopy(online)
    model = nn.ModuleDict({"online": online, "predict": models.mlp([16, 32, 16]), "target": target})
    target.requires_grad_(reachable)

    def forward(step: int) -> Tensor:
        a, b = _views(step)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
            wanted = F.normalize(target(b), dim=-1)
        return 2 - 2 * (F.normalize(model["predict"](online(a)), dim=-1) * wanted).sum(-1).mean()

    return Run(
        model=model, forward=forward, optimizer=make("adam", [*online.parameters(), *model["predict"].parameters()])
    )


def _two_towers() -> Run:
    model = nn.ModuleDict({"left": models.mlp([32, 48, 16]), "right": models.mlp([32, 48, 16])})
    model.scale = nn.Parameter(torch.tensor(2.0))  # type: ignore[assignment]

    def forward(step: int) -> Tensor:
        a, b = _views(step)
        scores = F.normalize(model["left"](a), dim=-1) @ F.normalize(model["right"](b), dim=-1).T * model.scale.exp()  # type: ignore[operator]
        labels = torch.arange(len(a))
        return 0.5 * (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels))

    return _plain(model, forward)


def _barlow() -> Run:
    model = models.mlp([32, 64, 64, 16], norm="batch")

    def forward(step: int) -> Tensor:
        a, b = (model(view) for view in _views(step))
        c = ((a - a.mean(0)) / (a.std(0) + 1e-4)).T @ ((b - b.mean(0)) / (b.std(0) + 1e-4)) / len(a)
        diagonal = torch.diagonal(c)
        return (diagonal - 1).pow(2).sum() + 0.01 * (c.pow(2).sum() - diagonal.pow(2).sum())

    return _plain(model, forward)


def policies() -> None:
    for actions, entropy in product((4, 8), (0.0, 0.01)):
        add(
            f"policy/reinforce_{actions}_{entropy}",
            lambda actions=actions, entropy=entropy: _reinforce(actions, entropy),
        )
    for optimizer in ("adam", "rmsprop"):
        add(f"policy/actor_critic_{optimizer}", lambda optimizer=optimizer: _actor_critic(optimizer))
        add(f"policy/gaussian_{optimizer}", lambda optimizer=optimizer: _gaussian(optimizer))
    add("policy/value_network", lambda: _q_learning(False))
    add("policy/value_network_dueling", lambda: _q_learning(True))
    add("policy/squashed", _squashed)
    add("policy/clipped_ratio", lambda: _ratio(3))
    add("policy/clipped_ratio_many_epochs", lambda: _ratio(8))
    add(
        "policy/behaviour_cloning",
        lambda: classify(models.mlp([24, 64, 64, 6], "tanh", init="orthogonal"), clusters(6), "adam"),
    )
    add("policy/sparse_reward", lambda: _reinforce(4, 0.01, sparse=True))


def _reinforce(actions: int, entropy: float, sparse: bool = False) -> Run:
    model = models.mlp([12, 32, 32, actions], "tanh")
    batches = surface()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        logits = model(x)
        chosen = torch.multinomial(logits.softmax(-1).detach(), 1, generator=torch.Generator().manual_seed(step))[:, 0]
        reward = (chosen == (x[:, :actions].argmax(-1))).float()
        if sparse:
            reward = reward * (x[:, 0] > 2.0)
        gain = reward - reward.mean()
        logs = logits.log_softmax(-1)
        spread = -(logs.exp() * logs).sum(-1).mean()
        return -(gain * logs.gather(1, chosen[:, None])[:, 0]).mean() - entropy * spread

    return _plain(model, forward, "adam")


def _actor_critic(optimizer: str) -> Run:
    model = models.Heads(
        models.mlp([12, 48, 48], "tanh", init="orthogonal"), {"policy": nn.Linear(48, 4), "value": nn.Linear(48, 1)}
    )
    nn.init.orthogonal_(model.heads["policy"].weight, 0.01)  # type: ignore[arg-type]
    batches = surface()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        out = model(x)
        chosen = torch.multinomial(out["policy"].softmax(-1).detach(), 1, generator=torch.Generator().manual_seed(step))
        reward = y[:, 0] + (chosen[:, 0] == 1)
        gain = reward - out["value"][:, 0]
        logs = out["policy"].log_softmax(-1)
        return (
            -(gain.detach() * logs.gather(1, chosen)[:, 0]).mean()
            + 0.5 * gain.pow(2).mean()
            + 0.01 * (logs.exp() * logs).sum(-1).mean()
        )

    return _plain(model, forward, optimizer)


def _gaussian(optimizer: str) -> Run:
    model = models.mlp([12, 48, 2], "tanh")
    model.log_std = nn.Parameter(torch.zeros(2))  # type: ignore[assignment]
    batches = surface()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        spread = torch.distributions.Normal(model(x), model.log_std.exp())  # type: ignore[operator]
        action = (spread.mean + spread.stddev * _noise(step, len(x), 2)).detach()
        reward = -(action - x[:, :2]).pow(2).sum(-1)
        gain = (reward - reward.mean()) / reward.std()
        return -(gain * spread.log_prob(action).sum(-1)).mean()

    return _plain(model, forward, optimizer)


def _q_learning(dueling: bool) -> Run:
    heads = {"advantage": nn.Linear(48, 4), "value": nn.Linear(48, 1)} if dueling else {"advantage": nn.Linear(48, 4)}
    online = models.Heads(models.mlp([12, 48, 48], init="he"), heads)
    target = copy.deepcopy(online)
    model = nn.ModuleDict({"online": online, "target": target})
    batches = surface()

    def value(out):
        return (
            out["advantage"] - out["advantage"].mean(-1, keepdim=True) + out["value"] if dueling else out["advantage"]
        )

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        if step % 10 == 0:
            target.load_state_dict(online.state_dict())
        chosen = torch.randint(0, 4, (len(x), 1), generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            wanted = y[:, 0] + 0.9 * value(target(x.roll(1, 0))).max(-1).values
        return F.smooth_l1_loss(value(online(x)).gather(1, chosen)[:, 0], wanted)

    return Run(model=model, forward=forward, optimizer=make("adam", online.parameters()))


def _squashed() -> Run:
    model = models.mlp([12, 48, 4])
    batches = surface()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        mean, log_std = model(x).chunk(2, -1)
        raw = mean + log_std.clamp(-5, 2).exp() * _noise(step, *mean.shape)
        logs = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp()).log_prob(raw) - 2 * (
            0.6931 - raw - F.softplus(-2 * raw)
        )
        return (0.1 * logs.sum(-1) + (raw.tanh() - x[:, :2].tanh()).pow(2).sum(-1)).mean()

    return _plain(model, forward)


def _ratio(epochs: int) -> Run:
    model = models.mlp([12, 48, 48, 4], "tanh", init="orthogonal")
    batches = surface()
    kept: dict[int, tuple[Tensor, ...]] = {}

    def forward(step: int) -> Tensor:
        rollout = step // epochs
        if rollout not in kept:
            x, _ = batches(rollout)
            with torch.no_grad():
                logs = model(x).log_softmax(-1)
            chosen = torch.multinomial(logs.exp(), 1, generator=torch.Generator().manual_seed(rollout))
            reward = (chosen[:, 0] == x[:, :4].argmax(-1)).float()
            kept[rollout] = (x, chosen, logs.gather(1, chosen), (reward - reward.mean()) / (reward.std() + 1e-6))
        x, chosen, old, gain = kept[rollout]
        ratio = (model(x).log_softmax(-1).gather(1, chosen) - old).exp()[:, 0]
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return _plain(model, forward)


def experts() -> None:
    for count, top in product((2, 4), (1, 2)):
        add(
            f"experts/{count}_top_{top}",
            lambda count=count, top=top: classify(models.Experts(count=count, top=top), clusters(), "adam"),
        )
    for optimizer in ("adam", "momentum"):
        add(
            f"experts/soft_{optimizer}",
            lambda optimizer=optimizer: classify(models.Experts(soft=True), clusters(), optimizer),
        )


def adapters() -> None:
    for optimizer, rank in product(("adam", "sgd", "adamw"), (2, 8)):
        add(f"adapter/low_rank_{optimizer}_{rank}", lambda optimizer=optimizer, rank=rank: _low_rank(optimizer, rank))
    add("adapter/transformer", _adapted_transformer)
    add("adapter/prompt", _prompt)
    add("adapter/bias_only", _bias_only)
    for optimizer in ("adam", "sgd"):
        add(f"finetune/frozen_{optimizer}", lambda optimizer=optimizer: _finetune(optimizer, frozen=True))
        add(f"finetune/all_{optimizer}", lambda optimizer=optimizer: _finetune(optimizer, frozen=False))
    add("finetune/two_rates", _two_rates)
    add("finetune/unfreezing", _unfreezing)
    add("finetune/frozen_norms", _frozen_norms)
    add(
        "finetune/small_rate",
        lambda: pretrain(classify(models.mlp([24, 48, 48, 5]), clusters(), lambda p: torch.optim.Adam(p, 1e-4)), 100),
    )
    for temperature in (1.0, 4.0):
        add(f"distillation/{temperature:g}", lambda temperature=temperature: _distilled(temperature))


def _low_rank(optimizer: str, rank: int) -> Run:
    base = pretrain(classify(models.mlp([24, 48, 48, 5], init="he"), clusters(salt=9), "adam"), 30).model
    for name, layer in list(base.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(base, name, models.LowRank(layer, rank))
    return classify(base, clusters(), optimizer)


def _adapted_transformer() -> Run:
    model = models.Language()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attn.qkv = models.LowRank(layer.attn.qkv)  # type: ignore[union-attr,assignment,arg-type]
        layer.fc_in = models.LowRank(layer.fc_in)  # type: ignore[assignment,arg-type]
    return classify(model, text(), "adam")


def _prompt() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = models.Vision().requires_grad_(False)
            self.prompt = nn.Parameter(0.02 * torch.randn(1, 3, 12, 12))
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.base(x + self.prompt))
            return out

    return classify(Model(), images(), "adam")


def _bias_only() -> Run:
    model = models.mlp([24, 48, 48, 5], init="he")
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias") or name.startswith("lin2"))
    return classify(model, clusters(), "adam")


def _finetune(optimizer: str, frozen: bool) -> Run:
    backbone = models.mlp([24, 48, 48, 32], init="he")
    model = models.Backboned(backbone, nn.Linear(32, 5), torch.relu)
    pretrain(classify(model, clusters(salt=9), "adam"), 60)
    backbone.requires_grad_(not frozen)
    model.head = nn.Linear(32, 5)
    return classify(model, clusters(), optimizer)


def _two_rates() -> Run:
    model = models.Backboned(models.mlp([24, 48, 48, 32], init="he"), nn.Linear(32, 5), torch.relu)
    groups = [
        {"params": list(model.backbone.parameters()), "lr": 1e-5},
        {"params": list(model.head.parameters()), "lr": 1e-3},
    ]
    return classify(model, clusters(), torch.optim.Adam(groups))


def _unfreezing() -> Run:
    model = models.Backboned(models.mlp([24, 48, 48, 32], init="he"), nn.Linear(32, 5), torch.relu)
    run = classify(model, clusters(), torch.optim.Adam(model.parameters(), 1e-3))
    model.backbone.requires_grad_(False)
    run.before.append(lambda step: model.backbone.requires_grad_(step >= 16))
    return run


def _frozen_norms() -> Run:
    model = models.ResNet(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
            module.eval()
    return classify(model, images(), "adam")


def _distilled(temperature: float) -> Run:
    teacher = pretrain(classify(models.mlp([24, 96, 5]), clusters(), "adam"), 100).model
    student = models.mlp([24, 24, 5])
    batches = clusters()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        with torch.no_grad():
            wanted = (teacher(x) / temperature).softmax(-1)
        return F.kl_div((student(x) / temperature).log_softmax(-1), wanted, reduction="batchmean") * temperature**2

    return _plain(student, forward)


def embeddings() -> None:
    for size, kind in product((1000, 20000), ("mean", "sum")):
        add(f"embedding/bag_{kind}_{size}", lambda size=size, kind=kind: _bag(size, kind))
    add("embedding/sparse", lambda: _skip_gram(sparse=True))
    add("embedding/skip_gram", lambda: _skip_gram(sparse=False))
    for optimizer in ("adam", "sgd", "adagrad"):
        add(f"embedding/factorisation_{optimizer}", lambda optimizer=optimizer: _factorised(optimizer))
    add("embedding/padded", _padded)
    add("embedding/recommender", _recommender)


def _bag(size: int, kind: str) -> Run:
    model = nn.Sequential(nn.EmbeddingBag(size, 16, mode=kind), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, size, (32, 6), generator=torch.Generator().manual_seed(step))
        return x, x[:, 0] % 4

    return classify(model, batch, "adam_fast")


def _skip_gram(sparse: bool) -> Run:
    model = nn.ModuleDict(
        {"word": nn.Embedding(2000, 16, sparse=sparse), "context": nn.Embedding(2000, 16, sparse=sparse)}
    )

    def forward(step: int) -> Tensor:
        words = torch.randint(0, 2000, (64,), generator=torch.Generator().manual_seed(step))
        near, far = (
            (words + 1) % 2000,
            torch.randint(0, 2000, (64,), generator=torch.Generator().manual_seed(step + 5000)),
        )
        a = model["word"](words)
        return -(
            F.logsigmoid((a * model["context"](near)).sum(-1)) + F.logsigmoid(-(a * model["context"](far)).sum(-1))
        ).mean()

    makers = (lambda p: torch.optim.SparseAdam(p, 1e-2)) if sparse else (lambda p: torch.optim.Adam(p, 1e-2))
    return Run(model=model, forward=forward, optimizer=makers(list(model.parameters())))


def _factorised(optimizer: str) -> Run:
    model = nn.ModuleDict({"user": nn.Embedding(300, 8), "item": nn.Embedding(200, 8)})
    for table in model.values():
        nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]

    def forward(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        users, items = (
            torch.randint(0, 300, (64,), generator=generator),
            torch.randint(0, 200, (64,), generator=generator),
        )
        return ((model["user"](users) * model["item"](items)).sum(-1) - ((users + items) % 5 - 2).float()).pow(2).mean()

    return _plain(model, forward, optimizer)


def _padded() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(40, 24, padding_idx=0)
            self.core = nn.GRU(24, 32, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            lengths = (tokens > 0).sum(1).clamp_min(1)
            packed = nn.utils.rnn.pack_padded_sequence(
                self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False
            )
            out: Tensor = self.head(self.core(packed)[1][-1])
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(1, 40, (24, 10), generator=generator)
        lengths = torch.randint(2, 11, (24, 1), generator=generator)
        return x.masked_fill(torch.arange(10) >= lengths, 0), x[:, 0] % 4

    return classify(Model(), batch, "adam_fast")


def _recommender() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (50, 500, 5000))
            self.dense = models.mlp([6, 16, 8])
            self.top = models.mlp([38, 32, 1])

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            parts = [self.dense(x), *(table(ids[:, index]) for index, table in enumerate(self.tables))]
            crossed = torch.stack([(a * b).sum(-1) for i, a in enumerate(parts) for b in parts[:i]], -1)
            out: Tensor = self.top(torch.cat([*parts, crossed], -1))[:, 0]
            return out

    model = Model()

    def forward(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 6, generator=generator)
        ids = torch.stack([torch.randint(0, size, (64,), generator=generator) for size in (50, 500, 5000)], -1)
        return F.binary_cross_entropy_with_logits(model(x, ids), (x[:, 0] + ids[:, 0] % 2 > 0.5).float())

    return _plain(model, forward)


def others() -> None:
    add("other/multi_task", lambda: _multi_task({"a": 1.0, "b": 1.0}))
    add("other/small_auxiliary_loss", lambda: _multi_task({"a": 1.0, "b": 1e-3}))
    add("other/alternating_tasks", lambda: _multi_task({"a": 1.0, "b": 1.0}, alternate=True))
    add("other/dense_connections", lambda: classify(_Dense(), images(), "adam"))
    add("other/inception", lambda: classify(_Inception(), images(), "adam"))
    add("other/squeeze", lambda: classify(_Squeeze(), images(), "adam"))
    add("other/highway", lambda: classify(_Highway(), clusters(), "adam"))
    add("other/re_zero", lambda: classify(_ReZero(), clusters(), "adam"))
    add("other/re_zero_sgd", lambda: classify(_ReZero(), clusters(), "sgd"))
    add("other/layer_scale", lambda: classify(_ReZero(1e-4), clusters(), "adam"))
    add(
        "other/siren",
        lambda: regress(
            _Siren(),
            lambda t: (2 * torch.rand(64, 2, generator=torch.Generator().manual_seed(t)) - 1,) * 2,
            "adam",
            lambda a, b: (a - (6 * b[:, :1]).sin()).pow(2).mean(),
        ),
    )
    add("other/flow", _flow)
    add("other/diffusion", _diffusion)
    add("other/graph", _graph)
    add("other/unet", lambda: _unet())
    add(
        "other/weight_norm",
        lambda: classify(_reparametrised(nn.utils.parametrizations.weight_norm), clusters(), "adam"),
    )
    add(
        "other/spectral_norm",
        lambda: classify(_reparametrised(nn.utils.parametrizations.spectral_norm), clusters(), "adam"),
    )
    add("other/attention_pool", lambda: _attention_pool())
    add("other/checkpointed", lambda: _checkpointed(False))
    add("other/checkpointed_reentrant", lambda: _checkpointed(True))
    add("other/shared_layers", lambda: classify(_Shared(), clusters(), "adam"))
    add("other/hypernetwork", lambda: classify(_Hyper(), clusters(), "adam"))
    add("other/mixup", lambda: _mixup())
    add("other/ctc", _ctc)
    add("other/binary_gate", lambda: classify(_Gated(), clusters(), "adam"))
    add(
        "other/rectified_output",
        lambda: regress(_positive(), lambda t: (surface()(t)[0], surface()(t)[1].abs()), "adam"),
    )
    add("other/softmax_module", lambda: _softmax_module())
    add("other/temporal_convolution", lambda: _temporal())
    add("other/quiet_head", lambda: classify(_quiet(), clusters(), "adam"))
    add("other/evaluation_between", _evaluated)
    add("other/two_optimizers", _two_optimizers)
    add("other/echo_state", _echo)
    add(
        "other/seq_to_seq",
        lambda: classify(
            models.Recurrent("LSTM", classes=3, every=True),
            lambda t: (sequences()(t)[0], sequences()(t)[0][..., :3].argmax(-1)),
            "adam",
        ),
    )


def _multi_task(weights: dict[str, float], alternate: bool = False) -> Run:
    model = models.Heads(models.mlp([24, 48, 48]), {"a": nn.Linear(48, 5), "b": nn.Linear(48, 5)})
    batches = clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        out = model(x)
        names = ["ab"[step % 2]] if alternate else list(weights)
        return sum(weights[name] * F.cross_entropy(out[name], (y + (name == "b")) % 5) for name in names)  # type: ignore[return-value]

    return _plain(model, forward)


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 + 6 * index, 6, 3, padding=1) for index in range(4))
        self.head = nn.Linear(27, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.cat([x, F.relu(conv(x))], 1)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class _Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.ways = nn.ModuleList(nn.Conv2d(8, 8, size, padding=size // 2) for size in (1, 3, 5))
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        out: Tensor = self.head(torch.cat([F.relu(way(x)) for way in self.ways], 1).mean((2, 3)))
        return out


class _Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.down, self.up, self.head = nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv(x))))
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        out: Tensor = self.head((x * gate[:, :, None, None]).mean((2, 3)))
        return out


class _Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 32), nn.Linear(32, 5)
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -3.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for part, gate in zip(self.parts, self.gates, strict=True):
            weight = torch.sigmoid(gate(x))
            x = weight * torch.relu(part(x)) + (1 - weight) * x
        out: Tensor = self.out(x)
        return out


class _ReZero(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 32), nn.Linear(32, 5)
        self.parts = nn.ModuleList(models.mlp([32, 32, 32]) for _ in range(6))
        self.alphas = nn.Parameter(torch.full((6,), start))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for part, alpha in zip(self.parts, self.alphas, strict=True):
            x = x + alpha * part(x)
        out: Tensor = self.out(x)
        return out


class _Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in ((2, 48), (48, 48), (48, 1)))
        for lin in self.lins[1:]:
            nn.init.uniform_(lin.weight, -((6 / 48) ** 0.5) / 10, (6 / 48) ** 0.5 / 10)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for lin in self.lins[:-1]:
            x = torch.sin(10 * lin(x))
        out: Tensor = self.lins[-1](x)
        return out


def _flow() -> Run:
    model = nn.ModuleList(models.mlp([8, 32, 16], "tanh") for _ in range(4))
    batches = manifold(width=16)

    def forward(step: int) -> Tensor:
        x = batches(step)
        logs = torch.zeros(len(x))
        for part in model:
            a, b = x.chunk(2, -1)
            scale, shift = part(a).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], -1)
            logs = logs + scale.sum(-1)
        return (0.5 * x.pow(2).sum(-1) - logs).mean()

    return _plain(model, forward)


def _diffusion() -> Run:
    model = models.mlp([17, 64, 64, 16], "silu")
    batches = manifold(width=16)

    def forward(step: int) -> Tensor:
        x = batches(step)
        level = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(step))
        noise = _noise(step, *x.shape)
        return F.mse_loss(model(torch.cat([(1 - level).sqrt() * x + level.sqrt() * noise, level], -1)), noise)

    return _plain(model, forward)


def _graph() -> Run:
    generator = torch.Generator().manual_seed(3)
    edges = ((torch.rand(60, 60, generator=generator) < 0.08) | torch.eye(60).bool()).float()
    edges = edges / edges.sum(1, keepdim=True)
    x = torch.randn(60, 12, generator=generator)
    labels = (edges @ x)[:, :3].argmax(-1)
    model = nn.ModuleList([nn.Linear(12, 32), nn.Linear(32, 3)])
    return _plain(model, lambda _: F.cross_entropy(edges @ model[1](F.relu(edges @ model[0](x))), labels), "adam_fast")


def _unet() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            a = F.relu(self.down(x))
            b = F.relu(self.deep(F.max_pool2d(a, 2)))
            out: Tensor = self.out(torch.cat([a, F.relu(self.up(b))], 1))
            return out

    batches = images()
    return regress(Model(), lambda t: (batches(t)[0] + 0.3 * _noise(t, 24, 3, 12, 12), batches(t)[0]), "adam")


def _reparametrised(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = models.mlp([24, 48, 48, 5])
    for layer in model:
        if isinstance(layer, nn.Linear):
            wrap(layer)
    return model


def _attention_pool() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.score, self.head = nn.Linear(4, 32), nn.Linear(32, 1), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            values = torch.tanh(self.value(x))
            out: Tensor = self.head((self.score(values).softmax(1) * values).sum(1))
            return out

    return classify(Model(), sequences(), "adam")


def _checkpointed(reentrant: bool) -> Run:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(24, 48), nn.Linear(48, 5)
            self.blocks = nn.ModuleList(models.mlp([48, 48, 48]) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            out: Tensor = self.out(x)
            return out

    return classify(Model(), clusters(), "adam")


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.core, self.out = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(4):
            x = x + 0.5 * F.gelu(self.core(x))
        out: Tensor = self.out(x)
        return out


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(1, 8))
        self.make = nn.Linear(8, 24 * 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.code).view(32, 24) / 3
        out: Tensor = self.head(F.relu(x @ weight.T))
        return out


def _mixup() -> Run:
    model, batches = models.mlp([24, 48, 48, 5]), clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        share = torch.rand(1, generator=torch.Generator().manual_seed(step))
        out = model(share * x + (1 - share) * x.flip(0))
        return (share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0)))[0]

    return _plain(model, forward)


def _ctc() -> Run:
    model = models.Recurrent("LSTM", classes=6, every=True)
    batches = sequences()

    def forward(step: int) -> Tensor:
        x, _ = batches(step)
        targets = torch.randint(1, 6, (len(x), 5), generator=torch.Generator().manual_seed(step))
        logs = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, targets, torch.full((len(x),), logs.shape[0]), torch.full((len(x),), 5))

    return _plain(model, forward, "adam_fast")


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body, self.head = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(32, 5)
        nn.init.constant_(self.gate.bias, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.sigmoid(self.gate(x)) * torch.tanh(self.body(x)))
        return out


def _positive() -> nn.Sequential:
    model = models.mlp([12, 48, 1])
    model.append(nn.Softplus())
    return model


def _softmax_module() -> Run:
    model = models.mlp([24, 48, 5])
    model.append(nn.Softmax(-1))
    batches = clusters()
    return _plain(model, lambda t: F.nll_loss((model(batches(t)[0]) + 1e-8).log(), batches(t)[1]))


def _temporal() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(
                nn.Conv1d(4 if index == 0 else 16, 16, 3, padding=2**index, dilation=2**index) for index in range(4)
            )
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(1, 2)
            for conv in self.convs:
                x = F.relu(conv(x))
            out: Tensor = self.head(x[:, :, -1])
            return out

    return classify(Model(), sequences(), "adam")


def _quiet() -> nn.Module:
    model = models.mlp([24, 48, 48, 5], "tanh", init="orthogonal")
    nn.init.orthogonal_(model.lin2.weight, 0.01)  # type: ignore[union-attr,arg-type]
    return model


def _evaluated() -> Run:
    run = classify(models.ConvNet(), images(), "adam")

    def evaluate(step: int) -> None:
        run.model.eval()
        with torch.no_grad():
            run.model(images()(step + 900)[0])
        run.model.train()

    run.before.append(evaluate)
    return run


def _two_optimizers() -> Run:
    model = models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5), torch.relu)
    run = classify(model, clusters(), make("adam", model.backbone.parameters()))
    run.optimizer = [run.optimizer, make("sgd", model.head.parameters())]
    return run


def _echo() -> Run:
    model = models.Recurrent("RNN")
    model.core.requires_grad_(False)
    return classify(model, sequences(), "adam_fast")


def declare() -> None:
    autoencoders()
    adversaries()
    contrasts()
    policies()
    experts()
    adapters()
    embeddings()
    others()
