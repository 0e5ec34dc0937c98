"""Faulty runs, of one fault each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import adam, entropy, generator, learn, randn, sgd, spirals, stack, tokens
from benchmarks.diagnosis.faults import at
from benchmarks.diagnosis.run import Run
from benchmarks.diagnosis.unseen.agents import Shared, actor_critic, q_loss
from benchmarks.diagnosis.unseen.book import Lion, adamw, cosine, curve, faulty, shapes, signals, textures
from benchmarks.diagnosis.unseen.series import Decoder, Dilated, Latents, Translate, total, translate
from benchmarks.diagnosis.unseen.tables import (
    Attended,
    Convolved,
    Coupling,
    Fixed,
    Mixture,
    Points,
    arcs,
    clouds,
    flow,
    on_graphs,
    oscillator,
)
from benchmarks.diagnosis.unseen.vision import Denoiser, GroupConv, Pair, Patches, UNet, dice, diffuse, siamese_loss
from gradtrack import GradientManager

LATE = 30
RATE = ("UNSTABLE", "EXPLODING", "NUMERICAL")


@faulty("dead/unet_bottom", "DEAD", r"middle")
def unet_bottom() -> Run:
    model = UNet("batch")
    nn.init.constant_(model.middle[1].bias, -12.0)
    return learn(model, shapes, adamw(model, 2e-3), dice)


@faulty("dead/point_features_late", "DEAD", r"each\.(0|1)$")
def point_features() -> Run:
    model = Points()
    return at(learn(model, clouds, adam(model, 2e-3)), LATE, lambda: model.each[0].bias.sub_(40.0))


@faulty("dead/normed_convolution", "DEAD", r"norms\.2|act")
def normed() -> Run:
    model = GroupConv()
    nn.init.constant_(model.norms[2].bias, -8.0)
    return learn(model, textures, sgd(model, 0.02, momentum=0.9))


@faulty("dead/value_network_half", "DEAD", r"^(2|3)$")
def value_half() -> Run:
    model = stack(4, 64, 64, 3)
    with torch.no_grad():
        model[2].bias[:44] = -30.0
    target = copy.deepcopy(model)
    return Run(model=model, forward=lambda t: q_loss(model, target, t), optimizer=adam(model, 1e-3))


def _small(model: nn.Module, gain: float) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d)) and layer.weight[0].numel() > 1:
            with torch.no_grad():
                nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
    return model


@faulty("vanishing/graph_of_fourteen_layers", "VANISHING", r"layers\.[0-7]$", "BOTTLENECK")
def deep_graph() -> Run:
    model = Convolved(14, norm=False, act=nn.Tanh)
    _small(model.layers, 0.5)
    return on_graphs(model, adam(model, 1e-3))


@faulty("vanishing/causal_convolutions", "VANISHING", r"enter|convs\.[0-3]", "BOTTLENECK")
def deep_causal() -> Run:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Conv1d(2, 16, 1), nn.Conv1d(16, 2, 1)
            self.convs = nn.ModuleList(nn.Conv1d(16, 16, 2) for _ in range(10))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x.mT)
            for conv in self.convs:
                x = torch.sigmoid(conv(F.pad(x, (1, 0))))
            found: Tensor = self.leave(x).mT
            return found

    model = Deep()
    return learn(model, signals, adam(model, 1e-3), F.mse_loss)


@faulty("vanishing/body_of_a_decoder", "VANISHING", r"body\.\d$", "BOTTLENECK")
def body() -> Run:
    deep = _small(stack(6, *[32] * 11, act=nn.Tanh), 0.45)
    model = nn.Sequential()
    model.add_module("body", deep)
    model.add_module("act", nn.Tanh())
    model.add_module("head", nn.Linear(32, 1))
    return learn(model, curve, sgd(model, 0.05), F.mse_loss)


@faulty("exploding/graph_attention", "EXPLODING", r"layers|scores", "LR_TOO_HIGH")
def wild_graph() -> Run:
    model = Attended(16, 3.0, 8)
    return on_graphs(model, sgd(model, 1e-9))


@faulty("exploding/fixed_point_that_grows", "EXPLODING", r"inside|enter", "SUPERCRITICAL", "NUMERICAL")
def growing() -> Run:
    model = Fixed(32, 2.0, 15, 1.0)
    return learn(model, curve, sgd(model, 1e-14), F.mse_loss)


@faulty("exploding/bad_batch_late", "EXPLODING", ".*", "UNSTABLE")
def bad_batch() -> Run:
    model = Dilated()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = signals(step)
        return (500 * x, 500 * y) if step == LATE else (x, y)

    return learn(model, batch, adam(model, 2e-3), F.mse_loss)


@faulty("saturation/actor_critic_trunk", "SATURATION", r"trunk")
def saturated_trunk() -> Run:
    model = Shared()
    with torch.no_grad():
        model.trunk[0].weight.mul_(40.0)
    return Run(model=model, forward=lambda t: actor_critic(model, t), optimizer=adam(model, 7e-4), steps=60)


@faulty("saturation/mixture_late", "SATURATION", r"body\.(0|1)$")
def saturated_late() -> Run:
    model = Mixture()
    run = Run(model=model, forward=lambda t: model(*arcs(t)), optimizer=adam(model, 1e-3))
    return at(run, LATE - 2, lambda: model.body[0].weight.mul_(200.0))


@faulty("saturation/unscaled_input", "SATURATION", r"^(0|1)$")
def unscaled() -> Run:
    model = stack(6, 48, 48, 1, act=nn.Sigmoid)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = curve(step)
        return 300 * x, y

    return learn(model, batch, adam(model, 1e-3), F.mse_loss)


@faulty("bottleneck/one_wide_layer_of_rank_one", "BOTTLENECK", r"^(4|5|6)$")
def rank_one() -> Run:
    model = stack(2, 64, 64, 64, 64, 3, act=nn.GELU)
    with torch.no_grad():
        model[4].weight.copy_(0.2 * torch.outer(randn(1, 64).sign(), randn(2, 64).sign()) / 8)
    return learn(model, spirals, sgd(model, 1e-3))


@faulty("bottleneck/one_unit", "BOTTLENECK", r"^(4|5|6)$")
def one_unit() -> Run:
    return learn(stack(6, 64, 64, 1, 64, 5), lambda t: (randn(t, 48, 6), randn(t, 48, 6)[:, :5].argmax(-1)))


@faulty("disconnected/encoder_of_a_translator", "DISCONNECTED", r"source|encoder")
def cut_encoder() -> Run:
    model = Translate()
    model.cut = True
    return translate(model, adam(model, 3e-3))


@faulty("disconnected/no_grad_stem", "DISCONNECTED", r"patch")
def no_grad_stem() -> Run:
    model = Patches(2)

    def forward(step: int) -> Tensor:
        x, y = textures(step)
        with torch.no_grad():
            x = model.patch(x).flatten(2).mT
        x = torch.cat([model.token.expand(len(x), -1, -1), x], 1) + model.places
        return entropy(model.head(model.norm(model.body(x))[:, 0]), y)

    return Run(model=model, forward=forward, optimizer=adamw(model))


@faulty("disconnected/rounded_code", "DISCONNECTED", r"encode")
def rounded() -> Run:
    encode, decode = stack(6, 32, 12), stack(12, 32, 1)
    model = nn.ModuleDict({"encode": encode, "decode": decode})

    def forward(step: int) -> Tensor:
        x, y = curve(step)
        return F.mse_loss(decode(torch.sigmoid(encode(x)).round()), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("unchanged/scale_nets_of_a_flow", "UNCHANGED", r"scale")
def still_flow() -> Run:
    model = nn.ModuleList(Coupling(bool(index % 2)) for index in range(4))
    params = [param for name, param in model.named_parameters() if "scale" not in name]
    return Run(model=model, forward=lambda t: flow(model, t), optimizer=torch.optim.Adam(params, 2e-3))


@faulty("unchanged/put_back_from_a_copy", "UNCHANGED", r"head")
def put_back() -> Run:
    model = GroupConv()
    kept = copy.deepcopy(model.head.state_dict())
    run = learn(model, textures, adam(model, 1e-3))
    run.before.append(lambda _: model.head.load_state_dict(kept))
    return run


@faulty("stale/oscillator", "STALE_GRAD", ".*")
def stale() -> Run:
    model = stack(1, 32, 32, 1, act=nn.Tanh)
    return Run(model=model, forward=lambda t: oscillator(model, t), optimizer=adam(model, 2e-3), zero=False)


@faulty("stale/one_optimizer_of_two", "STALE_GRAD", r"core")
def stale_half() -> Run:
    core, out = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 2)
    model = nn.ModuleDict({"core": core, "out": out})

    def forward(step: int) -> Tensor:
        out.zero_grad()
        x, y = signals(step)
        return F.mse_loss(out(core(x)[0]), y)

    return Run(model=model, forward=forward, optimizer=[adam(core, 1e-3), adam(out, 1e-3)], zero=False)


@faulty("rate_high/plain_descent", "LR_TOO_HIGH", ".*", *RATE)
def fast_descent() -> Run:
    model = stack(2, 64, 64, 3)
    return learn(model, spirals, sgd(model, 15.0), steps=120)


@faulty("rate_high/plain_descent_long", "LR_TOO_HIGH", ".*", *RATE)
def fast_long() -> Run:
    model = nn.Sequential(nn.Flatten(), *stack(432, 64, 64, 5))
    return learn(model, textures, sgd(model, 5.0), steps=300)


@faulty("rate_high/lion", "LR_TOO_HIGH", ".*", *RATE)
def fast_lion() -> Run:
    model = stack(6, 64, 64, 1)
    return learn(model, curve, Lion(model.parameters(), 0.1), F.mse_loss, steps=60)


@faulty("rate_high/transformer", "LR_TOO_HIGH", ".*", *RATE)
def fast_transformer() -> Run:
    model = Patches()
    return learn(model, textures, adamw(model, 0.5))


@faulty("rate_high/value_network", "LR_TOO_HIGH", ".*", *RATE)
def fast_value() -> Run:
    model = stack(4, 64, 64, 3)
    target = copy.deepcopy(model)
    return Run(model=model, forward=lambda t: q_loss(model, target, t), optimizer=adam(model, 0.7), steps=60)


@faulty("rate_low/diffusion", "LR_TOO_LOW", ".*")
def slow_diffusion() -> Run:
    model = Denoiser()
    nn.init.normal_(model.leave.weight, std=0.1)
    return diffuse(model, adam(model, 1e-9))


@faulty("rate_low/decoder_by_descent", "LR_TOO_LOW", ".*")
def slow_decoder() -> Run:
    model = Decoder(2)
    return learn(model, tokens, sgd(model, 1e-8))


@faulty("numerical/root_of_zero_distance", "NUMERICAL", ".*")
def root() -> Run:
    model = Pair()
    forward = siamese_loss(model, 0.0)

    def both(step: int) -> Tensor:
        x, _ = textures(step)
        alike = (model(x) - model(x)).square().sum(1).sqrt().mean()
        return forward(step) + (0.1 * alike if step >= 12 else 0.0)

    return Run(model=model, forward=both, optimizer=adam(model))


@faulty("numerical/width_of_zero", "NUMERICAL", ".*", "EXPLODING")
def width() -> Run:
    model = Mixture()
    model.floor = 0.0
    run = Run(model=model, forward=lambda t: model(*arcs(t)), optimizer=adam(model, 1e-3))
    return at(run, 20, lambda: model.out.bias[10:].sub_(200.0))


@faulty("numerical/bfloat16_weights", "NUMERICAL", ".*", "UNCHANGED", "LR_TOO_LOW")
def rounded_weights() -> Run:
    model = stack(6, 64, 64, 1, act=nn.GELU).bfloat16()
    return learn(
        model, lambda t: tuple(part.bfloat16() for part in curve(t)), sgd(model, 3e-4), F.mse_loss, scalable=False
    )


@faulty("clipped/by_the_loop", "CLIP_SATURATED", ".*")
def clipped() -> Run:
    model = Latents()
    run = learn(model, total, sgd(model, 0.1), F.mse_loss, steps=60, scalable=False)
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    return run


@faulty("imbalance/loud_critic", "GRAD_IMBALANCE", r"critic")
def loud() -> Run:
    model = Shared()
    return Run(model=model, forward=lambda t: actor_critic(model, t, 1e6), optimizer=adam(model, 7e-4), steps=60)


@faulty("attention/latents_look_at_one_place", "ATTN_ENTROPY_COLLAPSE", ".*")
def sharp_latents() -> Run:
    model = Latents()
    with torch.no_grad():
        for query in model.queries:
            query.weight.mul_(60.0)
    return learn(model, total, adamw(model, 1e-4), F.mse_loss)


@faulty("attention/tokens_become_equal", "RANK_COLLAPSE", ".*", "VANISHING", "BOTTLENECK")
def equal_tokens() -> Run:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(30, 32), nn.Linear(32, 30)
            self.layers = nn.ModuleList(nn.MultiheadAttention(32, 2, batch_first=True) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, x, x, need_weights=False)[0]
            found: Tensor = self.out(x)
            return found

    return learn(Plain(), tokens)


@faulty("recurrent_fault/explosive_state", "EXPLODING", r"core", "SUPERCRITICAL", "NUMERICAL")
def explosive() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.read = nn.RNN(2, 24, batch_first=True, nonlinearity="relu"), nn.Linear(24, 2)
            nn.init.orthogonal_(self.core.weight_hh_l0, 1.8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.read(self.core(x)[0])[:, -1:]
            return found

    model = Model()
    return learn(model, lambda t: (signals(t)[0], signals(t)[1][:, -1:]), sgd(model, 1e-12), F.mse_loss)


@faulty("recurrent_fault/forgets_what_it_needs", "SHORT_MEMORY", r"core", "VANISHING")
def forgets() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.read = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 1)
            nn.init.constant_(self.core.bias_ih_l0[24:48], -6.0)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.read(self.core(x)[0][:, -1])
            return found

    model = Model()
    run = learn(model, lambda t: (randn(t, 24, 30, 2), randn(t, 24, 30, 2)[:, 0, :1]), adam(model), F.mse_loss)
    run.horizon = 29
    return run


@faulty("policy_fault/collapses_on_noise", "ENTROPY_COLLAPSE", ".*", "LR_TOO_HIGH")
def collapse() -> Run:
    model, kept = Shared(), {}

    def forward(step: int) -> Tensor:
        logits, _ = model(randn(410_000 + step, 64, 4))
        logs = logits.log_softmax(-1)
        action = torch.multinomial(logs.exp().detach(), 1, generator=generator(step))
        reward = randn(step, 64)
        kept.update(logits=logits.detach(), reward=float(reward.mean()))
        spread = -(logs.exp() * logs).sum(-1).mean()
        return -(reward * logs.gather(1, action)[:, 0]).mean() + 2.0 * spread

    def observe(manager: GradientManager) -> None:
        manager.analyzer("rl_policy").observe(kept["logits"], episode_return=kept["reward"])

    settings: dict[str, Any] = {"analyzers": ["flow", "rl_policy"]}
    params = [*model.trunk.parameters(), *model.actor.parameters()]
    model.critic.requires_grad_(False)
    return Run(
        model=model, forward=forward, optimizer=torch.optim.Adam(params, 2e-2), observe=observe, settings=settings
    )


@faulty("rate_high/warm_up_to_far_too_much", "LR_TOO_HIGH", ".*", *RATE)
def warm_up() -> Run:
    model = Decoder(2)
    return cosine(learn(model, tokens, adamw(model, 2.0), steps=80), 10)
