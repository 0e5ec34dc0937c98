"""Faulty runs: one fault each, from the start or from step 30 on, in one layer, branch, head or expert."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis import models
from benchmarks.diagnosis.common import classify, make, regress, schedule
from benchmarks.diagnosis.data import clusters, images, sequences, surface, text
from benchmarks.diagnosis.run import Expected, Run, add

LATE = 29


def at(run: Run, step: int, change: Callable[[], object]) -> Run:
    """Do something to a run before a step."""

    def act(now: int) -> None:
        if now == step:
            with torch.no_grad():
                change()

    run.before.append(act)
    return run


def _when(name: str) -> int:
    return LATE if name == "late" else 0


def depth() -> None:
    vanishing = lambda where: Expected("VANISHING", where, ("BOTTLENECK",))  # noqa: E731
    for width, layers in product((24, 48), (9, 14)):
        add(
            f"vanishing/sigmoid_{width}_{layers}",
            lambda width=width, layers=layers: classify(
                models.mlp([24, *[width] * layers, 5], "sigmoid"), clusters(), "adam"
            ),
            vanishing(r"lin[0-4]\b"),
        )
    for act, gain in product(("tanh", "relu", "gelu"), (0.3, 0.5)):
        add(
            f"vanishing/small_init_{act}_{gain}",
            lambda act=act, gain=gain: classify(
                _gained(models.mlp([24, *[40] * 14, 5], act), gain), clusters(), "sgd" if gain == 0.5 else "adam"
            ),
            vanishing(r"lin[0-6]\b"),
        )
    add(
        "vanishing/cnn",
        lambda: classify(_gained(models.ConvNet(depth=10, norm=""), 0.4), images(), "adam"),
        vanishing(r"convs\.[0-4]\b"),
    )
    add(
        "vanishing/sgd",
        lambda: classify(_gained(models.mlp([24, *[40] * 14, 5], "tanh"), 0.5), clusters(), "sgd"),
        vanishing(r"lin[0-6]\b"),
    )
    add(
        "vanishing/functional",
        lambda: classify(_gained(models.FunctionalMlp([24, *[32] * 12, 5], torch.tanh), 0.4), clusters(), "adam"),
        vanishing(r"layers\.[0-6]\b"),
    )
    add(
        "vanishing/branch",
        lambda: classify(
            models.Branches(models.mlp([24, 32, 32]), _gained(models.mlp([24, *[32] * 12, 32], "tanh"), 0.4), 64, 5),
            clusters(),
            "adam",
        ),
        vanishing(r"right\.lin[0-6]\b"),
    )
    add(
        "vanishing/encoder",
        lambda: classify(
            models.Backboned(_gained(models.mlp([24, *[32] * 12, 32], "sigmoid"), 2.0), nn.Linear(32, 5)),
            clusters(),
            "adam",
        ),
        vanishing(r"backbone\.lin[0-6]\b"),
    )
    exploding = lambda where: Expected("EXPLODING", where, ("LR_TOO_HIGH",))  # noqa: E731
    for act, gain, layers in (
        ("relu", 3.0, 10),
        ("relu", 4.0, 8),
        ("leaky", 3.0, 10),
        ("gelu", 4.0, 10),
        ("elu", 3.0, 12),
    ):
        add(
            f"exploding/{act}_{gain}_{layers}",
            lambda act=act, gain=gain, layers=layers: classify(
                _gained(models.mlp([24, *[48] * layers, 5], act), gain), clusters(), _sgd(1e-9)
            ),
            exploding(r"lin\d"),
        )
    add(
        "exploding/cnn",
        lambda: classify(_gained(models.ConvNet(depth=10, norm=""), 3.5), images(), _sgd(1e-9)),
        exploding("convs"),
    )
    add(
        "exploding/residual",
        lambda: classify(_gained(models.FunctionalMlp([24, *[40] * 12, 5], F.leaky_relu), 3.0), clusters(), _sgd(1e-9)),
        exploding("layers"),
    )


def _gained(model: Any, gain: float) -> Any:
    """Draw all but the last layer's weights so that each has a gain."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    for layer in layers[:-1]:
        nn.init.normal_(layer.weight, std=gain / layer.weight[0].numel() ** 0.5)
        nn.init.zeros_(layer.bias)
    return model


