"""Healthy runs on vectors: functions, norms, losses, batches and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.diagnosis.common import pretrain, schedule
from benchmarks.diagnosis.corner.book import (
    Batch,
    adam,
    dense,
    dice,
    fit,
    from_step,
    groups,
    healthy,
    house,
    normal,
    sgd,
)
from benchmarks.diagnosis.run import Run


def _exclusive(step: int) -> Batch:
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    return x, torch.tensor([0, 1, 1, 0])


@healthy("vectors/exclusive_or_with_three_units")
def exclusive_or() -> Run:
    model = dense(2, 3, 2, act=nn.Tanh)
    return fit(model, sgd(model, 0.5), _exclusive)


@healthy("vectors/one_sample_at_a_time")
def single() -> Run:
    model = dense(20, 32, 32, 4)
    return fit(model, sgd(model, 0.01), lambda step: groups(step, 1), steps=60)


@healthy("vectors/one_sample_at_a_time_momentum_regression")
def single_price() -> Run:
    model = dense(8, 24, 1, act=nn.SiLU)
    return fit(model, sgd(model, 1e-3, momentum=0.9), lambda step: house(step, 1), F.mse_loss)


@healthy("vectors/four_thousand_wide")
def wide() -> Run:
    model = dense(20, 4096, 4)
    return fit(model, adam(model, 3e-4))


@healthy("vectors/widths_of_two")
def narrow() -> Run:
    model = dense(20, 2, 2, 4, act=nn.Tanh)
    return fit(model, adam(model, 1e-2))


@healthy("vectors/softmax_regression_at_rate_two")
def logistic() -> Run:
    model = nn.Linear(20, 4)
    return fit(model, sgd(model, 2.0))


@healthy("vectors/sgd_at_one_with_layer_norm")
def fast_normalised() -> Run:
    model = dense(20, 64, 64, 4, norm=nn.LayerNorm)
    return fit(model, sgd(model, 0.5))


@healthy("vectors/adamw_at_two_hundred_thousandths")
def gentle() -> Run:
    model = dense(20, 64, 64, 4, act=nn.GELU)
    return fit(model, torch.optim.AdamW(model.parameters(), 2e-5))


@healthy("vectors/thirty_steps_of_warm_up")
def warm() -> Run:
    model = dense(20, 64, 64, 4)
    return schedule(fit(model, adam(model, 3e-3)), lambda step: min(1.0, (step + 1e-4) / 30))


@healthy("vectors/cosine_with_restarts_every_ten")
def restarts() -> Run:
    model = dense(20, 48, 48, 4)
    run = fit(model, sgd(model, 0.2, momentum=0.8))
    return schedule(run, lambda step: 0.5 * (1 + math.cos(math.pi * (step % 10) / 10)))


@healthy("vectors/weight_norm")
def weight_norm() -> Run:
    model = dense(20, 48, 48, 4, act=nn.ELU)
    for layer in (model.fc0, model.fc1, model.fc2):
        parametrizations.weight_norm(layer)
    return fit(model, adam(model, 3e-3))


@healthy("vectors/spectral_norm")
def spectral_norm() -> Run:
    model = dense(20, 48, 48, 4)
    for layer in (model.fc0, model.fc1):
        parametrizations.spectral_norm(layer)
    return fit(model, sgd(model, 0.2, momentum=0.5))


ACTS = {
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "prelu": nn.PReLU,
    "selu": nn.SELU,
    "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid,
    "tanhshrink": nn.Tanhshrink,
}
for _name, _act in ACTS.items():

    @healthy(f"functions/{_name}")
    def with_function(act: type[nn.Module] = _act) -> Run:
        model = dense(20, 48, 48, 48, 4, act=act)
        return fit(model, adam(model, 3e-3))


@healthy("vectors/two_in_a_hundred_are_positive")
def rare() -> Run:
    model = dense(20, 32, 1)

    def batches(step: int) -> Batch:
        x = normal(800_000 + step, 128, 20)
        return x, (x[:, 0] + 0.5 * x[:, 1] > 2.3).float()[:, None]

    return fit(model, adam(model, 3e-3), batches, F.binary_cross_entropy_with_logits)


@healthy("vectors/sigmoid_outputs_and_bce")
def sigmoid_outputs() -> Run:
    model = nn.Sequential(dense(20, 48, 4), nn.Sigmoid())
    return fit(model, adam(model, 2e-3), loss=lambda p, y: F.binary_cross_entropy(p, F.one_hot(y, 4).float()), steps=60)


@healthy("vectors/five_of_three_hundred_tags")
def tags() -> Run:
    model = dense(40, 64, 300)
    rule = normal(2, 40, 300)

    def batches(step: int) -> Batch:
        x = normal(810_000 + step, 32, 40)
        return x, ((x @ rule) / 40**0.5 > 2.1).float()

    return fit(model, adam(model, 3e-3), batches, F.binary_cross_entropy_with_logits)


@healthy("vectors/targets_of_a_million_with_huber")
def million() -> Run:
    model = dense(8, 48, 1)
    return fit(model, adam(model, 1e-2), lambda step: house(step, scale=1e6), F.huber_loss)


@healthy("vectors/targets_of_a_millionth")
def millionth() -> Run:
    model = dense(8, 48, 1)
    return fit(model, adam(model, 1e-3), lambda step: house(step, scale=1e-6), F.mse_loss)


@healthy("vectors/huber_with_outliers")
def outliers() -> Run:
    model = dense(8, 48, 48, 1)

    def batches(step: int) -> Batch:
        x, y = house(step)
        far = torch.rand(len(y), 1, generator=dice(820_000 + step)) < 0.05
        return x, torch.where(far, 100.0 * y, y)

    return fit(model, adam(model, 2e-3), batches, F.huber_loss)


@healthy("vectors/twelve_linear_layers")
def linear() -> Run:
    model = dense(20, *[32] * 11, 4, act=nn.Identity)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
    return fit(model, sgd(model, 0.02))


@healthy("vectors/thirty_he_layers")
def deep_he() -> Run:
    model = dense(20, *[64] * 29, 4)
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return fit(model, adam(model, 1e-4))


@healthy("vectors/body_thaws_halfway")
def thaws() -> Run:
    model = dense(20, 48, 48, 4)
    last = {id(param) for param in model.fc2.parameters()}
    body = [param for param in model.parameters() if id(param) not in last]
    optimizer = torch.optim.Adam([{"params": model.fc2.parameters()}, {"params": body, "lr": 0.0}], 3e-3)

    def thaw() -> None:
        optimizer.param_groups[1]["lr"] = 1e-3

    return from_step(fit(model, optimizer), 20, thaw)


@healthy("vectors/a_hard_batch_every_fifteen")
def hard_batches() -> Run:
    model = dense(20, 48, 48, 4)
    return fit(
        model,
        sgd(model, 0.05, momentum=0.9),
        lambda step: groups(step, apart=0.3 if step % 15 == 14 else 2.0),
        steps=60,
    )


@healthy("vectors/half_dropped_and_labels_smoothed")
def dropped() -> Run:
    model = nn.Sequential(dense(20, 96, 96), nn.ReLU(), nn.Dropout(0.5), nn.Linear(96, 4))
    return fit(model, adam(model, 2e-3), loss=lambda out, y: F.cross_entropy(out, y, label_smoothing=0.2))


@healthy("vectors/labels_that_nothing_tells")
def nothing_to_learn() -> Run:
    model = dense(20, 48, 48, 5)

    def batches(step: int) -> Batch:
        return normal(830_000 + step, 64, 20), torch.randint(0, 5, (64,), generator=dice(840_000 + step))

    return fit(model, adam(model, 1e-3), batches, steps=80)


@healthy("vectors/learned_before_it_starts")
def learned() -> Run:
    model = dense(20, 48, 48, 4)
    return pretrain(fit(model, adam(model, 1e-3), lambda step: groups(step, apart=3.0)), 400)


@healthy("vectors/ninety_nine_of_a_hundred_alike")
def imbalanced() -> Run:
    model = dense(20, 32, 2)

    def batches(step: int) -> Batch:
        x = normal(850_000 + step, 100, 20)
        labels = torch.zeros(100, dtype=torch.long)
        labels[0] = 1
        x[0] += 1.0
        return x, labels

    return fit(model, adam(model, 1e-3), batches)


@healthy("vectors/four_parts_of_two_samples")
def accumulated() -> Run:
    model = dense(20, 48, 48, 4, act=nn.GELU)
    return fit(model, adam(model, 2e-3), lambda step: groups(step, 2), accumulate=4)


@healthy("vectors/autocast_to_bfloat16")
def autocast() -> Run:
    model = dense(20, 64, 64, 4)

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


class Sign(torch.optim.Optimizer):
    """Takes a step of the same length along the sign of a mean of gradients, as Lion does."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.sub_(group["lr"] * torch.sign(0.9 * mean + 0.1 * param.grad))
                mean.mul_(0.99).add_(param.grad, alpha=0.01)


OPTIMIZERS = {
    "lion": lambda params: Sign(params, 3e-4),
    "rmsprop_momentum": lambda params: torch.optim.RMSprop(params, 5e-4, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 2e-2),
    "adadelta": lambda params: torch.optim.Adadelta(params, 1.0),
    "adamax": lambda params: torch.optim.Adamax(params, 2e-3),
    "rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, 0.05),
    "radam": lambda params: torch.optim.RAdam(params, 3e-3),
    "adam_no_second_memory": lambda params: torch.optim.Adam(params, 5e-4, betas=(0.9, 0.9)),
}
FIXED = ("adadelta", "asgd", "radam")
"""Those whose first steps go by the scale of the loss, for which nothing makes up."""

for _name, _make in OPTIMIZERS.items():

    @healthy(f"optimizers/{_name}")
    def with_optimizer(name: str = _name, make: Callable[..., torch.optim.Optimizer] = _make) -> Run:
        model = dense(20, 48, 48, 4)
        optimizer = make(model.parameters())
        return fit(model, optimizer, lambda step: groups(step if name != "rprop" else 0), scalable=name not in FIXED)
