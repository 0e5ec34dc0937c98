"""Layers seen through parametrizations: their class, their parameters, and that what computes these is no layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gradtrack import GradientManager
from gradtrack.analyzers.rl_policy.update_metrics import DormantUnits
from gradtrack.analyzers.tools.modules import (
    evaluating,
    find_chain,
    floating,
    has_parts,
    kind_of,
    layers,
    own_parameters,
    owns_parameters,
    tensors,
)
from gradtrack.errors import UsageError


def test_a_parametrized_module_is_what_it_was() -> None:
    """It is of its own class, has no parts, and owns what its weight is computed from."""
    module = parametrizations.weight_norm(nn.Linear(3, 2, bias=False))
    assert (kind_of(module), has_parts(module)) == (nn.Linear, False)
    assert sorted(param.numel() for param in own_parameters(module)) == [2, 6]
    assert [name for name, _ in layers(nn.Sequential(module))] == ["", "0"]


def flow(model: nn.Module) -> Any:
    """Return the flow of one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    manager = GradientManager(analyzers=["flow"])
    manager.attach(model, optimizer)
    report = manager.step(model, optimizer, model(torch.ones(4, 5)).square().sum())
    analyzer: Any = manager.analyzer("flow")
    return report.analyzers["flow"], [node.name for node in analyzer.case.samples[-1].nodes]


def test_the_flow_through_parametrized_layers_is_that_through_plain_ones() -> None:
    """The computed weight is neither a layer nor a place of the gradient, also where a layer has no other parameter."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    expected = flow(plain)
    for layer in plain:
        parametrizations.weight_norm(layer)
    found = flow(plain)
    assert found[1] == expected[1] == ["0", "1", "2"]
    assert found[0].metrics() == pytest.approx(expected[0].metrics(), rel=1e-5)


def test_a_chain_of_parametrized_blocks_is_one() -> None:
    """Each of them has a class of its own, and yet they are of one kind."""
    model = nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(3, 3)) for _ in range(3)))
    assert list(find_chain(model)) == ["0", "1", "2"]


def test_units_of_a_parametrized_convolution_are_its_channels() -> None:
    """One of four channels is off, which its last axis does not show."""
    convolution = nn.Conv2d(1, 4, 1)
    with torch.no_grad():
        convolution.weight.fill_(1.0)
        assert convolution.bias is not None
        convolution.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -9.0]))
    model = nn.Sequential(parametrizations.weight_norm(convolution), nn.ReLU())
    units = DormantUnits(model)
    with units.watched():
        model(torch.ones(2, 1, 3, 3))
    assert units.shares == {"1": 0.25}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_script_takes_no_hook() -> None:
    """Blocks that are scripts are no chain; asked for by name they are refused with the reason."""
    script: Any = torch.jit.script
    model = nn.Sequential(*(script(nn.Linear(3, 3)) for _ in range(3)))
    assert find_chain(model) == {}
    with pytest.raises(UsageError, match="block '0' is a script"):
        find_chain(model, ["0", "1"])


def test_a_parametrized_buffer_is_no_parameter() -> None:
    """What a module computes from a buffer alone is not learned."""
    module = nn.Module()
    module.register_buffer("table", torch.ones(3))
    parametrize.register_parametrization(module, "table", nn.Identity())
    assert not list(own_parameters(module))
    assert not owns_parameters(module)
    assert owns_parameters(parametrizations.weight_norm(nn.Linear(2, 3, bias=False)))


@dataclass
class Output:
    """What a module may return."""

    first: torch.Tensor
    rest: Any = None


def test_tensors_are_found_in_every_kind_of_nest() -> None:
    """Mappings, sequences, packed sequences, dataclasses and what holds a tensor as its data are looked into."""
    a, b, c, d = (torch.full((1,), float(number)) for number in range(4))
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2, 3)])
    value = {"x": (a, [b]), "y": Output(c, {"z": SimpleNamespace(data=d)}), "n": None, "s": "text"}
    assert [float(tensor) for tensor in tensors(value)] == [0.0, 1.0, 2.0, 3.0]
    assert [tensor.shape for tensor in floating((packed, torch.ones(2, dtype=torch.long)))] == [(2, 3)]


def test_evaluating_puts_each_mode_back() -> None:
    """Parts that were in evaluation before are so after, also where the code within fails."""
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    seen: list[bool] = []
    with pytest.raises(RuntimeError), evaluating(model):
        _fail(seen, model)
    assert seen == [False, False, False]
    assert [part.training for part in model] == [True, False]


def _fail(seen: list[bool], model: nn.Module) -> None:
    seen += [part.training for part in model.modules()]
    raise RuntimeError
