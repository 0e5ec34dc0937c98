"""Healthy runs on tables, graphs, sets and the equations of physics."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn, randn, sgd, spirals, stack
from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.run import Run
from benchmarks.diagnosis.unseen.book import adamw, cosine, curve, graph, healthy, lion


@healthy("tables/embedding_bag_sparse")
def bag() -> Run:
    words, head = nn.EmbeddingBag(400, 16, mode="mean", sparse=True), stack(16, 32, 1)
    model = nn.ModuleDict({"words": words, "head": head})
    worth = randn(7, 400)

    def forward(step: int) -> Tensor:
        found = torch.randint(0, 400, (32, 12), generator=generator(200_000 + step))
        return F.binary_cross_entropy_with_logits(head(words(found))[:, 0], (worth[found].sum(1) > 0).float())

    optimizers = [torch.optim.SparseAdam(list(words.parameters()), 1e-2), adam(head, 1e-3)]
    return Run(model=model, forward=forward, optimizer=optimizers, steps=80)


@healthy("tables/factorisation_machine")
def machine() -> Run:
    model = nn.ModuleDict({"line": nn.Embedding(60, 1), "pairs": nn.Embedding(60, 8)})
    nn.init.normal_(model["pairs"].weight, std=0.1)
    taste = randn(8, 60, 3)

    def forward(step: int) -> Tensor:
        found = torch.randint(0, 20, (64, 3), generator=generator(210_000 + step)) + torch.tensor([0, 20, 40])
        kinds = taste[found]
        wanted = kinds.sum(1).square().sum(-1) - kinds.square().sum((1, 2)) > 0
        vectors = model["pairs"](found)
        cross = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(-1)
        return F.binary_cross_entropy_with_logits(model["line"](found).sum((1, 2)) + cross, wanted.float())

    return Run(model=model, forward=forward, optimizer=torch.optim.Adagrad(model.parameters(), 0.1), steps=120)


@healthy("tables/self_normalising")
def selu() -> Run:
    parts: list[nn.Module] = []
    for before, after in ((6, 48), (48, 48), (48, 48), (48, 48)):
        parts += [nn.Linear(before, after), nn.SELU(), nn.AlphaDropout(0.05)]
        nn.init.normal_(parts[-3].weight, std=before**-0.5)
    model = nn.Sequential(*parts, nn.Linear(48, 1))
    return learn(model, curve, sgd(model, 0.02, momentum=0.9), F.mse_loss, steps=60)


@healthy("tables/quantiles")
def quantiles() -> Run:
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(found: Tensor, wanted: Tensor) -> Tensor:
        gap = wanted - found
        return torch.maximum(levels * gap, (levels - 1) * gap).mean()

    model = stack(6, 48, 48, 3)
    return learn(model, curve, adam(model, 2e-3), pinball, steps=80)


@healthy("tables/poisson")
def poisson() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = randn(220_000 + step, 64, 6)
        return x, torch.poisson((0.8 * x[:, :1] + 0.4 * x[:, 1:2]).exp(), generator=generator(step))

    model = stack(6, 32, 1, act=nn.SiLU)
    return learn(model, batch, adam(model, 3e-3), F.poisson_nll_loss, steps=80)


class Mixture(nn.Module):
    """Predicts the weights, means and widths of five normal densities."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = stack(1, 32, 32, act=nn.Tanh), nn.Linear(32, 15)
        self.floor = 1e-3

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, width = self.out(torch.tanh(self.body(x))).chunk(3, -1)
        spread = F.softplus(width) + self.floor
        logs = weight.log_softmax(-1) - 0.5 * ((y - mean) / spread).square() - spread.log()
        return -logs.logsumexp(-1).mean()


def arcs(step: int) -> tuple[Tensor, Tensor]:
    y = torch.rand(64, 1, generator=generator(230_000 + step)) * 2 - 1
    return y + 0.3 * (2 * math.pi * y).sin() + 0.05 * randn(step, 64, 1), y


@healthy("tables/mixture_density")
def mixture() -> Run:
    model = Mixture()
    return Run(model=model, forward=lambda t: model(*arcs(t)), optimizer=adam(model, 3e-3), steps=150)


@healthy("tables/survival")
def survival() -> Run:
    model = stack(6, 32, 1)

    def forward(step: int) -> Tensor:
        x = randn(240_000 + step, 64, 6)
        time = -torch.log(torch.rand(64, generator=generator(step))) / (x[:, 0] - 0.5 * x[:, 1]).exp()
        seen = (time < 2).float()
        risk = model(x)[:, 0][time.argsort(descending=True)]
        logs = risk - risk.logcumsumexp(0)
        return -(logs * seen[time.argsort(descending=True)]).sum() / seen.sum()

    return Run(model=model, forward=forward, optimizer=adamw(model, 2e-3), steps=60)


