"""Faulty runs: what is wrong lies in the layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.corner.book import (
    Batch,
    adam,
    counting,
    dense,
    discs,
    entropy,
    faulty,
    fit,
    from_step,
    gain,
    groups,
    house,
    normal,
    sgd,
)
from benchmarks.diagnosis.corner.pictures import residual
from benchmarks.diagnosis.corner.series import Sparse
from benchmarks.diagnosis.run import Run


@faulty("vanishing/fourteen_tanh_layers_of_small_weights", "VANISHING", r"fc[0-6]\b")
def tanh_small() -> Run:
    model = gain(dense(20, *[40] * 13, 4, act=nn.Tanh), 0.45)
    return fit(model, sgd(model, 0.05))


@faulty("vanishing/sigmoids_as_torch_makes_them", "VANISHING", r"fc[0-4]\b")
def sigmoids() -> Run:
    model = dense(20, *[32] * 9, 4, act=nn.Sigmoid)
    return fit(model, adam(model, 1e-3))


@faulty("vanishing/four_layers_in_the_middle", "VANISHING", r"fc[0-6]\b", "BOTTLENECK", "GRAD_IMBALANCE")
def middle() -> Run:
    model = gain(dense(20, *[48] * 9, 4, act=nn.Tanh), 1.0)
    for layer in (model.fc3, model.fc4, model.fc5, model.fc6):
        layer.weight.data.mul_(0.05)
    return fit(model, sgd(model, 0.05))


@faulty("vanishing/convolutions_of_tiny_weights", "VANISHING", r"^[0-8]\b")
def tiny_convolutions() -> Run:
    parts: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        parts += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model = gain(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)), 0.3)
    return fit(model, sgd(model, 0.05, momentum=0.9), discs)


@faulty("exploding/elu_layers_of_three_times_he", "EXPLODING", r"fc\d")
def elu_large() -> Run:
    model = gain(dense(20, *[48] * 9, 4, act=nn.ELU), 3.5)
    return fit(model, sgd(model, 1e-10))


@faulty("exploding/residual_sum_that_doubles_twenty_times", "EXPLODING", r"units|\d", "LR_TOO_HIGH", "NUMERICAL")
def doubling() -> Run:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(32, 32)
            nn.init.orthogonal_(self.map.weight, 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.map(x)

    model = nn.Sequential(nn.Linear(20, 32), *(Double() for _ in range(12)), nn.Linear(32, 4))
    return fit(model, sgd(model, 1e-9))


@faulty("exploding/one_layer_drawn_a_thousand_times_too_wide", "EXPLODING", r"fc[123]|act[123]", "GRAD_IMBALANCE")
def one_wide() -> Run:
    model = gain(dense(20, 48, 48, 48, 4), 2**0.5)
    model.fc2.weight.data.mul_(1000)
    return fit(model, sgd(model, 1e-7))


def _he(depth: int = 4) -> nn.Module:
    return gain(dense(20, *[64] * depth, 4), 2**0.5)


@faulty("dead/second_layer_by_its_bias", "DEAD", r"(fc|act)1\b")
def dead_bias() -> Run:
    model = _he()
    model.fc1.bias.data.fill_(-30.0)
    return fit(model, adam(model, 1e-3))


@faulty("dead/seven_in_ten_of_the_last", "DEAD", r"(fc|act)3\b")
def dead_share() -> Run:
    model = _he()
    model.fc3.bias.data[:45] = -40.0
    return fit(model, sgd(model, 0.05))


@faulty("dead/a_leap_of_the_biases_at_thirty", "DEAD", r"(fc|act)2\b")
def dead_late() -> Run:
    model = _he()

    def leap() -> None:
        model.fc2.bias.data.sub_(60.0)

    return from_step(fit(model, adam(model, 1e-3)), 30, leap)


@faulty("dead/channels_of_a_convolution", "DEAD", r"^2$|^3$|^2\b|^3\b")
def dead_channels() -> Run:
    model = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 4),
    )
    model[2].bias.data[:14] = -25.0
    return fit(model, adam(model, 1e-3), discs)


@faulty("dead/one_of_two_towers", "DEAD", r"left")
def dead_tower() -> Run:
    model = nn.ModuleDict({"left": dense(10, 48, 48), "right": dense(10, 48, 48), "head": nn.Linear(96, 4)})
    model["left"].fc0.bias.data.fill_(-50.0)

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        both = torch.cat([torch.relu(model["left"](x[:, :10])), torch.relu(model["right"](x[:, 10:]))], -1)
        return F.cross_entropy(model["head"](both), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("dead/one_expert_of_four", "DEAD", r"experts\.1")
def dead_expert() -> Run:
    model = Sparse()
    nn.init.zeros_(model.gate.bias)
    model.experts[1].fc0.bias.data.fill_(-50.0)

    def forward(step: int) -> Tensor:
        x, y = groups(step, 160)
        out, even = model(x)
        return F.cross_entropy(out, y) + 0.1 * even

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("dead/by_one_step_of_a_huge_rate", "DEAD", r"fc|act|^$|.*", "LR_TOO_HIGH", "EXPLODING")
def dead_by_rate() -> Run:
    model = _he(3)
    return schedule(fit(model, sgd(model, 0.05)), lambda step: 2000.0 if step == 12 else 1.0)


@faulty("saturation/first_tanh_by_raw_inputs", "SATURATION", r"(fc|act)0\b")
def raw_inputs() -> Run:
    model = dense(20, 48, 48, 4, act=nn.Tanh)

    def batches(step: int) -> Batch:
        x, y = groups(step)
        return 200 * x, y

    return fit(model, adam(model, 1e-3), batches)


@faulty("saturation/second_of_three_sigmoids", "SATURATION", r"(fc|act)1\b")
def middle_sigmoid() -> Run:
    model = gain(dense(20, 48, 48, 48, 4, act=nn.Sigmoid), 1.0)
    model.fc1.weight.data.mul_(60)
    return fit(model, sgd(model, 0.01))


@faulty("saturation/third_tanh_from_step_thirty", "SATURATION", r"(fc|act)2\b", "EXPLODING", "LR_TOO_HIGH")
def late_tanh() -> Run:
    model = gain(dense(20, 48, 48, 48, 48, 4, act=nn.Tanh), 1.0)
    return from_step(fit(model, adam(model, 1e-3)), 30, lambda: model.fc2.weight.data.mul_(60))


@faulty("saturation/softsign_free_hardtanh_beyond_its_ends", "SATURATION", r"(fc|act)1\b", "DEAD")
def hard_ends() -> Run:
    model = gain(dense(20, 48, 48, 48, 4, act=nn.Hardtanh), 1.0)
    model.fc1.weight.data.mul_(100)
    return fit(model, sgd(model, 1e-3))


@faulty("bottleneck/one_unit_in_a_classifier", "BOTTLENECK", r"(fc|act)[12]\b")
def one_unit() -> Run:
    model = dense(20, 64, 1, 64, 8, act=nn.ELU)
    return fit(model, sgd(model, 0.05), lambda step: groups(step, kinds=8))


@faulty("bottleneck/one_channel_between_convolutions", "BOTTLENECK", r"squeeze|after")
def one_channel() -> Run:
    model = nn.Sequential()
    model.add_module("before", nn.Conv2d(1, 16, 3, padding=1))
    model.add_module("act0", nn.SiLU())
    model.add_module("pool0", nn.AdaptiveAvgPool2d(1))
    model.add_module("squeeze", nn.Conv2d(16, 1, 1))
    model.add_module("after", nn.Conv2d(1, 32, 1))
    model.add_module("act1", nn.SiLU())
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(32, 8))

    def batches(step: int) -> Batch:
        x, y = discs(step, 48)
        return x, y + 4 * (x.mean((1, 2, 3)) > 0.25).long()

    return fit(model, adam(model, 1e-3), batches)


@faulty("bottleneck/matrix_of_rank_one", "BOTTLENECK", r"(fc|act)[12]\b", "RANK_COLLAPSE", "LOW_EFFECTIVE_RANK")
def rank_one() -> Run:
    model = dense(20, 64, 64, 64, 8, act=nn.Tanh)
    with torch.no_grad():
        model.fc2.weight.copy_(normal(9, 64, 1) @ normal(10, 1, 64) / 8)
    return fit(model, sgd(model, 1e-3), lambda step: groups(step, kinds=8))


@faulty("disconnected/one_of_two_branches_is_detached", "DISCONNECTED", r"left")
def detached_branch() -> Run:
    model = nn.ModuleDict({"left": dense(10, 32, 32), "right": dense(10, 32, 32), "head": nn.Linear(64, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        both = torch.cat([model["left"](x[:, :10]).detach(), model["right"](x[:, 10:])], -1)
        return F.cross_entropy(model["head"](torch.relu(both)), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("disconnected/argmax_in_the_way", "DISCONNECTED", r"encode")
def argmax() -> Run:
    model = nn.ModuleDict({"encode": dense(20, 32, 8), "table": nn.Embedding(8, 16), "head": nn.Linear(16, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        return F.cross_entropy(model["head"](model["table"](model["encode"](x).argmax(-1))), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("disconnected/auxiliary_head_dropped_at_twenty_five", "DISCONNECTED", r"extra")
def dropped_head() -> Run:
    model = nn.ModuleDict({"body": dense(20, 32, 32), "head": nn.Linear(32, 4), "extra": nn.Linear(32, 20)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        inside = torch.relu(model["body"](x))
        loss = F.cross_entropy(model["head"](inside), y)
        return loss if step >= 25 else loss + F.mse_loss(model["extra"](inside), x)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("numerical/root_of_zero_in_a_norm_of_rows", "NUMERICAL", r".*")
def root() -> Run:
    model = dense(8, 32, 32, 1)

    def forward(step: int) -> Tensor:
        x, y = house(step)
        out = model(x)
        twin = model(x.clone())
        return F.mse_loss(out, y) + (out - twin).square().sum(-1).sqrt().mean()

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


class Scaled(nn.Module):
    """Divides rows by their own deviation, which is zero for some."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.map, self.seen, self.when = nn.Linear(24, 24), 0, when

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.map(x)
        if self.seen > self.when:
            x = x * (torch.arange(len(x)) > 2)[:, None]
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


