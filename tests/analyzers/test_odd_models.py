"""Models that are built in unusual ways: what is picked for them, that all can look, and that nothing changes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from gradtrack import GradientFlowAnalyzer, GradientManager, StepReport
from gradtrack.analyzers.tools.offline import call
from tests.analyzers.every_step import every_step
from tests.analyzers.odd_models import ODD
from tests.analyzers.test_observer_effect import analyzers

__all__ = ["every_step"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor is being accessed"),
]

CHAINS = {
    "nested lists": "3 Tree blocks, inner.0 to inner.2",
    "several calls": "4 Sequential blocks, blocks.0 to blocks.3",
    "double precision": "4 Sequential blocks, blocks.0 to blocks.3",
    "half precision": "4 Sequential blocks, blocks.0 to blocks.3",
    "one of everything": "4 Sequential blocks, blocks.0 to blocks.3",
    "counted calls": "3 Counting blocks, blocks.0 to blocks.2",
    "no samples": "3 Linear blocks, blocks.0 to blocks.2",
    "keywords only": "3 Linear blocks, blocks.0 to blocks.2",
    "dataclasses and mappings": "4 Runs blocks, blocks.0 to blocks.3",
    "nothing returned": "4 Runs blocks, blocks.0 to blocks.3",
    "nested tensors": "3 Linear blocks, blocks.0 to blocks.2",
    "nested tensors of the first kind": "3 Linear blocks, blocks.0 to blocks.2",
    "complex numbers": "3 Linear blocks, blocks.0 to blocks.2",
    "quantised weights": "3 Linear blocks, blocks.0 to blocks.2",
    "odd parameters": "4 Linear blocks, unused.0 to unused.3",
    "layers left out by chance": "6 Linear blocks, blocks.0 to blocks.5",
    "checkpointing": "3 TransformerEncoderLayer blocks, blocks.0 to blocks.2",
    "reentrant checkpointing": "3 TransformerEncoderLayer blocks, blocks.0 to blocks.2",
    "compiled": "3 Tree blocks, inner.0 to inner.2",
    "attention as a function": "3 Linear blocks, blocks.0 to blocks.2",
    "gpt2": "3 GPT2Block blocks, transformer.h.0 to transformer.h.2",
    "bert": "3 BertLayer blocks, bert.encoder.layer.0 to bert.encoder.layer.2",
    "llama": "3 LlamaDecoderLayer blocks, model.layers.0 to model.layers.2",
    "t5": "3 T5Block blocks, decoder.block.0 to decoder.block.2",
    "bart": "3 BartDecoderLayer blocks, model.decoder.layers.0 to model.decoder.layers.2",
    "checkpointed gpt2": "3 GPT2Block blocks, transformer.h.0 to transformer.h.2",
    "tied weights": "3 Linear blocks, blocks.0 to blocks.2",
    "parametrized weights": "3 Linear blocks, blocks.0 to blocks.2",
    "data parallel": "4 Sequential blocks, blocks.0 to blocks.3",
}
CELLS = {
    "several calls": "1 recurrent modules (GRU)",
    "double precision": "1 recurrent modules (GRU)",
    "half precision": "1 recurrent modules (GRU)",
    "one of everything": "1 recurrent modules (GRU)",
    "cells by name": "3 recurrent modules (GRUCell, LSTMCell, RNNCell)",
    "packed sequences": "1 recurrent modules (LSTM)",
    "keywords only": "1 recurrent modules (GRU)",
    "odd parameters": "1 recurrent modules (LSTM)",
    "checkpointing": "1 recurrent modules (LSTM)",
    "reentrant checkpointing": "1 recurrent modules (LSTM)",
    "tied weights": "2 recurrent modules (GRU)",
    "parametrized weights": "2 recurrent modules (GRU, RNNCell)",
    "data parallel": "1 recurrent modules (GRU)",
}
ATTENTION = {
    "several calls": "attention' is MultiheadAttention",
    "double precision": "attention' is MultiheadAttention",
    "half precision": "attention' is MultiheadAttention",
    "one of everything": "attention' is MultiheadAttention",
    "no samples": "attention' is MultiheadAttention",
    "checkpointing": "blocks.0.self_attn' is MultiheadAttention",
    "reentrant checkpointing": "blocks.0.self_attn' is MultiheadAttention",
    "encoder and decoder": "encoder.layers.0.self_attn' is MultiheadAttention",
    "gpt2": "transformer.h.0.attn' is GPT2Attention",
    "bert": "bert.encoder.layer.0.attention' is BertAttention",
    "llama": "model.layers.0.self_attn' is LlamaAttention",
    "t5": "encoder.block.0.layer.0' is T5LayerSelfAttention",
    "bart": "model.encoder.layers.0.self_attn' is BartAttention",
    "checkpointed gpt2": "transformer.h.0.attn' is GPT2Attention",
    "data parallel": "attention' is MultiheadAttention",
}


@pytest.fixture(autouse=True)
def one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the model that is wrapped for several ranks be the only one of them."""
    if getattr(request.node, "callspec", None) is None or request.node.callspec.params.get("name") != "data parallel":
        yield
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        distributed.destroy_process_group()


