"""Looking at a model from outside a training: what is put back, and which mistakes are named."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradtrack import (
    GradientFlowAnalyzer,
    JacobianAnalyzer,
    RecurrentAnalyzer,
    RLPolicyAnalyzer,
    TransformerAnalyzer,
    VectorAnalyzer,
)
from gradtrack.analyzers.tools.offline import call, kept, untouched
from gradtrack.errors import InputTypeError, UsageError


class Remembering(nn.Module):
    """A recurrent model whose forward pass assigns its buffers anew."""

    mean: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.read = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        """Read the last output, and remember it."""
        found: Tensor = self.read(self.rnn(x)[0][:, -1])
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        self.last = found.detach()
        if "calls" not in self._buffers:
            self.register_buffer("calls", torch.zeros(()))
        return found


def batch() -> Tensor:
    """Draw a batch with every generator that a data set may use."""
    return torch.randn(4, 5, 3) * random.random() + float(np.random.rand())


def squares(output: Tensor) -> Tensor:
    """Return the loss."""
    return output.square().mean()


def generators() -> tuple[Any, ...]:
    """Return the state of the random generators as plain data."""
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]


Analysis = Callable[[nn.Module, Any, Any], object]
ANALYSES: dict[str, Analysis] = {
    "flow": lambda model, batch, loss: GradientFlowAnalyzer(model).analyze(batch, loss, 3),
    "recurrent": lambda model, batch, loss: RecurrentAnalyzer(model).analyze(batch, loss, 3),
    "rl_policy": lambda model, batch, loss: RLPolicyAnalyzer(model).analyze(batch, loss, 3),
    "transformer": lambda model, batch, loss: TransformerAnalyzer(model).analyze(batch, loss, 3),
    "vector": lambda model, batch, loss: VectorAnalyzer(model).analyze(batch, loss, 3),
    "jacobian": lambda model, batch, loss: JacobianAnalyzer(model).analyze(batch),
}
OF_LOSSES = sorted(set(ANALYSES) - {"jacobian"})


@pytest.mark.parametrize("name", ANALYSES)
def test_buffers_that_are_assigned_anew_and_all_generators_are_put_back(name: str) -> None:
    """Each buffer is the tensor that it was, also where it was none, and no generator has moved."""
    model = Remembering()
    mean, before = model.mean, generators()
    ANALYSES[name](model, batch, squares)
    assert model.mean is mean
    assert torch.equal(mean, torch.zeros(2))
    assert list(model._buffers) == ["mean", "last"]
    assert model._buffers["last"] is None
    assert generators() == before


def test_buffers_are_put_back_after_a_fault() -> None:
    """A loss that fails in the middle leaves the model as it was."""
    model = Remembering()
    with pytest.raises(ZeroDivisionError):
        GradientFlowAnalyzer(model).analyze(batch, lambda output: output.sum() / 0 if 1 / 0 else output, 3)
    assert model.last is None


def test_an_optimizer_keeps_what_the_steps_made_of_the_buffers() -> None:
    """With an optimizer the steps are a training, which its buffers are part of."""
    model = Remembering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientFlowAnalyzer(model).analyze(batch, squares, 3, optimizer=optimizer)
    assert model.last is not None


@pytest.mark.parametrize("context", [untouched, kept])
def test_what_did_not_change_is_not_written_to(context: Any) -> None:
    """A graph that is still to be used may hold the weights and buffers, which it finds unchanged."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    versions = [tensor._version for tensor in model.state_dict().values()]
    with context(model):
        model(torch.ones(3, 2))
    assert [tensor._version for tensor in model.state_dict().values()] == versions


class Blocks(nn.Module):
    """Three blocks of attention and a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.read = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Read the last token."""
        x = self.rnn(x)[0]
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.read(x[:, -1])
        return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ANALYSES)
def test_a_compiled_model_is_looked_at_as_what_it_was_made_from(name: str, in_place: bool) -> None:
    """Hooks hear it, it is differentiated twice, and its parts have the names that they had."""
    torch.manual_seed(0)
    model = Blocks()
    expected = ANALYSES[name](model, batch, squares)
    compiled: Any = torch.compile(model, backend="aot_eager")
    if in_place:
        compiled = model
        model.compile(backend="aot_eager")
    assert ANALYSES[name](compiled, batch, squares) == expected


def test_a_mapping_of_a_tokenizer_is_passed_by_name() -> None:
    """A UserDict is one of keywords, as an ordinary dictionary is."""
    assert torch.equal(call(nn.Identity(), UserDict(input=torch.ones(2))), torch.ones(2))


@pytest.mark.parametrize("name", OF_LOSSES)
@pytest.mark.parametrize("loss", [None, 1.0, torch.ones(2, requires_grad=True)])
def test_a_loss_that_is_none_is_named(name: str, loss: object) -> None:
    """What loss_fn returned is in the error, whatever it is."""
    with pytest.raises(UsageError, match=r"loss_fn returned .*: expected a single number"):
        ANALYSES[name](Remembering(), batch, lambda output: loss)


@pytest.mark.parametrize("name", OF_LOSSES)
def test_a_batch_or_a_loss_in_place_of_its_function_is_named(name: str) -> None:
    """The two functions are asked for by name."""
    with pytest.raises(InputTypeError, match="input_fn is Tensor: expected a function"):
        ANALYSES[name](Remembering(), batch(), squares)
    with pytest.raises(InputTypeError, match="loss_fn is Tensor: expected a function"):
        ANALYSES[name](Remembering(), batch, torch.ones(()))


@pytest.mark.parametrize("name", OF_LOSSES)
def test_a_function_is_no_model(name: str) -> None:
    """What is analyzed has parameters and buffers."""
    not_a_model: Any = squares
    with pytest.raises(InputTypeError, match="Analyzer of function: expected a torch"):
        ANALYSES[name](not_a_model, batch, squares)
