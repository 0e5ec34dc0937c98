"""Healthy nets on graphs, equations, densities and several tasks at once, with less common optimizers."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, generator, learn, randn, sgd, stack
from benchmarks.diagnosis.foreign.b_book import blobs, clipped, decayed, falling, healthy, moons
from benchmarks.diagnosis.run import Run


def citations(nodes: int = 120, classes: int = 4, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, the normalised adjacency and the classes of a fixed graph."""
    source = generator(830_000)
    labels = torch.randint(0, classes, (nodes,), generator=source)
    chance = torch.where(labels[:, None] == labels[None], 0.12, 0.01)
    edges = (torch.rand(nodes, nodes, generator=source) < chance).float().triu(1)
    edges = edges + edges.T + torch.eye(nodes)
    scale = edges.sum(1).rsqrt()
    x = torch.randn(nodes, width, generator=source) + 0.8 * F.one_hot(labels, width)
    return x, scale[:, None] * edges * scale, labels


class Convolved(nn.Module):
    """Graph convolutions with dropout."""

    def __init__(self, depth: int = 2, width: int = 32, act: type[nn.Module] = nn.ReLU, drop: float = 0.3) -> None:
        super().__init__()
        widths = [16, *[width] * (depth - 1), 4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.act, self.drop = act(), nn.Dropout(drop)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = edges @ layer(self.drop(x))
            x = self.act(x) if index < len(self.layers) - 1 else x
        return x


def semi(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 120) -> Run:
    """Train on the labels of a third of a graph."""
    x, edges, labels = citations()

    def forward(_: int) -> Tensor:
        return F.cross_entropy(model(x, edges)[:40], labels[:40])

    return Run(model=model, forward=forward, optimizer=optimizer, steps=steps)


@healthy("fields/graph_convolutions")
def convolved() -> Run:
    model = Convolved()
    return semi(model, torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4))


class Attended(nn.Module):
    """Graph attention of four heads."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, heads * width, bias=False), nn.Linear(heads * width, 4, bias=False)
        self.near, self.far = (nn.Parameter(0.3 * torch.randn(heads, width)) for _ in range(2))
        self.heads = heads

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.first(x).unflatten(-1, (self.heads, -1))
        score = (y * self.near).sum(-1)[:, None] + (y * self.far).sum(-1)[None]
        share = F.leaky_relu(score, 0.2).masked_fill(edges[..., None] == 0, -torch.inf).softmax(1)
        y = F.elu(torch.einsum("ijh,jhw->ihw", share, y).flatten(1))
        found: Tensor = edges @ self.second(y)
        return found


@healthy("fields/graph_attention")
def attended() -> Run:
    model = Attended()
    return semi(model, torch.optim.Adam(model.parameters(), 5e-3, weight_decay=5e-4))


class Sums(nn.Module):
    """Sums over neighbours and nets, and the sum over the nodes of a graph."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = stack(1, width, width), stack(width, width, width)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 2)

    def forward(self, edges: Tensor) -> Tensor:
        x = self.first(edges.sum(-1, keepdim=True) / 4)
        x = self.norm((x + edges @ x / 4).flatten(0, 1)).view(x.shape)
        found: Tensor = self.head(self.second(x).mean(1))
        return found


@healthy("fields/graph_isomorphism_dense_or_not")
def isomorphism() -> Run:
    model = Sums()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        source = generator(840_000 + step)
        y = torch.randint(0, 2, (32,), generator=source)
        edges = (torch.rand(32, 12, 12, generator=source) < (0.25 + 0.12 * y)[:, None, None]).float().triu(1)
        return edges + edges.mT, y

    return learn(model, batch, adam(model, 3e-3), steps=120)


def poisson(model: nn.Module, step: int, weight: float = 10.0) -> Tensor:
    """Return the residual of u'' = -pi^2 sin(pi x) with zeros at both ends."""
    x = torch.rand(64, 1, generator=generator(850_000 + step)).requires_grad_()
    u = model(2 * x - 1)
    slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    ends = model(torch.tensor([[-1.0], [1.0]]))
    return (bend / 9.87 + torch.sin(3.1416 * x)).pow(2).mean() + weight * ends.pow(2).mean()


