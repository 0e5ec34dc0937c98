"""Healthy runs of less common kinds: policies, graphs, physics, games of chance with gradients."""

from __future__ import annotations

import copy
from typing import Any

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
    waves,
)
from benchmarks.diagnosis.blind.supervised import Conv, Small
from benchmarks.diagnosis.run import Run
from gradtrack import GradientManager


class Agent(nn.Module):
    """A trunk with a policy and a value."""

    def __init__(self, actions: int = 4, inputs: int = 6) -> None:
        super().__init__()
        self.trunk = stack(inputs, 48, 48, act=nn.Tanh)
        self.policy, self.value = nn.Linear(48, actions), nn.Linear(48, 1)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.trunk(x).tanh()
        return self.policy(z), self.value(z)[:, 0]


def ratio_learning(reward: Any, *, bonus: float = 0.01, epochs: int = 4, rate: float = 3e-4, watch: bool = True) -> Run:
    """Return a run of clipped policy ratios with advantages from a value head, a few epochs to each rollout."""
    model = Agent()
    kept: dict[str, Any] = {}

    def forward(step: int) -> Tensor:
        if step % epochs == 0:
            x = randn(step, 96, 6)
            with torch.no_grad():
                logits, value = model(x)
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator(step))
            gained = reward(x, chosen[:, 0], generator(step + 1))
            gain = gained - value
            old = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            kept.update(x=x, chosen=chosen, gained=gained, old=old, gain=(gain - gain.mean()) / (gain.std() + 1e-8))
        logits, value = model(kept["x"])
        logs = logits.log_softmax(-1)
        ratio = (logs.gather(1, kept["chosen"])[:, 0] - kept["old"]).exp()
        gain = kept["gain"]
        kept["logits"] = logits.detach()
        spread = -(logs.exp() * logs).sum(-1).mean()
        actor = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return actor + 0.5 * F.mse_loss(value, kept["gained"]) - bonus * spread

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=float(kept["gained"].mean()))

    run = Run(model=model, forward=forward, optimizer=adam(model, rate))
    if watch:
        run.observe, run.settings = observe, {"analyzers": ["flow", "rl_policy"]}
    return run


@healthy("policy/dense_reward")
def dense_reward() -> Run:
    return ratio_learning(lambda x, a, g: (a == x[:, :4].argmax(-1)).float(), rate=3e-3)


@healthy("policy/sparse_reward_seen")
def sparse_seen() -> Run:
    return ratio_learning(lambda x, a, g: ((a == 2) & (x[:, 0] > 1.5)).float())


@healthy("policy/sparse_reward_unseen")
def sparse_unseen() -> Run:
    return ratio_learning(lambda x, a, g: ((a == 1) & (x[:, 1] > 2.0)).float(), watch=False)


@healthy("policy/no_reward_yet")
def no_reward_yet() -> Run:
    return ratio_learning(lambda x, a, g: torch.zeros(len(a)), watch=False)


@healthy("policy/solved_and_sure")
def solved() -> Run:
    run = ratio_learning(lambda x, a, g: (a == 3).float(), rate=1e-2, bonus=0.0)
    with torch.no_grad():
        run.model.policy.bias[3] = 2.5
    return run


@healthy("policy/gaussian_with_range")
def gaussian_range() -> Run:
    model = nn.ModuleDict({"mean": stack(6, 48, 2, act=nn.Tanh)})
    model.log_std = nn.Parameter(torch.full((2,), -0.5))
    kept: dict[str, Tensor] = {}

    def forward(step: int) -> Tensor:
        x = randn(step, 96, 6)
        mean = model["mean"](x)
        action = (mean + model.log_std.exp() * randn(step + 5, 96, 2)).detach()
        gained = -(action - x[:, :2].tanh()).square().sum(-1)
        kept.update(mean=mean.detach(), gained=gained)
        logs = torch.distributions.Normal(mean, model.log_std.exp()).log_prob(action).sum(-1)
        return -(logs * (gained - gained.mean()) / gained.std()).mean()

    def observe(manager: GradientManager) -> None:
        pair = (kept["mean"], model.log_std.detach().exp().expand_as(kept["mean"]))
        manager.analyzer("rl_policy").observe(
            pair, action_range=(-1.0, 1.0), episode_return=float(kept["gained"].mean())
        )

    run = Run(model=model, forward=forward, optimizer=adam(model, 5e-3), settings={"analyzers": ["flow", "rl_policy"]})
    run.observe = observe
    return run


