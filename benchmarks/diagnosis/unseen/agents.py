"""Healthy runs of agents, of teachers and pupils, and of codes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, bars, generator, learn, randn, sgd, spirals, stack
from benchmarks.diagnosis.run import Run
from benchmarks.diagnosis.unseen.book import adamw, cosine, curve, healthy, textures
from benchmarks.diagnosis.unseen.vision import GroupConv

MOVE = 0.4 * randn(11, 4, 4)


def q_loss(model: nn.Module, target: nn.Module, step: int, discount: float = 0.9) -> Tensor:
    """Return the error of a value function on random transitions of a linear world."""
    if step % 25 == 0:
        target.load_state_dict(model.state_dict())
    state = randn(310_000 + step, 64, 4)
    action = torch.randint(0, 3, (64, 1), generator=generator(step))
    reward = state.gather(1, action) - 0.1 * action
    after = torch.tanh(state @ MOVE + 0.3 * (action - 1))
    with torch.no_grad():
        wanted = reward + discount * target(after).amax(1, keepdim=True)
    return F.smooth_l1_loss(model(state).gather(1, action), wanted)


@healthy("agents/deep_q")
def deep_q() -> Run:
    model = stack(4, 64, 64, 3)
    target = copy.deepcopy(model)
    return Run(model=model, forward=lambda t: q_loss(model, target, t), optimizer=adam(model, 1e-3), steps=150)


class Shared(nn.Module):
    """A trunk with a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = stack(4, 48, 48, act=nn.Tanh), nn.Linear(48, 4), nn.Linear(48, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.actor(x), self.critic(x)[:, 0]


def actor_critic(model: Shared, step: int, weight: float = 0.5) -> Tensor:
    state = randn(320_000 + step, 64, 4)
    logits, value = model(state)
    logs = logits.log_softmax(-1)
    action = torch.multinomial(logs.exp().detach(), 1, generator=generator(step))
    reward = (action[:, 0] == state.argmax(1)).float()
    gain = reward - value.detach()
    spread = -(logs.exp() * logs).sum(-1).mean()
    return -(gain * logs.gather(1, action)[:, 0]).mean() + weight * F.mse_loss(value, reward) - 0.01 * spread


@healthy("agents/actor_critic_rmsprop")
def a2c() -> Run:
    model = Shared()
    optimizer = torch.optim.RMSprop(model.parameters(), 7e-4, alpha=0.99, eps=1e-5)
    return Run(model=model, forward=lambda t: actor_critic(model, t), optimizer=optimizer, steps=150)


@healthy("agents/clipped_gaussian")
def ppo() -> Run:
    model = nn.ModuleDict({"mean": stack(4, 32, 32, 2, act=nn.Tanh), "value": stack(4, 32, 1, act=nn.Tanh)})
    model.log_std = nn.Parameter(torch.zeros(2) - 0.5)
    kept: dict[str, Tensor] = {}

    def play(step: int) -> None:
        state = randn(330_000 + step, 128, 4)
        with torch.no_grad():
            spread = torch.distributions.Normal(model["mean"](state), model.log_std.exp())
            action = spread.mean + spread.stddev * randn(step + 5, 128, 2)
            reward = -(action - state[:, :2]).square().sum(1)
            gain = reward - model["value"](state)[:, 0]
            logs = spread.log_prob(action).sum(1)
        kept.update(state=state, action=action, reward=reward, gain=(gain - gain.mean()) / gain.std(), logs=logs)

    def forward(step: int) -> Tensor:
        if step % 6 == 0 or not kept:
            play(step)
        spread = torch.distributions.Normal(model["mean"](kept["state"]), model.log_std.exp())
        ratio = (spread.log_prob(kept["action"]).sum(1) - kept["logs"]).exp()
        bound = torch.minimum(ratio * kept["gain"], ratio.clamp(0.8, 1.2) * kept["gain"])
        fit = F.mse_loss(model["value"](kept["state"])[:, 0], kept["reward"])
        return -bound.mean() + 0.5 * fit - 1e-3 * spread.entropy().sum(1).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=150)


