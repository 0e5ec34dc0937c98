"""Healthy runs that generate: adversarial, variational, with codes, by diffusion, by flows; and autoencoders."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.diagnosis.foreign.a_book import adam, adamw, curved, fit, glyphs, healthy, mlp, swirl, warm_cosine
from benchmarks.diagnosis.run import Run


class Pair(nn.Module):
    """A generator and the one who judges it."""

    def __init__(self, make: nn.Module, judge: nn.Module, latent: int) -> None:
        super().__init__()
        self.make, self.judge, self.latent = make, judge, latent

    def turn(self, judging: bool) -> None:
        """Let gradients reach only the one whose turn it is."""
        self.judge.requires_grad_(judging)
        self.make.requires_grad_(not judging)

    def fakes(self, size: int) -> Tensor:
        found: Tensor = self.make(torch.randn(size, self.latent))
        return found


def rivals(pair: Pair, lr: float, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(part.parameters(), lr, betas=betas) for part in (pair.make, pair.judge)]


def dcgan(latent: int = 16) -> Pair:
    make = nn.Sequential(
        nn.Linear(latent, 24 * 16),
        nn.Unflatten(1, (24, 4, 4)),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 12, 4, 2, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 1, 4, 2, 2, bias=False),
        nn.Tanh(),
    )
    judge = nn.Sequential(
        nn.Conv2d(1, 12, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(12, 24, 4, 2, 1, bias=False),
        nn.BatchNorm2d(24),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(24 * 9, 1),
    )
    for part in (*make, *judge):
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight, 1.0, 0.02)
    return Pair(make, judge, latent)


def _real(step: int, size: int = 24) -> Tensor:
    return (glyphs(step, size, noise=0.05)[0] * 0.5 - 0.2).clamp(-1, 1)


@healthy("gans/dcgan_alternating")
def deep() -> Run:
    pair = dcgan()

    def forward(step: int) -> Tensor:
        pair.turn(step % 2 == 0)
        fake = pair.judge(pair.fakes(24))
        if step % 2:
            return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))
        real = pair.judge(_real(step))
        return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(
            fake, torch.zeros_like(fake)
        )

    return Run(model=pair, forward=forward, optimizer=rivals(pair, 2e-4, (0.5, 0.999)), steps=200)


@healthy("gans/wasserstein_gradient_penalty")
def penalised() -> Run:
    pair = Pair(mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2)), 4)

    def forward(step: int) -> Tensor:
        judging = step % 4 < 3
        pair.turn(judging)
        fake = pair.fakes(64)
        if not judging:
            return -pair.judge(fake).mean()
        real, share = swirl(step, 64), torch.rand(64, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(pair.judge(between).sum(), between, create_graph=True)
        gap: Tensor = pair.judge(fake).mean() - pair.judge(real).mean()
        return gap + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return Run(model=pair, forward=forward, optimizer=rivals(pair, 5e-4, (0.0, 0.9)), steps=240)


@healthy("gans/spectral_norm_hinge")
def spectral() -> Run:
    judge = nn.Sequential(
        spectral_norm(nn.Linear(2, 64)),
        nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(64, 1)),
    )
    pair = Pair(mlp(4, 64, 64, 2, norm=nn.BatchNorm1d), judge, 4)

    def forward(step: int) -> Tensor:
        pair.turn(step % 2 == 0)
        fake: Tensor = pair.judge(pair.fakes(64))
        if step % 2:
            return -fake.mean()
        return F.relu(1 - pair.judge(swirl(step, 64))).mean() + F.relu(1 + fake).mean()

    return Run(model=pair, forward=forward, optimizer=rivals(pair, 1e-3, (0.0, 0.9)), steps=240)


class VAE(nn.Module):
    """An encoder to the mean and log variance of a code, and a decoder."""

    def __init__(self, encode: nn.Module, decode: nn.Module, inside: int, latent: int) -> None:
        super().__init__()
        self.encode, self.decode = encode, decode
        self.mean, self.log_var = nn.Linear(inside, latent), nn.Linear(inside, latent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = self.encode(x)
        mean, log_var = self.mean(inside), self.log_var(inside)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(code), -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)


@healthy("vaes/mlp_summed_loss_as_in_the_examples")
def summed() -> Run:
    model = VAE(
        nn.Sequential(nn.Flatten(), nn.Linear(196, 96), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 196)),
        96,
        8,
    )

    def forward(step: int) -> Tensor:
        x = (glyphs(step, 48, noise=0.0)[0] > 0).float()
        out, rate = model(x)
        return F.binary_cross_entropy_with_logits(out, x.flatten(1), reduction="sum") + rate.sum()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=200)


@healthy("vaes/conv_rate_weight_warms_up")
def warmed() -> Run:
    encode = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.SiLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.SiLU(), nn.Flatten())
    decode = nn.Sequential(
        nn.Linear(6, 24 * 16),
        nn.Unflatten(1, (24, 4, 4)),
        nn.SiLU(),
        nn.ConvTranspose2d(24, 12, 3, 2, 1),
        nn.SiLU(),
        nn.ConvTranspose2d(12, 1, 4, 2, 1),
    )
    model = VAE(encode, decode, 384, 6)

    def forward(step: int) -> Tensor:
        x, _ = glyphs(step, 32)
        out, rate = model(x)
        return F.mse_loss(out, x, reduction="none").sum((1, 2, 3)).mean() + min(1.0, step / 60) * rate.mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=120)


class Codes(nn.Module):
    """Directions replaced by their nearest code, with the gradient passed straight through."""

    def __init__(self, count: int, width: int, *, straight: bool = True) -> None:
        super().__init__()
        self.book, self.straight = nn.Embedding(count, width), straight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, book = F.normalize(x, dim=-1), F.normalize(self.book.weight, dim=-1)
        found = F.embedding((x @ book.T).argmax(-1), book)
        loss = F.mse_loss(found, x.detach())
        if not self.straight:
            return found, loss
        return x + (found - x).detach(), loss + 0.25 * F.mse_loss(x, found.detach())


class CodedPictures(nn.Module):
    """An autoencoder of pictures through codes at every place."""

    def __init__(self, *, straight: bool = True) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 8, 3, padding=1))
        self.codes = Codes(48, 8, straight=straight)
        self.decode = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(24, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside, loss = self.codes(self.encode(x).permute(0, 2, 3, 1))
        return self.decode(inside.permute(0, 3, 1, 2)), loss


def coded(*, straight: bool = True) -> Run:
    model = CodedPictures(straight=straight)

    def forward(step: int) -> Tensor:
        x, _ = glyphs(step, 24, noise=0.05)
        out, loss = model(x)
        return F.mse_loss(out, x) + loss

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=150)


@healthy("vaes/vector_quantised_straight_through")
def quantised() -> Run:
    return coded()


class Denoiser(nn.Module):
    """Predicts the noise in points from the points and sines of the time."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.enter, self.time = nn.Linear(2, width), nn.Linear(32, width)
        self.body, self.out = mlp(width, width, width, act=nn.SiLU), nn.Linear(width, 2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.linspace(0, math.log(1000), 16))
        inside = F.silu(self.enter(x) + self.time(torch.cat([waves.sin(), waves.cos()], 1)))
        found: Tensor = self.out(inside + F.silu(self.body(inside)))
        return found


