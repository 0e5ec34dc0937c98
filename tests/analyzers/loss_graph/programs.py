"""Programs whose loss is computed wrongly, each beside one in which that is mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES: Final = 5
BATCH: Final = 8


class Program(NamedTuple):
    """A head behind a small network, and its loss; `kind` and `layer` of the fault, or none for a healthy twin."""

    kind: str | None
    head: Callable[[], nn.Module]
    loss: Loss
    targets: str = "classes"
    layer: str = "head.0"


def _linear(*behind: nn.Module, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, outputs), *behind)


class Attention(nn.Module):
    """Attention pooling over the features as a sequence: a softmax that is no output."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.out = nn.Linear(1, 1), nn.Linear(1, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return the output for the loss."""
        sequence = features.unsqueeze(2)
        pooled = (torch.softmax(self.scores(sequence), 1) * sequence).sum(1)
        return self.out(pooled)  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """A class for each position, as language models have it: [B, C, T]."""

    def __init__(self, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.out, self.activation = nn.Linear(1, CLASSES), activation

    def forward(self, features: Tensor) -> Tensor:
        """Return the output for the loss."""
        logits = self.out(features.unsqueeze(2))
        return (logits if self.activation is None else self.activation(logits)).transpose(1, 2)


def _smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def _by_hand(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _policy_gradient(output: Tensor, target: Tensor) -> Tensor:
    chosen = F.log_softmax(output, 1).gather(1, target.unsqueeze(1)).squeeze(1)
    return -(chosen * torch.arange(1.0, BATCH + 1)).mean()


def _distilled(output: Tensor, target: Tensor) -> Tensor:
    teacher = torch.softmax(torch.ones(BATCH, CLASSES), 1)
    return F.kl_div(F.log_softmax(output, 1), teacher, reduction="batchmean")


def _pairwise(output: Tensor, target: Tensor) -> Tensor:
    return F.softplus(output - output.T).mean()


def _contrastive(output: Tensor, target: Tensor) -> Tensor:
    features = F.normalize(output, dim=1)
    return F.cross_entropy(features @ features.T / 0.1, torch.arange(BATCH))


def _quantiles(output: Tensor, target: Tensor) -> Tensor:
    errors = target.view(BATCH, 1, 1) - output.unsqueeze(2)
    return (errors * ((errors > 0).float() - 0.5)).mean()


def _with_penalty(output: Tensor, target: Tensor) -> Tensor:
    probabilities = torch.softmax(output, 1)
    entropy = -(probabilities * probabilities.log()).sum(1).mean()
    return F.cross_entropy(output, target) - 0.01 * entropy


def _adversarial(output: Tensor, target: Tensor) -> Tensor:
    return -F.binary_cross_entropy_with_logits(output.squeeze(1), torch.zeros(BATCH))


def _normal(output: Tensor, target: Tensor) -> Tensor:
    mean, spread = output.chunk(2, 1)
    scale = F.softplus(spread) + 0.05
    chances: Tensor = torch.distributions.Normal(mean, scale).log_prob(target.unsqueeze(1))  # type: ignore[no-untyped-call]
    return chances.mean()


def _categorical(output: Tensor, target: Tensor) -> Tensor:
    chances: Tensor = torch.distributions.Categorical(logits=output).log_prob(target)  # type: ignore[no-untyped-call]
    return chances.mean()


def _divergence(output: Tensor, weight: float) -> Tensor:
    mean, log_variance = output.chunk(2, 1)
    rest = (mean + torch.randn_like(mean) * (0.5 * log_variance).exp()).pow(2).mean()
    return rest + weight * -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()


def _sampled(output: Tensor, target: Tensor) -> Tensor:
    mean, log_scale = output.chunk(2, 1)
    policy = torch.distributions.Normal(mean, log_scale.exp())
    action = policy.rsample()
    chances: Tensor = policy.log_prob(action)  # type: ignore[no-untyped-call]
    return (0.2 * chances - action).mean()


FAULTY: Final[dict[str, Program]] = {
    "softmax before cross_entropy": Program("ACTIVATED_TWICE", _linear(nn.Softmax(dim=1)), F.cross_entropy),
    "softmax in the loss": Program(
        "ACTIVATED_TWICE", _linear(), lambda output, target: F.cross_entropy(F.softmax(output, 1), target)
    ),
    "softmax before a smoothed loss": Program("ACTIVATED_TWICE", _linear(nn.Softmax(dim=1)), _smoothed),
    "softmax at each position": Program(
        "ACTIVATED_TWICE", lambda: Sequences(nn.Softmax(dim=2)), F.cross_entropy, "positions", "head.out"
    ),
    "sigmoid before cross_entropy": Program("ACTIVATED_TWICE", _linear(nn.Sigmoid()), F.cross_entropy),
    "sigmoid before logits": Program(
        "ACTIVATED_TWICE",
        _linear(nn.Sigmoid(), outputs=1),
        lambda output, target: F.binary_cross_entropy_with_logits(output.squeeze(1), target),
        "zeros and ones",
    ),
    "sigmoid before logits, many labels": Program(
        "ACTIVATED_TWICE", _linear(nn.Sigmoid()), F.binary_cross_entropy_with_logits, "labels"
    ),
    "relu behind the logits": Program("RECTIFIED_LOGITS", _linear(nn.ReLU()), F.cross_entropy),
    "relu before a sigmoid": Program(
        "RECTIFIED_LOGITS", _linear(nn.ReLU()), F.binary_cross_entropy_with_logits, "labels"
    ),
    "nll of logits": Program("MISSING_LOG_SOFTMAX", _linear(), F.nll_loss),
    "nll of probabilities": Program("MISSING_LOG_SOFTMAX", _linear(nn.Softmax(dim=1)), F.nll_loss),
    "nll of sigmoids": Program("MISSING_LOG_SOFTMAX", _linear(nn.Sigmoid()), F.nll_loss),
    "log-softmax over the batch": Program("SOFTMAX_DIMENSION", _linear(nn.LogSoftmax(dim=0)), F.nll_loss),
    "softmax over the batch": Program(
        "SOFTMAX_DIMENSION", _linear(nn.Softmax(dim=0)), lambda output, target: F.nll_loss(output.log(), target)
    ),
    "softmax over the positions": Program(
        "SOFTMAX_DIMENSION",
        lambda: Sequences(),
        lambda output, target: F.nll_loss(F.log_softmax(output, 2), target),
        "positions",
        "head.out",
    ),
    "softmax over time, in rows": Program(
        "SOFTMAX_DIMENSION",
        Sequences,
        lambda output, target: F.nll_loss(
            F.log_softmax(output.transpose(1, 2), 1).reshape(-1, CLASSES), target.flatten()
        ),
        "positions",
        "head.out",
    ),
    "softmax over the columns of a picture": Program(
        "SOFTMAX_DIMENSION",
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, CLASSES, 1), nn.LogSoftmax(dim=-1)),
        F.nll_loss,
        "picture",
        "head.1",
    ),
    "one class": Program(
        "SOFTMAX_DIMENSION",
        _linear(outputs=1),
        lambda output, target: F.cross_entropy(output, torch.zeros(BATCH, dtype=torch.long)),
    ),
    "mse of [B, 1] and [B]": Program("BROADCAST_LOSS", _linear(outputs=1), F.mse_loss, "numbers"),
    "l1 of [B, 1] and [B]": Program("BROADCAST_LOSS", _linear(outputs=1), F.smooth_l1_loss, "numbers"),
    "huber of [B] and [B, 1]": Program(
        "BROADCAST_LOSS",
        _linear(outputs=1),
        lambda output, target: F.huber_loss(output.squeeze(1), target.unsqueeze(1)),
        "numbers",
    ),
    "difference of [B, 1] and [B]": Program("BROADCAST_LOSS", _linear(outputs=1), _by_hand, "numbers"),
    "difference of [B] and [B, 1]": Program(
        "BROADCAST_LOSS",
        _linear(outputs=1),
        lambda output, target: (target.unsqueeze(1) - output.squeeze(1)).abs().mean(),
        "numbers",
    ),
    "minus cross_entropy": Program("NEGATED_LOSS", _linear(), lambda output, target: -F.cross_entropy(output, target)),
    "minus the mean": Program(
        "NEGATED_LOSS", _linear(), lambda output, target: -F.cross_entropy(output, target, reduction="none").mean()
    ),
    "squared error of a softmax": Program("SQUARED_CLASSES", _linear(nn.Softmax(dim=1)), F.mse_loss, "labels"),
    "squared error of a softmax, summed": Program(
        "SQUARED_CLASSES",
        _linear(),
        lambda output, target: F.mse_loss(output.softmax(1), target, reduction="sum") / BATCH,
        "labels",
    ),
    "squared difference of a softmax": Program("SQUARED_CLASSES", _linear(nn.Softmax(dim=1)), _by_hand, "labels"),
    "squared difference from a softmax": Program(
        "SQUARED_CLASSES", _linear(), lambda output, target: (target - output.softmax(1)).pow(2).sum(1).mean(), "labels"
    ),
    "minus cross_entropy, a micro-batch of four": Program(
        "NEGATED_LOSS", _linear(), lambda output, target: 1.0 * -F.cross_entropy(output, target) / 4
    ),
    "squared error of a softmax, weighted": Program(
        "SQUARED_CLASSES", _linear(), lambda output, target: 0.5 * F.mse_loss(output.softmax(1), target), "labels"
    ),
    "squared error of a sigmoid, one class each": Program(
        "SQUARED_CLASSES", _linear(nn.Sigmoid()), F.mse_loss, "one-hot"
    ),
    "squared difference from a sigmoid, one class each": Program(
        "SQUARED_CLASSES", _linear(), lambda output, target: _by_hand(target, output.sigmoid()), "one-hot"
    ),
    "a likelihood": Program("NEGATED_LOSS", _linear(outputs=2), _normal, "numbers"),
    "a probability of classes": Program("NEGATED_LOSS", _linear(), _categorical),
    "a probability by its softmax": Program(
        "NEGATED_LOSS",
        _linear(nn.LogSoftmax(dim=1)),
        lambda output, target: output.gather(1, target.unsqueeze(1)).mean(),
    ),
    "a divergence that is taken away": Program(
        "NEGATED_LOSS", _linear(outputs=4), lambda output, target: _divergence(output, -0.01)
    ),
    "binary cross-entropy of -1 and 1": Program(
        "TARGET_RANGE",
        _linear(outputs=1),
        lambda output, target: F.binary_cross_entropy_with_logits(output.squeeze(1), target.sign()),
        "numbers",
    ),
    "binary cross-entropy of standardised pixels": Program(
        "TARGET_RANGE",
        _linear(outputs=1),
        lambda output, target: (
            F.binary_cross_entropy_with_logits(output.squeeze(1), 2 * target, reduction="none").sum() / BATCH
        ),
        "numbers",
    ),
    "tanh for prices": Program(
        "TARGET_RANGE",
        _linear(nn.Tanh(), outputs=1),
        lambda output, target: F.mse_loss(output.squeeze(1), 20 + 5 * target),
        "numbers",
    ),
    "sigmoid for counts, by hand and with a mask": Program(
        "TARGET_RANGE",
        _linear(nn.Sigmoid(), outputs=1),
        lambda output, target: ((output.squeeze(-1) - (300 + 100 * target)) ** 2 * (target > 0)).mean(),
        "numbers",
    ),
    "sigmoid for counts, the difference the other way": Program(
        "TARGET_RANGE",
        _linear(nn.Sigmoid(), outputs=1),
        lambda output, target: (300 + 100 * target - output.squeeze(-1)).abs().mean(),
        "numbers",
    ),
    "relu for numbers of both signs": Program(
        "TARGET_RANGE",
        _linear(nn.ReLU(), outputs=1),
        lambda output, target: F.smooth_l1_loss(output.squeeze(1), target - 1),
        "numbers",
    ),
    "minus mse": Program(
        "NEGATED_LOSS", _linear(outputs=1), lambda output, target: -F.mse_loss(output.squeeze(1), target), "numbers"
    ),
}