def dead() -> None:
    expected = lambda where: Expected("DEAD", where)  # noqa: E731
    for layer, when in product((0, 1, 2), ("start", "late")):
        add(
            f"dead/mlp_{layer}_{when}",
            lambda layer=layer, when=when: _killed(
                classify(models.mlp([24, 48, 48, 48, 5], init="he"), clusters(), "adam"), f"lin{layer}", 1.0, when
            ),
            expected(rf"(lin|nl){layer}\b"),
        )
    for share in (0.7, 0.9):
        add(
            f"dead/part_{share}",
            lambda share=share: _killed(
                classify(models.mlp([24, 64, 64, 5], init="he"), clusters(), "sgd"), "lin1", share, "start"
            ),
            expected(r"(lin|nl)1\b"),
        )
    add(
        "dead/functional",
        lambda: _killed(
            classify(models.FunctionalMlp([24, 48, 48, 48, 5]), clusters(), "adam"), "layers.1", 1.0, "start"
        ),
        expected(r"layers\.1\b"),
    )
    for when in ("start", "late"):
        add(
            f"dead/cnn_{when}",
            lambda when=when: _killed(classify(models.ConvNet(norm=""), images(), "momentum"), "convs.1", 1.0, when),
            expected(r"(convs|acts|norms)\.1\b"),
        )
        add(
            f"dead/cnn_norm_{when}",
            lambda when=when: _killed(classify(models.ConvNet(), images(), "adam"), "norms.2", 0.8, when),
            expected(r"(convs|acts|norms)\.2\b"),
        )
    add(
        "dead/gelu",
        lambda: _killed(classify(models.mlp([24, 48, 48, 5], "gelu"), clusters(), "adam"), "lin1", 1.0, "start"),
        expected(r"(lin|nl)1\b"),
    )
    add(
        "dead/resnet_branch",
        lambda: _killed(classify(models.ResNet(3), images(), "momentum"), "blocks.1.bn1", 1.0, "start"),
        expected(r"blocks\.1\b"),
    )
    add(
        "dead/transformer_ffn",
        lambda: _killed(classify(models.Language(act="relu", depth=3), text(), "adam"), "layers.1.fc_in", 1.0, "start"),
        expected(r"layers\.1\b"),
    )
    add(
        "dead/branch",
        lambda: _killed(
            classify(
                models.Branches(models.mlp([24, 32, 32, 16]), models.mlp([24, 32, 32, 16]), 32, 5), clusters(), "adam"
            ),
            "right.lin1",
            1.0,
            "late",
        ),
        expected(r"right\.(lin|nl)1\b"),
    )
    add(
        "dead/expert",
        lambda: _killed(classify(models.Experts(soft=True), clusters(), "adam"), "experts.2.lin0", 1.0, "start"),
        expected(r"experts\.2\b"),
    )
    add(
        "dead/policy_trunk",
        lambda: _killed(regress(models.mlp([12, 64, 64, 1], init="he"), surface(), "adam"), "lin0", 0.95, "start"),
        expected(r"(lin|nl)0\b"),
    )


def _killed(run: Run, layer: str, share: float, when: str) -> Run:
    module = run.model.get_submodule(layer)

    def kill() -> None:
        bias = module.bias
        assert isinstance(bias, Tensor)
        count = int(share * len(bias))
        bias[:count] = -60.0
        if isinstance(module, nn.BatchNorm2d):
            module.weight[:count] = 0.1  # type: ignore[index]

    return at(run, _when(when), kill)