@healthy("agents/soft_actor_twin_critics")
def soft() -> Run:
    actor, critics = stack(4, 48, 2), nn.ModuleList(stack(5, 48, 1) for _ in range(2))
    slow = copy.deepcopy(critics).requires_grad_(False)
    model = nn.ModuleDict({"actor": actor, "critics": critics, "slow": slow})

    def act(state: Tensor, step: int) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(state).chunk(2, 1)
        log_std = log_std.clamp(-4, 1)
        raw = mean + log_std.exp() * randn(step, len(state), 1)
        action = torch.tanh(raw)
        logs = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std - (1 - action.square() + 1e-6).log()
        return action, logs[:, 0]

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            for old, new in zip(slow.parameters(), critics.parameters(), strict=True):
                old.lerp_(new, 0.02)
            state, action = randn(340_000 + step, 64, 4), torch.tanh(randn(step + 1, 64, 1))
            after = torch.tanh(state @ MOVE)
            next_action, next_logs = act(after, step + 2)
            later = torch.minimum(*(one(torch.cat([after, next_action], 1))[:, 0] for one in slow))
            wanted = -(action[:, 0] - state[:, 0]).square() + 0.8 * (later - 0.1 * next_logs)
        fit = sum(F.mse_loss(one(torch.cat([state, action], 1))[:, 0], wanted) for one in critics)
        critics.requires_grad_(False)
        chosen, logs = act(state, step + 3)
        worth = torch.minimum(*(one(torch.cat([state, chosen], 1))[:, 0] for one in critics))
        critics.requires_grad_(True)
        return fit + (0.1 * logs - worth).mean()

    return Run(model=model, forward=forward, optimizer=[adam(actor, 1e-3), adam(critics, 1e-3)], steps=120)


@healthy("agents/distributional")
def distributional() -> Run:
    model, places = stack(4, 64, 3 * 11), torch.linspace(-3, 3, 11)

    def forward(step: int) -> Tensor:
        state = randn(350_000 + step, 64, 4)
        action = torch.randint(0, 3, (64,), generator=generator(step))
        reward = state[torch.arange(64), action] + 0.3 * randn(step, 64)
        wanted = (-(places - reward[:, None].clamp(-3, 3)).square() / 0.1).softmax(-1)
        logs = model(state).unflatten(1, (3, 11))[torch.arange(64), action].log_softmax(-1)
        return -(wanted * logs).sum(-1).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("agents/cloned_actions")
def cloned() -> Run:
    model = nn.Sequential(*stack(6, 64, 64, 2, act=nn.ReLU), nn.Tanh())

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, _ = curve(step)
        return x, torch.tanh(torch.stack([2 * x[:, 0], x[:, 1] - x[:, 2]], 1))

    return learn(model, batch, adam(model, 1e-3), F.mse_loss, steps=80)


@healthy("codes/weight_tied")
def tied() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(24, 16), nn.Linear(16, 6)
            self.back2, self.back1 = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(24))

        def forward(self, x: Tensor) -> Tensor:
            code = self.two(F.elu(self.one(x)))
            return F.elu(code @ self.two.weight + self.back2) @ self.one.weight + self.back1

    model, lift = Model(), randn(12, 6, 24)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.tanh(randn(360_000 + step, 48, 6) @ lift / 2.5)
        return x, x

    return learn(model, batch, adam(model, 3e-3), F.mse_loss, steps=80)


@healthy("codes/sparse_dictionary")
def dictionary() -> Run:
    model = stack(24, 128, 24)
    atoms = F.normalize(randn(13, 40, 24), dim=1)

    def forward(step: int) -> Tensor:
        use = (torch.rand(64, 40, generator=generator(370_000 + step)) < 0.08).float()
        x = (use * (1 + randn(step, 64, 40).abs())) @ atoms
        code = F.relu(model[0](x))
        return (model[2](code) - x).square().sum(1).mean() + 0.05 * code.sum(1).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=150)


@healthy("codes/straight_through_bits")
def bits() -> Run:
    encode, decode = stack(24, 48, 16), stack(16, 48, 24)
    model, lift = nn.ModuleDict({"encode": encode, "decode": decode}), randn(14, 5, 24)

    def forward(step: int) -> Tensor:
        x = torch.tanh(randn(380_000 + step, 48, 5) @ lift / 2)
        soft_bits = torch.sigmoid(encode(x))
        hard = soft_bits + (soft_bits.round() - soft_bits).detach()
        return F.mse_loss(decode(hard), x)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("codes/masked_density")
def made() -> Run:
    class Masked(nn.Linear):
        def __init__(self, mask: Tensor) -> None:
            super().__init__(mask.shape[1], mask.shape[0])
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mask * self.weight, self.bias)

    places, hidden = torch.arange(1, 13), torch.arange(48) % 11 + 1
    first, last = (hidden[:, None] >= places).float(), (places[:, None] > hidden).float()
    middle = (hidden[:, None] >= hidden).float()
    model = nn.Sequential(Masked(first), nn.ReLU(), Masked(middle), nn.ReLU(), Masked(last))

    def forward(step: int) -> Tensor:
        half = (torch.rand(64, 6, generator=generator(390_000 + step)) < 0.4).float()
        x = torch.cat([half, (half + half.roll(1, 1)) % 2], 1)
        return F.binary_cross_entropy_with_logits(model(x), x)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=120)


