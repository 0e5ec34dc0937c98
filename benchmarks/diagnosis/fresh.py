"""Runs that were written after the rules and looked at once: other widths, data, optimizers and places."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.diagnosis import faults, models, special
from benchmarks.diagnosis.common import classify, regress, schedule
from benchmarks.diagnosis.data import clusters, images, sequences, surface, text
from benchmarks.diagnosis.run import Expected, add


def healthy() -> None:
    for act, width, optimizer in product(("relu", "tanh", "silu"), (20, 96), ("nadam", "nesterov", "adamw")):
        add(
            f"fresh_mlp/{act}_{width}_{optimizer}",
            lambda act=act, width=width, optimizer=optimizer: classify(
                models.mlp([30, width, width, 8], act), clusters(8, 30, 32, salt=21), optimizer
            ),
        )
    for norm, act, optimizer in product(("batch", "group"), ("relu", "silu"), ("adamw", "nesterov", "rmsprop")):
        add(
            f"fresh_cnn/{norm}_{act}_{optimizer}",
            lambda norm=norm, act=act, optimizer=optimizer: classify(
                models.ConvNet(6, 16, 4, norm, act), images(6, side=14, size=16, salt=22), optimizer
            ),
        )
    for cell, layers, optimizer in product(("GRU", "LSTM"), (1, 2), ("adam_fast", "rmsprop", "adamw")):
        add(
            f"fresh_recurrent/{cell}_{layers}_{optimizer}",
            lambda cell=cell, layers=layers, optimizer=optimizer: classify(
                models.Recurrent(cell, 32, num_layers=layers), sequences(14, lag=1, salt=23), optimizer
            ),
        )
    for depth, act, optimizer in product((2, 3), ("gelu", "silu"), ("adamw", "adam", "nadam")):
        add(
            f"fresh_transformer/{depth}_{act}_{optimizer}",
            lambda depth=depth, act=act, optimizer=optimizer: schedule(
                classify(models.Language(60, 40, depth, act=act), text(60, 12, 10, salt=24), optimizer),
                lambda t: min(1.0, (t + 1) / 5),
            ),
        )
    for loss, width, optimizer in product((F.mse_loss, F.smooth_l1_loss), (24, 80), ("adam", "adagrad", "rmsprop")):
        add(
            f"fresh_regression/{loss.__name__}_{width}_{optimizer}",
            lambda loss=loss, width=width, optimizer=optimizer: regress(
                models.mlp([12, width, width, 1], "silu"), surface(scale=30.0, salt=25), optimizer, loss
            ),
        )
    for temperature, optimizer in product((0.2, 1.0), ("adamw", "nesterov")):
        add(f"fresh_contrastive/{temperature}_{optimizer}", lambda t=temperature, o=optimizer: special._info_nce(t, o))
    for count, top in ((3, 1), (6, 2), (8, 3)):
        add(
            f"fresh_experts/{count}_{top}",
            lambda count=count, top=top: classify(models.Experts(30, 8, count, top), clusters(8, 30, salt=26), "adam"),
        )
    for latent, act in product((3, 6), ("silu", "gelu")):
        add(f"fresh_autoencoder/{latent}_{act}", lambda latent=latent, act=act: special._autoencoder(latent, act))
        add(f"fresh_vae/{latent}_{act}", lambda latent=latent, act=act: special._vae(latent, act, "adam", beta=0.5))
    for actions, entropy in product((3, 6), (0.005, 0.05)):
        add(f"fresh_policy/{actions}_{entropy}", lambda a=actions, e=entropy: special._reinforce(a, e))
    for parts, size in product((3, 6), (8, 16)):
        add(
            f"fresh_accumulation/{parts}_{size}",
            lambda parts=parts, size=size: classify(
                models.mlp([30, 40, 8], "gelu"), clusters(8, 30, size, salt=27), "adam", accumulate=parts
            ),
        )


def faulty() -> None:
    def wide() -> nn.Sequential:
        return models.mlp([30, 56, 56, 56, 56, 8], "relu", init="he")

    data = lambda: clusters(8, 30, 40, salt=31)  # noqa: E731
    for layer, when in product((1, 3), ("start", "late")):
        add(
            f"fresh_dead/{layer}_{when}",
            lambda layer=layer, when=when: faults._killed(classify(wide(), data(), "nadam"), f"lin{layer}", 0.95, when),
            Expected("DEAD", rf"(lin|nl){layer}\b"),
        )
    for act, gain in (("tanh", 0.35), ("silu", 0.4), ("elu", 0.3)):
        add(
            f"fresh_vanishing/{act}",
            lambda act=act, gain=gain: classify(
                faults._gained(models.mlp([30, *[36] * 13, 8], act), gain), data(), "sgd"
            ),
            Expected("VANISHING", r"lin[0-6]\b", ("BOTTLENECK",)),
        )
    for act, gain in (("relu", 4.5), ("elu", 3.5), ("silu", 5.0)):
        add(
            f"fresh_exploding/{act}",
            lambda act=act, gain=gain: classify(
                faults._gained(models.mlp([30, *[40] * 10, 8], act), gain), data(), faults._sgd(1e-9)
            ),
            Expected("EXPLODING", r"lin\d"),
        )
    for layer, when in product(("lin0", "lin2"), ("start", "late")):
        add(
            f"fresh_saturation/{layer}_{when}",
            lambda layer=layer, when=when: faults._stretched(
                classify(models.mlp([30, 44, 44, 44, 8], "tanh", init="xavier"), data(), "adamw"), layer, 60.0, when
            ),
            Expected("SATURATION", rf"{layer}\b|nl{layer[-1]}\b"),
        )
    for rate, act in product((0.3, 2.0), ("relu", "silu", "tanh")):
        add(
            f"fresh_rate_high/{act}_{rate}",
            lambda rate=rate, act=act: classify(models.mlp([30, 40, 40, 8], act), data(), faults._adam(rate)),
            Expected("LR_TOO_HIGH", ".*", ("UNSTABLE", "EXPLODING", "NUMERICAL")),
        )
    for rate, build in ((1e-9, "adam"), (1e-8, "sgd")):
        add(
            f"fresh_rate_low/{build}",
            lambda rate=rate, build=build: classify(
                models.ConvNet(6, 16), images(6, salt=32), (faults._adam if build == "adam" else faults._sgd)(rate)
            ),
            Expected("LR_TOO_LOW", ".*", ("UNCHANGED",)),
        )
    add(
        "fresh_bottleneck/one_unit",
        lambda: classify(models.mlp([30, 80, 80, 1, 80, 8], "silu", init="xavier"), data(), "adam"),
        Expected("BOTTLENECK", r"(lin|nl)[23]\b"),
    )
    add(
        "fresh_disconnected/detached",
        lambda: classify(models.Backboned(models.ConvNet(12), nn.Linear(12, 6), torch.detach), images(6), "adam"),
        Expected("DISCONNECTED", "backbone"),
    )
    add(
        "fresh_unchanged/gru",
        lambda: faults._without(classify(models.Recurrent("GRU"), sequences(), "adam"), "core"),
        Expected("UNCHANGED", "core"),
    )
    add(
        "fresh_stale/gru",
        lambda: faults._kept(classify(models.Recurrent("GRU"), sequences(), "sgd")),
        Expected("STALE_GRAD", ".*"),
    )
    for name, when in (("start", 4), ("late", 33)):
        add(f"fresh_numerical/bad_batch_{name}", lambda when=when: faults._bad_batch(when), Expected("NUMERICAL", ".*"))
    for factor in (80.0, 1000.0):
        add(
            f"fresh_spike/{factor:g}",
            lambda factor=factor: faults._spiked(factor, 27),
            Expected("EXPLODING", ".*", ("UNSTABLE",)),
        )


def declare() -> None:
    healthy()
    faulty()
