"""Healthy runs that predict: ordinary models under the conditions that alarms mistake for faults."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.blind.book import (
    adam,
    bars,
    entropy,
    generator,
    healthy,
    learn,
    randn,
    sgd,
    spirals,
    stack,
    table,
    tokens,
    waves,
)
from benchmarks.diagnosis.common import pretrain, schedule
from benchmarks.diagnosis.run import Run


class Conv(nn.Module):
    """Three convolutions and a head."""

    def __init__(self, width: int = 10, norm: bool = True, classes: int = 6, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(3):
            layers.append(nn.Conv2d(1 if index == 0 else width, width, 3, stride=1 if index == 0 else 2, padding=1))
            layers += [nn.BatchNorm2d(width)] if norm else []
            layers.append(act())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * 9, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


@healthy("mlp/spirals_adam")
def spirals_adam() -> Run:
    return learn(stack(2, 64, 64, 64, 3), spirals)


@healthy("mlp/spirals_tanh_sgd")
def spirals_tanh() -> Run:
    model = stack(2, 40, 40, 3, act=nn.Tanh)
    return learn(model, spirals, sgd(model, 0.3, momentum=0.9))


@healthy("mlp/squared_relu")
def squared_relu() -> Run:
    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x).square()

    return learn(stack(10, 48, 48, 1, act=Squared), table, loss=F.mse_loss)


@healthy("mlp/half_zeros_wide")
def half_zeros() -> Run:
    model = stack(10, 256, 256, 1)
    return learn(model, table, sgd(model, 0.02, momentum=0.9), F.mse_loss)


@healthy("mlp/norm_then_relu_shifted")
def shifted_norm() -> Run:
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.append(nn.ReLU()).append(nn.Linear(64, 1))
    nn.init.constant_(model[1].bias, -0.5)
    return learn(model, table, loss=F.mse_loss)


@healthy("mlp/maxout")
def maxout() -> Run:
    class Maxout(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.linear = nn.Linear(before, 3 * after)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).unflatten(-1, (-1, 3)).amax(-1)

    return learn(nn.Sequential(Maxout(10, 24), Maxout(24, 24), nn.Linear(24, 1)), table, loss=F.mse_loss)


@healthy("mlp/top_k_units")
def top_units() -> Run:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            least = x.topk(8, -1).values[:, -1:]
            return torch.where(x >= least, x, torch.zeros_like(x))

    return learn(stack(10, 40, 40, 1, act=Best), table, loss=F.mse_loss)


@healthy("mlp/heavy_dropout")
def heavy_dropout() -> Run:
    model = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Dropout(0.8), nn.Linear(128, 128), nn.ReLU())
    return learn(model.append(nn.Dropout(0.8)).append(nn.Linear(128, 1)), table, loss=F.mse_loss)


@healthy("mlp/stochastic_depth")
def stochastic_depth() -> Run:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(2, 32), nn.Linear(32, 3)
            self.steps = nn.ModuleList(stack(32, 64, 32) for _ in range(6))
            self.source = generator(5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index, step in enumerate(self.steps):
                if torch.rand(1, generator=self.source) > 0.08 * index:
                    x = x + step(x)
            out: Tensor = self.leave(x)
            return out

    return learn(Deep(), spirals)


@healthy("deep_linear/orthogonal")
def deep_linear() -> Run:
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(7)), nn.Linear(12, 1))
    for layer in model[:-1]:
        nn.init.orthogonal_(layer.weight)
    return learn(model, lambda t: (randn(t, 32, 12), randn(t, 32, 12)[:, :1] * 0.7), sgd(model, 0.02), F.mse_loss)


@healthy("deep_linear/default_four")
def deep_linear_default() -> Run:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 3))
    x = randn(3, 200, 32)
    labels = (x[:, :3] + 0.3 * randn(4, 200, 3)).argmax(-1)
    return learn(model, lambda _: (x, labels), adam(model, 2e-3))


@healthy("deep_linear/factorisation")
def factorisation() -> Run:
    target = randn(1, 30, 4) @ randn(2, 4, 30) / 4

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(0.3 * torch.randn(30, 8)), nn.Parameter(0.3 * torch.randn(8, 30))

        def forward(self, _: Tensor) -> Tensor:
            return self.left @ self.right

    model = Product()
    return learn(model, lambda _: (target, target), sgd(model, 5.0), F.mse_loss)


@healthy("edge_of_stability/tanh_cross_entropy")
def edge_cross_entropy() -> Run:
    model = stack(2, 48, 48, 3, act=nn.Tanh)
    return learn(model, lambda _: spirals(0, 96, full=True), sgd(model, 1.0))


@healthy("edge_of_stability/relu_squared_error")
def edge_squared() -> Run:
    model = stack(2, 64, 64, 3)
    x, labels = spirals(0, 96, full=True)
    target = F.one_hot(labels, 3).float()
    return learn(model, lambda _: (x, target), sgd(model, 0.6), F.mse_loss)


@healthy("edge_of_stability/elu_regression")
def edge_elu() -> Run:
    model = stack(10, 40, 40, 1, act=nn.ELU)
    return learn(model, lambda _: table(3, 128, noise=0.0), sgd(model, 0.15), F.mse_loss)


@healthy("edge_of_stability/normalised_large_rate")
def edge_normalised() -> Run:
    model = Conv()
    return learn(model, bars, sgd(model, 0.5, momentum=0.5))


@healthy("noise/forty_percent_wrong_labels")
def wrong_labels() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, labels = spirals(step)
        wrong = torch.rand(len(labels), generator=generator(step)) < 0.4
        return x, torch.where(wrong, torch.randint(0, 3, labels.shape, generator=generator(step + 9)), labels)

    return learn(stack(2, 64, 64, 3), batch)


@healthy("noise/pure_noise_target")
def pure_noise() -> Run:
    model = stack(10, 64, 64, 1, act=nn.GELU)
    return learn(model, lambda t: (table(t)[0], 3 * randn(t, 48, 1)), loss=F.mse_loss)


@healthy("noise/random_labels_sgd_momentum")
def random_labels() -> Run:
    model = Conv()
    return learn(model, lambda t: (bars(t)[0], bars(t + 777)[1]), sgd(model, 0.01, momentum=0.9))


@healthy("noise/heteroscedastic")
def heteroscedastic() -> Run:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = out.chunk(2, -1)
        return (0.5 * log_variance + 0.5 * (y - mean).square() * (-log_variance).exp()).mean()

    return learn(stack(10, 48, 48, 2, act=nn.SiLU), table, loss=loss)


@healthy("small_batch/one_picture")
def one_picture() -> Run:
    model = Conv(norm=False)
    return learn(model, lambda t: bars(t, 1), sgd(model, 0.01))


@healthy("small_batch/two_rows_adam")
def two_rows() -> Run:
    return learn(stack(10, 32, 32, 1), lambda t: table(t, 2), loss=F.mse_loss)


@healthy("small_batch/one_row_momentum")
def one_row() -> Run:
    model = stack(10, 32, 1, act=nn.Tanh)
    return learn(model, lambda t: table(t, 1), sgd(model, 0.01, momentum=0.9), F.mse_loss)


@healthy("small_batch/three_sequences")
def three_sequences() -> Run:
    return learn(Forecast(), lambda t: waves(t, 3), loss=F.mse_loss)


@healthy("converged/logistic_full_batch")
def logistic() -> Run:
    x, labels = spirals(0, 200, full=True)
    model = nn.Linear(2, 3)
    return pretrain(learn(model, lambda _: (x, labels), sgd(model, 0.5)), 600)


@healthy("converged/interpolated")
def interpolated() -> Run:
    x, labels = spirals(0, 30, full=True)
    model = stack(2, 128, 128, 3)
    return pretrain(learn(model, lambda _: (x, labels), adam(model, 3e-3)), 700)


@healthy("converged/exact_regression")
def exact_regression() -> Run:
    x = randn(8, 64, 10)
    model = nn.Linear(10, 1)
    return pretrain(learn(model, lambda _: (x, x[:, :1] - x[:, 1:2]), sgd(model, 0.1), F.mse_loss), 400)


@healthy("converged/pictures")
def converged_pictures() -> Run:
    return pretrain(learn(Conv(), bars), 250)


@healthy("converged/forecast")
def converged_forecast() -> Run:
    model = Forecast()
    return pretrain(learn(model, waves, adam(model, 5e-3), F.mse_loss), 200)


@healthy("schedule/warm_restarts")
def warm_restarts() -> Run:
    model = Conv()
    return schedule(learn(model, bars, sgd(model, 0.1)), lambda t: 0.5 + 0.5 * math.cos(math.pi * (t % 10) / 10))


@healthy("schedule/linear_to_zero")
def linear_to_zero() -> Run:
    model = stack(10, 48, 48, 1)
    return schedule(learn(model, table, adam(model, 2e-3), F.mse_loss), lambda t: max(0.0, 1 - t / 36))


@healthy("schedule/zero_rate_at_first")
def zero_at_first() -> Run:
    model = stack(2, 48, 48, 3)
    return schedule(learn(model, spirals, adam(model, 2e-3)), lambda t: 0.0 if t < 2 else min(1.0, t / 10))


@healthy("schedule/warm_up_then_cosine")
def warm_up_cosine() -> Run:
    model = Small()
    return schedule(
        learn(model, tokens, torch.optim.AdamW(model.parameters(), 3e-3)),
        lambda t: min((t + 1) / 6, 0.5 + 0.5 * math.cos(math.pi * t / 42)),
    )


@healthy("schedule/huge_warm_up_step_count")
def long_warm_up() -> Run:
    model = Small()
    return schedule(learn(model, tokens, adam(model, 1e-3)), lambda t: (t + 1) / 4000)


class Forecast(nn.Module):
    """An LSTM that predicts the next value of a series."""

    def __init__(self, cell: type[nn.Module] = nn.LSTM, width: int = 24) -> None:
        super().__init__()
        self.memory = cell(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.memory(x)[0])
        return out


@healthy("recurrent/forecast_gru_sgd")
def forecast_gru() -> Run:
    model = Forecast(nn.GRU)
    return learn(model, waves, sgd(model, 0.1, momentum=0.9), F.mse_loss)


@healthy("recurrent/forecast_rnn_adam")
def forecast_rnn() -> Run:
    model = Forecast(nn.RNN)
    return learn(model, waves, adam(model, 3e-3), F.mse_loss)


@healthy("recurrent/carried_state")
def carried_state() -> Run:
    model = Forecast(nn.LSTM)
    kept: dict[str, tuple[Tensor, ...]] = {}

    def forward(step: int) -> Tensor:
        x, y = waves(step // 4)
        piece = slice(6 * (step % 4), 6 * (step % 4) + 6)
        state = kept.get("state") if step % 4 else None
        out, state = model.memory(x[:, piece], state)
        kept["state"] = tuple(part.detach() for part in state)
        return F.mse_loss(model.out(out), y[:, piece])

    return Run(model=model, forward=forward, optimizer=adam(model, 3e-3))


@healthy("recurrent/declared_horizon_reached")
def declared_horizon() -> Run:
    class Recall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.out = nn.GRU(3, 32, batch_first=True), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.memory(x)[0][:, -1])
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = randn(step, 32, 10, 3)
        return x, (x[:, -4, 0] > 0).long()

    model = Recall()
    return learn(model, batch, adam(model, 5e-3), horizon=4)


@healthy("recurrent/attentive_decoder")
def attentive_decoder() -> Run:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 24)
            self.read, self.write = nn.GRU(24, 24, batch_first=True), nn.GRU(24, 24, batch_first=True)
            self.out = nn.Linear(48, 30)

        def forward(self, x: Tensor) -> Tensor:
            seen, last = self.read(self.words(x))
            said, _ = self.write(self.words(x.flip(1)), last)
            weights = (said @ seen.mT / 24**0.5).softmax(-1)
            out: Tensor = self.out(torch.cat([said, weights @ seen], -1))
            return out

    return learn(Translate(), lambda t: (tokens(t)[0], tokens(t)[0].flip(1)))


@healthy("recurrent/euler_steps")
def euler_steps() -> Run:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = stack(2, 32, 2, act=nn.Tanh)
            self.out = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = x + 0.15 * self.field(x)
            out: Tensor = self.out(x)
            return out

    return learn(Flow(), spirals)


@healthy("recurrent/packed_both_ways")
def packed() -> Run:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 16, padding_idx=0)
            self.memory = nn.LSTM(16, 20, bidirectional=True, batch_first=True)
            self.out = nn.Linear(40, 4)

        def forward(self, x: Tensor) -> Tensor:
            lengths = (x > 0).sum(1).clamp_min(1)
            packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, True, False)
            out: Tensor = self.out(torch.cat(tuple(self.memory(packed)[1][0]), -1))
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, 30, (20, 9), generator=generator(step))
        x[torch.arange(9) >= torch.randint(2, 10, (20, 1), generator=generator(step + 1))] = 0
        return x, x[:, 0] % 4

    model = Tagger()
    return learn(model, batch, adam(model, 5e-3))


class Part(nn.Module):
    """A pre-norm transformer layer with separate projections, and optional scales on its branches."""

    def __init__(self, width: int, heads: int, scale: float | None = None, causal: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scales = None if scale is None else nn.Parameter(torch.full((2, width), scale))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        one, two = (1.0, 1.0) if self.scales is None else self.scales
        x = x + one * self.mix(seen)
        return x + two * self.down(F.silu(self.up(self.second(x))))


class Small(nn.Module):
    """A small language model."""

    def __init__(
        self, depth: int = 2, width: int = 24, vocabulary: int = 30, places: int = 64, scale: float | None = None
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(places, width)
        self.parts = nn.ModuleList(Part(width, 4, scale) for _ in range(depth))
        self.norm, self.decode = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for table_ in (self.embed, self.place):
            nn.init.normal_(table_.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) + self.place.weight[: x.shape[1]]
        for part in self.parts:
            y = part(y)
        out: Tensor = self.decode(self.norm(y))
        return out


@healthy("transformer/repeats")
def repeats() -> Run:
    return learn(Small(3), tokens)


@healthy("transformer/long_table_of_places")
def many_places() -> Run:
    return learn(Small(places=2048), tokens)


@healthy("transformer/rare_words")
def rare_words() -> Run:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        ranks = torch.rand(8, 19, generator=generator(step)) ** 6
        x = (ranks * 5000).long()
        return x[:, :-1], x[:, 1:]

    return learn(Small(vocabulary=5000), batch)


@healthy("transformer/encoder_with_class_token")
def class_token() -> Run:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(1, 24, 5, stride=5)
            self.mark = nn.Parameter(torch.zeros(1, 1, 24))
            self.parts = nn.ModuleList(Part(24, 3, causal=False) for _ in range(2))
            self.out = nn.Linear(24, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([self.mark.expand(len(x), -1, -1), self.cut(x).flatten(2).mT], 1)
            for part in self.parts:
                y = part(y)
            out: Tensor = self.out(y[:, 0])
            return out

    return learn(Picture(), bars)


@healthy("transformer/mixer")
def mixer() -> Run:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(1, 16, 2, stride=2)
            self.across = nn.ModuleList(stack(25, 32, 25, act=nn.GELU) for _ in range(2))
            self.within = nn.ModuleList(stack(16, 32, 16, act=nn.GELU) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
            self.out = nn.Linear(16, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.cut(x).flatten(2).mT
            for index in range(2):
                y = y + self.across[index](self.norms[2 * index](y).mT).mT
                y = y + self.within[index](self.norms[2 * index + 1](y))
            out: Tensor = self.out(y.mean(1))
            return out

    return learn(Mixer(), bars)


@healthy("transformer/torch_decoder_dropout")
def torch_decoder() -> Run:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 24)
            layer = nn.TransformerEncoderLayer(24, 4, 48, 0.4, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.decode = nn.Linear(24, 30)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            out: Tensor = self.decode(self.body(self.embed(x), mask=mask, is_causal=True))
            return out

    return learn(Decoder(), tokens)


@healthy("residual/layer_scale_1e-5")
def layer_scale() -> Run:
    return learn(Small(6, scale=1e-5), tokens)


@healthy("residual/layer_scale_1e-5_fast")
def layer_scale_fast() -> Run:
    model = Small(4, scale=1e-5)
    return learn(model, tokens, adam(model, 3e-3))


@healthy("residual/layer_scale_convolutions")
def layer_scale_conv() -> Run:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spread, self.norm = nn.Conv2d(12, 12, 5, padding=2, groups=12), nn.GroupNorm(1, 12)
            self.up, self.down = nn.Conv2d(12, 36, 1), nn.Conv2d(36, 12, 1)
            self.scale = nn.Parameter(torch.full((12, 1, 1), 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.down(F.gelu(self.up(self.norm(self.spread(x)))))

    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), *(Block() for _ in range(5)))
    model.append(nn.AdaptiveAvgPool2d(3)).append(nn.Flatten()).append(nn.Linear(108, 6))
    return learn(model, bars, torch.optim.AdamW(model.parameters(), 2e-3))


@healthy("residual/zero_last_layer_of_branches")
def zero_branches() -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(10, 32), nn.Linear(32, 1)
            self.branches = nn.ModuleList(stack(32, 32, 32) for _ in range(8))
            for branch in self.branches:
                nn.init.zeros_(branch[2].weight)
                nn.init.zeros_(branch[2].bias)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for branch in self.branches:
                x = x + branch(F.relu(x))
            out: Tensor = self.leave(x)
            return out

    return learn(Net(), table, loss=F.mse_loss)


@healthy("residual/zero_head_sgd")
def zero_head() -> Run:
    model = stack(2, 64, 64, 3)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return learn(model, spirals, sgd(model, 0.2))


@healthy("residual/added_control")
def added_control() -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Conv(norm=False).requires_grad_(False)
            self.control = Conv(norm=False)
            self.zero = nn.Linear(6, 6)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.zero(self.control(x))

    return learn(Net(), bars)


@healthy("precision/bfloat16_body_float32_head")
def mixed_dtypes() -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = stack(10, 64, 64).bfloat16()
            self.head = nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x.bfloat16()).relu().float())
            return out

    model = Net()
    return learn(model, table, adam(model, 2e-3), F.mse_loss)


@healthy("precision/autocast_transformer")
def autocast_transformer() -> Run:
    model = Small(2)

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return entropy(model(tokens(step)[0]), tokens(step)[1])

    return Run(model=model, forward=loss, optimizer=adam(model))


@healthy("precision/scaler_and_autocast")
def scaler() -> Run:
    model = Conv()

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return entropy(model(bars(step)[0]), bars(step)[1])

    scaler_ = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return Run(model=model, forward=loss, optimizer=adam(model), scaler=scaler_)


@healthy("precision/double_recurrent")
def double_recurrent() -> Run:
    model = Forecast().double()
    return learn(model, lambda t: tuple(part.double() for part in waves(t)), loss=F.mse_loss)
