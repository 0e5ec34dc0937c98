"""Small synthetic tasks; every batch follows from its step alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Batches = Callable[[int], tuple[Tensor, Tensor]]


def _at(step: int, salt: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 * salt + step)


def clusters(classes: int = 5, width: int = 24, size: int = 48, spread: float = 3.0, salt: int = 1) -> Batches:
    """Return noisy clusters to be told apart."""
    centres = torch.randn(classes, width, generator=_at(0, salt)) * spread / width**0.5

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = _at(step + 1, salt)
        labels = torch.randint(0, classes, (size,), generator=generator)
        return centres[labels] + torch.randn(size, width, generator=generator), labels

    return batch


def images(classes: int = 4, channels: int = 3, side: int = 12, size: int = 24, salt: int = 2) -> Batches:
    """Return images with a pattern for each class under noise."""
    patterns = torch.randn(classes, channels, side, side, generator=_at(0, salt))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = _at(step + 1, salt)
        labels = torch.randint(0, classes, (size,), generator=generator)
        return patterns[labels] + torch.randn(size, channels, side, side, generator=generator), labels

    return batch


def surface(width: int = 12, size: int = 64, noise: float = 0.1, scale: float = 1.0, salt: int = 3) -> Batches:
    """Return a smooth function of several inputs, to be regressed."""
    direction = torch.randn(width, 2, generator=_at(0, salt)) / width**0.5

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = _at(step + 1, salt)
        x = torch.randn(size, width, generator=generator)
        u = x @ direction
        y = torch.sin(2 * u[:, :1]) + 0.5 * u[:, 1:] ** 2 + noise * torch.randn(size, 1, generator=generator)
        return x, scale * y

    return batch


def sequences(length: int = 20, width: int = 4, size: int = 24, lag: int = 3, salt: int = 4) -> Batches:
    """Return noise, and whether it was positive some steps before its end."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, length, width, generator=_at(step, salt))
        return x, (x[:, -1 - lag, 0] > 0).long()

    return batch


def text(vocabulary: int = 40, length: int = 16, size: int = 12, salt: int = 5) -> Batches:
    """Return token sequences of which every second one follows from its predecessor, and the next tokens."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, vocabulary, (size, length + 1), generator=_at(step, salt))
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % vocabulary
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def manifold(width: int = 32, latent: int = 4, size: int = 48, salt: int = 6) -> Callable[[int], Tensor]:
    """Return points near a curved surface of few dimensions."""
    lift = torch.randn(latent, width, generator=_at(0, salt)) / latent**0.5

    def batch(step: int) -> Tensor:
        generator = _at(step + 1, salt)
        code = torch.randn(size, latent, generator=generator)
        return torch.tanh(code @ lift) + 0.05 * torch.randn(size, width, generator=generator)

    return batch