def saturation() -> None:
    expected = lambda where: Expected("SATURATION", where)  # noqa: E731
    for act, gain in (("tanh", 20.0), ("tanh", 8.0), ("sigmoid", 60.0)):
        add(
            f"saturation/{act}_{gain}",
            lambda act=act, gain=gain: classify(
                _gained(models.mlp([24, 48, 48, 48, 5], act), gain), clusters(), "adam"
            ),
            expected(r"(lin|nl)[0-2]\b"),
        )
    for when in ("start", "late"):
        add(
            f"saturation/one_layer_{when}",
            lambda when=when: _stretched(
                classify(models.mlp([24, 48, 48, 48, 5], "tanh", init="xavier"), clusters(), "adam"), "lin1", 40.0, when
            ),
            expected(r"(lin|nl)1\b"),
        )
        add(
            f"saturation/functional_{when}",
            lambda when=when: _stretched(
                classify(models.FunctionalMlp([24, 48, 48, 5], torch.tanh), clusters(), "adam"), "layers.1", 30.0, when
            ),
            expected(r"layers\.1\b"),
        )
    add(
        "saturation/regression",
        lambda: _stretched(
            regress(models.mlp([12, 40, 40, 40, 1], "tanh", init="xavier"), surface(), "sgd"), "lin2", 40.0, "start"
        ),
        expected(r"(lin|nl)2\b"),
    )
    add(
        "saturation/unscaled_input",
        lambda: regress(
            models.mlp([12, 40, 40, 1], "tanh", init="xavier"),
            lambda t: (300 * surface()(t)[0], surface()(t)[1]),
            "adam",
        ),
        expected(r"(lin|nl)0\b"),
    )
    add("saturation/rnn", lambda: _stretched_recurrent(), expected("core"))


def _stretched(run: Run, layer: str, factor: float, when: str) -> Run:
    module = run.model.get_submodule(layer)
    return at(run, _when(when), lambda: module.weight.mul_(factor))  # type: ignore[operator,union-attr,func-returns-value]


def _stretched_recurrent() -> Run:
    run = classify(models.Recurrent("RNN"), sequences(), "adam")
    return at(run, 0, lambda: run.model.core.weight_ih_l0.mul_(40.0))  # type: ignore[union-attr,operator,func-returns-value]


def bottleneck() -> None:
    expected = lambda where: Expected("BOTTLENECK", where, ("RANK_COLLAPSE",))  # noqa: E731
    for act, place in product(("tanh", "gelu", "leaky"), (1, 2)):
        widths = [24, 64, 64, 64, 10]
        widths[place + 1] = 1
        add(
            f"bottleneck/one_unit_{act}_{place}",
            lambda widths=widths, act=act: classify(models.mlp(widths, act, init="xavier"), clusters(10), "adam"),
            expected(rf"(lin|nl)[{place}{place + 1}]\b"),
        )
    for when in ("start", "late"):
        add(
            f"bottleneck/rank_one_{when}",
            lambda when=when: _flattened(
                classify(models.mlp([24, 64, 64, 64, 10], "tanh", init="xavier"), clusters(10), "sgd"), "lin2", when
            ),
            expected(r"(lin|nl)[123]\b"),
        )
    add("bottleneck/cnn", lambda: classify(_cnn_neck(), images(8), "adam"), expected(r"neck|widen"))
    add("bottleneck/text", lambda: classify(_text_neck(), text(), "adam"), expected(r"neck|widen"))


def _flattened(run: Run, layer: str, when: str) -> Run:
    module = run.model.get_submodule(layer)

    def flatten() -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        left, values, right = torch.linalg.svd(weight)
        weight.copy_(values[0] * torch.outer(left[:, 0], right[0]))

    return at(run, _when(when), flatten)


def _cnn_neck() -> nn.Module:
    from collections import OrderedDict

    return nn.Sequential(
        OrderedDict(
            conv0=nn.Conv2d(3, 16, 3, padding=1),
            nl0=nn.ReLU(),
            pool0=nn.AvgPool2d(3),
            flat=nn.Flatten(),
            lin0=nn.Linear(256, 64),
            nl1=nn.Tanh(),
            neck=nn.Linear(64, 1),
            nl2=nn.Tanh(),
            widen=nn.Linear(1, 64),
            nl3=nn.Tanh(),
            head=nn.Linear(64, 8),
        )
    )


def _text_neck() -> nn.Module:
    from collections import OrderedDict

    return nn.Sequential(
        OrderedDict(
            tokens=nn.Embedding(40, 32),
            lin0=nn.Linear(32, 32),
            nl0=nn.GELU(),
            neck=nn.Linear(32, 1),
            nl1=nn.Tanh(),
            widen=nn.Linear(1, 32),
            nl2=nn.GELU(),
            head=nn.Linear(32, 40),
        )
    )