def train(name: str, chosen: Any) -> tuple[nn.Module, list[StepReport], list[Tensor]]:
    """Train six steps with evaluations in between; return weights, buffers and the random state at the end too."""
    torch.manual_seed(0)
    model, batch, loss_fn = ODD[name]()
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    with GradientManager(analyzers=chosen) as manager:
        manager.attach(model, optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_fn(call(model, batch()))
            model.eval()
            with torch.no_grad():
                call(model, batch())
            model.train()
            manager.step(model, optimizer, loss)
            optimizer.step()
        manager.diagnose()
        reports = list(manager.reports)
    return model, reports, [*model.parameters(), *model.buffers(), torch.get_rng_state()]


def hooks(model: nn.Module) -> list[int]:
    """Count the hooks on every module: some models have their own."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [sum(len(getattr(part, kind, ())) for kind in kinds) for part in model.modules()]


@pytest.mark.parametrize("name", ODD)
def test_all_analyzers_look_and_change_nothing(name: str, every_step: None, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, buffers and random state are those of a plain training, no hook stays, and no look fails."""
    untouched, _, plain = train(name, [])
    with caplog.at_level(logging.WARNING, "gradtrack"):
        model, reports, watched = train(name, analyzers())
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
    assert hooks(model) == hooks(untouched)
    assert "failed" not in caplog.text
    assert "could not be read" not in caplog.text
    for report in reports:
        written = report.model_dump_json()
        assert StepReport.model_validate_json(written).model_dump_json() == written


@pytest.mark.parametrize("name", ODD)
def test_what_is_picked_and_why(name: str) -> None:
    """The first report names every analyzer that was picked with its reason, and no other."""
    _, reports, _ = train(name, "auto")
    said = dict(re.findall(r"analyzer (\w+) was chosen: (.*)\.", "\n".join(reports[0].notes)))
    expected = {
        "flow": "gradients flow through every model",
        "loss_graph": "every training has a loss",
        "updates": "every training has updates",
    }
    if name in CHAINS:
        expected["gain"] = f"the model has a chain of {CHAINS[name]}"
    if name in CELLS:
        expected["recurrent"] = f"the model has {CELLS[name]}"
    if name in ATTENTION:
        expected["transformer"] = f"module '{ATTENTION[name]}".replace("''", "'")
    assert said == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_offline_with_every_switch_nothing_is_changed(name: str) -> None:
    """The analysis of the flow with all that it can run along ends, and leaves the model as it was."""
    torch.manual_seed(0)
    model, batch, loss_fn = ODD[name]()
    before = [value.clone() for value in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    analyzer = GradientFlowAnalyzer(model, True, True, enable_jacobian=True, enable_vector_analysis=True)
    assert isinstance(analyzer.analyze(batch, loss_fn, 2), list)
    after = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert set(analyzer.details) | set(analyzer.skipped) == {"jacobian", "vector", "recurrent"}
    assert ("recurrent" in analyzer.details) == (name in {*CELLS, "counted calls"} - {"odd parameters"})
    assert ("vector" in analyzer.skipped) == (name == "complex numbers" or name.startswith("nested tensors"))
    assert ("jacobian" in analyzer.skipped) == name.startswith("scripted")


def test_a_model_without_sizes_gets_them_from_the_analysis() -> None:
    """A lazy model that has never run can be analyzed."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    assert GradientFlowAnalyzer(model).analyze(lambda: torch.randn(8, 3), lambda out: out.square().mean(), 3) == []


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_have_the_numbers_of_their_rows(layout: torch.layout, every_step: None) -> None:
    """Flow, gain and Jacobians are those of the same rows in one tensor, and a sample is one of the sequences."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.0)
    reports = []
    for nest in (False, True):
        with GradientManager(analyzers=["flow", "gain", "jacobian"]) as manager:
            manager.attach(blocks, optimizer)
            optimizer.zero_grad()
            batch: Any = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=layout) if nest else x
            output = blocks(batch)
            loss = (torch.cat(output.unbind()) if nest else output).square().sum()
            reports.append(manager.step(blocks, optimizer, loss))
    plain, nested = (dict[str, Any](report.analyzers) for report in reports)
    assert set(nested) == set(plain) == {"flow", "gain", "jacobian"}
    assert nested["flow"].metrics() == pytest.approx(plain["flow"].metrics(), rel=1e-5)
    for name in ("norms", "rms_norms", "gains"):
        assert nested["gain"][name] == pytest.approx(plain["gain"][name], rel=1e-6)
    assert (nested["gain"].num_samples, plain["gain"].num_samples) == (2, 6)
    assert nested["jacobian"].skipped == {}
    assert nested["jacobian"].blocks["0"].num_inputs == 8
    jacobians: Any = torch.func.vmap(torch.func.jacrev(blocks[0]))(x[:2])  # side by side in that of the sequence
    sigmas = torch.linalg.matrix_norm(jacobians, 2).tolist()
    assert nested["jacobian"].blocks["0"].sigma_max == pytest.approx(max(sigmas), rel=1e-5)
