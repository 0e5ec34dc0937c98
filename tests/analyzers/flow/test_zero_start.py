"""Parts that begin at zero by design, and a gradient that had vanished and is there again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrack import GradientManager


class LoRA(nn.Module):
    """A frozen layer with a low-rank adapter, whose second factor begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer and its adapter."""
        found: Tensor = self.base(x) + 2 * self.lora_B(self.lora_A(x))
        return found


class Attention(nn.Module):
    """A pre-norm block of attention as in Llama, with small weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the past."""
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        found: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.o_proj(found)  # type: ignore[no-any-return]


def llama(*targets: str) -> nn.Module:
    """Return a tiny frozen language model with adapters on some of the projections."""
    blocks = [Attention(64), Attention(64)]
    model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 64))
    for param in model.parameters():
        param.requires_grad_(False)
        if param.ndim > 1:
            nn.init.normal_(param, 0, 0.02)
    for block in blocks:
        for name in targets:
            setattr(block, name, LoRA(getattr(block, name)))
    return model


class Gated(nn.Module):
    """A residual branch behind a gain that begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        found: Tensor = x + self.alpha * self.branch(x)
        return found


def rezero() -> nn.Module:
    """Return blocks of ReZero, of which the first has nothing but the input before it."""
    return nn.Sequential(Gated(16), Gated(16), Gated(16), nn.Linear(16, 4))


class Controlled(nn.Module):
    """A frozen convolution with a trained copy that comes in through a convolution of zeros, as ControlNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
        self.copy, self.zero = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4).requires_grad_(False)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes of pictures."""
        found: Tensor = self.head((self.frozen(x) + self.zero(self.copy(x).relu())).mean((2, 3)))
        return found


def zero_gain() -> nn.Module:
    """Return a layer behind a normalisation whose gain begins at zero, as that of the last of a residual branch."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    return model


TOKENS = (8, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "LoRA on queries": (lambda: llama("q_proj"), lambda: torch.randint(64, TOKENS)),
    "LoRA on queries and values": (lambda: llama("q_proj", "v_proj"), lambda: torch.randint(64, TOKENS)),
    "ReZero": (rezero, lambda: torch.randn(16, 16)),
    "zero convolution": (Controlled, lambda: torch.randn(8, 3, 8, 8)),
    "zero gain": (zero_gain, lambda: torch.randn(16, 16)),
}


def heard(model: nn.Module, batch: Callable[[], Tensor], rate: float, steps: int = 72) -> list[str]:
    """Train a model on classes that follow from the input, and return the keys of the issues that opened."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, opened = torch.optim.AdamW(params, rate), list[str]()
    with GradientManager(analyzers=["flow"]) as manager:
        manager.on_issue(lambda issue, report: opened.append(issue.key))
        manager.attach(model, optimizer)
        for _ in range(steps):
            x = batch()
            classes = (x.flatten(1)[:, 0] > 0).long() if x.is_floating_point() else x.flatten() // 2
            optimizer.zero_grad()
            manager.step(model, optimizer, F.cross_entropy(model(x).flatten(0, -2), classes))
            optimizer.step()
    return opened


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("name", MODELS)
def test_what_begins_at_zero_by_design_is_no_fault(name: str, rate: float) -> None:
    """The layer before it gets next to no gradient at first, at any rate."""
    torch.manual_seed(0)
    build, batch = MODELS[name]
    assert heard(build(), batch, rate) == []


def sigmoids(head: nn.Module) -> nn.Module:
    """Return a deep network in which the gradient vanishes, before some head."""
    layers = [layer for _ in range(9) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    return nn.Sequential(*layers, head)


@pytest.mark.parametrize("head", [nn.Linear(16, 4), LoRA(nn.Linear(16, 4)), nn.Sequential(Gated(16), nn.Linear(16, 4))])
def test_what_begins_at_zero_hides_no_other_fault(head: nn.Module) -> None:
    """A gradient that vanishes in the layers before it is told of."""
    torch.manual_seed(0)
    assert "VANISHING:0" in heard(sigmoids(head), lambda: torch.randn(16, 16), 1e-3)


class Scaled(nn.Module):
    """Two layers with a factor in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(16, 16), nn.Linear(16, 4), 1e-4

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes."""
        found: Tensor = self.last(self.factor * self.first(x))
        return found


@pytest.mark.parametrize(("until", "closed"), [(20, True), (200, False)])
def test_a_vanished_gradient_is_told_of_until_it_has_recovered(until: int, closed: bool) -> None:
    """The issue closes when its number is well again, though the loss has not come down, and not before."""
    torch.manual_seed(0)
    model, opened = Scaled(), list[str]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with GradientManager(analyzers=["flow"]) as manager:
        manager.on_issue(lambda issue, report: opened.append(issue.key))
        manager.attach(model, optimizer)
        for step in range(72):
            model.factor = 1e-4 if step < until else 1.0
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(16, 16)), torch.randint(4, (16,)))
            report = manager.step(model, optimizer, loss)
            optimizer.step()
        assert opened == ["VANISHING:first"]
        assert report.health.healthy is closed
        assert [issue.key for issue in manager.diagnose()] == ([] if closed else opened)


def test_an_adapter_that_its_first_step_blows_up_is_a_rate_too_high() -> None:
    """All that moves first began at zero, so that no share of it tells; the loss does."""
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=3.0)
    with GradientManager(analyzers=["flow"], backends=[]) as manager:
        for _ in range(80):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            manager.step(model, optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))
            optimizer.step()
        assert manager.diagnose()[0].key == "LR_TOO_HIGH"


def test_no_step_at_all_is_one_fault() -> None:
    """What never moves for want of a step is no rate that is too low, and no other rate is recommended."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with GradientManager(analyzers=["flow"], backends=[]) as manager:
        for _ in range(80):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            manager.step(model, optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))
        first, *others = manager.diagnose()
    assert first.key == "UNCHANGED"
    assert [(issue.key, issue.explained_by) for issue in others] == [("LR_TOO_LOW", "UNCHANGED")]
    assert "optimizer.step()" in others[0].recommendation