@healthy("tables/heavy_dropout")
def dropout() -> Run:
    parts = [nn.Dropout(0.2), nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.6), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Dropout(0.6), nn.Linear(128, 3))
    return learn(model, spirals, adam(model, 3e-3), steps=80)


@healthy("tables/adafactor")
def adafactor() -> Run:
    model = stack(6, 64, 64, 1, act=nn.GELU)
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    return learn(model, curve, optimizer, F.mse_loss, steps=80, scalable=False)


@healthy("tables/lion_mlp")
def lion_mlp() -> Run:
    model = stack(6, 64, 64, 1)
    return cosine(learn(model, curve, lion(model, 1e-3), F.mse_loss, steps=100))


@healthy("tables/warm_restarts")
def restarts() -> Run:
    model = stack(2, 48, 48, 3)
    optimizer = sgd(model, 0.3, momentum=0.9, weight_decay=5e-4)
    run = learn(model, spirals, optimizer, steps=160)
    return schedule(run, lambda step: 0.5 * (1 + math.cos(math.pi * (step % 40) / 40)))


@healthy("tables/prototypes")
def prototypes() -> Run:
    model = stack(8, 48, 24)

    def forward(step: int) -> Tensor:
        centres = 1.5 * randn(250_000 + step, 5, 8)
        shown, asked = (model(centres.repeat(4, 1) + 0.7 * randn(step + k, 20, 8)) for k in (1, 2))
        far = torch.cdist(asked, shown.unflatten(0, (4, 5)).mean(0)).square()
        return F.cross_entropy(-far, torch.arange(5).repeat(4))

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=80)


class Convolved(nn.Module):
    """Sums over the neighbours of every node."""

    def __init__(self, depth: int = 2, width: int = 24, norm: bool = True, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        widths = [8] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) if norm else nn.Identity() for _ in range(depth))
        self.act, self.head = act(), nn.Linear(width, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.bincount(target, minlength=len(x)).float()
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.act(norm(torch.zeros_like(y := layer(x)).index_add(0, target, weight * y[source])))
        found: Tensor = self.head(x)
        return found


def on_graphs(model: nn.Module, optimizer: torch.optim.Optimizer, **options: int) -> Run:
    def forward(step: int) -> Tensor:
        x, edges, labels = graph(step)
        return entropy(model(x, edges), labels)

    return Run(model=model, forward=forward, optimizer=optimizer, **options)


@healthy("graphs/convolutions")
def convolutions() -> Run:
    model = Convolved()
    return on_graphs(model, adam(model, 5e-3), steps=60)


class Attended(nn.Module):
    """Weighs the neighbours of every node by a score."""

    def __init__(self, width: int = 16, gain: float = 1.0, depth: int = 2) -> None:
        super().__init__()
        widths = [8] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(depth))
        self.head = nn.Linear(width, 2)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=gain * layer.in_features**-0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer, score in zip(self.layers, self.scores, strict=True):
            y = layer(x)
            raw = F.leaky_relu(score(torch.cat([y[source], y[target]], 1))[:, 0], 0.2)
            part = (raw - raw.max().detach()).exp()
            whole = torch.zeros(len(x)).index_add(0, target, part)
            x = F.elu(torch.zeros_like(y).index_add(0, target, (part / (whole[target] + 1e-9))[:, None] * y[source]))
        found: Tensor = self.head(x)
        return found


@healthy("graphs/attention")
def attended() -> Run:
    model = Attended()
    return on_graphs(model, adam(model, 5e-3), steps=60)


class Points(nn.Module):
    """A network for each point, and the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = stack(3, 32, 64), stack(64, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.whole(self.each(x).amax(1))
        return found


def clouds(step: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 3, (24,), generator=generator(260_000 + step))
    points = randn(step, 24, 40, 3)
    sphere, box = points / points.norm(dim=-1, keepdim=True), points.clamp(-0.7, 0.7)
    kinds = torch.stack([sphere, box, points * torch.tensor([1.0, 1.0, 0.1])], 1)
    return kinds[torch.arange(24), labels], labels


@healthy("graphs/point_sets")
def points() -> Run:
    model = Points()
    return learn(model, clouds, adam(model, 2e-3), steps=80)


def slope(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return found


def oscillator(model: nn.Module, step: int) -> Tensor:
    """Return how far a function is from u'' = -u with u(0) = 1 and u'(0) = 0."""
    x = (6 * torch.rand(48, 1, generator=generator(270_000 + step))).requires_grad_()
    u = model(x)
    rest = slope(slope(u, x), x) + u
    begin = torch.zeros(1, 1, requires_grad=True)
    u0 = model(begin)
    return rest.square().mean() + (u0 - 1).square().mean() + slope(u0, begin).square().mean()