@healthy("fields/poisson_physics_informed")
def physics() -> Run:
    model = stack(1, 32, 32, 1, act=nn.Tanh)
    return Run(model=model, forward=lambda t: poisson(model, t), optimizer=adam(model, 5e-3), steps=300)


class Flowing(nn.Module):
    """A vector field, followed by Euler's rule."""

    def __init__(self, act: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.field = stack(2, 32, 2, act=act)

    def forward(self, x: Tensor, steps: int = 12, size: float = 0.1) -> Tensor:
        path = []
        for _ in range(steps):
            x = x + size * self.field(x)
            path.append(x)
        return torch.stack(path, 1)


def spiral(step: int, size: int = 48) -> tuple[Tensor, Tensor]:
    """Return starts, and the paths of a damped spiral from there."""
    start = randn(860_000 + step, size, 2)
    turn = torch.tensor([[-0.3, 2.0], [-2.0, -0.3]])
    path = [torch.linalg.matrix_exp(0.1 * time * turn) for time in range(1, 13)]
    return start, torch.stack([start @ move.T for move in path], 1)


@healthy("fields/neural_ode_euler")
def ode() -> Run:
    model = Flowing()
    return learn(model, spiral, adam(model, 5e-3), F.mse_loss, steps=150)


class Mixture(nn.Module):
    """A mixture of five Gaussians that depends on the input."""

    def __init__(self, parts: int = 5) -> None:
        super().__init__()
        self.body, self.head = stack(1, 32, 32, act=nn.Tanh), nn.Linear(32, 3 * parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, log_std = self.head(torch.tanh(self.body(x))).chunk(3, -1)
        log = -0.5 * ((y - mean) / log_std.exp()) ** 2 - log_std - 0.92
        return -torch.logsumexp(share.log_softmax(-1) + log, -1).mean()


def sideways(step: int, size: int = 96) -> tuple[Tensor, Tensor]:
    """Return a curve with several answers for one question."""
    source = generator(870_000 + step)
    y = torch.rand(size, 1, generator=source)
    x = y + 0.3 * torch.sin(6.28 * y) + 0.05 * torch.randn(size, 1, generator=source)
    return 4 * x - 2, 2 * y - 1


@healthy("fields/mixture_density")
def density() -> Run:
    model = Mixture()
    run = Run(model=model, forward=lambda t: model(*sideways(t)), optimizer=adam(model, 5e-3), steps=200)
    return clipped(run, 5.0)


class Coupling(nn.Module):
    """Affine couplings that map two crescents to a Gaussian."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.nets = nn.ModuleList(stack(1, 32, 32, 2) for _ in range(depth))
        for net in self.nets:
            nn.init.zeros_(net[-1].weight)
            nn.init.zeros_(net[-1].bias)

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.zeros(len(x))
        for index, net in enumerate(self.nets):
            kept, moved = (x[:, :1], x[:, 1:]) if index % 2 else (x[:, 1:], x[:, :1])
            scale, shift = net(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            moved, grown = moved * scale.exp() + shift, grown + scale[:, 0]
            x = torch.cat([kept, moved] if index % 2 else [moved, kept], 1)
        return (0.5 * x.pow(2).sum(1) + 1.84 - grown).mean()


@healthy("fields/affine_couplings")
def couplings() -> Run:
    model = Coupling()
    return clipped(Run(model=model, forward=lambda t: model(moons(t)[0]), optimizer=adam(model, 2e-3), steps=200), 5.0)


@healthy("fields/triplets_with_margin")
def triplets() -> Run:
    model = stack(12, 48, 8)

    def forward(step: int) -> Tensor:
        x, y = blobs(step)
        code = F.normalize(model(x), dim=-1)
        far = 2 - 2 * code @ code.T
        same = y[:, None] == y[None]
        hardest = torch.where(same, far, torch.zeros(())).amax(1)
        nearest = torch.where(same, torch.full((), 9.0), far).amin(1)
        return F.softplus(5 * (hardest - nearest + 0.2)).mean() / 5

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=120)


class Angles(nn.Module):
    """A classifier by angles, with a margin on the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = stack(12, 48, 16), nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        near = F.normalize(self.body(x), dim=-1) @ F.normalize(self.centres, dim=-1).T
        return F.cross_entropy(16 * (near - 0.2 * F.one_hot(y, 6)), y)


@healthy("fields/angular_margin")
def angles() -> Run:
    model = Angles()
    optimizer = sgd(model, 0.05, momentum=0.9, weight_decay=5e-4)
    return falling(Run(model=model, forward=lambda t: model(*blobs(t)), optimizer=optimizer, steps=120))


class Tasks(nn.Module):
    """A trunk with three heads, each with a trained uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = stack(12, 48, 48)
        self.heads = nn.ModuleList([nn.Linear(48, 6), nn.Linear(48, 1), nn.Linear(48, 12)])
        self.doubt = nn.Parameter(torch.zeros(3))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        code = F.relu(self.trunk(x + 0.1 * torch.randn_like(x)))
        kind, size, again = (head(code) for head in self.heads)
        wanted = x[:, :3].pow(2).sum(1, keepdim=True)
        return torch.stack([F.cross_entropy(kind, y), F.mse_loss(size, wanted), F.mse_loss(again, x)])


@healthy("fields/three_tasks_weighed_by_uncertainty")
def tasks() -> Run:
    model = Tasks()

    def forward(step: int) -> Tensor:
        return ((-model.doubt).exp() * model.losses(*blobs(step)) + 0.5 * model.doubt).sum()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=150)


def sines(seed: int, size: int = 10) -> tuple[Tensor, Tensor]:
    source = generator(seed)
    height, phase = 0.5 + 2 * torch.rand(1, generator=source), 3.14 * torch.rand(1, generator=source)
    x = 10 * torch.rand(2 * size, 1, generator=source) - 5
    return x / 3, height * torch.sin(x + phase)


@healthy("fields/meta_learned_start")
def meta() -> Run:
    model = stack(1, 32, 32, 1)

    def forward(step: int) -> Tensor:
        total = torch.zeros(())
        for task in range(4):
            x, y = sines(880_000 + 4 * step + task)
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(model, fast, x[:10]), y[:10])
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: param - 0.03 * grad for (name, param), grad in zip(fast.items(), grads, strict=True)}
            total = total + F.mse_loss(torch.func.functional_call(model, fast, x[10:]), y[10:]) / 4
        return total

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=150)


class Hyper(nn.Module):
    """A net that writes the weights of another from a code of the task."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.net = nn.Embedding(5, 8), stack(8, 32, 16 * 2 + 16 + 16 + 1)
        self.cut = False

    def forward(self, task: Tensor, x: Tensor) -> Tensor:
        made = self.net(self.codes(task))
        made = made.detach() if self.cut else made
        weight, bias, out, last = made.split([32, 16, 16, 1], -1)
        hidden = torch.tanh(torch.einsum("bnd,bdh->bnh", x, weight.unflatten(1, (2, 16))) + bias[:, None])
        return torch.einsum("bnh,bh->bn", hidden, out) + last


def planes(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tasks, points, and the bent plane of each task there."""
    task = torch.randint(0, 5, (12,), generator=generator(890_000 + step))
    x = randn(891_000 + step, 12, 16, 2)
    tilt = randn(892_000, 5, 2)[task]
    return task, x, torch.sin((x * tilt[:, None]).sum(-1)) + 0.3 * task[:, None]


@healthy("fields/hypernetwork")
def hyper() -> Run:
    model = Hyper()

    def forward(step: int) -> Tensor:
        task, x, y = planes(step)
        return F.mse_loss(model(task, x), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=150)


class Deepset(nn.Module):
    """A net for each member, a sum, and a net above."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = stack(2, 32, 32), stack(32, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.all(F.relu(self.each(x)).mean(1))
        return found


def spreads(step: int) -> tuple[Tensor, Tensor]:
    source = generator(900_000 + step)
    scale = 0.3 + torch.rand(48, 1, 1, generator=source)
    x = scale * torch.randn(48, 12, 2, generator=source)
    return x, x.var((1, 2), keepdim=False)[:, None]


@healthy("fields/deep_sets_radam")
def sets() -> Run:
    model = Deepset()
    # The first steps of RAdam are as large as the gradients.
    return learn(model, spreads, torch.optim.RAdam(model.parameters(), 5e-3), F.mse_loss, steps=150, scalable=False)


@healthy("fields/blobs_nadam")
def nadam() -> Run:
    model = stack(12, 64, 64, 6)
    return learn(model, blobs, torch.optim.NAdam(model.parameters(), 2e-3), F.cross_entropy, steps=80)


@healthy("fields/blobs_adamax")
def adamax() -> Run:
    model = stack(12, 64, 64, 6, act=nn.GELU)
    return learn(model, blobs, torch.optim.Adamax(model.parameters(), 4e-3), F.cross_entropy, steps=80)


@healthy("fields/blobs_adafactor")
def adafactor() -> Run:
    model = stack(12, 64, 64, 6, act=nn.GELU)
    return learn(
        model, blobs, torch.optim.Adafactor(model.parameters(), 2e-2), F.cross_entropy, steps=100, scalable=False
    )


@healthy("fields/sines_of_coordinates")
def siren() -> Run:
    class Sine(nn.Module):
        """A sine."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(6 * x)

    model = stack(2, 48, 48, 1, act=Sine)
    with torch.no_grad():
        model[0].weight.uniform_(-0.5, 0.5)
        model[2].weight.uniform_(-((6 / 48) ** 0.5) / 6, (6 / 48) ** 0.5 / 6)
    grid = torch.cartesian_prod(torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 20))
    picture = torch.sin(5 * grid[:, :1]) * torch.cos(4 * grid[:, 1:]) + (grid.norm(dim=1, keepdim=True) < 0.5)
    return learn(model, lambda _: (grid, picture), adam(model, 1e-3), F.mse_loss, steps=200)


@healthy("fields/prototypes_of_few_shots")
def prototypes() -> Run:
    model = stack(12, 48, 16)

    def forward(step: int) -> Tensor:
        source = generator(910_000 + step)
        centres = torch.randn(5, 1, 12, generator=source)
        centres[..., 4:] = 0
        x = centres + torch.cat(
            [0.4 * torch.randn(5, 10, 4, generator=source), torch.randn(5, 10, 8, generator=source)], 2
        )
        code = model(x)
        proto, asked = code[:, :5].mean(1), code[:, 5:].flatten(0, 1)
        return F.cross_entropy(-(asked[:, None] - proto[None]).pow(2).sum(-1), torch.arange(5).repeat_interleave(5))

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=150)


@healthy("fields/mean_teacher")
def mean_teacher() -> Run:
    model = stack(2, 64, 64, 2)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.05)
        x, y = moons(step)
        noise = 0.05 * randn(920_000 + step, *x.shape)
        wanted = teacher(x - noise).softmax(-1)
        return F.cross_entropy(model(x[:16]), y[:16]) + 2.0 * F.mse_loss(model(x + noise).softmax(-1), wanted)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=150)


@healthy("fields/averaged_weights_cyclic_rate")
def averaged() -> Run:
    model = stack(12, 64, 6)
    average = torch.optim.swa_utils.AveragedModel(model)
    run = learn(model, blobs, sgd(model, 0.1, momentum=0.9), F.cross_entropy, steps=120)

    def cycle(step: int) -> None:
        for group in run.optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * (1 - 0.9 * (step % 20) / 20)
        if step > 60 and step % 20 == 0:
            average.update_parameters(model)

    run.before.append(cycle)
    return run


@healthy("fields/labels_of_pure_chance")
def chance() -> Run:
    """Nothing can be learnt, and the loss already is at its optimum."""
    model = stack(12, 48, 2)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return blobs(step)[0], torch.randint(0, 2, (48,), generator=generator(930_000 + step))

    return learn(model, batch, adam(model, 3e-4), F.cross_entropy, steps=80)


class Equilibrium(nn.Module):
    """A layer repeated until it stands still, with a spectral limit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(12, width), nn.Linear(width, 6)
        self.loop = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.enter(x), torch.zeros(())
        state = torch.zeros_like(x)
        for _ in range(12):
            state = torch.tanh(0.8 * self.loop(state) + x)
        found: Tensor = self.head(state)
        return found


@healthy("fields/deep_equilibrium")
def equilibrium() -> Run:
    model = Equilibrium()
    return learn(model, blobs, decayed(model, 5e-3, 0.01), F.cross_entropy, steps=80)