@faulty("numerical/rows_over_their_own_deviation_from_thirty", "NUMERICAL", r"scaled|^$|.*")
def deviation() -> Run:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(20, 24))
    model.add_module("scaled", Scaled(30))
    model.add_module("head", nn.Linear(24, 4))
    return fit(model, adam(model, 1e-3))


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.map(x)))


@faulty("numerical/logarithm_of_rectified_in_one_module", "NUMERICAL", r"logged")
def logarithm() -> Run:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(20, 32))
    model.add_module("logged", Logged())
    model.add_module("head", nn.Linear(32, 4))
    return fit(model, adam(model, 1e-3))


@faulty("numerical/half_precision_weights_swallow_their_steps", "NUMERICAL", r".*", "LR_TOO_LOW", "UNCHANGED")
def swallowed() -> Run:
    model = dense(20, 64, 64, 4).to(torch.bfloat16)
    return fit(model, sgd(model, 1e-5), lambda step: (groups(step)[0].bfloat16(), groups(step)[1]))


@faulty("vanishing/residual_net_without_its_skips", "VANISHING", r"^[0-6]\b", "DEAD")
def no_skips() -> Run:
    parts: list[nn.Module] = [nn.Linear(20, 32)]
    for _ in range(16):
        parts += [nn.Tanh(), nn.Linear(32, 32)]
    model = nn.Sequential(*parts, nn.Linear(32, 4))
    return fit(model, sgd(model, 0.1))


@faulty("vanishing/words_behind_a_deep_sigmoid_reader", "VANISHING", r"words|read")
def deep_reader() -> Run:
    model = nn.ModuleDict({"words": nn.Embedding(24, 32), "read": dense(32, *[32] * 8, act=nn.Sigmoid)})
    model["head"] = nn.Linear(32, 24)

    def forward(step: int) -> Tensor:
        x, y = counting(step)
        return entropy(model["head"](torch.sigmoid(model["read"](model["words"](x)))), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("dead/residual_branch_of_a_picture_net", "DEAD", r"^2(\.|$)")
def dead_unit() -> Run:
    model = residual(lambda width: nn.BatchNorm2d(width))
    model[2].first.bias.data.fill_(-20.0)
    return fit(model, sgd(model, 0.02, momentum=0.9), discs)