def wiring() -> None:
    disconnected = lambda where: Expected("DISCONNECTED", where, ("UNCHANGED",))  # noqa: E731
    cut = lambda model: classify(model, clusters(), "adam")  # noqa: E731
    add(
        "disconnected/detached",
        lambda: cut(models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5), lambda x: x.detach())),
        disconnected("backbone"),
    )
    add("disconnected/no_grad", lambda: cut(_Blind()), disconnected("encoder"))
    add(
        "disconnected/numpy",
        lambda: cut(
            models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5), lambda x: torch.from_numpy(x.detach().numpy()))
        ),
        disconnected("backbone"),
    )
    add("disconnected/unused_head", lambda: _multi(used=("a",)), disconnected(r"heads\.b"))
    add("disconnected/unused_layer", lambda: cut(_with_spare(models.mlp([24, 48, 5]))), disconnected("spare"))
    add(
        "disconnected/argmax",
        lambda: cut(
            models.Backboned(
                models.mlp([24, 48, 32]), models.mlp([32, 5]), lambda x: F.one_hot(x.argmax(-1), 32).float()
            )
        ),
        disconnected("backbone"),
    )
    add(
        "disconnected/resnet_block",
        lambda: classify(_bypassed(models.ResNet(3)), images(), "momentum"),
        disconnected(r"blocks\.1"),
    )
    add(
        "disconnected/expert",
        lambda: classify(_closed(models.Experts(count=4, top=1)), clusters(), "adam"),
        Expected("DISCONNECTED", r"experts\.3", ("DEAD", "UNCHANGED")),
    )
    unchanged = lambda where: Expected("UNCHANGED", where, ("DISCONNECTED",))  # noqa: E731
    for kind in ("sgd", "adam"):
        add(
            f"unchanged/backbone_{kind}",
            lambda kind=kind: _partly(models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5)), "head", kind),
            unchanged("backbone"),
        )
    add(
        "unchanged/head",
        lambda: _partly(models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5)), "backbone", "adam"),
        unchanged("head"),
    )
    add("unchanged/replaced_head", lambda: _replaced(), unchanged("head"))
    add("unchanged/restored", lambda: _restored(), unchanged("lin1"))
    add(
        "unchanged/cnn_stem",
        lambda: _without(classify(models.ConvNet(), images(), "adam"), "convs.0"),
        unchanged(r"convs\.0"),
    )
    add("unchanged/group_rate_zero", lambda: _zero_rate(), unchanged("backbone"))
    add(
        "unchanged/transformer_layer",
        lambda: _without(classify(models.Language(depth=3), text(), "adam"), "layers.1"),
        unchanged(r"layers\.1"),
    )
    add(
        "unchanged/embedding",
        lambda: _without(classify(models.Language(), text(), "adam"), "tokens"),
        unchanged("tokens"),
    )
    stale = Expected("STALE_GRAD", ".*")
    for kind in ("sgd", "momentum", "adam"):
        add(
            f"stale/mlp_{kind}",
            lambda kind=kind: _kept(classify(models.mlp([24, 48, 48, 5], "tanh"), clusters(), kind)),
            stale,
        )
    add("stale/cnn", lambda: _kept(classify(models.ConvNet(), images(), "sgd")), stale)
    add("stale/lstm", lambda: _kept(classify(models.Recurrent("LSTM"), sequences(), "adam")), stale)
    add("stale/language", lambda: _kept(classify(models.Language(), text(), "adam")), stale)
    add("stale/late", lambda: _kept(classify(models.mlp([24, 48, 48, 5]), clusters(), "adam"), LATE), stale)
    add(
        "stale/accumulating",
        lambda: _kept(classify(models.mlp([24, 48, 48, 5]), clusters(size=16), "sgd", accumulate=2)),
        stale,
    )


class _Blind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = models.mlp([24, 48, 32]), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.encoder(x)
        out: Tensor = self.head(z)
        return out


def _with_spare(model: nn.Module) -> nn.Module:
    outer = models.Backboned(model, nn.Identity())
    outer.spare = nn.Linear(7, 7)
    return outer


def _bypassed(model: models.ResNet) -> nn.Module:
    block = model.blocks[1]
    block.forward = lambda x: x  # type: ignore[method-assign]
    return model


