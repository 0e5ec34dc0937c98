"""The panels that every run gets."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gradtrack import GradientManager
from gradtrack.backends.memory import MemoryBackend
from gradtrack.records import Panel
from gradtrack.reports.panels import CORE_PANELS
from tests.training import batch_loss, optimizer_of, small_model

NAMES = st.lists(st.from_regex(r"[a-c](/[a-c]){0,3}", fullmatch=True), unique=True)


def test_every_core_panel_draws_something_that_is_emitted() -> None:
    """Each panel finds a metric among those of an ordinary step."""
    backend = MemoryBackend()
    model = small_model()
    manager = GradientManager(backends=[backend], grad_log_every_n_steps=1)
    manager.step(model, optimizer_of(model), batch_loss(model))
    metrics = backend.records[0].metrics
    assert all(set(panel.pick(metrics)) & set(metrics) for panel in CORE_PANELS)


def test_panels_come_once_with_the_first_record_of_each_pair() -> None:
    """The first row of a pair carries the panels of its own metrics, and no later row does."""
    backend = MemoryBackend()
    models: list[Any] = [small_model(0), small_model(1)]
    manager = GradientManager(backends=[backend], grad_log_every_n_steps=1)
    optimizers = [optimizer_of(model) for model in models]
    manager.attach(models[0], optimizers[0])
    manager.attach(models[1], optimizers[1], name="critic")
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            manager.step(model, optimizer, batch_loss(model))
    first, critic, *others = backend.records
    assert first.panels == CORE_PANELS
    assert all(set(panel.pick(critic.metrics)) & set(critic.metrics) for panel in critic.panels)
    assert {panel.section for panel in critic.panels} == {"gradients: critic"}
    assert not any(record.panels for record in others)


def test_analyzer_panels_follow_the_core_panels() -> None:
    """What an analyzer wants drawn comes with the pair's own panels."""
    backend = MemoryBackend()
    model = small_model()
    manager = GradientManager(backends=[backend], analyzers=["gain"], grad_log_every_n_steps=1)
    manager.step(model, optimizer_of(model), batch_loss(model))
    assert backend.records[0].panels == (*CORE_PANELS, *manager.analyzer("gain").panels)


@given(NAMES, st.from_regex(r"[a-c](/[a-c]){0,2}(/\*)?", fullmatch=True))
def test_a_star_stands_for_what_follows_its_slash(names: list[str], metric: str) -> None:
    """A starred metric picks exactly the known names below it; any other is picked as it is."""
    picked = Panel(title="p", section="s", metrics=(metric,)).pick(names)
    if metric.endswith("/*"):
        assert picked == sorted(name for name in names if name.startswith(metric.removesuffix("*")))
    else:
        assert picked == [metric]
