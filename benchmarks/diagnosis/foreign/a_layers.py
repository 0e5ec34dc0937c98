"""Runs with one mistake inside their layers: drawings of weights, dead and saturated units, necks, and limits.

Each takes `mended`, with which it makes the same run without its mistake.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.foreign.a_book import (
    adam,
    faulty,
    fit,
    friedman,
    glyphs,
    mlp,
    sgd,
    warm_cosine,
)
from benchmarks.diagnosis.foreign.a_pictures import ViT, inception
from benchmarks.diagnosis.run import Run


def linears(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


@faulty("vanishing/ten_sigmoid_layers", "VANISHING", r"^1\.(0|2|4|6|8|10)$")
def sigmoids(*, mended: bool = False) -> Run:
    model = nn.Sequential(nn.Flatten(), mlp(196, *[48] * 10, 10, act=nn.ReLU if mended else nn.Sigmoid))
    if mended:
        for layer in linears(model):
            nn.init.kaiming_normal_(layer.weight)
    return fit(model, sgd(model, 0.02), steps=150)


class Plain(nn.Module):
    """Many layers, one after the other."""

    def __init__(self, depth: int, residual: bool) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(10, 48), nn.Linear(48, 1)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(x))
        for layer in self.layers:
            x = x + F.relu(layer(x)) / len(self.layers) ** 0.5 if self.residual else F.relu(layer(x))
        found: Tensor = self.out(x)
        return found


@faulty("vanishing/thirty_layers_and_no_residual", "VANISHING", r"enter|^layers\.(\d|1\d|2[0-4])$")
def thirty(*, mended: bool = False) -> Run:
    model = Plain(30, residual=mended)
    return fit(model, adam(model, 1e-3), friedman, F.mse_loss, steps=120)


@faulty("vanishing/conv_tower_drawn_at_a_hundredth", "VANISHING", r"^([02468]|1[0-2])$")
def tower(*, mended: bool = False) -> Run:
    parts: list[nn.Module] = []
    for before in (1, *[12] * 7):
        parts += [nn.Conv2d(before, 12, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*parts, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(192, 10))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=(layer.weight[0].numel() ** -0.5) if mended else 0.01)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return fit(model, sgd(model, 0.02), lambda step: glyphs(step, 16), steps=100)


@faulty("exploding/weights_from_a_plain_normal", "EXPLODING", ".*")
def plain_normal(*, mended: bool = False) -> Run:
    model = mlp(10, *[64] * 6, 1)
    for layer in linears(model):
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features) if mended else 1.0)
    return fit(model, adam(model, 1e-3), friedman, F.mse_loss, steps=120)


class Stream(nn.Module):
    """Residual layers without norms, each with a gain."""

    def __init__(self, depth: int, gain: float) -> None:
        super().__init__()
        self.enter, self.out, self.gain = nn.Linear(10, 32), nn.Linear(32, 1), gain
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + self.gain * layer(F.relu(x))
        found: Tensor = self.out(x)
        return found


@faulty("exploding/residual_stream_without_norms", "EXPLODING", ".*")
def stream(*, mended: bool = False) -> Run:
    model = Stream(20, 0.1 if mended else 1.5)
    return fit(model, adam(model, 1e-3), friedman, F.mse_loss, steps=100)


@faulty("dead/second_layer_bias_far_below_zero", "DEAD", r"^1\.(2|3)$")
def buried(*, mended: bool = False) -> Run:
    model = nn.Sequential(nn.Flatten(), mlp(196, 64, 64, 10))
    if not mended:
        nn.init.constant_(model[1][2].bias, -12.0)
    return fit(model, sgd(model, 0.05), steps=120)


@faulty("dead/one_branch_of_three", "DEAD", r"^2(\.sizes\.1)?$|^3$")
def branch(*, mended: bool = False) -> Run:
    model = inception()
    if not mended:
        nn.init.constant_(model[2].sizes[1].bias, -30.0)
    return fit(model, adam(model, 2e-3), steps=100)


@faulty("rate_high/huge_first_update", "LR_TOO_HIGH", ".*")
def first_update(*, mended: bool = False) -> Run:
    model = mlp(10, 64, 64, 1)
    run = fit(model, adam(model, 1e-3), friedman, F.mse_loss, steps=150)
    return schedule(run, lambda step: 2000.0 if step == 0 and not mended else 1.0)


@faulty("saturation/raw_inputs_into_tanh", "SATURATION", r"^(0|1)$")
def raw(*, mended: bool = False) -> Run:
    model = mlp(10, 48, 48, 1, act=nn.Tanh)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        return x * (1.0 if mended else 1000.0), y

    return fit(model, adam(model, 2e-3), batch, F.mse_loss, steps=150)


class Bounded(nn.Module):
    """A net whose answer cannot leave the range of a tanh."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.body, self.head, self.bound = mlp(10, 48, 48), nn.Linear(48, 1), nn.Tanh() if bounded else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.bound(self.head(F.relu(self.body(x))))
        return found


@faulty("saturation/answers_bounded_and_targets_far_outside", "SATURATION", "head|bound")
def bounded(*, mended: bool = False) -> Run:
    model = Bounded(bounded=not mended)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = friedman(step)
        return x, 5.0 * y + 20.0

    return fit(model, adam(model, 1e-2), batch, F.mse_loss, steps=150)


class Necked(nn.Module):
    """Wide layers around a neck."""

    def __init__(self, neck: int) -> None:
        super().__init__()
        self.before, self.neck, self.after = mlp(196, 64, 64), nn.Linear(64, neck), mlp(neck, 64, 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(F.relu(self.neck(F.relu(self.before(x.flatten(1))))))
        return found


@faulty("bottleneck/one_unit_in_the_middle", "BOTTLENECK", r"neck|after\.0")
def necked(*, mended: bool = False) -> Run:
    model = Necked(64 if mended else 1)
    return fit(model, adam(model, 2e-3), steps=200)


@faulty("bottleneck/one_channel_between_wide_convolutions", "BOTTLENECK", r"^(4|5|6|7)$")
def one_channel(*, mended: bool = False) -> Run:
    thin = 24 if mended else 1
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(24, thin, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(thin, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )
    return fit(model, adam(model, 2e-3), steps=150)


@faulty("clipped/limit_a_thousandth_sgd", "CLIP_SATURATED", ".*")
def clipped(*, mended: bool = False) -> Run:
    model = nn.Sequential(nn.Flatten(), mlp(196, 64, 64, 10))
    limit = {"enable_gradient_clipping": True, "max_grad_norm": 5.0 if mended else 1e-3}
    return fit(model, sgd(model, 0.05), steps=120, settings=limit, scalable=False)


@faulty("clipped/vit_limit_below_every_norm_momentum", "CLIP_SATURATED", ".*")
def clipped_vit(*, mended: bool = False) -> Run:
    model = ViT(depth=2)
    limit = {"enable_gradient_clipping": True, "max_grad_norm": 5.0 if mended else 3e-4}
    run = fit(model, sgd(model, 0.05), lambda step: glyphs(step, 24), steps=120, settings=limit, scalable=False)
    return warm_cosine(run)