OF_VALUES: Final = frozenset(
    (
        "minus cross_entropy, a micro-batch of four",
        "squared error of a sigmoid, one class each",
        "squared difference from a sigmoid, one class each",
        "a likelihood",
        "a divergence that is taken away",
        *(name for name, program in FAULTY.items() if program.kind == "TARGET_RANGE"),
    )
)
"""The faults that targets or numbers show, which are known before the backward pass alone."""

HEALTHY: Final[dict[str, Program]] = {
    "cross_entropy": Program(None, _linear(), F.cross_entropy),
    "smoothed": Program(None, _linear(), _smoothed),
    "positions": Program(None, Sequences, F.cross_entropy, "positions"),
    "softmax over the classes of each position": Program(
        None, Sequences, lambda output, target: F.nll_loss(F.log_softmax(output, 1), target), "positions"
    ),
    "softmax over the classes, in rows": Program(
        None,
        Sequences,
        lambda output, target: F.nll_loss(
            F.log_softmax(output.transpose(1, 2), 2).reshape(-1, CLASSES), target.flatten()
        ),
        "positions",
    ),
    "softmax over the second axis, which is moved": Program(
        None,
        Sequences,
        lambda output, target: F.nll_loss(
            F.log_softmax(output, 1).transpose(1, 2).reshape(-1, CLASSES), target.flatten()
        ),
        "positions",
    ),
    "softmax over the last axis, which is moved": Program(
        None,
        Sequences,
        lambda output, target: F.nll_loss(F.log_softmax(output.transpose(1, 2), -1).transpose(1, 2), target),
        "positions",
    ),
    "softmax over the last of two equal axes, which is moved": Program(
        None,
        Sequences,
        lambda output, target: F.nll_loss(
            F.log_softmax(output.transpose(1, 2)[:, :CLASSES], -1).transpose(1, 2), target[:, :CLASSES]
        ),
        "positions",
    ),
    "softmax over the channels of a picture": Program(
        None,
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, CLASSES, 1), nn.LogSoftmax(dim=1)),
        F.nll_loss,
        "picture",
    ),
    "nll of log-softmax": Program(None, _linear(nn.LogSoftmax(dim=1)), F.nll_loss),
    "nll of the logarithm of a softmax": Program(
        None, _linear(nn.Softmax(dim=1)), lambda output, target: F.nll_loss(output.log(), target)
    ),
    "logits": Program(
        None,
        _linear(outputs=1),
        lambda output, target: F.binary_cross_entropy_with_logits(output.squeeze(1), target),
        "zeros and ones",
    ),
    "probabilities": Program(
        None,
        _linear(nn.Sigmoid(), outputs=1),
        lambda output, target: F.binary_cross_entropy(output.squeeze(1), target),
        "zeros and ones",
    ),
    "tanh behind a regression": Program(
        None, _linear(nn.Tanh(), outputs=1), lambda output, target: F.mse_loss(output.squeeze(1), target), "numbers"
    ),
    "relu behind a regression": Program(
        None,
        _linear(nn.ReLU(), outputs=1),
        lambda output, target: F.mse_loss(output, target.unsqueeze(1).abs()),
        "numbers",
    ),
    "difference of one shape": Program(
        None, _linear(outputs=1), lambda output, target: _by_hand(output.squeeze(1), target), "numbers"
    ),
    "one number for all": Program(
        None, _linear(), lambda output, target: ((output - torch.ones(1)) ** 2).mean(), "numbers"
    ),
    "softmax inside of attention": Program(None, Attention, F.cross_entropy),
    "policy gradient": Program(None, _linear(), _policy_gradient),
    "distillation": Program(None, _linear(), _distilled),
    "pairs of predictions": Program(None, _linear(outputs=1), _pairwise),
    "contrastive": Program(None, _linear(), _contrastive),
    "quantiles": Program(None, _linear(), _quantiles, "numbers"),
    "entropy as a penalty": Program(None, _linear(), _with_penalty),
    "a generator's loss": Program(None, _linear(outputs=1), _adversarial),
    "weighted cross_entropy": Program(
        None, _linear(), lambda output, target: F.cross_entropy(output, target, weight=torch.ones(CLASSES))
    ),
    "temperature": Program(None, _linear(), lambda output, target: F.cross_entropy(output / 0.5, target)),
    "squared error of a sigmoid": Program(None, _linear(nn.Sigmoid()), F.mse_loss, "labels"),
    "squared difference from a sigmoid": Program(
        None, _linear(), lambda output, target: _by_hand(target, output.sigmoid()), "labels"
    ),
    "squared error of logits, one class each": Program(None, _linear(), F.mse_loss, "one-hot"),
    "squared error of logits": Program(None, _linear(), F.mse_loss, "labels"),
    "squared error of what attention reads": Program(None, Attention, F.mse_loss, "labels"),
    "consistency beside a loss": Program(
        None,
        _linear(),
        lambda output, target: (
            F.cross_entropy(output, target) + F.mse_loss(output.softmax(1), torch.ones(BATCH, 5) / 5)
        ),
    ),
    "a factor below zero": Program(None, _linear(), lambda output, target: -0.3 * F.cross_entropy(output, target)),
    "minus cross_entropy, of an adversary": Program(
        None, _linear(), lambda output, target: -0.3 * -F.cross_entropy(output, target)
    ),
    "minus a likelihood": Program(None, _linear(outputs=2), lambda output, target: -_normal(output, target), "numbers"),
    "minus a probability": Program(None, _linear(), lambda output, target: -_categorical(output, target)),
    "a likelihood of a sample": Program(None, _linear(outputs=2), _sampled, "numbers"),
    "a divergence": Program(None, _linear(outputs=4), lambda output, target: _divergence(output, 0.01)),
    "a poisson likelihood": Program(
        None, _linear(outputs=1), lambda output, target: F.poisson_nll_loss(output.squeeze(1), target.abs()), "numbers"
    ),
    "a variance of its own": Program(
        None,
        _linear(outputs=2),
        lambda output, target: F.gaussian_nll_loss(output[:, 0], target, output[:, 1].exp()),
        "numbers",
    ),
    "tanh with outliers": Program(
        None,
        _linear(nn.Tanh(), outputs=1),
        lambda output, target: F.mse_loss(output.squeeze(1), 1.2 * target),
        "numbers",
    ),
    "relu for prices": Program(
        None,
        _linear(nn.ReLU(), outputs=1),
        lambda output, target: F.mse_loss(output.squeeze(1), 20 + 5 * target),
        "numbers",
    ),
    "a scaled tanh for prices": Program(
        None,
        _linear(nn.Tanh(), outputs=1),
        lambda output, target: F.mse_loss(20 + 10 * output.squeeze(1), 20 + 5 * target),
        "numbers",
    ),
    "soft labels": Program(
        None,
        _linear(outputs=1),
        lambda output, target: F.binary_cross_entropy_with_logits(output.squeeze(1), (target + 1) / 2),
        "numbers",
    ),
    "two losses": Program(
        None, _linear(), lambda output, target: F.cross_entropy(output, target) + 0.1 * (output**2).mean()
    ),
}


def targets_of(program: Program) -> Tensor:
    """Return the targets of a batch."""
    kinds: dict[str, Callable[[], Tensor]] = {
        "classes": lambda: torch.arange(BATCH) % CLASSES,
        "positions": lambda: torch.arange(BATCH * 6).view(BATCH, 6) % CLASSES,
        "zeros and ones": lambda: (torch.arange(BATCH) % 2).float(),
        "labels": lambda: (torch.arange(BATCH * CLASSES).view(BATCH, CLASSES) % 2).float(),
        "picture": lambda: torch.arange(BATCH * 6).view(BATCH, 2, 3) % CLASSES,
        "one-hot": lambda: torch.eye(CLASSES)[torch.arange(BATCH) % CLASSES],
        "numbers": lambda: torch.linspace(-1, 1, BATCH),
    }
    return kinds[program.targets]()


class Network(nn.Module):
    """Two layers of features and a head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the loss."""
        return self.head(self.features(x))  # type: ignore[no-any-return]