def _closed(model: models.Experts) -> nn.Module:
    with torch.no_grad():
        model.gate.bias[3] = -1e4
    return model


def _multi(used: tuple[str, ...], weights: dict[str, float] | None = None, optimizer: str = "adam") -> Run:
    model = models.Heads(models.mlp([24, 48, 48]), {"a": nn.Linear(48, 5), "b": nn.Linear(48, 5)})
    batches = clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        out = model(x)
        return sum(
            (weights or {}).get(name, 1.0) * F.cross_entropy(out[name], (y + (name == "b")) % 5) for name in used
        )  # type: ignore[return-value]

    return Run(model=model, forward=forward, optimizer=make(optimizer, model.parameters()))


def _partly(model: nn.Module, part: str, kind: str) -> Run:
    return classify(model, clusters(), make(kind, model.get_submodule(part).parameters()))


def _without(run: Run, layer: str) -> Run:
    outside = {id(param) for param in run.model.get_submodule(layer).parameters()}
    run.optimizer = torch.optim.Adam([param for param in run.model.parameters() if id(param) not in outside], 1e-3)
    return run


def _replaced() -> Run:
    model = models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 7))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.head = nn.Linear(32, 5)
    return classify(model, clusters(), optimizer)


def _restored() -> Run:
    run = classify(models.mlp([24, 48, 48, 5]), clusters(), "adam")
    kept = {name: param.detach().clone() for name, param in run.model.lin1.named_parameters()}  # type: ignore[union-attr,operator]

    def restore(_: int) -> None:
        with torch.no_grad():
            for name, param in run.model.lin1.named_parameters():  # type: ignore[union-attr,operator]
                param.copy_(kept[name])

    run.before.append(restore)
    return run


def _zero_rate() -> Run:
    model = models.Backboned(models.mlp([24, 48, 32]), nn.Linear(32, 5))
    groups = [{"params": list(model.backbone.parameters()), "lr": 0.0}, {"params": list(model.head.parameters())}]
    return classify(model, clusters(), torch.optim.Adam(groups, 1e-3))


def _kept(run: Run, since: int = 0) -> Run:
    run.zero = False

    def clear(step: int) -> None:
        if step < since:
            for optimizer in run.optimizers:
                optimizer.zero_grad()

    run.before.append(clear)
    return run


def _beyond_float32(run: Run) -> Run:
    """Mark a run whose gradients overflow: where that happens does depend on the scale of the loss."""
    run.scalable = False
    return run


def rates() -> None:
    high = Expected("LR_TOO_HIGH", ".*", ("UNSTABLE", "EXPLODING", "NUMERICAL"))
    for name, build in (
        ("mlp_sgd_50", lambda: classify(models.mlp([24, 48, 48, 5]), clusters(), _sgd(50.0))),
        ("mlp_adam_1", lambda: classify(models.mlp([24, 48, 48, 5]), clusters(), _adam(1.0))),
        ("tanh_adam_half", lambda: classify(models.mlp([24, 48, 48, 5], "tanh"), clusters(), _adam(0.5))),
        ("cnn_adam_half", lambda: classify(models.ConvNet(), images(), _adam(0.5))),
        ("language_adam_half", lambda: classify(models.Language(), text(), _adam(0.5))),
        ("gru_adam_1", lambda: classify(models.Recurrent("GRU"), sequences(), _adam(1.0))),
        (
            "regression_momentum_3",
            lambda: _beyond_float32(regress(models.mlp([12, 48, 1], "tanh"), surface(), _sgd(3.0, 0.9))),
        ),
        ("resnet_sgd_100", lambda: _beyond_float32(classify(models.ResNet(2), images(), _sgd(100.0)))),
    ):
        add(f"rate_high/{name}", lambda build=build: build(), high)
    for factor, kind in product((1e3, 1e4), ("adam", "sgd")):
        add(
            f"rate_high/late_{factor:g}_{kind}",
            lambda factor=factor, kind=kind: schedule(
                classify(models.mlp([24, 48, 48, 5], "tanh"), clusters(), kind),
                lambda t: factor if t >= LATE - 5 else 1.0,
            ),
            high,
        )
    low = Expected("LR_TOO_LOW", ".*", ("UNCHANGED",))
    for name, build in (
        ("mlp_sgd", lambda: classify(models.mlp([24, 48, 48, 5]), clusters(), _sgd(1e-8))),
        ("mlp_adam", lambda: classify(models.mlp([24, 48, 48, 5]), clusters(), _adam(1e-9))),
        ("cnn_momentum", lambda: classify(models.ConvNet(), images(), _sgd(1e-8, 0.9))),
        ("language_adam", lambda: classify(models.Language(std=0.0), text(), _adam(1e-9))),
        ("lstm_sgd", lambda: classify(models.Recurrent("LSTM"), sequences(), _sgd(1e-7))),
        ("regression_sgd", lambda: regress(models.mlp([12, 48, 1]), surface(), _sgd(1e-9))),
        ("resnet_adam", lambda: classify(models.ResNet(2), images(), _adam(1e-10))),
        ("vision_sgd", lambda: classify(models.Vision(), images(), _sgd(1e-8))),
    ):
        add(f"rate_low/{name}", lambda build=build: build(), low)
    unstable = Expected("UNSTABLE", ".*", ("LR_TOO_HIGH", "EXPLODING"))
    for excess, width in product((1.005, 1.02, 1.05), (8, 20)):
        add(
            f"unstable/quadratic_{excess}_{width}",
            lambda excess=excess, width=width: _quadratic(excess, width),
            unstable,
        )
    add("unstable/momentum", lambda: _quadratic(1.02, 16, momentum=0.5), unstable)


