"""Small trainings that make every part emit every metric that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Categorical

from gradtrack import (
    GradientManager,
    RLPolicyAnalyzer,
    TransformerAnalyzer,
    UpdatesAnalyzer,
    VectorAnalyzer,
    safe_backward,
)

Names = set[str]
PAIR: Final = "second"


def every() -> dict[str, Callable[[], Names]]:
    """Return what makes the core and each analyzer emit, by the name of the analyzer."""
    return {
        "core": lambda: _core() | _limited() | _scaled() | on_ranks(),
        "flow": lambda: _live(_blocks(), ["flow"]) | _live(_blocks().half(), ["flow"]),
        "gain": lambda: _live(_blocks(), ["gain"]),
        "jacobian": lambda: _live(_blocks(), ["jacobian"]),
        "loss_graph": lambda: _live(_blocks(), ["loss_graph"]),
        "precision": lambda: _live(_blocks(), ["precision"]),
        "recurrent": _recurrent,
        "rl_policy": _policies,
        "transformer": _attention,
        "updates": lambda: _live(_blocks(), ["updates"]) | set(_updates_offline()),
        "vector": _fields,
    }


def second_pair() -> Names:
    """Return what a pair with a name emits, with groups and analyzers."""
    model = _blocks()
    with GradientManager(backends=["memory"], analyzers=["flow", "gain"], grad_log_every_n_steps=1) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer, name=PAIR)
        _train(manager, model, optimizer, torch.randn(8, 6), steps=9)
        return _recorded(manager)


def on_ranks() -> Names:
    """Return what a training on sharded parameters emits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def shard(_: str, module: nn.Module, mesh: Any) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))

    with _one_rank():
        mesh = init_device_mesh("cpu", (1,))
        model = distribute_module(nn.Linear(6, 6), mesh, shard)
        data = distribute_tensor(torch.randn(8, 6), mesh)
        with GradientManager(backends=["memory"], grad_log_every_n_steps=1, per_rank=True) as manager:
            _train(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), data, steps=3)
            return _recorded(manager)


@contextmanager
def _one_rank() -> Iterator[None]:
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 - torch does not export it to type checkers
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))


