"""Faulty runs: what is wrong lies in the steps, the losses and what the loop does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.common import schedule
from benchmarks.diagnosis.corner.book import (
    adam,
    counting,
    dense,
    discs,
    echo,
    faulty,
    fit,
    from_step,
    groups,
    house,
    normal,
    sgd,
)
from benchmarks.diagnosis.corner.pictures import residual
from benchmarks.diagnosis.corner.plain import Sign
from benchmarks.diagnosis.corner.series import Reader, Teller
from benchmarks.diagnosis.run import Run

FAST = ("UNSTABLE", "EXPLODING", "NUMERICAL")


@faulty("rate_high/plain_sgd_at_thirty", "LR_TOO_HIGH", ".*", *FAST)
def plain_sgd() -> Run:
    model = dense(20, 64, 64, 4)
    return fit(model, sgd(model, 30.0))


@faulty("rate_high/adam_at_a_half", "LR_TOO_HIGH", ".*", *FAST)
def adam_half() -> Run:
    model = dense(8, 64, 64, 1)
    return fit(model, adam(model, 0.5), house, F.mse_loss)


@faulty("rate_high/regression_above_two_over_curvature", "UNSTABLE", ".*", "LR_TOO_HIGH", "EXPLODING")
def above_edge() -> Run:
    x = normal(20, 200, 12)
    x[:, 0] *= 4
    aim = x @ normal(21, 12, 1)
    top = torch.linalg.eigvalsh(2 * x.T @ x / 200)[-1].item()
    model = nn.Linear(12, 1, bias=False)
    return fit(model, sgd(model, 2.05 / top), lambda step: (x, aim), F.mse_loss)


@faulty("rate_high/sign_steps_of_a_tenth", "LR_TOO_HIGH", ".*", *FAST)
def sign_steps() -> Run:
    model = dense(20, 64, 64, 4)
    return fit(model, Sign(model.parameters(), 0.1))


@faulty("rate_high/attention_at_a_third_by_adam", "LR_TOO_HIGH", ".*", *FAST, "ATTN_ENTROPY_COLLAPSE")
def attention_fast() -> Run:
    model = Teller()
    return fit(model, adam(model, 0.33), counting, steps=60)


@faulty("rate_high/head_group_a_thousandfold", "LR_TOO_HIGH", r"fc2|^$", *FAST, "GRAD_IMBALANCE")
def group_fast() -> Run:
    model = dense(20, 64, 64, 4)
    body = [*model.fc0.parameters(), *model.fc1.parameters()]
    groups_ = [{"params": body}, {"params": model.fc2.parameters(), "lr": 2.0}]
    return fit(model, torch.optim.Adam(groups_, 1e-3))


@faulty("rate_high/a_hundredfold_from_thirty_on", "LR_TOO_HIGH", ".*", *FAST, "DEAD")
def late_rate() -> Run:
    model = dense(20, 64, 64, 4)
    return schedule(fit(model, adam(model, 5e-3), steps=60), lambda step: 300.0 if step >= 30 else 1.0)


@faulty("rate_low/adam_at_a_billionth", "LR_TOO_LOW", ".*", "UNCHANGED")
def adam_low() -> Run:
    model = residual(nn.BatchNorm2d)
    return fit(model, adam(model, 1e-9), discs)


@faulty("rate_low/gru_by_sgd_at_a_ten_millionth", "LR_TOO_LOW", ".*", "UNCHANGED")
def gru_low() -> Run:
    model = Reader("GRU")
    return fit(model, sgd(model, 1e-7), counting)


@faulty("rate_low/one_group_a_millionfold_smaller", "LR_TOO_LOW", r"fc0", "UNCHANGED")
def group_low() -> Run:
    model = dense(20, 64, 64, 4)
    rest = [*model.fc1.parameters(), *model.fc2.parameters()]
    return fit(model, torch.optim.Adam([{"params": model.fc0.parameters(), "lr": 1e-9}, {"params": rest}], 2e-3))


@faulty("clipped/at_a_hundred_thousandth_by_torch", "CLIP_SATURATED", ".*", "LR_TOO_LOW")
def clipped() -> Run:
    model = dense(20, 64, 64, 4)
    run = fit(model, sgd(model, 0.1))
    run.after.append(lambda _: nn.utils.clip_grad_norm_(model.parameters(), 1e-5))
    run.scalable = False
    return run


@faulty("clipped/at_a_ten_thousandth_by_the_manager", "CLIP_SATURATED", ".*", "LR_TOO_LOW")
def clipped_here() -> Run:
    model = dense(8, 64, 64, 1)
    settings = {"enable_gradient_clipping": True, "max_grad_norm": 1e-4}
    return fit(model, sgd(model, 0.05), house, F.mse_loss, settings=settings, scalable=False)


@faulty("stale/never_emptied_adam", "STALE_GRAD", ".*")
def never_emptied() -> Run:
    model = dense(20, 48, 48, 4)
    return fit(model, adam(model, 1e-3), zero=False)


@faulty("stale/never_emptied_recurrent", "STALE_GRAD", ".*")
def never_emptied_recurrent() -> Run:
    model = Reader("GRU")
    return fit(model, sgd(model, 0.01), counting, zero=False)


@faulty("stale/only_the_head_is_emptied", "STALE_GRAD", r"fc0|fc1|^$")
def half_emptied() -> Run:
    model = dense(20, 48, 48, 4)
    run = fit(model, sgd(model, 0.01), zero=False)
    run.before.append(lambda _: model.fc2.zero_grad())
    return run


@faulty("unchanged/middle_layer_forgotten", "UNCHANGED", r"fc1")
def forgotten() -> Run:
    model = dense(20, 48, 48, 4)
    return fit(model, adam(nn.ModuleList([model.fc0, model.fc2]), 1e-3))


@faulty("unchanged/parameter_beside_the_layers", "UNCHANGED", r"scale")
def lone_parameter() -> Run:
    model = nn.ModuleDict({"body": dense(20, 48, 48), "head": nn.Linear(48, 4)})
    model.scale = nn.Parameter(torch.ones(48))
    chosen = [param for name, param in model.named_parameters() if name != "scale"]

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        return F.cross_entropy(model["head"](torch.relu(model["body"](x)) * model.scale), y)

    return Run(model=model, forward=forward, optimizer=torch.optim.Adam(chosen, 1e-3))


@faulty("unchanged/layer_made_anew_after_the_optimizer", "UNCHANGED", r"fc2|^$")
def made_anew() -> Run:
    model = dense(20, 48, 48, 4)
    optimizer = adam(model, 1e-3)
    model.fc2 = nn.Linear(48, 4)
    return fit(model, optimizer)


@faulty("unchanged/weights_put_back_after_each_step", "UNCHANGED", r"fc1")
def put_back() -> Run:
    model = dense(20, 48, 48, 4)
    kept = model.fc1.weight.detach().clone()
    run = fit(model, adam(model, 1e-3))
    run.before.append(lambda _: model.fc1.weight.data.copy_(kept))
    return run


@faulty("imbalance/one_head_a_million_times_as_loud", "GRAD_IMBALANCE", r"loud|quiet|body")
def loud() -> Run:
    model = nn.ModuleDict({"body": dense(20, 48, 48), "quiet": nn.Linear(48, 4), "loud": nn.Linear(48, 1)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        inside = torch.relu(model["body"](x))
        size = (x.norm(dim=-1) + 0.5 * normal(2_000_000 + step, 64))[:, None]
        return F.cross_entropy(model["quiet"](inside), y) + 1e6 * F.mse_loss(model["loud"](inside), size)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-4))


@faulty("imbalance/left_tower_speaks_ten_thousandfold", "GRAD_IMBALANCE", r"left|right", "EXPLODING", "VANISHING")
def loud_tower() -> Run:
    model = nn.ModuleDict({"left": dense(10, 32, 16), "right": dense(10, 32, 16), "head": nn.Linear(16, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        return F.cross_entropy(model["head"](model["left"](x[:, :10]) + 1e-4 * model["right"](x[:, 10:])), y)

    return Run(model=model, forward=forward, optimizer=adam(model, 1e-3))


@faulty("spike/one_batch_of_raw_numbers_at_thirty", "EXPLODING", ".*", "UNSTABLE", "LR_TOO_HIGH")
def raw_batch() -> Run:
    model = dense(8, 48, 48, 1)

    def forward(step: int) -> Tensor:
        x, y = house(step, scale=500.0 if step == 30 else 1.0)
        return F.mse_loss(model(x), y)

    # Its gradients end beyond the range of float32, and when they do depends on the scale of the loss.
    return Run(model=model, forward=forward, optimizer=sgd(model, 0.01), scalable=False)


@faulty("unstable/batches_of_two_kinds_in_turn", "UNSTABLE", ".*", "EXPLODING", "LR_TOO_HIGH")
def two_kinds() -> Run:
    model = dense(8, 48, 1)

    def forward(step: int) -> Tensor:
        x, y = house(step, scale=1000.0 if step % 2 else 1.0)
        return F.mse_loss(model(x), y)

    return Run(model=model, forward=forward, optimizer=sgd(model, 1e-6))


@faulty("exploding/recurrent_gain_by_far_too_large", "EXPLODING", r"core", "SUPERCRITICAL")
def recurrent_gain() -> Run:
    model = nn.ModuleDict({"core": nn.RNN(3, 32, batch_first=True, nonlinearity="relu"), "head": nn.Linear(32, 2)})
    nn.init.orthogonal_(model["core"].weight_hh_l0, 1.8)

    def forward(step: int) -> Tensor:
        x, y = echo(step, length=40)
        return 1e-6 * F.cross_entropy(model["head"](model["core"](x)[0][:, -1]), y)

    return Run(model=model, forward=forward, optimizer=sgd(model, 1e-12), horizon=40)


@faulty("unchanged/rate_zero_for_a_tower", "UNCHANGED", r"left", "LR_TOO_LOW")
def rate_zero() -> Run:
    model = nn.ModuleDict({"left": dense(10, 32, 16), "right": dense(10, 32, 16), "head": nn.Linear(32, 4)})

    def forward(step: int) -> Tensor:
        x, y = groups(step)
        return F.cross_entropy(model["head"](torch.cat([model["left"](x[:, :10]), model["right"](x[:, 10:])], -1)), y)

    rest = [*model["right"].parameters(), *model["head"].parameters()]
    optimizer = torch.optim.SGD([{"params": model["left"].parameters(), "lr": 0.0}, {"params": rest}], 0.1)
    return Run(model=model, forward=forward, optimizer=optimizer)


@faulty("numerical/weights_become_infinite_at_thirty", "NUMERICAL", r"fc1|^$|.*")
def infinite_weight() -> Run:
    model = dense(20, 48, 48, 4)

    def spoil() -> None:
        model.fc1.weight.data[0, 0] = float("inf")

    return from_step(fit(model, adam(model, 1e-3)), 30, spoil)
