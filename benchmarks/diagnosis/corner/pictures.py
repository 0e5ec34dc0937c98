"""Healthy runs on pictures, and of models that make things up."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import pretrain, schedule
from benchmarks.diagnosis.corner.book import Batch, adam, dense, dice, discs, fit, healthy, normal, sgd
from benchmarks.diagnosis.run import Run


class Unit(nn.Module):
    """Two convolutions with norms, around which the input goes on."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second, self.act = norm(width), norm(width), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.second(self.two(self.act(self.first(self.one(x))))))


def residual(norm: Callable[[int], nn.Module], act: Callable[[], nn.Module] = nn.ReLU, depth: int = 3) -> nn.Module:
    units = [Unit(12, norm, act) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)
    )


@healthy("pictures/batch_norm_and_swish_in_batches_of_four")
def small_batches() -> Run:
    model = residual(nn.BatchNorm2d, nn.SiLU)
    return fit(model, sgd(model, 0.02, momentum=0.9), lambda step: discs(step, 4))


@healthy("pictures/group_norm_one_picture_a_step")
def one_picture() -> Run:
    model = residual(lambda width: nn.GroupNorm(4, width))
    return fit(model, adam(model, 1e-3), lambda step: discs(step, 1))


@healthy("pictures/instance_norm_and_relu6")
def instance() -> Run:
    model = residual(lambda width: nn.InstanceNorm2d(width, affine=True), nn.ReLU6)
    return fit(model, adam(model, 3e-3), discs)


@healthy("pictures/last_scale_of_each_unit_begins_at_zero")
def zero_scales() -> Run:
    model = residual(nn.BatchNorm2d, depth=5)
    for module in model.modules():
        if isinstance(module, Unit):
            nn.init.zeros_(module.second.weight)
    return fit(model, sgd(model, 0.1, momentum=0.9), discs)


@healthy("pictures/depthwise_and_squeezed")
def depthwise() -> Run:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.Hardsigmoid())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.ask(x.mean((2, 3)))[:, :, None, None]

    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish()),
        *(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16), nn.Hardswish(), Squeeze()),
        *(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    return fit(model, torch.optim.RMSprop(model.parameters(), 2e-3, momentum=0.9), discs)


class Bridge(nn.Module):
    """Down twice, up twice, with what was on the way down beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.low, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge, self.out = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.down1(x))
        low = torch.relu(self.low(torch.relu(self.down2(high))))
        return self.out(torch.relu(self.merge(torch.cat([self.up(low), high], 1))))


@healthy("pictures/masks_by_a_bridge_of_skips")
def bridge() -> Run:
    model = Bridge()

    def batches(step: int) -> Batch:
        x, _ = discs(step)
        return x, (x > 1.0).float()

    return fit(model, adam(model, 2e-3), batches, F.binary_cross_entropy_with_logits)


class Looker(nn.Module):
    """Patches that attend to each other, and a token that answers."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 3, 3)
        self.answer, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.cut(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.answer.expand(len(x), -1, -1), seen], 1) + self.places)[:, 0])


@healthy("pictures/patches_that_look_at_each_other")
def looker() -> Run:
    model = Looker()
    run = fit(model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1), discs, steps=60)
    return schedule(run, lambda step: min(1.0, (step + 1) / 10))


@healthy("pictures/backbone_stands_still_in_eval")
def still_backbone() -> Run:
    model = nn.ModuleDict({"backbone": residual(nn.BatchNorm2d)[:-1], "head": nn.Linear(12, 4)})
    model["backbone"].eval().requires_grad_(False)

    def forward(step: int) -> Tensor:
        x, y = discs(step)
        return F.cross_entropy(model["head"](model["backbone"](x)), y)

    return Run(model=model, forward=forward, optimizer=sgd(model, 0.1))