@healthy("policy/soft_actor_critic")
def soft_actor_critic() -> Run:
    actor, critic = stack(6, 48, 4), stack(8, 48, 1)
    slow = copy.deepcopy(critic).requires_grad_(False)
    model = nn.ModuleDict({"actor": actor, "critic": critic, "slow": slow})

    def forward(step: int) -> Tensor:
        x, after = randn(step, 64, 6), randn(step + 10**5, 64, 6)
        mean, log = actor(x).chunk(2, -1)
        raw = mean + log.clamp(-4, 1).exp() * randn(step + 1, 64, 2)
        action = raw.tanh()
        reward = -(action.detach() - x[:, :2].tanh()).square().sum(-1, keepdim=True)
        with torch.no_grad():
            for a, b in zip(slow.parameters(), critic.parameters(), strict=True):
                a.lerp_(b, 0.02)
            wanted = reward + 0.9 * slow(torch.cat([after, actor(after)[:, :2].tanh()], -1))
        told = critic(torch.cat([x, action.detach()], -1))
        frozen = {name: param.detach() for name, param in critic.named_parameters()}
        praised = torch.func.functional_call(critic, frozen, (torch.cat([x, action], -1),))
        return F.mse_loss(told, wanted) - praised.mean() + 0.05 * log.sum(-1).neg().mean()

    return Run(model=model, forward=forward, optimizer=[adam(actor), adam(critic)])


@healthy("policy/double_q_learning")
def double_q() -> Run:
    online = stack(6, 64, 64, 5)
    slow = copy.deepcopy(online).requires_grad_(False)
    model = nn.ModuleDict({"online": online, "slow": slow})

    def forward(step: int) -> Tensor:
        x, after = randn(step, 64, 6), randn(step + 10**5, 64, 6)
        action = torch.randint(0, 5, (64, 1), generator=generator(step))
        reward = (action[:, 0] == x[:, :5].argmax(-1)).float()
        if step % 8 == 0:
            slow.load_state_dict(online.state_dict())
        with torch.no_grad():
            wanted = reward + 0.95 * slow(after).gather(1, online(after).argmax(-1, keepdim=True))[:, 0]
        return F.smooth_l1_loss(online(x).gather(1, action)[:, 0], wanted)

    return Run(model=model, forward=forward, optimizer=adam(online, 5e-4))


@healthy("policy/preferences")
def preferences() -> Run:
    model = Small(2)
    fixed = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        x, y = tokens(step)
        worse = torch.randint(0, 30, y.shape, generator=generator(step))
        mine, theirs = model(x).log_softmax(-1), fixed(x).log_softmax(-1)
        margin = [
            (part.gather(-1, y[..., None]) - part.gather(-1, worse[..., None])).sum((1, 2)) for part in (mine, theirs)
        ]
        return -F.logsigmoid(0.1 * (margin[0] - margin[1])).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


def _edges(nodes: int = 50) -> Tensor:
    links = (torch.rand(nodes, nodes, generator=generator(1)) < 0.1) | torch.eye(nodes).bool()
    return (links | links.T).float()


@healthy("graph/convolution")
def graph_convolution() -> Run:
    edges = _edges()
    degree = edges.sum(1).rsqrt()
    mix = degree[:, None] * edges * degree
    x = randn(2, 50, 16)
    labels = (mix @ x)[:, :4].argmax(-1)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)])

        def forward(self, y: Tensor) -> Tensor:
            for layer in self.layers[:-1]:
                y = F.relu(mix @ layer(y))
            out: Tensor = mix @ self.layers[-1](y)
            return out

    model = Graph()
    return learn(model, lambda _: (x, labels), adam(model, 1e-2))


@healthy("graph/attention")
def graph_attention() -> Run:
    edges, x = _edges(), randn(2, 50, 16)
    labels = (edges @ x)[:, :3].argmax(-1)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.left, self.right, self.out = (nn.Linear(16, n) for n in (24, 1, 1, 3))
            self.out = nn.Linear(24, 3)

        def forward(self, y: Tensor) -> Tensor:
            scores = F.leaky_relu(self.left(y) + self.right(y).T, 0.2).masked_fill(edges == 0, -1e9)
            out: Tensor = self.out(F.elu(scores.softmax(-1) @ self.value(y)))
            return out

    model = Graph()
    return learn(model, lambda _: (x, labels), adam(model, 1e-2))


@healthy("graph/set_of_points")
def points() -> Run:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.all = stack(2, 32, 64), stack(64, 32, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.all(self.each(x).amax(1))
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 3, (24,), generator=generator(step))
        scale = torch.tensor([[1.0, 1.0], [2.0, 0.5], [0.5, 2.0]])[labels]
        return randn(step, 24, 20, 2) * scale[:, None], labels

    return learn(Points(), batch)


