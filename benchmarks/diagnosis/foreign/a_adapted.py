"""Healthy runs that contrast, adapt a trained trunk, or learn from another net."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.foreign.a_book import (
    adam,
    adamw,
    beforehand,
    fit,
    freeze,
    glyphs,
    healthy,
    mlp,
    sgd,
    source,
    warm_cosine,
)
from benchmarks.diagnosis.run import Run


def trunk(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, 1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, width),
        nn.ReLU(),
    )


class Classifier(nn.Module):
    """A trunk and a linear head."""

    def __init__(self, body: nn.Module, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def halves(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return digits, and whether each is above four: a task beside the one that the trunk was trained on."""
    x, labels = glyphs(step, size)
    return x, (labels > 4).long()


def ready(steps: int = 250) -> nn.Module:
    """Return a trunk that was trained to tell digits apart."""
    whole = Classifier(trunk())
    return beforehand(fit(whole, adam(whole)), steps).model.body  # type: ignore[return-value]


def views(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return two views of the same digits: shifted, brightened, and under fresh noise."""
    x, _ = glyphs(step, size, noise=0.05)
    dice = source(step + 900_000)
    seen = []
    for _ in range(2):
        down, right = torch.randint(-1, 2, (2,), generator=dice).tolist()
        light = 0.7 + 0.6 * torch.rand(size, 1, 1, 1, generator=dice)
        seen.append(x.roll((down, right), (2, 3)) * light + 0.3 * torch.randn(x.shape, generator=dice))
    return seen[0], seen[1]


def contrast(one: Tensor, two: Tensor, heat: float = 0.2) -> Tensor:
    """Return the loss of finding the other view of each among all."""
    codes = F.normalize(torch.cat([one, two]), dim=1)
    scores = (codes @ codes.T / heat).masked_fill(torch.eye(len(codes), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(codes)).roll(len(one)))


@healthy("contrastive/simclr_batchnorm_projection")
def simclr() -> Run:
    model = nn.Sequential(trunk(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def forward(step: int) -> Tensor:
        one, two = model(torch.cat(views(step))).chunk(2)
        return contrast(one, two)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=120)


@healthy("contrastive/triplets_that_are_mostly_met")
def triplets() -> Run:
    model = nn.Sequential(trunk(), nn.Linear(32, 8))

    def forward(step: int) -> Tensor:
        x, y = glyphs(step, 48)
        code = F.normalize(model(x), dim=1)
        far = torch.cdist(code, code)
        same = y[:, None] == y[None]
        gaps = far[:, :, None] - far[:, None, :] + 0.3
        valid = (same & ~torch.eye(len(y), dtype=torch.bool))[:, :, None] & ~same[:, None, :]
        return F.relu(gaps[valid]).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=200)


@healthy("contrastive/siamese_margin_pairs")
def siamese() -> Run:
    model = nn.Sequential(trunk(), nn.Linear(32, 4))

    def forward(step: int) -> Tensor:
        x, y = glyphs(step, 64)
        one, two = model(x).chunk(2)
        same = (y[:32] == y[32:]).float()
        far = ((one - two) ** 2).sum(1).add(1e-8).sqrt()
        return (same * far**2 + (1 - same) * F.relu(1 - far) ** 2).mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=200)


class Byol(nn.Module):
    """A net that predicts what its own slowly moving mean says of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(trunk(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.predict = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = freeze(copy.deepcopy(self.online))

    @torch.no_grad()
    def follow(self, _: int) -> None:
        for slow, now in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.lerp_(now, 0.02)


@healthy("contrastive/byol_moving_target")
def byol() -> Run:
    model = Byol()

    def forward(step: int) -> Tensor:
        one, two = views(step)
        total = torch.zeros(())
        for left, right in ((one, two), (two, one)):
            with torch.no_grad():
                goal = model.target(right)
            total = total + 2 - 2 * F.cosine_similarity(model.predict(model.online(left)), goal).mean()
        return total

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3), steps=100, before=[model.follow])


class Towers(nn.Module):
    """A tower for pictures, one for attributes, and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.words = nn.Sequential(trunk(), nn.Linear(32, 16)), nn.EmbeddingBag(40, 16, mode="sum")
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        one, two = F.normalize(self.picture(x), dim=1), F.normalize(self.words(words), dim=1)
        return self.scale.exp() * one @ two.T


@healthy("contrastive/two_towers_learnt_temperature")
def towers() -> Run:
    model = Towers()

    def forward(step: int) -> Tensor:
        x, y = glyphs(step, 32)
        dark = (x.amax((1, 2, 3)) > 2.0).long()
        scores = model(x, torch.stack([y, 10 + dark, 12 + (y * 7 + dark) % 28], 1))
        goal = torch.arange(32)
        return (F.cross_entropy(scores, goal) + F.cross_entropy(scores.T, goal)) / 2

    return Run(model=model, forward=forward, optimizer=adamw(model, 2e-3, 0.1), steps=150)


@healthy("contrastive/angular_margin_classes")
def angular() -> Run:
    class Angles(nn.Module):
        """Cosines between a code and the direction of each class."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.classes = nn.Sequential(trunk(), nn.Linear(32, 16)), nn.Parameter(torch.randn(10, 16))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.normalize(self.body(x), dim=1), F.normalize(self.classes, dim=1))

    model = Angles()

    def loss(cosines: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(16 * (cosines - 0.2 * F.one_hot(y, 10)), y)

    return fit(model, sgd(model, 0.02, weight_decay=5e-4), glyphs, loss, steps=150)


@healthy("adapted/frozen_trunk_new_head")
def frozen() -> Run:
    model = Classifier(freeze(ready()), classes=2)
    return fit(model, sgd(model, 0.01), halves, steps=100)


@healthy("adapted/discriminative_rates")
def rates() -> Run:
    model = Classifier(ready(), classes=2)
    groups = [{"params": model.body.parameters(), "lr": 2e-4}, {"params": model.head.parameters(), "lr": 5e-3}]
    return warm_cosine(fit(model, torch.optim.AdamW(groups), halves, steps=100))


@healthy("adapted/trunk_thaws_half_way")
def thaw() -> Run:
    model = Classifier(ready(), classes=2)
    groups = [{"params": model.body.parameters(), "lr": 1e-4}, {"params": model.head.parameters(), "lr": 2e-3}]

    def change(step: int) -> None:
        model.body.requires_grad_(step >= 50)

    return fit(model, torch.optim.Adam(groups), halves, steps=100, before=[change])


class Lora(nn.Module):
    """A frozen linear layer with a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = freeze(base)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 2.0 * x @ self.down.T @ self.up.T
        return found


def swapped(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return digits and another name for each."""
    x, labels = glyphs(step, size)
    return x, (labels * 3 + 1) % 10


@healthy("adapted/lora_on_every_linear")
def lora() -> Run:
    whole = nn.Sequential(nn.Flatten(), mlp(196, 96, 96, 10))
    beforehand(fit(whole, adam(whole)), 300)
    body = whole[1]
    for index in (0, 2, 4):
        body[index] = Lora(body[index])  # type: ignore[index, operator]
    return fit(whole, adamw(whole, 5e-3, 0.0), swapped, steps=150)


class Adapter(nn.Module):
    """A residual pair of thin layers, the second of which starts at zero."""

    def __init__(self, width: int, thin: int = 4) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, thin), nn.Linear(thin, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.up(F.gelu(self.down(x)))
        return added


@healthy("adapted/thin_adapters_in_a_frozen_net")
def adapters() -> Run:
    whole = nn.Sequential(nn.Flatten(), mlp(196, 96, 96, 32))
    head = nn.Linear(32, 10)
    both = nn.Sequential(whole, head)
    beforehand(fit(both, adam(both)), 300)
    one, two, three = (freeze(whole[1][index]) for index in (0, 2, 4))  # type: ignore[index, arg-type]
    model = nn.Sequential(
        nn.Flatten(), one, nn.ReLU(), Adapter(96), two, nn.ReLU(), Adapter(96), three, nn.Linear(32, 10)
    )
    return fit(model, adam(model, 3e-3), swapped, steps=150)


class Pupil(nn.Module):
    """A small net beside the trained one that it is to follow."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = freeze(teacher), nn.Sequential(nn.Flatten(), mlp(196, 48, 10))


@healthy("adapted/distilled_at_temperature_four")
def distilled() -> Run:
    whole = Classifier(trunk())
    model = Pupil(beforehand(fit(whole, adam(whole)), 250).model)

    def forward(step: int) -> Tensor:
        x, y = glyphs(step)
        model.teacher.eval()
        with torch.no_grad():
            goal = (model.teacher(x) / 4).softmax(1)
        found = model.student(x)
        soft = F.kl_div((found / 4).log_softmax(1), goal, reduction="batchmean") * 16
        return 0.7 * soft + 0.3 * F.cross_entropy(found, y)

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=200)
