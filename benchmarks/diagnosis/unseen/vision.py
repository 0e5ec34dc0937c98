"""Healthy runs on pictures."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn, randn, sgd
from benchmarks.diagnosis.run import Run
from benchmarks.diagnosis.unseen.book import adamw, cosine, healthy, lion, shapes, textures


def _double(before: int, after: int, norm: str = "group") -> nn.Sequential:
    parts: list[nn.Module] = []
    for width in (before, after):
        parts.append(nn.Conv2d(width, after, 3, padding=1))
        parts.append(nn.GroupNorm(4, after) if norm == "group" else nn.BatchNorm2d(after))
        parts.append(nn.SiLU() if norm == "group" else nn.ReLU(inplace=True))
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Two levels down and up again, with skips between them."""

    def __init__(self, norm: str = "group", width: int = 12) -> None:
        super().__init__()
        self.down1, self.down2 = _double(1, width, norm), _double(width, 2 * width, norm)
        self.middle = _double(2 * width, 2 * width, norm)
        self.lift2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.up2 = _double(4 * width, width, norm)
        self.lift1 = nn.ConvTranspose2d(width, width, 2, 2)
        self.up1 = _double(2 * width, width, norm)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        deep = self.middle(F.max_pool2d(two, 2))
        up = self.up2(torch.cat([self.lift2(deep), two], 1))
        found: Tensor = self.out(self.up1(torch.cat([self.lift1(up), one], 1)))
        return found


def dice(logits: Tensor, mask: Tensor) -> Tensor:
    share = logits.sigmoid()
    both = (share * mask).sum((1, 2, 3))
    return (
        F.binary_cross_entropy_with_logits(logits, mask)
        + 1
        - ((2 * both + 1) / (share.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()
    )


@healthy("pictures/unet_groupnorm_warmup_cosine")
def unet() -> Run:
    model = UNet()
    return cosine(learn(model, shapes, adamw(model, 2e-3), dice, steps=80))


@healthy("pictures/unet_batchnorm_sgd")
def unet_sgd() -> Run:
    model = UNet("batch")
    return learn(model, shapes, sgd(model, 0.05, momentum=0.9), F.binary_cross_entropy_with_logits)


class GroupConv(nn.Module):
    """Four convolutions with group norm, two of them with a stride."""

    def __init__(self, act: type[nn.Module] = nn.ReLU, classes: int = 5) -> None:
        super().__init__()
        widths = (3, 16, 16, 32, 32)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 2 if i % 2 else 1, 1) for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in widths[1:])
        self.act = act()
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.act(norm(conv(x)))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


@healthy("pictures/mixup_and_smoothing")
def mixup() -> Run:
    model = GroupConv()

    def forward(step: int) -> Tensor:
        x, y = textures(step)
        share = float(torch.rand(1, generator=generator(step)))
        order = torch.randperm(len(x), generator=generator(step + 1))
        logits = model(share * x + (1 - share) * x[order])
        one, other = (F.cross_entropy(logits, label, label_smoothing=0.1) for label in (y, y[order]))
        return share * one + (1 - share) * other

    return cosine(Run(model=model, forward=forward, optimizer=sgd(model, 0.1, momentum=0.9, nesterov=True), steps=120))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, with gates for the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.deep = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False) for _ in range(3))
        self.point = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.gates = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16), nn.Sigmoid()) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.stem(x)))
        for deep, point, norm, gate in zip(self.deep, self.point, self.norms, self.gates, strict=True):
            y = F.hardswish(norm(point(deep(x))))
            x = x + y * gate(y.mean((2, 3)))[:, :, None, None]
        found: Tensor = self.head(x.mean((2, 3)))
        return found


@healthy("pictures/separable_with_gates")
def separable() -> Run:
    model = Separable()
    return learn(model, textures, torch.optim.RMSprop(model.parameters(), 2e-3, momentum=0.9), steps=80)


class Patches(nn.Module):
    """A vision transformer with a token for the class."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 3, 3)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        found: Tensor = self.head(self.norm(self.body(x))[:, 0])
        return found


@healthy("pictures/vit_lion")
def vit_lion() -> Run:
    model = Patches()
    return cosine(learn(model, textures, lion(model, 3e-4), steps=160))


@healthy("pictures/vit_long_adamw")
def vit_long() -> Run:
    model = Patches()
    return learn(model, textures, adamw(model, 1e-3), steps=400)


class Scaled(nn.Module):
    """A wide block whose branch begins at next to nothing."""

    def __init__(self, width: int, begin: float) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), begin))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).movedim(1, -1))
        return x + (self.scale * self.back(F.gelu(self.wide(y)))).movedim(-1, 1)


@healthy("pictures/layer_scale")
def layer_scale() -> Run:
    blocks = (Scaled(16, 1e-6) for _ in range(3))
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 5))
    model = nn.Sequential(nn.Conv2d(3, 16, 2, 2), *blocks, *pool)
    return cosine(learn(model, textures, adamw(model, 4e-3, 0.05), steps=80))


class Denoiser(nn.Module):
    """Predicts the noise in a picture from the picture and how much of it there is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        nn.init.zeros_(self.leave.weight)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        angle = level[:, None] * 2 ** torch.arange(4)
        told = self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        x = self.enter(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x) + told))
        found: Tensor = self.leave(F.silu(x))
        return found