def _train(manager: GradientManager, model: nn.Module, optimizer: Any, data: Tensor, *, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(data)
        output = output[0] if isinstance(output, tuple) else output
        safe_backward(output.square().mean(), model, optimizer, manager)
        optimizer.step()


def _recorded(manager: GradientManager) -> Names:
    memory: Any = manager.backend("memory")
    return {name for record in memory.records for name in (*record.metrics, *record.histograms)}


def _core() -> Names:
    """Clip, skip a step that is not finite, and open an issue."""
    model = _blocks()
    with GradientManager(
        backends=["memory"], grad_log_every_n_steps=1, log_histograms=True, track_parameters=True
    ) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _train(manager, model, optimizer, torch.randn(8, 6), steps=2)
        _train(manager, model, optimizer, torch.full((8, 6), math.inf), steps=1)
        return _recorded(manager)


def _limited() -> Names:
    """Clip by group, and skip a spike."""
    model = _blocks()
    with GradientManager(
        backends=["memory"], max_grad_norm={"weight": 1.0}, spike_action="skip", spike_window=4
    ) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for scale in (1.0, 1.0, 1.0, 1e3):
            _train(manager, model, optimizer, torch.full((8, 6), scale), steps=1)
        return _recorded(manager)


def _scaled() -> Names:
    """Train with a loss scale."""
    model, scaler = _blocks(), torch.amp.GradScaler("cpu")
    with GradientManager(backends=["memory"], grad_log_every_n_steps=1) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            safe_backward(model(torch.randn(8, 6)).square().mean(), model, optimizer, manager, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
        return _recorded(manager)


def _live(model: nn.Module, analyzers: list[Any]) -> Names:
    with GradientManager(backends=["memory"], analyzers=analyzers, grad_log_every_n_steps=1) as manager:
        optimizer = torch.optim.Adam(model.parameters())
        manager.attach(model, optimizer)
        _train(manager, model, optimizer, torch.randn(8, 6, dtype=next(model.parameters()).dtype), steps=9)
        return _recorded(manager)


def _recurrent() -> Names:
    model = nn.LSTM(6, 8, num_layers=2, batch_first=True)
    with GradientManager(
        backends=["memory"], analyzers=[{"name": "recurrent", "enable_vector_analysis": True}]
    ) as manager:
        optimizer = torch.optim.Adam(model.parameters())
        manager.attach(model, optimizer)
        _train(manager, model, optimizer, torch.randn(4, 12, 6), steps=2)
        return _recorded(manager)


def _updates_offline() -> Names:
    model = _blocks()
    optimizer = torch.optim.Adam(model.parameters())
    report = UpdatesAnalyzer(model).analyze(
        lambda: torch.randn(8, 6), lambda output: output.square().mean(), steps=3, optimizer=optimizer
    )
    return set(report.metrics())


def _fields() -> Names:
    model = _blocks()
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    game = {"min": ([x], lambda: (x * y).sum()), "max": ([y], lambda: -(x * y).sum())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    reports = [
        VectorAnalyzer().analyze_game(game),
        VectorAnalyzer(model).analyze(lambda: torch.randn(8, 6), loss, steps=3),
        VectorAnalyzer(model).analyze(lambda: torch.randn(8, 6), loss, steps=3, optimizer=optimizer),
    ]
    return {name for report in reports for name in report.metrics()}


class _Encoder(nn.Module):
    """Two layers of attention over vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Encode."""
        found: Tensor = self.layers(x)
        return found


def _attention() -> Names:
    model = _Encoder()
    with GradientManager(backends=["memory"], analyzers=["transformer"]) as manager:
        optimizer = torch.optim.Adam(model.parameters())
        manager.attach(model, optimizer)
        _train(manager, model, optimizer, torch.randn(4, 10, 8), steps=4)
        found = _recorded(manager)
    analyzer = TransformerAnalyzer(model, enable_vector_analysis=True)
    _, stats = analyzer.analyze(lambda: torch.randn(4, 10, 8), lambda output: output.square().mean(), steps=3)
    return found | set(stats.metrics())


class _ActorCritic(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values."""
        hidden = self.trunk(states)
        return self.actor(hidden), self.critic(hidden)


def _policies() -> Names:
    model = _ActorCritic()
    with GradientManager(
        backends=["memory"], analyzers=[{"name": "rl_policy", "enable_vector_analysis": True}]
    ) as manager:
        optimizer = torch.optim.Adam(model.parameters())
        manager.attach(model, optimizer)
        for _ in range(12):
            states = torch.randn(16, 6)
            logits, values = model(states)
            policy: Any = manager.analyzer("rl_policy")
            policy.observe(
                Categorical(logits=logits),
                episode_return=1.0,
                log_ratio=0.1 * torch.randn(16),
                values=values.detach().flatten(),
                returns=torch.randn(16),
            )
            optimizer.zero_grad()
            safe_backward(logits.square().mean() + values.square().mean(), model, optimizer, manager)
            optimizer.step()
        found = _recorded(manager)
    continuous = RLPolicyAnalyzer()
    continuous.observe((torch.randn(16, 2), torch.tensor([0.3, 0.6])), action_range=(-1.0, 1.0))
    offline = RLPolicyAnalyzer(model, enable_jacobian=True, enable_vector_analysis=True)
    _, stats = offline.analyze(
        lambda: torch.randn(16, 6),
        lambda output: output[0].square().mean() + output[1].square().mean(),
        steps=3,
        action_extractor=lambda output: (output[0], None, None, output[1]),
    )
    return found | set(continuous.report().metrics()) | set(stats.metrics())
