"""The models of the scenarios, from perceptrons to mixtures of experts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
}


def mlp(
    widths: Sequence[int], act: str = "relu", norm: str = "", dropout: float = 0.0, init: str = ""
) -> nn.Sequential:
    """Return a perceptron of layers `lin0`, `nl0`, `lin1`, ..."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (before, after) in enumerate(pairwise(widths)):
        layer = parts[f"lin{index}"] = nn.Linear(before, after)
        if init == "he":
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif init == "xavier":
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif init == "orthogonal":
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
        if index < len(widths) - 2:
            if norm == "batch":
                parts[f"norm{index}"] = nn.BatchNorm1d(after)
            elif norm == "layer":
                parts[f"norm{index}"] = nn.LayerNorm(after)
            parts[f"nl{index}"] = ACTIVATIONS[act]()
            if dropout:
                parts[f"drop{index}"] = nn.Dropout(dropout)
    return nn.Sequential(parts)


class FunctionalMlp(nn.Module):
    """A perceptron that calls its activations as functions."""

    def __init__(self, widths: Sequence[int], function: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu" if function is torch.relu else "tanh")
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.function(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


class ConvNet(nn.Module):
    """Convolutions with or without normalisation, by modules or by functions, and a linear head."""

    def __init__(
        self,
        classes: int = 4,
        width: int = 12,
        depth: int = 3,
        norm: str = "batch",
        act: str = "relu",
        pool: str = "max",
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.acts = nn.ModuleList()
        for index in range(depth):
            conv = nn.Conv2d(3 if index == 0 else width, width, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight)
            self.convs.append(conv)
            kinds = {"batch": nn.BatchNorm2d(width), "group": nn.GroupNorm(4, width), "": nn.Identity()}
            self.norms.append(kinds[norm])
            self.acts.append(ACTIVATIONS[act]())
        self.pool = nn.MaxPool2d(2) if pool == "max" else nn.AvgPool2d(2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for index, (conv, norm, act) in enumerate(zip(self.convs, self.norms, self.acts, strict=True)):
            x = act(norm(conv(x)))
            if index < 2:
                x = self.pool(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class ResBlock(nn.Module):
    """Two convolutions around which the input is led."""

    def __init__(self, width: int, zero: bool = False, pre: bool = False, norm: str = "batch") -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else (lambda n: nn.GroupNorm(4, n))
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = make(width), make(width)
        self.pre = pre
        if zero:
            nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            out = self.conv1(F.relu(self.bn1(x)))
            return x + self.conv2(F.relu(self.bn2(out)))
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    """A stem, residual blocks and a linear head."""

    def __init__(self, depth: int = 4, width: int = 12, classes: int = 4, **options: object) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ResBlock(width, **options) for _ in range(depth)))  # type: ignore[arg-type]
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.blocks(self.stem(x))).mean((2, 3)))
        return out


class Recurrent(nn.Module):
    """A recurrent layer that reads a sequence, and a head on its last or on every step."""

    def __init__(
        self, cell: str = "LSTM", width: int = 24, classes: int = 2, every: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.core = getattr(nn, cell)(4, width, batch_first=True, **options)
        self.every = every
        self.readout = nn.Linear(width * (2 if options.get("bidirectional") else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.core(x)[0]
        out: Tensor = self.readout(states if self.every else states[:, -1])
        return out


class Unrolled(nn.Module):
    """A recurrent cell that is called once for every step."""

    def __init__(self, cell: str = "GRUCell", width: int = 24, classes: int = 2) -> None:
        super().__init__()
        self.cell = getattr(nn, cell)(4, width)
        self.readout = nn.Linear(width, classes)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        memory = state
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(x[:, step], (state, memory))
            else:
                state = self.cell(x[:, step], state)
        out: Tensor = self.readout(state)
        return out


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(size, length, width))
        return out


class Layer(nn.Module):
    """A transformer layer, normalised before or after its branches."""

    def __init__(self, width: int, heads: int = 4, causal: bool = True, pre: bool = True, act: str = "gelu") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.fc_in, self.act, self.fc_out = nn.Linear(width, 4 * width), ACTIVATIONS[act](), nn.Linear(4 * width, width)
        self.pre = pre

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attn(self.norm1(x))
            out: Tensor = x + self.fc_out(self.act(self.fc_in(self.norm2(x))))
            return out
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.fc_out(self.act(self.fc_in(x))))


class Language(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(
        self,
        vocabulary: int = 40,
        width: int = 32,
        depth: int = 2,
        tied: bool = False,
        std: float = 0.02,
        **options: object,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width, **options) for _ in range(depth))  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and std:
                nn.init.normal_(module.weight, std=std)
        if tied:
            self.unembed.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.unembed(self.norm(x))
        return out


class Vision(nn.Module):
    """A vision transformer on patches."""

    def __init__(self, classes: int = 4, width: int = 32, depth: int = 2, **options: object) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(9, width))
        self.layers = nn.Sequential(*(Layer(width, causal=False, **options) for _ in range(depth)))  # type: ignore[arg-type]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return out


class Experts(nn.Module):
    """Experts behind a gate, of which every input takes the best few."""

    def __init__(self, width: int = 24, classes: int = 5, count: int = 4, top: int = 1, soft: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(mlp([width, 32, 32], init="he") for _ in range(count))
        self.head = nn.Linear(32, classes)
        self.top, self.soft = top, soft

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        if self.soft:
            mixed = sum(weights[:, [index]] * expert(x) for index, expert in enumerate(self.experts))
            return self.head(F.relu(mixed))  # type: ignore[no-any-return]
        best, chosen = weights.topk(self.top, -1)
        out = x.new_zeros(len(x), 32)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, best[rows, place, None] * expert(x[rows]))
        return self.head(F.relu(out))  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """A frozen linear layer with a trainable product of two thin factors beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Branches(nn.Module):
    """Two towers over one input whose outputs a head joins."""

    def __init__(self, left: nn.Module, right: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.left(x), self.right(x)], -1))
        return out


class Heads(nn.Module):
    """A trunk with several heads."""

    def __init__(self, trunk: nn.Module, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared = torch.relu(self.trunk(x))
        return {name: head(shared) for name, head in self.heads.items()}


class Backboned(nn.Module):
    """A backbone and a head, with whatever is to happen in between."""

    def __init__(self, backbone: nn.Module, head: nn.Module, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.between = between or (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.backbone(x)))
        return out