def diffuse(model: Denoiser, optimizer: torch.optim.Optimizer, **options: int) -> Run:
    def forward(step: int) -> Tensor:
        x, _ = shapes(step, 12, 12)
        level = torch.rand(len(x), generator=generator(step)) * math.pi / 2
        noise = randn(step + 9, *x.shape)
        mixed = level.cos()[:, None, None, None] * x + level.sin()[:, None, None, None] * noise
        return F.mse_loss(model(mixed, level), noise)

    return Run(model=model, forward=forward, optimizer=optimizer, **options)


@healthy("pictures/diffusion")
def diffusion() -> Run:
    model = Denoiser()
    return diffuse(model, adam(model, 2e-3), steps=100)


@healthy("pictures/diffusion_adafactor")
def diffusion_adafactor() -> Run:
    model = Denoiser()
    return diffuse(model, torch.optim.Adafactor(model.parameters(), 0.05), steps=80, scalable=False)


class Pair(nn.Module):
    """One network that both pictures of a pair go through."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.embed = nn.Linear(216, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embed(self.body(x))
        return found


def siamese_loss(model: Pair, safe: float):
    def forward(step: int) -> Tensor:
        (one, first), (two, second) = textures(2 * step), textures(2 * step + 1)
        gap = (model(one) - model(two)).square().sum(1)
        same = (first == second).float()
        return (same * gap + (1 - same) * F.relu(1 - (gap + safe).sqrt()).square()).mean()

    return forward


@healthy("pictures/siamese_margin")
def siamese() -> Run:
    model = Pair()
    return Run(model=model, forward=siamese_loss(model, 1e-6), optimizer=adam(model), steps=80)


@healthy("pictures/autocast_bfloat16")
def autocast() -> Run:
    model = GroupConv(nn.GELU)

    def forward(step: int) -> Tensor:
        x, y = textures(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        return entropy(logits, y)

    return Run(model=model, forward=forward, optimizer=adamw(model, 2e-3), steps=60)


@healthy("pictures/spectral_gan")
def spectral_gan() -> Run:
    wrap = torch.nn.utils.parametrizations.spectral_norm
    maker = nn.Sequential(
        nn.Linear(8, 144), nn.Unflatten(1, (16, 3, 3)), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )  # fmt: skip
    judge = nn.Sequential(
        wrap(nn.Conv2d(1, 8, 4, 2, 1)), nn.LeakyReLU(0.2), wrap(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.2),
        nn.Flatten(), wrap(nn.Linear(144, 1)),
    )  # fmt: skip
    model = nn.ModuleDict({"maker": maker, "judge": judge})

    def forward(step: int) -> Tensor:
        real, _ = shapes(step, 16, 12)
        fake = maker(randn(step, 16, 8))
        judge.requires_grad_(False)
        fooled = -judge(fake).mean()
        judge.requires_grad_(True)
        return fooled + F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake.detach())).mean()

    makers = [torch.optim.Adam(part.parameters(), rate, (0.0, 0.9)) for part, rate in ((maker, 2e-4), (judge, 4e-4))]
    return Run(model=model, forward=forward, optimizer=makers, steps=80)


@healthy("pictures/masked_autoencoder")
def masked() -> Run:
    model = Patches(2)
    model.head = nn.Linear(32, 27)
    model.mask = nn.Parameter(torch.zeros(32))

    def forward(step: int) -> Tensor:
        x, _ = textures(step)
        wanted = F.unfold(x, 3, stride=3).mT
        hidden = torch.rand(24, 16, 1, generator=generator(step)) < 0.6
        seen = torch.where(hidden, model.mask, model.patch(x).flatten(2).mT) + model.places[:, 1:]
        found = model.head(model.norm(model.body(seen)))
        return ((found - wanted).square().mean(-1, keepdim=True) * hidden).sum() / hidden.sum()

    params = [param for name, param in model.named_parameters() if name != "token"]
    return cosine(Run(model=model, forward=forward, optimizer=torch.optim.AdamW(params, 1e-3), steps=80))
