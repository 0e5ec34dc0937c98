"""Faults of agents, embeddings, graphs and equations; each is mended when it is built with True."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, learn, randn, sgd, stack
from benchmarks.diagnosis.foreign.b_agents import Actor, bandit
from benchmarks.diagnosis.foreign.b_book import blobs, faulty, moons
from benchmarks.diagnosis.foreign.b_fields import Convolved, Coupling, Hyper, planes, semi
from benchmarks.diagnosis.foreign.b_tables import Clicks, Factors, Towers, Words, clicked, matched, rated, sampled
from benchmarks.diagnosis.run import Run


@faulty(
    "agents_fault/policy_collapses_by_its_rate", "ENTROPY_COLLAPSE", ".*", "LR_TOO_HIGH", "INSUFFICIENT_EXPLORATION"
)
def by_rate(mended: bool = False) -> Run:
    """Adam at one decides for one action before anything is learnt."""
    model = Actor()
    return bandit(model, adam(model, 3e-3 if mended else 1.0), hand=True, steps=120)


@faulty("agents_fault/bonus_with_the_wrong_sign", "ENTROPY_COLLAPSE", ".*", "INSUFFICIENT_EXPLORATION")
def wrong_sign(mended: bool = False) -> Run:
    """The entropy is subtracted from what is sought, so that the policy becomes certain of anything."""
    model = Actor()
    return bandit(model, adam(model, 3e-3), bonus=0.01 if mended else -50.0, hand=True, steps=120)


@faulty("agents_fault/bonus_far_too_large", "OVER_EXPLORATION", ".*")
def bonus(mended: bool = False) -> Run:
    """An entropy bonus of 20 keeps the policy at chance."""
    model = Actor()
    return bandit(model, adam(model, 3e-3), bonus=0.01 if mended else 20.0, hand=True, steps=150)


@faulty("agents_fault/critic_diverges", "LR_TOO_HIGH", ".*", "EXPLODING", "UNSTABLE", "NUMERICAL")
def diverges(mended: bool = False) -> Run:
    """SGD at three on a value net."""
    model = stack(4, 32, 32, 1)

    def forward(step: int) -> Tensor:
        state = randn(970_000 + step, 64, 4)
        with torch.no_grad():
            wanted = state[:, :1].abs() + 0.8 * model(0.8 * state + 0.6 * randn(971_000 + step, 64, 4))
        return F.mse_loss(model(state), wanted)

    # The loss leaves the range of a float32, sooner where it is larger.
    optimizer = sgd(model, 0.05 if mended else 3.0)
    return Run(model=model, forward=forward, optimizer=optimizer, steps=60, scalable=False)


@faulty("embeddings_fault/both_tables_zero", "DEAD", r".*", "VANISHING", "UNCHANGED", "DISCONNECTED")
def both_zero(mended: bool = False) -> Run:
    """Both tables of word vectors begin at zero, where the gradient of each is zero."""
    model = Words()
    if not mended:
        nn.init.zeros_(model.centre.weight)
    return Run(model=model, forward=lambda t: sampled(model, t), optimizer=adam(model, 1e-2), steps=80)


@faulty("embeddings_fault/item_tower_detached", "DISCONNECTED", r"^item", "UNCHANGED", "DEAD")
def item_detached(mended: bool = False) -> Run:
    """The items' vectors are cached without their graph."""
    model = Towers()
    model.cut = not mended
    return Run(model=model, forward=lambda t: matched(model, t), optimizer=adam(model, 3e-3), steps=80)


@faulty("embeddings_fault/tables_without_a_rate", "LR_TOO_LOW", r"tables", "UNCHANGED")
def slow_tables(mended: bool = False) -> Run:
    """The tables' group has a rate of 1e-9 beside 2e-3."""
    model = Clicks()
    groups = [
        {"params": [*model.bottom.parameters(), *model.top.parameters()]},
        {"params": model.tables.parameters(), "lr": 1e-2 if mended else 1e-9},
    ]
    optimizer = torch.optim.Adam(groups, 2e-3)
    return Run(model=model, forward=lambda t: clicked(model, t), optimizer=optimizer, steps=250)


@faulty("embeddings_fault/factors_rate_huge", "LR_TOO_HIGH", ".*", "EXPLODING", "UNSTABLE", "NUMERICAL")
def factors_huge(mended: bool = False) -> Run:
    """SGD at 300 on factors."""
    model = Factors()
    return Run(model=model, forward=lambda t: rated(model, t), optimizer=sgd(model, 0.3 if mended else 300.0), steps=60)


@faulty("embeddings_fault/items_not_optimised", "UNCHANGED", r"^item$|^item\.", "DISCONNECTED")
def items_lost(mended: bool = False) -> Run:
    """The table of the items is missing from the optimizer."""
    model = Factors()
    left = [p for name, p in model.named_parameters() if mended or not name.startswith("item.")]
    return Run(model=model, forward=lambda t: rated(model, t), optimizer=torch.optim.Adam(left, 2e-2), steps=200)