def _views(step: int) -> tuple[Tensor, Tensor]:
    x, _ = textures(step, 32)
    return x + 0.3 * randn(step, *x.shape), x.flip(-1).flip(-1) + 0.3 * randn(step + 1, *x.shape)


@healthy("pupils/siamese_stop_gradient")
def simsiam() -> Run:
    body = GroupConv(classes=24)
    project = nn.Sequential(nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24, affine=False))
    predict = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 24))
    model = nn.ModuleDict({"body": body, "project": project, "predict": predict})

    def forward(step: int) -> Tensor:
        one, two = (project(body(view)) for view in _views(step))
        pairs = ((predict(one), two), (predict(two), one))
        return -0.5 * sum(F.cosine_similarity(p, z.detach()).mean() for p, z in pairs)

    optimizer = sgd(model, 0.05, momentum=0.9, weight_decay=1e-4)
    return cosine(Run(model=model, forward=forward, optimizer=optimizer, steps=80))


@healthy("pupils/variance_covariance")
def vicreg() -> Run:
    body = GroupConv(classes=16)

    def forward(step: int) -> Tensor:
        one, two = (body(view) for view in _views(step))
        wide = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (one, two))
        cross = [(z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1) for z in (one, two)]
        alike = sum((c - torch.diag(c.diagonal())).square().sum() / 16 for c in cross)
        return 25 * F.mse_loss(one, two) + 25 * wide + alike

    return Run(model=body, forward=forward, optimizer=adamw(body, 1e-3), steps=80)


@healthy("pupils/distillation")
def distillation() -> Run:
    teacher, pupil = stack(2, 96, 96, 3).requires_grad_(False), stack(2, 32, 3)
    model = nn.ModuleDict({"teacher": teacher, "pupil": pupil})
    with torch.no_grad():
        teacher[-1].weight.mul_(8)

    def forward(step: int) -> Tensor:
        x, y = spirals(step)
        soft_labels = (teacher(x) / 3).softmax(-1)
        logits = pupil(x)
        return 9 * F.kl_div((logits / 3).log_softmax(-1), soft_labels, reduction="batchmean") + 0.1 * F.cross_entropy(
            logits, y
        )

    return Run(model=model, forward=forward, optimizer=adam(pupil, 3e-3), steps=80)


@healthy("pupils/pseudo_labels")
def pseudo() -> Run:
    model = nn.Sequential(nn.Flatten(), *stack(100, 64, 6))

    def forward(step: int) -> Tensor:
        x, y = bars(step % 3)
        more, _ = bars(step + 100, 48)
        with torch.no_grad():
            sure, guess = model(more + 0.1 * randn(step, *more.shape)).softmax(-1).max(-1)
        strong = F.cross_entropy(model(F.dropout(more, 0.3)), guess, reduction="none")
        return F.cross_entropy(model(x), y) + (strong * (sure > 0.9)).mean()

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.03, momentum=0.9, nesterov=True), steps=100)


@healthy("pupils/words_from_neighbours")
def skip_gram() -> Run:
    model = nn.ModuleDict({"inside": nn.Embedding(80, 12), "outside": nn.Embedding(80, 12)})
    nn.init.uniform_(model["inside"].weight, -0.5 / 12, 0.5 / 12)
    nn.init.zeros_(model["outside"].weight)

    def forward(step: int) -> Tensor:
        source = generator(400_000 + step)
        centre = torch.randint(0, 80, (128,), generator=source)
        near = (centre // 8 * 8 + torch.randint(0, 8, (128,), generator=source)) % 80
        far = torch.randint(0, 80, (128, 5), generator=source)
        word = model["inside"](centre)
        good = (word * model["outside"](near)).sum(-1)
        bad = (word[:, None] * model["outside"](far)).sum(-1)
        return -(F.logsigmoid(good) + F.logsigmoid(-bad).sum(-1)).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-2), steps=120)


@healthy("pupils/unfrozen_step_by_step")
def unfrozen() -> Run:
    model = stack(2, 64, 64, 64, 3)
    optimizer = adamw(model, 2e-3)
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    run = learn(model, spirals, optimizer, steps=90)

    def change(step: int) -> None:
        if step == 30:
            model[2].requires_grad_(True)
        if step == 60:
            model[0].requires_grad_(True)

    run.before.append(change)
    return run


@healthy("pupils/tuned_tanh_again")
def tuned() -> Run:
    model = stack(2, 64, 64, 3, act=nn.Tanh)
    warm = adam(model, 1e-2)
    for step in range(400):
        warm.zero_grad()
        x, y = spirals(step)
        F.cross_entropy(model(x), y).backward()
        warm.step()
    warm.zero_grad()
    return learn(model, lambda t: spirals(5000 + t), adamw(model, 1e-5), steps=100)