@healthy("odd/heat_equation")
def heat_equation() -> Run:
    model = stack(2, 32, 32, 1, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        at = torch.rand(64, 2, generator=generator(step)).requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        start = torch.rand(32, 1, generator=generator(step + 1))
        begin = model(torch.cat([start, torch.zeros(32, 1)], 1)) - (torch.pi * start).sin()
        return (slope[:, 1] - 0.1 * bend[:, 0]).square().mean() + 10 * begin.square().mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3))


@healthy("odd/fourier_features")
def fourier_features() -> Run:
    waves_ = 4 * randn(1, 2, 32)
    model = stack(64, 48, 48, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(96, 2, generator=generator(step))
        phase = 2 * torch.pi * x @ waves_
        return torch.cat([phase.sin(), phase.cos()], -1), (8 * x[:, :1]).sin() * (6 * x[:, 1:]).cos()

    return learn(model, batch, loss=F.mse_loss)


@healthy("odd/hinge_mostly_satisfied")
def hinge() -> Run:
    model = nn.Linear(6, 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.relu(1 - y * out).mean()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = 4 * randn(step, 32, 6)
        return x, x[:, :1].sign()

    return learn(model, batch, sgd(model, 0.1, weight_decay=1e-4), loss)


@healthy("odd/counts")
def counts() -> Run:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.poisson_nll_loss(out, y)

    model = stack(10, 32, 1)
    return learn(
        model,
        lambda t: (table(t)[0], torch.poisson((1 + table(t)[0][:, :1]).exp(), generator=generator(t))),
        None,
        loss,
    )


@healthy("odd/quantiles")
def quantiles() -> Run:
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        off = y - out
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    return learn(stack(10, 48, 48, 3), table, loss=loss)


@healthy("odd/proportional_hazards")
def hazards() -> Run:
    model = stack(10, 32, 1)

    def forward(step: int) -> Tensor:
        x, y = table(step)
        order = y[:, 0].argsort(descending=True)
        risk = model(x[order])[:, 0]
        return (risk.logcumsumexp(0) - risk).mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("odd/ranking")
def ranking() -> Run:
    model = stack(10, 32, 1, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        x, y = table(step)
        score = model(x)
        return F.softplus(-(score - score.T) * (y - y.T).sign()).mean()

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.1, momentum=0.9))


@healthy("odd/balanced_experts")
def balanced_experts() -> Run:
    gate, experts, out = nn.Linear(10, 6), nn.ModuleList(stack(10, 24, 24) for _ in range(6)), nn.Linear(24, 1)
    model = nn.ModuleDict({"gate": gate, "experts": experts, "out": out})

    def forward(step: int) -> Tensor:
        x, y = table(step, 64)
        shares = gate(x).softmax(-1)
        best, chosen = shares.topk(2, -1)
        mixed = torch.zeros(64, 24)
        for index, expert in enumerate(experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, best[rows, place, None] * expert(x[rows]))
        load = F.one_hot(chosen, 6).float().sum(1).mean(0)
        return F.mse_loss(out(mixed.relu()), y) + 0.1 * (load * shares.mean(0)).sum()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3))


