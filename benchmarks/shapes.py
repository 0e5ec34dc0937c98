"""The gradients that are measured, as shapes."""

from __future__ import annotations

import torch
from torch import nn

Shape = tuple[int, ...]


def gpt2_124m() -> list[Shape]:
    """Return the 148 parameters of GPT-2."""
    width = 768
    block: list[Shape] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


SHAPES: dict[str, list[Shape]] = {
    "gpt2_124m": gpt2_124m(),
    "tiny_2000": [(64,)] * 2000,
    "mlp_1m": [(512, 512), (512,)] * 4,
    "policy_25k": [(64, 64), (64,)] * 6,
}


class Parameters(nn.Module):
    """A model that is nothing but parameters, two to a module, with random gradients."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for start in range(0, len(shapes), 2):
            part = nn.Module()
            for index, shape in enumerate(shapes[start : start + 2]):
                param = nn.Parameter(torch.full(shape, 0.02, dtype=dtype))
                param.grad = torch.randn(shape, generator=generator).to(dtype)
                part.register_parameter(f"p{index}", param)
            self.add_module(f"m{start // 2}", part)


def split(total: int, count: int) -> list[Shape]:
    """Return this many vectors that have this many elements together."""
    return [(total // count,)] * count
