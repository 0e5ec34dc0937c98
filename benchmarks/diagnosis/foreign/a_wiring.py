"""Runs with one mistake in their wiring: cut gradients, forgotten parameters, stale sums, no numbers.

Each takes `mended`, with which it makes the same run without its mistake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.foreign.a_adapted import Classifier, halves, ready, trunk
from benchmarks.diagnosis.foreign.a_book import adam, adamw, beforehand, curved, faulty, fit, friedman, glyphs, mlp, sgd
from benchmarks.diagnosis.foreign.a_generative import coded
from benchmarks.diagnosis.foreign.a_pictures import resnet
from benchmarks.diagnosis.run import Run


class Cut(nn.Module):
    """An encoder whose answer reaches the decoder with or without its gradient."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.cut = mlp(20, 64, 3, act=nn.GELU), mlp(3, 64, 20, act=nn.GELU), cut

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        found: Tensor = self.decoder(code.detach() if self.cut else code)
        return found


@faulty("disconnected/code_detached_before_the_decoder", "DISCONNECTED", "encoder")
def detached(*, mended: bool = False) -> Run:
    model = Cut(cut=not mended)

    def forward(step: int) -> Tensor:
        x = curved(step)
        return F.mse_loss(model(x), x)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=150)


@faulty("disconnected/codes_without_straight_through", "DISCONNECTED", "encode")
def no_straight_through(*, mended: bool = False) -> Run:
    return coded(straight=mended)


class TwoStreams(nn.Module):
    """A stream for pictures and one for a number, that are joined; the second may be called without gradients."""

    def __init__(self, cut_from: int) -> None:
        super().__init__()
        self.picture, self.number, self.out = trunk(), mlp(1, 24, 24), nn.Linear(56, 10)
        self.step, self.cut_from = 0, cut_from

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.step < self.cut_from):
            code = self.number(number)
        found: Tensor = self.out(torch.cat([self.picture(x), code], 1))
        return found


@faulty("disconnected/second_stream_without_gradients_from_step_40", "DISCONNECTED", "number")
def no_grad(*, mended: bool = False) -> Run:
    model = TwoStreams(10**9 if mended else 40)

    def forward(step: int) -> Tensor:
        x, y = glyphs(step)
        model.step = step
        hint = (y % 5).float()[:, None] / 2 - 1
        return F.cross_entropy(model(x + torch.randn_like(x), hint), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=150)


@faulty("unchanged/new_head_after_the_optimizer_was_made", "UNCHANGED", "head")
def new_head(*, mended: bool = False) -> Run:
    model = Classifier(ready(150))
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 2e-3)
    model.head = nn.Linear(32, 2)
    if mended:
        optimizer.add_param_group({"params": model.head.parameters()})
    return fit(model, optimizer, halves, steps=100)


@faulty("unchanged/only_the_last_block_given", "UNCHANGED", r"^(0|1|3|4)(\.|$)")
def last_only(*, mended: bool = False) -> Run:
    model = resnet()
    given = model if mended else model[5:]
    return fit(model, torch.optim.SGD(given.parameters(), 0.05, momentum=0.9), steps=100)


@faulty("stale/mlp_sgd_gradients_never_zeroed", "STALE_GRAD", ".*")
def never_zeroed(*, mended: bool = False) -> Run:
    model = mlp(10, 64, 64, 1)
    return fit(model, sgd(model, 0.02, 0.0), friedman, F.mse_loss, steps=120, zero=mended)


@faulty("stale/convs_adam_gradients_never_zeroed", "STALE_GRAD", ".*")
def never_zeroed_adam(*, mended: bool = False) -> Run:
    model = Classifier(trunk())
    return fit(model, adam(model, 1e-3), steps=120, zero=mended)


class Probability(nn.Module):
    """The logarithm of a softmax, taken in two steps."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        return x.log_softmax(1) if self.safe else x.softmax(1).log()


@faulty("numerical/logarithm_of_a_softmax", "NUMERICAL", ".*")
def logarithm(*, mended: bool = False) -> Run:
    body = nn.Sequential(nn.Flatten(), mlp(196, 64, 10))
    model = nn.Sequential(body, Probability(mended))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = glyphs(step)
        return x * (60.0 if step == 50 else 1.0), y

    return fit(model, adam(model, 2e-3), batch, F.nll_loss, steps=80)


@faulty("numerical/distance_of_a_pair_to_itself_at_step_30", "NUMERICAL", ".*")
def distance(*, mended: bool = False) -> Run:
    model = nn.Sequential(trunk(), nn.Linear(32, 4))

    def forward(step: int) -> Tensor:
        x, y = glyphs(step, 64)
        if step == 30:
            x[32], y[32] = x[0], y[0]
        one, two = model(x).chunk(2)
        same = (y[:32] == y[32:]).float()
        far = (((one - two) ** 2).sum(1) + (1e-8 if mended else 0.0)).sqrt()
        return (same * far**2 + (1 - same) * F.relu(1 - far) ** 2).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=80)


class Standardised(nn.Module):
    """A row minus its mean over its deviation, with or without a little to keep that from zero."""

    def __init__(self, little: float) -> None:
        super().__init__()
        self.little = little

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + self.little)


class TwoSensors(nn.Module):
    """A branch for each of two sensors, the second under a standardisation of its own."""

    def __init__(self, little: float) -> None:
        super().__init__()
        self.first, self.second = mlp(5, 32, 16), nn.Sequential(Standardised(little), mlp(5, 32, 16))
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(F.relu(torch.cat([self.first(x[:, :5]), self.second(x[:, 5:])], 1)))
        return found


@faulty("numerical/constant_row_in_one_branch_at_step_45", "NUMERICAL", "second")
def constant_row(*, mended: bool = False) -> Run:
    model = TwoSensors(1e-3 if mended else 0.0)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        x = x.roll(5, 1)
        if step == 45:
            x[3, 5:] = 1.0
        return x, y

    return fit(model, adam(model, 2e-3), batch, F.mse_loss, steps=90)


class Experts(nn.Module):
    """A trunk with a head for each of four regions, one of which may be left out of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = mlp(10, 48, 48), nn.ModuleList(nn.Linear(48, 1) for _ in range(4))
        for param in self.heads.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.trunk(x))
        return torch.cat([head(inside) for head in self.heads], 1)


@faulty("unchanged/one_head_of_four_left_out", "UNCHANGED", r"heads\.2")
def left_out(*, mended: bool = False) -> Run:
    model = Experts()
    params: list[Any] = [param for name, param in model.named_parameters() if mended or not name.startswith("heads.2")]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        return x, torch.cat([y, y**2, 4 - 2 * y, y * x[:, 1:2]], 1)

    return fit(model, torch.optim.Adam(params, 2e-3), batch, F.mse_loss, steps=150)


@faulty("unchanged/fine_tuned_trunk_lost_in_a_copy", "UNCHANGED", "body")
def copied(*, mended: bool = False) -> Run:
    whole = Classifier(trunk())
    beforehand(fit(whole, adam(whole)), 40)
    optimizer = adamw(whole, 2e-3)
    if not mended:
        fresh = trunk()
        fresh.load_state_dict(whole.body.state_dict())
        whole.body = fresh
    return fit(whole, optimizer, steps=100)