def _sgd(rate: float, momentum: float = 0.0) -> Callable[[Any], Any]:
    return lambda params: torch.optim.SGD(params, rate, momentum=momentum)


def _adam(rate: float) -> Callable[[Any], Any]:
    return lambda params: torch.optim.Adam(params, rate)


def _quadratic(excess: float, width: int, momentum: float = 0.0) -> Run:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(200, width, generator=generator)
    x[:, 0] *= 4
    target = x @ torch.randn(width, 1, generator=generator)
    model = nn.Linear(width, 1, bias=False)
    curvature = float(torch.linalg.eigvalsh(2 * x.T @ x / 200)[-1])
    rate = 2 * (1 + momentum) * excess / curvature
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    return Run(model=model, forward=lambda _: (model(x) - target).pow(2).mean(), optimizer=optimizer)


def numerics() -> None:
    expected = Expected("NUMERICAL", ".*")
    for when in ("start", "late"):
        add(f"numerical/log_of_zero_{when}", lambda when=when: _log_of_zero(_when(when)), expected)
        add(f"numerical/bad_batch_{when}", lambda when=when: _bad_batch(_when(when)), expected)
    add("numerical/sqrt_of_zero", lambda: _sqrt(), expected)
    add("numerical/division", lambda: _division(), expected)
    add(
        "numerical/overflowing_exp",
        lambda: regress(models.mlp([12, 32, 1]), surface(), "adam", lambda a, b: ((1e3 * a).exp() - b).pow(2).mean()),
        expected,
    )
    add("numerical/infinite_mask", lambda: _masked(), expected)
    add(
        "numerical/weights",
        lambda: at(
            run := classify(models.mlp([24, 48, 48, 5]), clusters(), "adam"),
            20,
            lambda: run.model.lin1.weight[0, :1].fill_(float("nan")),
        ),
        Expected("NUMERICAL", r".*"),
    )  # type: ignore[union-attr,index,operator]
    for name, build in (
        ("mlp", lambda: (models.mlp([24, 48, 48, 5]), clusters())),
        ("cnn", lambda: (models.ConvNet(), images())),
        ("language", lambda: (models.Language(std=0.0), text())),
    ):
        add(
            f"numerical/rounded_{name}",
            lambda build=build: _rounded(*build()),
            Expected("NUMERICAL", ".*", ("LR_TOO_LOW", "UNCHANGED")),
        )
    spike = Expected("EXPLODING", ".*", ("UNSTABLE", "NUMERICAL"))
    for factor, when in product((200.0, 5000.0), (20, 30, 38)):
        add(f"spike/regression_{factor:g}_{when}", lambda factor=factor, when=when: _spiked(factor, when), spike)