class Adapted(nn.Module):
    """A layer that stands still, and a narrow one beside it that begins at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.out_features, 4), nn.Linear(4, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found + self.up(torch.relu(self.down(found)))


@healthy("pictures/adapters_in_a_model_that_stands_still")
def adapters() -> Run:
    net = dense(144, 48, 48, 4)
    model = nn.Sequential(nn.Flatten(), Adapted(net.fc0), nn.ReLU(), Adapted(net.fc1), nn.ReLU(), net.fc2)
    return fit(model, adam(model, 3e-3), discs, steps=60)


@healthy("made_up/code_of_two_numbers")
def two_numbers() -> Run:
    model = nn.Sequential(dense(20, 48, 2, act=nn.Tanh), dense(2, 48, 20, act=nn.Tanh))
    mix = normal(5, 2, 20)

    def batches(step: int) -> Batch:
        x = torch.tanh(normal(step, 64, 2) @ mix)
        return x, x

    return fit(model, adam(model, 3e-3), batches, F.mse_loss, steps=80)


@healthy("made_up/one_number_code_of_a_line")
def one_number() -> Run:
    model = nn.Sequential(dense(10, 32, 1), dense(1, 32, 10))
    mix = normal(6, 1, 10)

    def batches(step: int) -> Batch:
        x = normal(step, 64, 1) @ mix + 0.05 * normal(1_100_000 + step, 64, 10)
        return x, x

    return fit(model, adam(model, 3e-3), batches, F.mse_loss, steps=80)


class Coupling(nn.Module):
    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.net, self.swap = dense(1, 32, 32, 2, act=nn.Tanh), swap
        nn.init.zeros_(self.net.fc2.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, -1) if not self.swap else x.chunk(2, -1)[::-1]
        scale, shift = self.net(kept).chunk(2, -1)
        moved = moved * torch.tanh(scale).exp() + shift
        return torch.cat([moved, kept] if self.swap else [kept, moved], -1), torch.tanh(scale)[:, 0]


@healthy("made_up/flow_of_six_couplings")
def flow() -> Run:
    model = nn.ModuleList(Coupling(bool(index % 2)) for index in range(6))

    def forward(step: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(128, generator=dice(1_200_000 + step))
        x = torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * normal(1_210_000 + step, 128, 2)
        volume = torch.zeros(128)
        for layer in model:
            x, change = layer(x)
            volume = volume + change
        return (0.5 * x.square().sum(-1) - volume).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("made_up/noise_that_is_taken_off")
def noise() -> Run:
    model = dense(3, 64, 64, 2, act=nn.SiLU)

    def forward(step: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(128, 1, generator=dice(1_300_000 + step))
        x = torch.cat([angle.cos(), angle.sin()], -1)
        time = torch.rand(128, 1, generator=dice(1_310_000 + step))
        added = normal(1_320_000 + step, 128, 2)
        mixed = torch.cos(0.5 * math.pi * time) * x + torch.sin(0.5 * math.pi * time) * added
        return F.mse_loss(model(torch.cat([mixed, time], -1)), added)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=60)


@healthy("made_up/codebook_with_a_straight_way_back")
def codebook() -> Run:
    model = nn.ModuleDict({"inside": dense(20, 32, 4), "book": nn.Embedding(16, 4), "out": dense(4, 32, 20)})
    model["book"].weight.data.mul_(0.3)
    mix = normal(7, 3, 20)

    def forward(step: int) -> Tensor:
        x = torch.tanh(normal(step, 64, 3) @ mix)
        code = model["inside"](x)
        near = model["book"](torch.cdist(code, model["book"].weight).argmin(-1))
        passed = code + (near - code).detach()
        bound = F.mse_loss(near, code.detach()) + F.mse_loss(code, near.detach())
        return F.mse_loss(model["out"](passed), x) + bound

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=80)


@healthy("made_up/critic_with_spectral_norm")
def critic() -> Run:
    norm = nn.utils.parametrizations.spectral_norm
    maker = dense(4, 32, 32, 2)
    judge = nn.Sequential(norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2))
    judge.append(nn.Linear(32, 1))
    model = nn.ModuleDict({"maker": maker, "judge": judge})

    def forward(step: int) -> Tensor:
        real = normal(step, 64, 2) + torch.tensor([2.0, 0.0])
        made = maker(normal(1_400_000 + step, 64, 4))
        if step % 2:
            judge.requires_grad_(False)
            loss = F.softplus(-judge(made)).mean()
            judge.requires_grad_(True)
            return loss
        return F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3, betas=(0.5, 0.9)), steps=60)


@healthy("made_up/bits_with_a_straight_way_back")
def bits() -> Run:
    class Round(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.sign(x) - x).detach()

    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 48), nn.Hardtanh(), Round(), nn.Linear(48, 4))
    return fit(model, adam(model, 2e-3), discs)


@healthy("made_up/waves_of_high_frequency")
def sines() -> Run:
    class Sine(nn.Module):
        def __init__(self, before: int, after: int, speed: float, first: bool = False) -> None:
            super().__init__()
            self.map, self.speed = nn.Linear(before, after), speed
            bound = 1 / before if first else math.sqrt(6 / before) / speed
            nn.init.uniform_(self.map.weight, -bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.speed * self.map(x))

    model = nn.Sequential(Sine(2, 64, 30.0, True), Sine(64, 64, 30.0), Sine(64, 64, 30.0), nn.Linear(64, 1))

    def batches(step: int) -> Batch:
        place = 2 * torch.rand(256, 2, generator=dice(1_500_000 + step)) - 1
        return place, torch.sin(12 * place[:, :1]) * torch.cos(9 * place[:, 1:])

    return fit(model, adam(model, 3e-4), batches, F.mse_loss, steps=80)


@healthy("pictures/learned_and_tuned_on_at_a_low_rate")
def tuned() -> Run:
    model = residual(nn.BatchNorm2d)
    run = pretrain(fit(model, adam(model, 3e-3), discs), 120)
    run.optimizer = sgd(model, 1e-4, momentum=0.9)
    return run