@healthy("physics/oscillator")
def pinn() -> Run:
    model = stack(1, 32, 32, 1, act=nn.Tanh)
    return Run(model=model, forward=lambda t: oscillator(model, t), optimizer=adam(model, 5e-3), steps=150)


@healthy("physics/heat")
def heat() -> Run:
    model = stack(2, 40, 40, 1, act=nn.SiLU)

    def forward(step: int) -> Tensor:
        x = torch.rand(64, 2, generator=generator(280_000 + step)).requires_grad_()
        d = slope(u := model(x), x)
        rest = d[:, 1] - 0.1 * slope(d[:, 0], x)[:, 0]
        edge = torch.rand(32, 1, generator=generator(step))
        start = model(torch.cat([edge, torch.zeros(32, 1)], 1)) - (math.pi * edge).sin()
        sides = model(torch.cat([edge.round(), edge], 1))
        return rest.square().mean() + 10 * (start.square().mean() + sides.square().mean()) + 0 * u.sum()

    return cosine(Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=120))


@healthy("physics/neural_ode")
def ode() -> Run:
    field = stack(2, 32, 2, act=nn.Tanh)
    turn = torch.tensor([[0.0, 1.0], [-1.0, -0.1]])

    def forward(step: int) -> Tensor:
        x = randn(290_000 + step, 32, 2)
        y, loss = x, x.new_zeros(())
        for _ in range(20):
            x, y = x + 0.1 * field(x), y + 0.1 * y @ turn.T
            loss = loss + F.mse_loss(x, y) / 20
        return loss

    model = nn.ModuleDict({"field": field})
    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=80)


class Fixed(nn.Module):
    """A layer that is applied until its state hardly changes."""

    def __init__(self, width: int = 32, gain: float = 0.6, rounds: int = 15, grow: float = 0.0) -> None:
        super().__init__()
        self.inside, self.enter, self.out = nn.Linear(width, width), nn.Linear(6, width), nn.Linear(width, 1)
        nn.init.orthogonal_(self.inside.weight, gain)
        self.rounds, self.width, self.grow = rounds, width, grow

    def forward(self, x: Tensor) -> Tensor:
        state, given = x.new_zeros(len(x), self.width), self.enter(x)
        for _ in range(self.rounds):
            new = self.inside(state) + given
            state = F.relu(new) if self.grow else torch.tanh(new)
        found: Tensor = self.out(state)
        return found


@healthy("physics/fixed_point")
def fixed() -> Run:
    model = Fixed()
    return learn(model, curve, adam(model, 2e-3), F.mse_loss, steps=80)


@healthy("physics/hamiltonian")
def hamiltonian() -> Run:
    model = stack(2, 48, 48, 1, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        x = (1.5 * randn(300_000 + step, 48, 2)).requires_grad_()
        d = slope(model(x), x)
        found, wanted = torch.stack([d[:, 1], -d[:, 0]], 1), torch.stack([x[:, 1], -x[:, 0].sin()], 1)
        return F.mse_loss(found, wanted.detach())

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=100)


class Coupling(nn.Module):
    """Scales and shifts one half by what the other says."""

    def __init__(self, flip: bool, width: int = 32) -> None:
        super().__init__()
        self.scale, self.shift = stack(1, width, 1, act=nn.Tanh), stack(1, width, 1)
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        log = torch.tanh(self.scale(one))
        two = two * log.exp() + self.shift(one)
        return torch.cat([two, one] if self.flip else [one, two], 1), log.sum(1)


def flow(model: nn.ModuleList, step: int) -> Tensor:
    x, _ = spirals(step, 96)
    logs = torch.zeros(96)
    for layer in model:
        x, log = layer(x)
        logs = logs + log
    return (0.5 * x.square().sum(1) - logs).mean()


@healthy("physics/normalising_flow")
def realnvp() -> Run:
    model = nn.ModuleList(Coupling(bool(index % 2)) for index in range(6))
    return Run(model=model, forward=lambda t: flow(model, t), optimizer=adam(model, 2e-3), steps=120)