def _log_of_zero(since: int) -> Run:
    model, batches = models.mlp([24, 48, 5]), clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        sharp = 3000.0 if step >= since else 1.0
        return -(sharp * model(x)).softmax(-1).gather(1, y[:, None]).log().mean()

    return Run(model=model, forward=forward, optimizer=make("adam", model.parameters()))


def _bad_batch(since: int) -> Run:
    batches = clusters()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        if step == max(since, 3):
            x[0, 0] = float("nan")
        return x, y

    return classify(models.mlp([24, 48, 5]), batch, "adam")


def _sqrt() -> Run:
    model, batches = models.mlp([12, 32, 1]), surface()
    return Run(
        model=model,
        forward=lambda t: ((model(batches(t)[0]) - model(batches(t)[0])) ** 2).sum(1).sqrt().mean(),
        optimizer=make("adam", model.parameters()),
    )


def _rounded(model: nn.Module, batches: Any) -> Run:
    model = model.bfloat16()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x.bfloat16() if x.is_floating_point() else x, y

    return classify(model, batch, _adam(1e-6))


def _division() -> Run:
    model, batches = models.mlp([12, 32, 8]), surface()

    def forward(step: int) -> Tensor:
        out = model(batches(step)[0]).relu() - 5
        out = out.relu()
        return (out / out.sum(1, keepdim=True)).sum(1).mean()

    return Run(model=model, forward=forward, optimizer=make("adam", model.parameters()))


def _masked() -> Run:
    model, batches = models.mlp([24, 48, 5]), clusters()

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        out = model(x)
        mask = torch.zeros_like(out, dtype=torch.bool)
        if step % 5 == 2:
            mask[0] = True
        return F.cross_entropy(out.masked_fill(mask, float("-inf")), y)

    return Run(model=model, forward=forward, optimizer=make("adam", model.parameters()))


def _spiked(factor: float, when: int) -> Run:
    batches = surface()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, factor * y + factor if step == when else y

    return regress(models.mlp([12, 48, 1], "tanh"), batch, "adam")


def balance() -> None:
    clipped = Expected("CLIP_SATURATED", ".*")
    for limit, name, build in (
        (1e-3, "mlp", lambda: classify(models.mlp([24, 48, 5]), clusters(), "sgd")),
        (1e-4, "cnn", lambda: classify(models.ConvNet(), images(), "momentum")),
        (1e-4, "language", lambda: classify(models.Language(), text(), "adam")),
        (1.0, "summed", lambda: _times(regress(models.mlp([12, 48, 1]), surface(), "adam"), 1e5)),
    ):
        add(f"clip_saturated/managed_{name}", lambda build=build, limit=limit: _managed(build(), limit), clipped)
        add(f"clip_saturated/own_{name}", lambda build=build, limit=limit: _own(build(), limit), clipped)
    imbalance = lambda where: Expected("GRAD_IMBALANCE", where, ("EXPLODING",))  # noqa: E731
    for weight in (3e4, 1e6):
        add(
            f"imbalance/head_{weight:g}",
            lambda weight=weight: _multi(("a", "b"), {"b": weight}),
            imbalance(r"heads\.b"),
        )
    add("imbalance/input_scale", lambda: _unscaled(), imbalance("right"))


def _times(run: Run, factor: float) -> Run:
    plain = run.forward
    run.forward = lambda step: factor * plain(step)
    return run


def _managed(run: Run, limit: float) -> Run:
    run.settings = {"enable_gradient_clipping": True, "max_grad_norm": limit}
    run.scalable = False
    return run


def _own(run: Run, limit: float) -> Run:
    run.after.append(lambda _: torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit))
    run.scalable = False
    return run


def _unscaled() -> Run:
    """Return a run with one layer whose weights are tiny and whose output is multiplied up."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(12, 32), nn.Linear(12, 32, bias=False)
            self.mid, self.mid2, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
            nn.init.normal_(self.right.weight, std=1e-5)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.left(x) + 1e4 * self.right(x))
            out: Tensor = self.head(torch.tanh(self.mid2(torch.tanh(self.mid(z)))))
            return out

    return regress(Model(), surface(), _adam(1e-7))


def declare() -> None:
    depth()
    dead()
    saturation()
    bottleneck()
    wiring()
    rates()
    numerics()
    balance()
