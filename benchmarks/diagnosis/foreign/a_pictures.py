"""Healthy runs that classify or segment pictures."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.foreign.a_book import (
    adam,
    adamw,
    beforehand,
    coloured,
    fit,
    glyphs,
    healthy,
    mlp,
    one_cycle,
    sgd,
    trained,
    warm_cosine,
)
from benchmarks.diagnosis.run import Run


@healthy("vision/mlp_plain_sgd")
def plain() -> Run:
    model = nn.Sequential(nn.Flatten(), mlp(196, 64, 64, 10))
    return fit(model, sgd(model, 0.1, 0.0), steps=200)


@healthy("vision/lenet_tanh_average_pooling")
def lenet() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.Tanh(),
        nn.Linear(48, 10),
    )
    return fit(model, sgd(model, 0.03), steps=200)


@healthy("vision/two_convs_dropout_adadelta")
def dropped() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(600, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )
    # Adadelta takes its epsilon to the size of an update, which has nothing to do with the scale of the loss.
    return fit(model, torch.optim.Adadelta(model.parameters(), 1.0), steps=150, scalable=False)


class Block(nn.Module):
    """A residual block of two convolutions, whose last norm starts at a given gain."""

    def __init__(self, before: int, after: int, stride: int = 1, gain: float = 1.0, group: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, after) if group else nn.BatchNorm2d(after)
        self.norm2 = nn.GroupNorm(4, after) if group else nn.BatchNorm2d(after)
        nn.init.constant_(self.norm2.weight, gain)
        self.short = nn.Conv2d(before, after, 1, stride) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inside)) + self.short(x))


def resnet(channels: int = 1, gain: float = 1.0, *, group: bool = False, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(4, width) if group else nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1, gain, group),
        Block(width, 2 * width, 2, gain, group),
        Block(2 * width, 4 * width, 2, gain, group),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


@healthy("vision/resnet_zero_gain_nesterov_onecycle")
def residual() -> Run:
    model = resnet(gain=0.0)
    return one_cycle(fit(model, sgd(model, 0.1, nesterov=True, weight_decay=5e-4), steps=120))


@healthy("vision/resnet_groupnorm_adamw_warm_cosine")
def grouped() -> Run:
    model = resnet(3, group=True)
    return warm_cosine(fit(model, adamw(model, 3e-3), coloured, steps=100))


@healthy("vision/resnet_bfloat16_autocast")
def half() -> Run:
    model = resnet()

    def forward(step: int) -> Tensor:
        x, y = glyphs(step, 24)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=60)


@healthy("vision/resnet_two_pictures_at_a_time")
def tiny_batch() -> Run:
    model = resnet(group=True)
    return fit(model, adam(model, 5e-4), lambda step: glyphs(step, 2), steps=300)


class Depthwise(nn.Module):
    """An inverted residual: widen, filter each channel, narrow without an activation."""

    def __init__(self, width: int, wide: int = 4) -> None:
        super().__init__()
        inner = width * wide
        self.widen = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6())
        self.each = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()
        )
        self.narrow = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.narrow(self.each(self.widen(x)))
        return added


@healthy("vision/mobile_relu6_rmsprop")
def mobile() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        Depthwise(8),
        Depthwise(8),
        nn.Conv2d(8, 48, 1),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3, alpha=0.9, momentum=0.9, eps=1e-3)
    return fit(model, optimizer, steps=120)


class Next(nn.Module):
    """A block of large depthwise filters, layer norm and a gain for each channel that starts tiny."""

    def __init__(self, width: int, gain: float = 1e-6) -> None:
        super().__init__()
        self.each = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(gain * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(self.each(x).permute(0, 2, 3, 1))
        added: Tensor = x + (self.gain * self.narrow(F.gelu(self.wide(inside)))).permute(0, 3, 1, 2)
        return added


@healthy("vision/convnext_tiny_layer_gain")
def convnext() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 24, 2, 2),
        nn.GroupNorm(1, 24),
        Next(24),
        Next(24),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(216),
        nn.Linear(216, 10),
    )
    return warm_cosine(fit(model, adamw(model, 4e-3), steps=150))


class Segmenter(nn.Module):
    """One level down and up again, with a skip, for the mask of the digit."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.1))
        self.deep = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.LeakyReLU(0.1))
        self.lift = nn.ConvTranspose2d(24, 12, 2, 2)
        self.merge = nn.Sequential(nn.Conv2d(24, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.1))
        self.out = nn.Conv2d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        up = self.lift(self.deep(F.max_pool2d(skip, 2)))
        mask: Tensor = self.out(self.merge(torch.cat([skip, up], 1)))
        return mask


def masks(step: int, noise: float = 0.35) -> tuple[Tensor, Tensor]:
    """Return noisy digits and where there is ink."""
    clean, _ = glyphs(step, 16, noise=0.0)
    ink = (clean > 0.2).float()
    return clean + noise / 0.45 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(step)), ink


@healthy("vision/unet_leaky_masks_adam")
def unet() -> Run:
    model = Segmenter()
    return fit(model, adam(model, 2e-3), masks, F.binary_cross_entropy_with_logits, steps=80)


