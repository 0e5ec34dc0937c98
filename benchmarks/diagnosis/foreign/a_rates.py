"""Runs with a rate that is far too high or far too low, in the whole or in a part.

Each takes `mended`, with which it makes the same run without its mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.foreign.a_adapted import Classifier, halves, ready
from benchmarks.diagnosis.foreign.a_book import (
    adam,
    adamw,
    coloured,
    faulty,
    fit,
    friedman,
    glyphs,
    mlp,
    sgd,
)
from benchmarks.diagnosis.foreign.a_generative import Denoiser, _noised, swirl
from benchmarks.diagnosis.foreign.a_pictures import ViT, resnet
from benchmarks.diagnosis.run import Run


def convs(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), act(), nn.Conv2d(12, 24, 3, 2, 1), act(), nn.Flatten(), nn.Linear(384, 10)
    )


@faulty("rate_high/convs_adam_at_a_rate_for_sgd", "LR_TOO_HIGH", ".*")
def adam_as_sgd(*, mended: bool = False) -> Run:
    model = convs()
    return fit(model, adam(model, 1e-3 if mended else 0.2), steps=100)


@faulty("rate_high/resnet_groupnorm_momentum", "LR_TOO_HIGH", ".*")
def resnet_fast(*, mended: bool = False) -> Run:
    model = resnet(3, group=True)
    return fit(model, sgd(model, 0.05 if mended else 5.0), coloured, steps=60)


@faulty("rate_high/vit_adamw_no_warm_up", "LR_TOO_HIGH", ".*")
def vit_fast(*, mended: bool = False) -> Run:
    model = ViT()
    return fit(model, adamw(model, 1e-3 if mended else 0.1), lambda step: glyphs(step, 24), steps=120)


@faulty("rate_high/warm_restart_a_hundredfold_at_step_100", "LR_TOO_HIGH", ".*")
def restarted(*, mended: bool = False) -> Run:
    model = mlp(10, 64, 64, 1)
    run = fit(model, adam(model, 2e-3), friedman, F.mse_loss, steps=160)
    return schedule(run, lambda step: 100.0 if step >= 100 and not mended else 1.0)


@faulty("rate_high/head_group_given_the_wrong_rate", "LR_TOO_HIGH", "head|^$|model")
def head_fast(*, mended: bool = False) -> Run:
    model = Classifier(ready(150), classes=2)
    groups = [
        {"params": model.body.parameters(), "lr": 1e-4},
        {"params": model.head.parameters(), "lr": 2e-3 if mended else 1.0},
    ]
    return fit(model, torch.optim.Adam(groups), halves, steps=100)


@faulty("rate_high/noise_prediction_rmsprop", "LR_TOO_HIGH", ".*")
def noise_fast(*, mended: bool = False) -> Run:
    model = Denoiser()

    def forward(step: int) -> Tensor:
        time = torch.rand(128)
        mixed, noise = _noised(swirl(step), time)
        return F.mse_loss(model(mixed, time), noise)

    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3 if mended else 0.1)
    return Run(model=model, forward=forward, optimizer=optimizer, steps=150)


@faulty("rate_low/mlp_sgd_at_a_rate_for_adam", "LR_TOO_LOW", ".*")
def sgd_as_adam(*, mended: bool = False) -> Run:
    model = nn.Sequential(nn.Flatten(), mlp(196, 64, 64, 10))
    return fit(model, sgd(model, 0.1 if mended else 1e-5, 0.0), steps=150)


@faulty("rate_low/convs_adamw_wrong_exponent", "LR_TOO_LOW", ".*")
def wrong_exponent(*, mended: bool = False) -> Run:
    model = convs(nn.GELU)
    return fit(model, adamw(model, 1e-3 if mended else 1e-8), steps=120)


@faulty("rate_low/decay_meant_for_epochs_at_every_step", "LR_TOO_LOW", ".*")
def decayed(*, mended: bool = False) -> Run:
    model = mlp(10, 64, 64, 1)
    run = fit(model, sgd(model, 0.01), friedman, F.mse_loss, steps=150)
    return run if mended else schedule(run, lambda step: 0.5**step)