@faulty("embeddings_fault/towers_rate_huge", "LR_TOO_HIGH", ".*")
def towers_huge(mended: bool = False) -> Run:
    """Adam at one on two towers."""
    model = Towers()
    return Run(
        model=model, forward=lambda t: matched(model, t), optimizer=adam(model, 3e-3 if mended else 1.0), steps=80
    )


@faulty(
    "fields_fault/graph_of_ten_sigmoids",
    "VANISHING",
    r"layers\.[0-5]$|layers\.[0-5]\.",
    "SATURATION",
    "RANK_COLLAPSE",
)
def sigmoids(mended: bool = False) -> Run:
    """Ten graph convolutions with sigmoids."""
    model = Convolved(2 if mended else 10, act=nn.ReLU if mended else nn.Sigmoid, drop=0.0)
    return semi(model, sgd(model, 0.5), 100)


@faulty("fields_fault/generated_weights_detached", "DISCONNECTED", r"^(net|codes)|^$", "UNCHANGED", "DEAD")
def weights_detached(mended: bool = False) -> Run:
    """Generated weights are copied, and only a scale of the output still learns."""
    model = Hyper()
    model.scale, model.cut = nn.Parameter(torch.ones(1)), not mended

    def forward(step: int) -> Tensor:
        task, x, y = planes(step)
        return F.mse_loss(model.scale * model(task, x), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3), steps=80)


@faulty("fields_fault/distance_to_itself", "NUMERICAL", r"body|^$")
def itself(mended: bool = False) -> Run:
    """The root of a squared distance of zero has no finite slope."""
    model = nn.ModuleDict({"body": stack(12, 32, 8), "head": nn.Linear(8, 6)})

    def forward(step: int) -> Tensor:
        x, y = blobs(step)
        code = model["body"](x)
        far = (code[:, None] - code[None]).pow(2).sum(-1)
        far = (far + (1e-8 if mended else 0.0)).sqrt()
        same = (y[:, None] == y[None]).float()
        pull = (same * far + (1 - same) * F.relu(1 - far)).mean()
        return F.cross_entropy(model["head"](code.detach()), y) + pull

    return Run(model=model, forward=forward, optimizer=adam(model, 2e-3), steps=60)


@faulty("fields_fault/scales_explode", "EXPLODING", ".*", "LR_TOO_HIGH", "NUMERICAL", "UNSTABLE")
def scales(mended: bool = False) -> Run:
    """Coupling layers trained by SGD at a rate of two."""
    model = Coupling()
    return Run(
        model=model, forward=lambda t: model(moons(t)[0]), optimizer=sgd(model, 0.02 if mended else 2.0), steps=60
    )


@faulty("fields_fault/outlier_blows_the_net_up", "EXPLODING", ".*", "UNSTABLE", "NUMERICAL", "LR_TOO_HIGH")
def outlier(mended: bool = False) -> Run:
    """At step 40 of 120 one batch of targets has lost its offset, and the steps it causes grow without end."""
    model = stack(12, 48, 48, 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, _ = blobs(step)
        y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2]
        return x, y - 40.0 if step == 40 and not mended else y

    return learn(model, batch, sgd(model, 0.05), F.mse_loss, steps=120)


@faulty("fields_fault/dying_rectifiers", "DEAD", r"^[0-4]$|^[0-4]\.")
def dying(mended: bool = False) -> Run:
    """The biases of the second hidden layer begin at -20."""
    model = stack(12, 48, 48, 6)
    if not mended:
        nn.init.constant_(model[2].bias, -20.0)
    return learn(model, blobs, adam(model, 1e-3), F.cross_entropy, steps=80)


@faulty("fields_fault/piled_up_under_momentum", "STALE_GRAD", r".*")
def stale(mended: bool = False) -> Run:
    """A classifier with momentum whose gradients pile up."""
    model = stack(12, 48, 6)
    return learn(model, blobs, sgd(model, 0.05, momentum=0.9), F.cross_entropy, steps=100, zero=mended)


@faulty("fields_fault/loop_clips_at_a_millionth", "CLIP_SATURATED", ".*", "LR_TOO_LOW")
def millionth(mended: bool = False) -> Run:
    """The loop clips the norm to 1e-6 before a step of SGD."""
    model = stack(12, 48, 6)
    run = learn(model, blobs, sgd(model, 0.1, momentum=0.9), F.cross_entropy, steps=80, scalable=False)
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if mended else 1e-6))
    return run


@faulty("fields_fault/field_saturates_in_raw_units", "SATURATION", r"^[0-4]$|^[0-4]\.", "VANISHING")
def units(mended: bool = False) -> Run:
    """Inputs in thousands before two layers of tanh."""
    model = stack(12, 48, 48, 6, act=nn.Tanh)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = blobs(step)
        return x if mended else 1000 * x + 3000, y

    return learn(model, batch, adam(model, 1e-3), F.cross_entropy, steps=80)
