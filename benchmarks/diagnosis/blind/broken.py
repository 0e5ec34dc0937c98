"""Faulty runs of layers, rates, numbers and wiring."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import (
    adam,
    bars,
    entropy,
    faulty,
    generator,
    learn,
    randn,
    sgd,
    spirals,
    stack,
    table,
    tokens,
    waves,
)
from benchmarks.diagnosis.blind.supervised import Conv, Forecast, Small
from benchmarks.diagnosis.faults import at
from benchmarks.diagnosis.run import Run

LATE = 30
RATE = ("UNSTABLE", "EXPLODING", "NUMERICAL")


def _drawn(model: nn.Module, gain: float) -> nn.Module:
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    for layer in layers[:-1]:
        nn.init.normal_(layer.weight, std=gain / layer.weight[0].numel() ** 0.5)
        nn.init.zeros_(layer.bias)
    return model


@faulty("vanishing/sixteen_sigmoids", "VANISHING", r"^(\d|1[0-6])$", "BOTTLENECK", "SATURATION")
def sixteen_sigmoids() -> Run:
    return learn(stack(2, *[40] * 16, 3, act=nn.Sigmoid), spirals)


@faulty("vanishing/tiny_convolutions", "VANISHING", r"features\.[0-9]$", "BOTTLENECK")
def tiny_convolutions() -> Run:
    body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh())
    for _ in range(9):
        body.append(nn.Conv2d(8, 8, 3, padding=1)).append(nn.Tanh())
    body.append(nn.Flatten())
    model = nn.Sequential()
    model.add_module("features", body)
    model.add_module("classifier", nn.Linear(800, 6))
    return learn(_drawn(model, 0.4), bars)


@faulty("vanishing/scaled_loss", "VANISHING", r"^(\d|1[0-4])$", "BOTTLENECK")
def vanishing_scaled() -> Run:
    model = _drawn(stack(10, *[48] * 14, 1, act=nn.Tanh), 0.5)
    return learn(model, table, adam(model, 1e-4), lambda a, b: 1e5 * F.mse_loss(a, b))


@faulty("vanishing/one_encoder_of_two", "VANISHING", r"sound", "BOTTLENECK")
def one_encoder() -> Run:
    sound, sight = _drawn(stack(10, *[32] * 12, 16, act=nn.Tanh), 0.4), stack(10, 32, 16)
    model = nn.ModuleDict({"sound": sound, "sight": sight, "join": nn.Linear(32, 1)})

    def forward(step: int) -> Tensor:
        x, y = table(step)
        return F.mse_loss(model["join"](torch.cat([sound(x), sight(x)], -1)), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("exploding/selu_gain", "EXPLODING", r"\d", "LR_TOO_HIGH")
def selu_gain() -> Run:
    model = _drawn(stack(10, *[64] * 12, 1, act=nn.SELU), 2.5)
    return learn(model, table, sgd(model, 1e-12), F.mse_loss)


@faulty("exploding/linear_chain", "EXPLODING", r"\d", "LR_TOO_HIGH")
def linear_chain() -> Run:
    model = _drawn(nn.Sequential(*(nn.Linear(24, 24) for _ in range(10)), nn.Linear(24, 3)), 2.5)
    return learn(model, lambda t: (randn(t, 32, 24), randn(t, 32, 24)[:, :3].argmax(-1)), sgd(model, 1e-9))


@faulty("exploding/jump_late", "EXPLODING", ".*", "UNSTABLE", "NUMERICAL", "LR_TOO_HIGH")
def jump_late() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = table(step)
        return (300 * x, 300 * y) if step == LATE else (x, y)

    return learn(stack(10, 48, 48, 1), batch, loss=F.mse_loss)


@faulty("dead/all_biases", "DEAD", r"^(0|1)$")
def all_biases() -> Run:
    model = stack(2, 48, 48, 3)
    nn.init.constant_(model[0].bias, -40.0)
    return learn(model, spirals)


@faulty("dead/after_one_huge_step", "DEAD", r"features", "LR_TOO_HIGH", "EXPLODING")
def after_huge_step() -> Run:
    model = Conv(norm=False)
    run = learn(model, bars, sgd(model, 0.05))
    return at(run, 12, lambda: [layer.bias.sub_(30.0) for layer in model.features if isinstance(layer, nn.Conv2d)])


@faulty("dead/normalisation_off", "DEAD", r"features\.(3|4|5)$")
def normalisation_off() -> Run:
    model = Conv()
    norm = model.features[4]
    nn.init.constant_(norm.weight, 0.01)
    nn.init.constant_(norm.bias, -5.0)
    return learn(model, bars)


@faulty("dead/three_quarters_of_a_layer", "DEAD", r"^(2|3)$")
def three_quarters() -> Run:
    model = stack(10, 64, 64, 64, 1)
    with torch.no_grad():
        model[2].bias[:48] = -25.0
    return learn(model, table, loss=F.mse_loss)


@faulty("dead/one_expert", "DEAD", r"experts\.1")
def dead_expert() -> Run:
    gate, experts, out = nn.Linear(10, 3), nn.ModuleList(stack(10, 32, 32) for _ in range(3)), nn.Linear(32, 1)
    model = nn.ModuleDict({"gate": gate, "experts": experts, "out": out})
    nn.init.constant_(experts[1][0].bias, -50.0)

    def forward(step: int) -> Tensor:
        x, y = table(step)
        shares = gate(x).softmax(-1)
        return F.mse_loss(out(sum(shares[:, [i]] * expert(x) for i, expert in enumerate(experts))), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("dead/expert_never_chosen", "DISCONNECTED", r"experts\.2", "DEAD", "UNCHANGED")
def never_chosen() -> Run:
    gate, experts, out = nn.Linear(10, 3), nn.ModuleList(stack(10, 32, 32) for _ in range(3)), nn.Linear(32, 1)
    model = nn.ModuleDict({"gate": gate, "experts": experts, "out": out})
    with torch.no_grad():
        gate.bias[2] = -100.0

    def forward(step: int) -> Tensor:
        x, y = table(step)
        best, chosen = gate(x).softmax(-1).max(-1)
        mixed = torch.zeros(len(x), 32)
        for index, expert in enumerate(experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, best[rows, None] * expert(x[rows]))
        return F.mse_loss(out(mixed), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("dead/branch_late", "DEAD", r"right")
def branch_late() -> Run:
    model = nn.ModuleDict({"left": stack(10, 32, 32, 16), "right": stack(10, 32, 32, 16), "join": nn.Linear(32, 1)})

    def forward(step: int) -> Tensor:
        x, y = table(step)
        return F.mse_loss(model["join"](torch.cat([model["left"](x), model["right"](x)], -1)), y)

    run = Run(model=model, forward=forward, optimizer=adam(model))
    return at(run, LATE, lambda: model["right"][2].bias.fill_(-60.0))


@faulty("saturation/sigmoid_weights", "SATURATION", r"^(0|1|2|3)$")
def sigmoid_weights() -> Run:
    model = stack(10, 48, 48, 1, act=nn.Sigmoid)
    with torch.no_grad():
        model[0].weight.mul_(60.0)
    return learn(model, table, loss=F.mse_loss)


@faulty("saturation/raw_inputs", "SATURATION", r"^(0|1)$")
def raw_inputs() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = bars(step, 32)
        return 128 + 60 * x.flatten(1), y

    return learn(stack(100, 48, 48, 6, act=nn.Tanh), batch)


@faulty("saturation/late_in_the_middle", "SATURATION", r"^(2|3)$")
def saturation_late() -> Run:
    model = stack(10, 40, 40, 40, 1, act=nn.Tanh)
    run = learn(model, table, loss=F.mse_loss)
    return at(run, LATE, lambda: model[2].weight.mul_(80.0))


@faulty("bottleneck/one_unit_pictures", "BOTTLENECK", r"narrow|wide", "RANK_COLLAPSE")
def one_unit_pictures() -> Run:
    model = nn.Sequential()
    for name, part in (
        ("flat", nn.Flatten()),
        ("enter", nn.Linear(100, 64)),
        ("act", nn.Tanh()),
        ("narrow", nn.Linear(64, 1)),
        ("act2", nn.Tanh()),
        ("wide", nn.Linear(1, 64)),
        ("act3", nn.Tanh()),
        ("out", nn.Linear(64, 6)),
    ):
        model.add_module(name, part)
    return learn(model, lambda t: bars(t, 32))


@faulty("bottleneck/rank_one_weights", "BOTTLENECK", r"^(2|3|4)$", "RANK_COLLAPSE")
def rank_one() -> Run:
    model = stack(100, 64, 64, 64, 6, act=nn.Tanh)
    with torch.no_grad():
        model[2].weight.copy_(torch.outer(torch.randn(64), torch.randn(64)) / 8)
    return learn(model, lambda t: (bars(t, 32)[0].flatten(1), bars(t, 32)[1]), sgd(model, 1e-3))


@faulty("disconnected/detached_encoder", "DISCONNECTED", r"encoder")
def detached() -> Run:
    model = nn.ModuleDict({"encoder": Conv(classes=16), "head": nn.Linear(16, 6)})

    def forward(step: int) -> Tensor:
        x, y = bars(step)
        return entropy(model["head"](model["encoder"](x).detach()), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("disconnected/data_attribute", "DISCONNECTED", r"memory")
def data_attribute() -> Run:
    model = Forecast()

    def forward(step: int) -> Tensor:
        x, y = waves(step)
        return F.mse_loss(model.out(model.memory(x)[0].data), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("disconnected/rounded_code", "DISCONNECTED", r"encode")
def rounded() -> Run:
    model = nn.ModuleDict({"encode": stack(10, 32, 8), "decode": stack(8, 32, 10)})

    def forward(step: int) -> Tensor:
        x, _ = table(step)
        return F.mse_loss(model["decode"](model["encode"](x).round()), x)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("disconnected/forgotten_layer", "DISCONNECTED", r"extra")
def forgotten() -> Run:
    model = Small(2)
    model.extra = nn.Linear(24, 24)
    return learn(model, tokens)


@faulty("disconnected/branch_without_loss", "DISCONNECTED", r"second")
def without_loss() -> Run:
    model = nn.ModuleDict({"body": stack(2, 32, 32), "first": nn.Linear(32, 3), "second": nn.Linear(32, 2)})

    def forward(step: int) -> Tensor:
        x, y = spirals(step)
        z = model["body"](x).relu()
        model["second"](z)
        return entropy(model["first"](z), y)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("unchanged/head_only_in_optimizer", "UNCHANGED", r"features", "DISCONNECTED")
def head_only() -> Run:
    model = Conv()
    return learn(model, bars, adam(model.classifier))


@faulty("unchanged/optimizer_of_an_old_copy", "UNCHANGED", ".*", "DISCONNECTED", "LR_TOO_LOW")
def old_copy() -> Run:
    model = Small(2)
    old = model.parts[1]
    optimizer = adam(model)
    model.parts[1] = type(old)(24, 4)
    return learn(model, tokens, optimizer)


@faulty("unchanged/one_group_at_zero", "UNCHANGED", r"memory", "LR_TOO_LOW")
def group_at_zero() -> Run:
    model = Forecast(nn.GRU)
    groups = [{"params": list(model.memory.parameters()), "lr": 0.0}, {"params": list(model.out.parameters())}]
    return learn(model, waves, torch.optim.Adam(groups, 1e-3), F.mse_loss)


@faulty("unchanged/reloaded_every_step", "UNCHANGED", r"^2$")
def reloaded() -> Run:
    model = stack(10, 48, 48, 1)
    kept = model[2].weight.detach().clone()
    run = learn(model, table, loss=F.mse_loss)
    run.before.append(lambda _: model[2].weight.data.copy_(kept))
    run.before.append(lambda _: model[2].bias.data.zero_())
    return run


def _kept(run: Run) -> Run:
    run.zero = False
    return run


@faulty("stale/convolutions", "STALE_GRAD", ".*")
def stale_convolutions() -> Run:
    model = Conv()
    return _kept(learn(model, bars, sgd(model, 0.01)))


@faulty("stale/transformer", "STALE_GRAD", ".*")
def stale_transformer() -> Run:
    return _kept(learn(Small(2), tokens))


@faulty("stale/half_of_the_model", "STALE_GRAD", r"body")
def stale_half() -> Run:
    model = nn.ModuleDict({"body": stack(2, 48, 48), "head": nn.Linear(48, 3)})

    def forward(step: int) -> Tensor:
        x, y = spirals(step)
        return entropy(model["head"](model["body"](x).relu()), y)

    run = Run(model=model, forward=forward, optimizer=sgd(model, 0.01), zero=False)
    run.before.append(lambda _: model["head"].zero_grad())
    return run


@faulty("rate_high/convolutions_sgd", "LR_TOO_HIGH", ".*", *RATE)
def high_sgd() -> Run:
    model = Conv()
    return learn(model, bars, sgd(model, 200.0))


@faulty("rate_high/transformer_adam", "LR_TOO_HIGH", ".*", *RATE)
def high_adam() -> Run:
    model = Small(2)
    return learn(model, tokens, adam(model, 1.0))


@faulty("rate_high/lstm_adam", "LR_TOO_HIGH", ".*", *RATE)
def high_lstm() -> Run:
    model = Forecast()
    return learn(model, waves, adam(model, 2.0), F.mse_loss)


@faulty("rate_high/regression_overshoots", "UNSTABLE", ".*", "LR_TOO_HIGH", "EXPLODING", "NUMERICAL")
def overshoots() -> Run:
    x = randn(1, 128, 10) * torch.linspace(0.3, 3, 10)
    model = nn.Linear(10, 1, bias=False)
    largest = float(torch.linalg.eigvalsh(2 * x.T @ x / 128)[-1])
    return learn(model, lambda _: (x, x @ randn(2, 10, 1)), sgd(model, 2.03 / largest), F.mse_loss)


@faulty("rate_high/late_mistake", "LR_TOO_HIGH", ".*", *RATE)
def late_mistake() -> Run:
    model = stack(2, 48, 48, 3, act=nn.Tanh)
    optimizer = adam(model, 1e-3)
    run = learn(model, spirals, optimizer)
    return at(run, 24, lambda: optimizer.param_groups[0].update(lr=2.0))


@faulty("rate_high/wrong_scale_of_the_loss", "LR_TOO_HIGH", ".*", *RATE)
def wrong_scale() -> Run:
    model = stack(2, 48, 48, 3, act=nn.Tanh)
    return learn(model, spirals, sgd(model, 0.1), lambda out, y: 1e4 * entropy(out, y))


@faulty("rate_low/gru_sgd", "LR_TOO_LOW", ".*", "UNCHANGED")
def low_sgd() -> Run:
    model = Forecast(nn.GRU)
    return learn(model, waves, sgd(model, 1e-8), F.mse_loss)


@faulty("rate_low/transformer_adam", "LR_TOO_LOW", ".*", "UNCHANGED")
def low_adam() -> Run:
    model = Small(2)
    return learn(model, tokens, adam(model, 1e-9))


@faulty("rate_low/loss_scaled_down", "LR_TOO_LOW", ".*", "UNCHANGED", "VANISHING")
def scaled_down() -> Run:
    model = stack(10, 48, 48, 1)
    return learn(model, table, sgd(model, 1e-2), lambda a, b: 1e-7 * F.mse_loss(a, b))


@faulty("numerical/log_of_nothing", "NUMERICAL", ".*")
def log_of_nothing() -> Run:
    model = stack(2, 48, 3)
    return learn(model, spirals, loss=lambda out, y: -(out.relu() / 1e3).log().gather(1, y[:, None]).mean())


@faulty("numerical/root_of_zero", "NUMERICAL", ".*")
def root_of_zero() -> Run:
    return learn(
        stack(10, 32, 1),
        table,
        loss=lambda out, y: (out - out.detach()).square().sum(1).sqrt().mean() + F.mse_loss(out, y),
    )


@faulty("numerical/constant_feature", "NUMERICAL", ".*")
def constant_feature() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = table(step)
        x[:, 4] = 2.0
        return (x - x.mean(0)) / x.std(0), y

    return learn(stack(10, 32, 1), batch, loss=F.mse_loss)


@faulty("numerical/late_overflow", "NUMERICAL", ".*", "EXPLODING")
def late_overflow() -> Run:
    model = stack(10, 32, 1)

    def forward(step: int) -> Tensor:
        x, y = table(step)
        out = model(x)
        return (out.exp() if step < LATE else (1e4 * out.abs() + 100).exp()).log1p().sub(y).square().mean()

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("numerical/row_without_keys", "NUMERICAL", ".*")
def row_without_keys() -> Run:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.ask, self.out = nn.Embedding(30, 24), nn.Linear(24, 24), nn.Linear(24, 30)

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            scores = (self.ask(y) @ y.mT / 24**0.5).masked_fill((x == 0)[:, None], float("-inf"))
            out: Tensor = self.out(y + scores.softmax(-1) @ y)
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = tokens(step)
        x = x.clone()
        if step >= 6:
            x[0] = 0
        return x, y

    return learn(Masked(), batch)


@faulty("numerical/half_precision_underflow", "NUMERICAL", ".*", "VANISHING", "UNCHANGED", "LR_TOO_LOW")
def half_underflow() -> Run:
    model = stack(10, 48, 48, 1).half()

    def forward(step: int) -> Tensor:
        x, y = table(step)
        return 1e-6 * F.mse_loss(model(x.half()).float(), y)

    run = Run(model=model, forward=forward, optimizer=sgd(model, 100.0))
    run.scalable = False
    return run


@faulty("numerical/weights_too_coarse", "NUMERICAL", ".*", "LR_TOO_LOW", "UNCHANGED")
def too_coarse() -> Run:
    model = stack(10, 48, 48, 1).bfloat16()
    return learn(model, lambda t: tuple(part.bfloat16() for part in table(t)), adam(model, 2e-6), F.mse_loss)


@faulty("clipped/limit_far_too_small", "CLIP_SATURATED", ".*")
def limit_too_small() -> Run:
    model = Conv()
    run = learn(model, bars, sgd(model, 0.1), settings={"enable_gradient_clipping": True, "max_grad_norm": 1e-3})
    run.scalable = False
    return run


@faulty("clipped/loss_of_millions", "CLIP_SATURATED", ".*")
def loss_of_millions() -> Run:
    model = stack(10, 48, 1)
    run = learn(model, table, adam(model), lambda a, b: 1e6 * F.mse_loss(a, b))
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    run.scalable = False
    return run


@faulty("imbalance/one_loud_task", "GRAD_IMBALANCE", r"loud", "EXPLODING")
def loud_task() -> Run:
    model = nn.ModuleDict({"body": stack(2, 48, 48), "quiet": nn.Linear(48, 3), "loud": nn.Linear(48, 2)})

    def forward(step: int) -> Tensor:
        x, y = spirals(step)
        z = model["body"](x).relu()
        return entropy(model["quiet"](z), y) + 1e5 * F.mse_loss(model["loud"](z), x)

    return Run(model=model, forward=forward, optimizer=adam(model))


@faulty("unstable/batches_of_two_kinds", "UNSTABLE", ".*", "EXPLODING")
def two_kinds() -> Run:
    source = generator(3)
    kinds = (torch.rand(64, generator=source) < 0.5).tolist()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = table(step)
        return (x, y) if kinds[step % 64] else (x, 1e3 * y)

    model = stack(10, 48, 48, 1)
    return learn(model, batch, adam(model, 1e-4), F.mse_loss)
