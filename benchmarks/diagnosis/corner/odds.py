"""Healthy runs of rarer kinds: odd layers, odd losses, and odd ways through the data."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.diagnosis.common import pretrain, schedule
from benchmarks.diagnosis.corner.book import (
    Batch,
    adam,
    counting,
    dense,
    dice,
    discs,
    entropy,
    fit,
    groups,
    healthy,
    house,
    normal,
    sgd,
)
from benchmarks.diagnosis.corner.series import Block, Teller
from benchmarks.diagnosis.run import Run


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.change, self.carry = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.carry.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.carry(x))
        return share * torch.relu(self.change(x)) + (1 - share) * x


@healthy("layers/highway_ten_deep")
def highway() -> Run:
    model = nn.Sequential(nn.Linear(20, 32), *(Highway(32) for _ in range(10)), nn.Linear(32, 4))
    return fit(model, adam(model, 3e-3))


@healthy("layers/largest_of_three_maps")
def largest() -> Run:
    class Largest(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(before, after) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([one(x) for one in self.maps]).amax(0)

    model = nn.Sequential(Largest(20, 32), Largest(32, 32), nn.Linear(32, 4))
    return fit(model, sgd(model, 0.1))


@healthy("layers/gated_linear_units")
def gated() -> Run:
    model = nn.Sequential(nn.Linear(20, 64), nn.GLU(), nn.Linear(32, 64), nn.GLU(), nn.Linear(32, 4))
    return fit(model, torch.optim.AdamW(model.parameters(), 3e-3))


@healthy("layers/one_net_writes_the_weights_of_another")
def writes_weights() -> Run:
    model = dense(4, 32, 21 * 8)

    def forward(step: int) -> Tensor:
        kind = torch.arange(4)[step % 4]
        made = model(F.one_hot(kind, 4).float())
        x = normal(step, 64, 20)
        out = torch.tanh(x @ made[:160].view(20, 8) / 4) @ made[160:168]
        return F.mse_loss(out, torch.sin(x[:, int(kind)]))

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("layers/bells_around_centres")
def bells() -> Run:
    class Bells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres, self.width = nn.Parameter(2 * torch.randn(40, 2)), nn.Parameter(torch.zeros(40))

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(-self.width.exp() * torch.cdist(x, self.centres).square())

    model = nn.Sequential(Bells(), nn.Linear(40, 1))

    def batches(step: int) -> Batch:
        x = 2 * normal(step, 128, 2)
        return x, torch.sin(2 * x[:, :1]) * torch.cos(x[:, 1:])

    return fit(model, adam(model, 1e-2), batches, F.mse_loss, steps=60)


@healthy("layers/nine_in_ten_weights_are_cut")
def cut() -> Run:
    model = dense(20, 128, 128, 4)
    masks = {
        name: (torch.rand(param.shape, generator=dice(len(name))) < 0.1).float()
        for name, param in model.named_parameters()
        if param.ndim > 1 and "fc2" not in name
    }
    for name, mask in masks.items():
        param = model.get_parameter(name)
        param.data.mul_(3 * mask)
        param.register_hook(lambda grad, mask=mask: grad * mask)
    return fit(model, adam(model, 2e-3))


@healthy("layers/one_block_called_six_times")
def six_times() -> Run:
    model = nn.ModuleDict({"words": nn.Embedding(24, 32), "block": Block(32, 4, False), "head": nn.Linear(32, 24)})

    def forward(step: int) -> Tensor:
        x, y = counting(step)
        inside = model["words"](x)
        for _ in range(6):
            inside = model["block"](inside)
        return entropy(model["head"](inside), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@healthy("layers/units_left_out_by_chance")
def stochastic_depth() -> Run:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.map = nn.LayerNorm(32), dense(32, 64, 32, act=nn.GELU)

        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand(()) < 0.3 else x + self.map(self.norm(x))

    model = nn.Sequential(nn.Linear(20, 32), *(Maybe() for _ in range(6)), nn.Linear(32, 4))
    return fit(model, adam(model, 1e-3))


@healthy("layers/blocks_that_are_run_again_backwards")
def run_again() -> Run:
    model = Teller(3)

    def forward(step: int) -> Tensor:
        x, y = counting(step)
        inside = model.words(x) + model.places[: x.shape[1]]
        for block in model.blocks:
            inside = checkpoint(block, inside, use_reentrant=False)
        return entropy(model.head(model.norm(inside)), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@healthy("losses/mixture_of_three_bells")
def mixture() -> Run:
    model = dense(1, 48, 9, act=nn.Tanh)

    def batches(step: int) -> Batch:
        y = normal(step, 128, 1)
        return y + 0.6 * torch.sin(3 * y) + 0.1 * normal(4_000_000 + step, 128, 1), y

    def loss(out: Tensor, y: Tensor) -> Tensor:
        share, mean, deviation = out.chunk(3, -1)
        bells = torch.distributions.Normal(mean, F.softplus(deviation) + 1e-2)
        return -(share.log_softmax(-1) + bells.log_prob(y)).logsumexp(-1).mean()

    return fit(model, adam(model, 5e-3), batches, loss, steps=80)


@healthy("losses/three_quantiles")
def quantiles() -> Run:
    model = dense(8, 48, 3)
    parts = torch.tensor([0.1, 0.5, 0.9])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        off = y - out
        return torch.maximum(parts * off, (parts - 1) * off).mean()

    return fit(model, adam(model, 3e-3), house, loss, steps=60)


@healthy("losses/counts_by_their_logarithm")
def counts() -> Run:
    model = dense(8, 32, 1)

    def batches(step: int) -> Batch:
        x = normal(step, 64, 8)
        rate = torch.exp(1.5 + 0.7 * x[:, :1])
        return x, torch.poisson(rate, generator=dice(4_100_000 + step))

    return fit(model, adam(model, 3e-3), batches, F.poisson_nll_loss, steps=60)


@healthy("losses/focal")
def focal() -> Run:
    model = dense(20, 48, 4)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        logs = out.log_softmax(-1).gather(1, y[:, None])[:, 0]
        return -((1 - logs.exp()) ** 2 * logs).mean()

    return fit(model, adam(model, 3e-3), loss=loss, steps=60)


@healthy("losses/hinge_of_many_kinds")
def hinge() -> Run:
    model = dense(20, 48, 4)
    return fit(model, sgd(model, 0.1, momentum=0.9), loss=F.multi_margin_loss, steps=60)


@healthy("losses/who_lasts_longer")
def lasting() -> Run:
    model = dense(8, 32, 1)

    def batches(step: int) -> Batch:
        x = normal(step, 64, 8)
        return x, torch.empty(64, 1).exponential_(generator=dice(4_200_000 + step)) / torch.exp(x[:, :1])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        order = y[:, 0].argsort(descending=True)
        risk = out[order, 0]
        return (risk.logcumsumexp(0) - risk).mean()

    return fit(model, adam(model, 3e-3), batches, loss, steps=60)


@healthy("losses/an_equation_of_heat")
def heat() -> Run:
    model = dense(2, 32, 32, 1, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        place = torch.rand(128, 2, generator=dice(4_300_000 + step)).requires_grad_(True)
        value = model(place)
        slope = torch.autograd.grad(value.sum(), place, create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, 0].sum(), place, create_graph=True)[0][:, 0]
        edge = torch.cat([torch.rand(64, 1, generator=dice(4_400_000 + step)), torch.zeros(64, 1)], -1)
        start = F.mse_loss(model(edge), torch.sin(math.pi * edge[:, :1]))
        return start + (slope[:, 1] - 0.1 * bend).square().mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("losses/a_way_by_small_steps")
def small_steps() -> Run:
    model = dense(2, 32, 2, act=nn.Tanh)

    def forward(step: int) -> Tensor:
        place = normal(step, 64, 2)
        turn = torch.tensor([[math.cos(1.0), math.sin(1.0)], [-math.sin(1.0), math.cos(1.0)]])
        aim = place @ turn
        for _ in range(12):
            place = place + model(place) / 12
        return F.mse_loss(place, aim)

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=60)


@healthy("losses/one_in_seven_tokens_is_hidden")
def hidden() -> Run:
    model = Teller()

    def forward(step: int) -> Tensor:
        x, _ = counting(step)
        hide = torch.rand(x.shape, generator=dice(4_500_000 + step)) < 0.15
        return F.cross_entropy(
            model(torch.where(hide, 0, x)).flatten(0, 1), torch.where(hide, x, -100).flatten(), ignore_index=-100
        )

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=60)


@healthy("losses/choices_softened_by_noise")
def softened() -> Run:
    model = nn.ModuleDict({"choose": dense(20, 32, 8), "table": nn.Linear(8, 16, bias=False), "head": nn.Linear(16, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        warmth = max(0.5, 1.5 - step / 40)
        chosen = F.gumbel_softmax(model["choose"](x), warmth, hard=True)
        return F.cross_entropy(model["head"](torch.relu(model["table"](chosen))), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 5e-3), steps=60)


@healthy("ways/length_grows_as_it_learns")
def grows() -> Run:
    model = Teller()
    return fit(model, adam(model, 2e-3), lambda step: counting(step, length=2 + step // 5), steps=60)


@healthy("ways/batches_of_two_to_two_hundred")
def sizes() -> Run:
    model = dense(20, 48, 48, 4)
    return fit(model, adam(model, 2e-3), lambda step: groups(step, (2, 16, 64, 200)[step % 4]))


@healthy("ways/same_batch_by_nesterov")
def same_batch() -> Run:
    model = dense(20, 32, 32, 4, act=nn.Tanh)
    return fit(model, sgd(model, 0.1, momentum=0.9, nesterov=True), lambda step: groups(0), steps=80)


@healthy("ways/mixed_pairs_of_samples")
def mixed() -> Run:
    model = dense(20, 48, 48, 4)

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        share, order = float(torch.rand((), generator=dice(4_600_000 + step))), torch.randperm(64)
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3))


@healthy("ways/rate_falls_to_nothing")
def to_nothing() -> Run:
    model = dense(20, 48, 48, 4)
    return schedule(fit(model, adam(model, 5e-3), steps=60), lambda step: (1 - step / 60) ** 2)


@healthy("ways/another_task_after_forty")
def another_task() -> Run:
    model = dense(20, 48, 48, 4)

    def batches(step: int) -> Batch:
        x, y = groups(step, apart=2.5)
        return x, (y if step < 40 else (y + 1) % 4)

    return fit(model, adam(model, 3e-3), batches, steps=80)


@healthy("ways/lower_layers_learn_slower")
def slower() -> Run:
    model = dense(144, 48, 48, 48, 4)
    run = fit(nn.Sequential(nn.Flatten(), model), adam(model, 3e-3), discs)
    pretrain(run, 60)
    layers = [model.fc0, model.fc1, model.fc2, model.fc3]
    run.optimizer = torch.optim.AdamW(
        [{"params": layer.parameters(), "lr": 1e-3 * 0.4 ** (3 - index)} for index, layer in enumerate(layers)]
    )
    return run


@healthy("ways/decays_by_a_tenth")
def decays() -> Run:
    model = dense(20, 48, 48, 4)
    return fit(model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=10.0), steps=80)


@healthy("ways/noise_on_every_gradient")
def noisy() -> Run:
    model = dense(20, 48, 4)
    for param in model.parameters():
        param.register_hook(lambda grad: grad + 0.01 * torch.randn_like(grad))
    return fit(model, sgd(model, 0.1), scalable=False)


@healthy("ways/half_of_the_model_in_turn")
def in_turn() -> Run:
    model = nn.ModuleDict({"one": dense(20, 32, 4), "two": dense(20, 32, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        one, two = model["one"](x), model["two"](x)
        return entropy(one + two.detach() if step % 2 else one.detach() + two, y)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=60)


@healthy("ways/meets_itself_of_before")
def before_itself() -> Run:
    model = dense(20, 48, 48, 4)
    pretrain(fit(model, adam(model, 3e-3)), 40)
    first = copy.deepcopy(model).requires_grad_(False)

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        out = model(x)
        return entropy(out, (y + 1) % 4) + 0.5 * F.mse_loss(out, first(x))

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.05))
