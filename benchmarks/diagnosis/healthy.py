"""Healthy runs: supervised learning with feed-forward, convolutional, recurrent and attention models."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis import models
from benchmarks.diagnosis.common import classify, make, pretrain, regress, schedule
from benchmarks.diagnosis.data import clusters, images, sequences, surface, text
from benchmarks.diagnosis.run import Run, add


def perceptrons() -> None:
    for act, depth, optimizer in product(("relu", "tanh", "gelu", "silu", "leaky", "elu"), (1, 3, 6), ("sgd", "adam")):
        init = "xavier" if act == "tanh" else "he"
        widths = [24, *[48] * depth, 5]
        add(
            f"mlp/{act}_{depth}_{optimizer}",
            lambda widths=widths, act=act, init=init, optimizer=optimizer: classify(
                models.mlp(widths, act, init=init), clusters(), optimizer
            ),
        )
    for norm, dropout, optimizer in product(("batch", "layer", ""), (0.0, 0.3), ("momentum", "adamw", "rmsprop")):
        add(
            f"mlp/norm_{norm or 'none'}_{dropout}_{optimizer}",
            lambda norm=norm, dropout=dropout, optimizer=optimizer: classify(
                models.mlp([24, 64, 64, 5], "relu", norm, dropout), clusters(), optimizer
            ),
        )
    for optimizer in ("adagrad", "nadam", "nesterov", "adam_fast"):
        add(
            f"mlp/optimizer_{optimizer}",
            lambda optimizer=optimizer: classify(models.mlp([24, 48, 48, 5], "relu_inplace"), clusters(), optimizer),
        )
    for name, function in (("relu", torch.relu), ("tanh", torch.tanh), ("gelu", F.gelu)):
        add(
            f"mlp/functional_{name}",
            lambda function=function: classify(models.FunctionalMlp([24, 40, 40, 5], function), clusters(), "adam"),
        )
    add(
        "mlp/sigmoid_2",
        lambda: classify(models.mlp([24, 32, 32, 5], "sigmoid", init="xavier"), clusters(), "adam_fast"),
    )
    add("mlp/wide", lambda: classify(models.mlp([24, 512, 5], "relu"), clusters(), "sgd"))
    add("mlp/linear", lambda: classify(models.mlp([24, 5]), clusters(), "sgd"))
    add("mlp/zero_head", lambda: classify(_zero_head(models.mlp([24, 48, 48, 5], init="he")), clusters(), "adam"))
    add("mlp/pyramid", lambda: classify(models.mlp([24, 128, 64, 32, 16, 5], init="he"), clusters(), "adam"))


def _zero_head(model: nn.Sequential) -> nn.Sequential:
    last = model[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    return model


def regressions() -> None:
    for scale, optimizer in product((1e-3, 1.0, 1e3), ("adam", "adam_fast")):
        add(
            f"regression/scale_{scale:g}_{optimizer}",
            lambda scale=scale, optimizer=optimizer: regress(
                models.mlp([12, 48, 48, 1], "tanh", init="xavier"), surface(scale=scale), optimizer
            ),
        )
    for name, loss in (
        ("huber", F.huber_loss),
        ("l1", F.l1_loss),
        ("logcosh", lambda a, b: (a - b).cosh().log().mean()),
    ):
        for act in ("relu", "silu"):
            add(
                f"regression/{name}_{act}",
                lambda loss=loss, act=act: regress(models.mlp([12, 48, 48, 1], act), surface(), "adam", loss),
            )
    add("regression/heavy_tails", lambda: regress(models.mlp([12, 48, 48, 1]), _heavy(), "adam", F.huber_loss))
    add("regression/linear_sgd", lambda: regress(nn.Linear(12, 1), surface(), "sgd"))
    add("regression/full_batch", lambda: regress(models.mlp([12, 32, 1], "tanh"), lambda _: surface()(0), "momentum"))
    add(
        "regression/rosenbrock_small_lr",
        lambda: regress(models.mlp([12, 32, 32, 1], "tanh"), lambda _: surface()(0), "sgd"),
    )
    add("regression/physics", _physics)
    add("regression/double", lambda: _double())


def _heavy():
    plain = surface()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = plain(step)
        generator = torch.Generator().manual_seed(step)
        return x, y + 0.3 * torch.randn(y.shape, generator=generator) / torch.rand(
            y.shape, generator=generator
        ).clamp_min(0.05)

    return batch


def _double() -> Run:
    model = models.mlp([12, 32, 32, 1], "tanh").double()
    batches = surface()
    return regress(model, lambda step: tuple(part.double() for part in batches(step)), "adam")  # type: ignore[arg-type,return-value]


def _physics() -> Run:
    model = models.mlp([1, 32, 32, 1], "tanh", init="xavier")

    def forward(step: int) -> Tensor:
        x = torch.rand(64, 1, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        start = model(torch.zeros(1, 1)) - 1
        return (slope + 2 * y).pow(2).mean() + start.pow(2).mean()

    return Run(model=model, forward=forward, optimizer=make("adam_fast", model.parameters()))


def convolutions() -> None:
    for norm, pool, optimizer in product(("batch", "group", ""), ("max", "mean"), ("momentum", "adam")):
        add(
            f"cnn/{norm or 'plain'}_{pool}_{optimizer}",
            lambda norm=norm, pool=pool, optimizer=optimizer: classify(
                models.ConvNet(norm=norm, pool=pool), images(), optimizer
            ),
        )
    for act in ("gelu", "silu", "leaky", "relu_inplace"):
        add(f"cnn/{act}", lambda act=act: classify(models.ConvNet(act=act), images(), "adam"))
    add("cnn/deep", lambda: classify(models.ConvNet(depth=8), images(), "adam"))
    add("cnn/deep_no_norm", lambda: classify(models.ConvNet(depth=7, norm=""), images(), "adam"))
    for depth, pre, zero in product((2, 6), (False, True), (False, True)):
        if not (pre and zero):
            add(
                f"resnet/{depth}_{'pre' if pre else 'post'}_{'zero' if zero else 'plain'}",
                lambda depth=depth, pre=pre, zero=zero: classify(
                    models.ResNet(depth, pre=pre, zero=zero), images(), "momentum"
                ),
            )
    add("resnet/group_norm", lambda: classify(models.ResNet(4, norm="group"), images(), "adam"))
    add(
        "resnet/adamw_cosine",
        lambda: schedule(
            classify(models.ResNet(4), images(), "adamw"),
            lambda t: 0.5 + 0.5 * torch.cos(torch.tensor(t / 13.0)).item(),
        ),
    )
    add("resnet/batch_of_4", lambda: classify(models.ResNet(3, norm="group"), images(size=4), "adam"))


def recurrents() -> None:
    for cell, every, optimizer in product(("RNN", "LSTM", "GRU"), (False, True), ("adam", "momentum")):
        add(
            f"recurrent/{cell}_{'every' if every else 'last'}_{optimizer}",
            lambda cell=cell, every=every, optimizer=optimizer: _recurrent(cell, every, optimizer),
        )
    for cell in ("LSTM", "GRU"):
        add(
            f"recurrent/{cell}_deep",
            lambda cell=cell: classify(models.Recurrent(cell, num_layers=2, dropout=0.1), sequences(), "adam"),
        )
        add(
            f"recurrent/{cell}_both_ways",
            lambda cell=cell: classify(models.Recurrent(cell, bidirectional=True), sequences(), "adam"),
        )
    for cell in ("RNNCell", "GRUCell", "LSTMCell"):
        add(
            f"recurrent/unrolled_{cell}",
            lambda cell=cell: classify(models.Unrolled(cell), sequences(length=12), "adam"),
        )
    add("recurrent/language", _recurrent_language)
    add("recurrent/language_clipped", lambda: _clipped(_recurrent_language(), 0.25))


def _recurrent(cell: str, every: bool, optimizer: str) -> Run:
    batches = sequences(lag=2)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, (x[:, :, 0] > 0).long() if every else y

    return classify(models.Recurrent(cell, every=every), batch, optimizer)


def _clipped(run: Run, norm: float) -> Run:
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(run.model.parameters(), norm))
    run.scalable = False
    return run


def _recurrent_language() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(40, 24)
            self.core = nn.LSTM(24, 48, batch_first=True)
            self.unembed = nn.Linear(48, 40)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.unembed(self.core(self.tokens(tokens))[0])
            return out

    return classify(Model(), text(), "adam_fast")


def transformers() -> None:
    for depth, pre, act in product((1, 4), (True, False), ("gelu", "relu")):
        add(
            f"transformer/{depth}_{'pre' if pre else 'post'}_{act}",
            lambda depth=depth, pre=pre, act=act: schedule(
                classify(models.Language(depth=depth, pre=pre, act=act), text(), "adam"),
                lambda t: min(1.0, (t + 1) / 8),
            ),
        )
    add("transformer/tied", lambda: classify(models.Language(tied=True), text(), "adam"))
    add("transformer/default_init", lambda: classify(models.Language(std=0.0), text(), "adamw"))
    add("transformer/deep", lambda: classify(models.Language(depth=8, width=16), text(size=6), "adam"))
    add("transformer/sgd", lambda: classify(models.Language(std=0.0), text(), "momentum"))
    add("transformer/clipped", lambda: _clipped(classify(models.Language(), text(), "adam"), 1.0))
    add("transformer/managed_clipping", lambda: _managed(classify(models.Language(), text(), "adam")))
    for optimizer in ("adam", "momentum"):
        add(f"vision/{optimizer}", lambda optimizer=optimizer: classify(models.Vision(), images(), optimizer))
    add("vision/post", lambda: classify(models.Vision(pre=False), images(), "adam"))
    add("transformer/torch_encoder", lambda: _torch_encoder(False))
    add("transformer/torch_encoder_pre", lambda: _torch_encoder(True))
    add("transformer/encoder_decoder", _encoder_decoder)


def _managed(run: Run) -> Run:
    run.settings = {"enable_gradient_clipping": True, "max_grad_norm": 1.0}
    run.scalable = False
    return run


def _torch_encoder(pre: bool) -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(40, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=pre)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.unembed = nn.Linear(32, 40)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.unembed(self.encoder(self.tokens(tokens)))
            return out

    return classify(Model(), text(), "adam")


def _encoder_decoder() -> Run:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(40, 32)
            self.body = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)
            self.unembed = nn.Linear(32, 40)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            out: Tensor = self.unembed(self.body(x, x))
            return out

    return classify(Model(), text(), "adam")


def conditions() -> None:
    """Odd but healthy circumstances of ordinary runs."""
    for parts in (2, 4, 8):
        add(
            f"accumulation/{parts}",
            lambda parts=parts: classify(models.mlp([24, 48, 48, 5]), clusters(size=12), "adam", accumulate=parts),
        )
    add("accumulation/cnn", lambda: classify(models.ConvNet(), images(size=8), "momentum", accumulate=2))
    add("accumulation/transformer", lambda: classify(models.Language(), text(size=4), "adam", accumulate=4))
    for name, build in (
        ("mlp", lambda: classify(models.mlp([24, 48, 48, 5]), clusters(), "adam_fast")),
        ("mlp_sgd", lambda: classify(models.mlp([24, 48, 48, 5], init="he"), clusters(spread=8.0), "momentum")),
        ("cnn", lambda: classify(models.ConvNet(), images(), "adam_fast")),
        ("regression", lambda: regress(models.mlp([12, 48, 48, 1], "tanh"), surface(noise=0.0), "adam")),
        ("gru", lambda: classify(models.Recurrent("GRU"), sequences(lag=0), "adam_fast")),
        ("tanh", lambda: classify(models.mlp([24, 32, 32, 5], "tanh"), clusters(spread=8.0), "adam")),
    ):
        for steps in (150, 500):
            add(f"converged/{name}_{steps}", lambda build=build, steps=steps: pretrain(build(), steps))
    for name, model in (
        ("mlp", lambda: models.mlp([24, 48, 48, 5])),
        ("functional", lambda: models.FunctionalMlp([24, 32, 32, 5])),
    ):
        for size in (1, 2, 8):
            add(
                f"noisy/{name}_batch_{size}",
                lambda model=model, size=size: classify(model(), clusters(size=size), "adam"),
            )
            add(
                f"noisy/{name}_sgd_batch_{size}",
                lambda model=model, size=size: classify(model(), clusters(size=size), "sgd"),
            )
    add("noisy/random_labels", lambda: classify(models.mlp([24, 64, 64, 5]), clusters(spread=0.0), "adam"))
    add("noisy/random_labels_sgd", lambda: classify(models.mlp([24, 64, 64, 5]), clusters(spread=0.0), "sgd"))
    add(
        "noisy/random_images",
        lambda: classify(models.ConvNet(), lambda step: (images()(step)[0], images()(step + 500)[1]), "adam"),
    )
    add("noisy/label_smoothing", lambda: classify(models.mlp([24, 64, 64, 5]), clusters(), "adam", smoothing=0.2))
    mlp = lambda optimizer="adam": classify(models.mlp([24, 48, 48, 5]), clusters(), optimizer)  # noqa: E731
    add("schedule/warmup", lambda: schedule(mlp("sgd"), lambda t: min(1.0, (t + 1) / 20)))
    add("schedule/warmup_from_zero", lambda: schedule(mlp(), lambda t: t / 40))
    add("schedule/long_warmup", lambda: schedule(mlp("sgd"), lambda t: (t + 1) * 1e-6))
    add(
        "schedule/cosine",
        lambda: schedule(mlp(), lambda t: 0.5 + 0.5 * torch.cos(torch.tensor(t * 3.14159 / 40)).item()),
    )
    add("schedule/one_cycle", lambda: schedule(mlp("momentum"), lambda t: 1 + min(t, 40 - t) / 4))
    add("schedule/steps", lambda: schedule(mlp("sgd"), lambda t: 0.1 ** (t // 15)))
    add("schedule/decayed", lambda: schedule(mlp("adam"), lambda t: 0.8**t))
    for rate, width in ((0.5, 32), (0.3, 64)):
        add(
            f"schedule/edge_of_stability_{rate}",
            lambda rate=rate, width=width: regress(
                models.mlp([12, width, 1], "tanh"), lambda _: surface(noise=0.0)(0), lambda p: torch.optim.SGD(p, rate)
            ),
        )
    add("scale/amp_65536", lambda: _scaled(mlp("adam"), 65536.0))
    add("scale/tiny", lambda: _scaled(mlp("adam"), 1e-4))
    add("scale/transformer_1024", lambda: _scaled(classify(models.Language(), text(), "adam"), 1024.0))
    add("scale/sum_reduction", lambda: _scaled(classify(models.ConvNet(), images(), "adam"), 24.0))
    for name, model, batches in (
        ("mlp", lambda: models.mlp([24, 48, 48, 5]), clusters),
        ("cnn", lambda: models.ConvNet(), images),
        ("language", lambda: models.Language(), text),
    ):
        add(
            f"precision/autocast_{name}",
            lambda model=model, batches=batches: _autocast(classify(model(), batches(), "adam")),
        )
        add(f"precision/bfloat16_{name}", lambda model=model, batches=batches: _bfloat16(model(), batches()))
    add(
        "precision/float64",
        lambda: classify(
            models.mlp([24, 48, 48, 5]).double(), lambda t: (clusters()(t)[0].double(), clusters()(t)[1]), "adam"
        ),
    )


def _scaled(run: Run, scale: float) -> Run:
    plain = run.forward
    run.forward = lambda step: scale * plain(step)
    return run


def _autocast(run: Run) -> Run:
    plain = run.forward

    def forward(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(step)

    run.forward = forward
    return run


def _bfloat16(model: nn.Module, batches) -> Run:
    model = model.bfloat16()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x.bfloat16() if x.is_floating_point() else x, y

    return classify(model, batch, torch.optim.AdamW(model.parameters(), 2e-3))


def declare() -> None:
    perceptrons()
    regressions()
    convolutions()
    recurrents()
    transformers()
    conditions()