@healthy("odd/sparse_experts_of_twelve")
def twelve_experts() -> Run:
    gate, experts, out = nn.Linear(10, 12), nn.ModuleList(stack(10, 16, 16) for _ in range(12)), nn.Linear(16, 1)
    model = nn.ModuleDict({"gate": gate, "experts": experts, "out": out})

    def forward(step: int) -> Tensor:
        x, y = table(step, 24)
        best, chosen = gate(x).softmax(-1).max(-1)
        mixed = torch.zeros(24, 16)
        for index, expert in enumerate(experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, best[rows, None] * expert(x[rows]))
        return F.mse_loss(out(mixed), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@healthy("odd/signs_straight_through")
def signs() -> Run:
    class Sign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            soft = x.clamp(-1, 1)
            return soft + (x.sign() - soft).detach()

    return learn(stack(10, 64, 64, 1, act=Sign), table, loss=F.mse_loss)


@healthy("odd/four_bit_weights")
def four_bits() -> Run:
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            size = self.weight.detach().abs().amax() / 7
            return F.linear(x, self.weight + ((self.weight / size).round() * size - self.weight).detach(), self.bias)

    return learn(nn.Sequential(Rounded(2, 48), nn.ReLU(), Rounded(48, 48), nn.ReLU(), Rounded(48, 3)), spirals)


@healthy("odd/gated_convolutions")
def gated_convolutions() -> Run:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.out = nn.Conv1d(1, 12, 1), nn.Conv1d(12, 1, 1)
            self.layers = nn.ModuleList(nn.Conv1d(12, 24, 2, dilation=2**index) for index in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.enter(x.mT)
            for index, layer in enumerate(self.layers):
                a, b = layer(F.pad(y, (2**index, 0))).chunk(2, 1)
                y = y + a.tanh() * b.sigmoid()
            out: Tensor = self.out(y).mT
            return out

    return learn(Gated(), waves, loss=F.mse_loss)


@healthy("odd/memory_by_keys")
def memory_by_keys() -> Run:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = nn.Linear(10, 16)
            self.keys, self.values = nn.Parameter(torch.randn(200, 16) / 4), nn.Parameter(torch.randn(200, 8) / 4)
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            best, chosen = (self.ask(x) @ self.keys.T).topk(8, -1)
            out: Tensor = self.out((best.softmax(-1)[..., None] * self.values[chosen]).sum(1))
            return out

    return learn(Memory(), table, loss=F.mse_loss)


@healthy("odd/accumulated_noise")
def accumulated() -> Run:
    model = stack(10, 48, 48, 1)
    return learn(model, lambda t: table(t, 4), adam(model), F.mse_loss, accumulate=6)


@healthy("odd/clipped_now_and_then")
def clipped_sometimes() -> Run:
    model = Small(2)
    run = learn(model, tokens, adam(model), settings={"enable_gradient_clipping": True, "max_grad_norm": 1.0})
    run.scalable = False
    return run


@healthy("odd/strong_weight_decay")
def strong_decay() -> Run:
    model = Conv()
    return learn(model, bars, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1.0))


@healthy("odd/averaged_weights_beside")
def averaged() -> Run:
    model = stack(2, 48, 48, 3)
    mean = torch.optim.swa_utils.AveragedModel(model)
    run = learn(model, spirals)
    run.before.append(lambda step: mean.update_parameters(model))
    return run


@healthy("odd/adagrad_large_rate")
def adagrad() -> Run:
    model = stack(10, 48, 1)
    return learn(model, table, torch.optim.Adagrad(model.parameters(), 0.05), F.mse_loss)


@healthy("odd/spectral_norms")
def spectral_norms() -> Run:
    model = stack(100, 48, 48, 6, act=nn.LeakyReLU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.utils.parametrizations.spectral_norm(layer)
    return learn(model, lambda t: (bars(t)[0].flatten(1), bars(t)[1]))


@healthy("odd/raw_pixel_range_normalised_inside")
def raw_pixels() -> Run:
    model = nn.Sequential(nn.BatchNorm2d(1), Conv())
    return learn(model, lambda t: (255 * bars(t)[0].sigmoid(), bars(t)[1]))


@healthy("odd/large_targets")
def large_targets() -> Run:
    model = stack(10, 48, 48, 1)
    return learn(model, lambda t: (table(t)[0], 2e3 * table(t)[1] + 5e3), adam(model, 1e-2), F.mse_loss)


@healthy("odd/summed_loss")
def summed_loss() -> Run:
    return learn(stack(2, 48, 3), spirals, loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"))


@healthy("odd/segmentation")
def segmentation() -> Run:
    class Segment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.three, self.four = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = F.relu(self.one(x))
            b = F.interpolate(F.relu(self.two(F.avg_pool2d(a, 2))), scale_factor=2.0)
            out: Tensor = self.four(F.relu(self.three(torch.cat([a, b], 1))))
            return out

    def loss(out: Tensor, y: Tensor) -> Tensor:
        share = out.sigmoid()
        return 1 - (2 * (share * y).sum() + 1) / (share.sum() + y.sum() + 1)

    return learn(Segment(), lambda t: (bars(t)[0], (bars(t)[0] > 1).float()), loss=loss)


@healthy("odd/detection_with_rare_positives")
def rare_positives() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = randn(step, 128, 10)
        return x, (x[:, :1] > 2.2).float()

    def focal(out: Tensor, y: Tensor) -> Tensor:
        lost = F.binary_cross_entropy_with_logits(out, y, reduction="none")
        return ((1 - (-lost).exp()) ** 2 * lost).mean()

    model = stack(10, 48, 48, 1)
    nn.init.constant_(model[-1].bias, -4.0)
    return learn(model, batch, loss=focal)


@healthy("odd/evaluates_in_between")
def evaluates() -> Run:
    model = Conv()

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            entropy(model(bars(step + 10**4)[0]), bars(step + 10**4)[1])
        model.train()

    run = learn(model, bars, sgd(model, 0.05, momentum=0.9, nesterov=True))
    run.before.append(evaluate)
    return run