class Mix(nn.Module):
    """A block that mixes places, then channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.channels = mlp(places, 32, places, act=nn.GELU), mlp(width, 64, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).mT).mT
        mixed: Tensor = x + self.channels(self.norm2(x))
        return mixed


class Patches(nn.Module):
    """Pictures as a sequence of embedded patches."""

    def __init__(self, width: int, side: int = 2, channels: int = 1) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, side, side)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.project(x).flatten(2).mT
        return found


class Mean(nn.Module):
    """The mean over the places of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@healthy("vision/mixer_mixup_adamw")
def mixer() -> Run:
    model = nn.Sequential(Patches(32), Mix(49, 32), Mix(49, 32), nn.LayerNorm(32), Mean(), nn.Linear(32, 10))

    def forward(step: int) -> Tensor:
        x, y = glyphs(step)
        share = float(torch.distributions.Beta(0.2, 0.2).sample())
        other = torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return warm_cosine(Run(model=model, forward=forward, optimizer=adamw(model, 4e-3), steps=150))


class ViT(nn.Module):
    """A small vision transformer with a token for the class and norms before each part."""

    def __init__(self, width: int = 32, depth: int = 3, norm_first: bool = True) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 50, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1) + self.place
        found: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return found


@healthy("vision/vit_label_smoothing")
def vit() -> Run:
    model = ViT()
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    return warm_cosine(fit(model, adamw(model, 2e-3), lambda step: glyphs(step, 24), smooth, steps=150))


class Squeeze(nn.Module):
    """A gate for each channel from the means of all, through a narrow pair of layers."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, narrow), nn.Linear(narrow, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.outer(F.relu(self.inner(x.mean((2, 3))))).sigmoid()[..., None, None]


@healthy("vision/squeeze_excite_mish")
def squeeze() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.Mish(),
        Squeeze(16, 4),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.Mish(),
        Squeeze(32, 4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return fit(model, adam(model, 2e-3), steps=100)


@healthy("vision/selu_alpha_dropout_deep")
def selu() -> Run:
    parts: list[nn.Module] = [nn.Flatten()]
    for before in (196, *[64] * 7):
        parts += [nn.Linear(before, 64), nn.SELU(), nn.AlphaDropout(0.05)]
    model = nn.Sequential(*parts, nn.Linear(64, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return fit(model, adam(model, 1e-3), steps=150)


@healthy("vision/softplus_convs_rmsprop")
def softplus() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1),
        nn.Softplus(),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 24, 3, 2, 1),
        nn.Softplus(),
        nn.BatchNorm2d(24),
        nn.Flatten(),
        nn.Linear(384, 10),
    )
    return fit(model, torch.optim.RMSprop(model.parameters(), 1e-3), steps=120)


class Focal(nn.Module):
    """A detector of a rare digit at every place, whose bias starts at the rare rate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1)
        )
        self.score = nn.Conv2d(16, 1, 3, padding=1)
        nn.init.normal_(self.score.weight, std=0.01)
        nn.init.constant_(self.score.bias, -4.6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.score(F.relu(self.body(x)))
        return found


@healthy("vision/focal_loss_rare_positives")
def focal() -> Run:
    model = Focal()

    def loss(logits: Tensor, ink: Tensor) -> Tensor:
        ink = F.max_pool2d(ink, 2) * (F.avg_pool2d(ink, 2) > 0.9)
        plain = F.binary_cross_entropy_with_logits(logits, ink, reduction="none")
        missed = (1 - (-plain).exp()) ** 2
        return ((0.25 * ink + 0.75 * (1 - ink)) * missed * plain).sum() / ink.sum().clamp(min=1)

    return fit(model, adam(model, 2e-3), masks, loss, steps=150)


@healthy("vision/convs_converged_and_going_on")
def converged() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 10)
    )
    return beforehand(fit(model, sgd(model, 0.003), steps=60), 350)


@healthy("vision/convs_averaged_weights")
def averaged() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), nn.SiLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(384, 10)
    )
    shadow = copy.deepcopy(model)

    def average(_: int) -> None:
        with torch.no_grad():
            for mean, now in zip(shadow.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.05)

    return fit(model, torch.optim.NAdam(trained(model), 2e-3), steps=100, before=[average])


class Branches(nn.Module):
    """Filters of three sizes beside each other."""

    def __init__(self, before: int, each: int) -> None:
        super().__init__()
        self.sizes = nn.ModuleList(nn.Conv2d(before, each, size, padding=size // 2) for size in (1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([conv(x) for conv in self.sizes], 1))


def inception() -> nn.Sequential:
    return nn.Sequential(
        Branches(1, 6), nn.MaxPool2d(2), Branches(18, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(216, 10)
    )


@healthy("vision/inception_micro_batches")
def branched() -> Run:
    model = inception()
    return fit(model, adam(model, 2e-3), lambda step: glyphs(step, 12), accumulate=4, steps=60)


@healthy("vision/deep_stochastic_depth")
def stochastic() -> Run:
    class Drop(nn.Module):
        """A residual layer that is left out now and then."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner, self.outer = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

        def forward(self, x: Tensor) -> Tensor:
            kept = (torch.rand(len(x), 1) < 0.8) / 0.8
            added: Tensor = x + kept * self.outer(F.gelu(self.inner(self.norm(x))))
            return added

    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 48), *(Drop() for _ in range(8)), nn.Linear(48, 10))
    return warm_cosine(fit(model, adamw(model, 2e-3), steps=150))