def _noised(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    shape = (-1,) + (1,) * (x.dim() - 1)
    kept = (torch.cos(time * math.pi / 2) ** 2).reshape(shape)
    noise = torch.randn_like(x)
    return kept.sqrt() * x + (1 - kept).clamp(min=0).sqrt() * noise, noise


@healthy("diffusion/points_predict_noise")
def points() -> Run:
    model = Denoiser()

    def forward(step: int) -> Tensor:
        time = torch.rand(128)
        mixed, noise = _noised(swirl(step), time)
        return F.mse_loss(model(mixed, time), noise)

    return Run(model=model, forward=forward, optimizer=adamw(model, 2e-3, 0.01), steps=300)


class PictureDenoiser(nn.Module):
    """Two residual blocks under the time, whose last convolutions start at zero."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.time = nn.Conv2d(1, width, 3, padding=1), mlp(16, 32, 2 * width, act=nn.SiLU)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last, self.out = nn.GroupNorm(4, width), nn.Conv2d(width, 1, 3, padding=1)
        for conv in (self.convs[1], self.convs[3], self.out):
            for param in conv.parameters():
                nn.init.zeros_(param)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.linspace(0, math.log(500), 8))
        shifts = self.time(torch.cat([waves.sin(), waves.cos()], 1)).chunk(2, 1)
        x = self.enter(x)
        for index, shift in enumerate(shifts):
            inside = self.convs[2 * index](F.silu(self.norms[2 * index](x))) + shift[..., None, None]
            x = x + self.convs[2 * index + 1](F.silu(self.norms[2 * index + 1](inside)))
        found: Tensor = self.out(F.silu(self.last(x)))
        return found


@healthy("diffusion/pictures_zero_last_convolutions")
def pictures() -> Run:
    model = PictureDenoiser()

    def forward(step: int) -> Tensor:
        time = torch.rand(16)
        mixed, noise = _noised(glyphs(step, 16, noise=0.05)[0], time)
        return F.mse_loss(model(mixed, time), noise)

    return warm_cosine(Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=120))


def _itself(step: int) -> tuple[Tensor, Tensor]:
    x = curved(step)
    return x, x


@healthy("autoencoders/two_units_for_two_dimensions")
def tight() -> Run:
    model = nn.Sequential(mlp(20, 64, 32, 2, act=nn.GELU), mlp(2, 32, 64, 20, act=nn.GELU))
    return fit(model, adam(model, 3e-3), _itself, F.mse_loss, steps=250)


@healthy("autoencoders/sparse_code_absolute_penalty")
def sparse() -> Run:
    encode, decode = nn.Linear(20, 80), nn.Linear(80, 20)
    model = nn.ModuleDict({"encode": encode, "decode": decode})

    def forward(step: int) -> Tensor:
        x = curved(step)
        code = F.relu(encode(x))
        return ((decode(code) - x) ** 2).sum(1).mean() + 0.02 * code.sum(1).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=200)


@healthy("autoencoders/eight_largest_of_a_wide_code")
def largest() -> Run:
    class Largest(nn.Module):
        """All but the eight largest set to zero."""

        def forward(self, x: Tensor) -> Tensor:
            top: Any = x.topk(8, -1)
            return torch.zeros_like(x).scatter(-1, top.indices, F.relu(top.values))

    model = nn.Sequential(nn.Linear(20, 64), Largest(), nn.Linear(64, 20))
    return fit(model, adam(model, 3e-3), _itself, F.mse_loss, steps=200)


@healthy("autoencoders/convs_remove_noise_and_holes")
def restored() -> Run:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
    )

    def batch(step: int) -> tuple[Tensor, Tensor]:
        clean, _ = glyphs(step, 24, noise=0.0)
        return (clean + 0.4 * torch.randn_like(clean)) * (torch.rand_like(clean) < 0.9), clean

    return fit(model, adam(model, 2e-3), batch, F.mse_loss, steps=120)
