"""The replay of recurrent modules against torch's own kernels, and their derivatives against autograd."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradtrack.analyzers.recurrent.cells import function_cell, layer_cells, single_cell
from gradtrack.analyzers.recurrent.dynamics import pull_back
from gradtrack.analyzers.recurrent.trajectories import Sequences, Trajectory, choose, outputs, replay
from gradtrack.analyzers.tools.modules import evaluating
from gradtrack.errors import InputTypeError
from tests.analyzers.recurrent.recurrent_models import KINDS, Case, build, cases, run


@torch.no_grad()
def gap(case: Case) -> float:
    """Return by how much the replay is off, in outputs and final states of the sequences that it took."""
    sequences, chosen = Sequences.of(case.module, case.inputs, case.state, limit=4)
    paths, (output, final) = replay(case.module, sequences), run(case)
    found = outputs(paths[-2:] if case.module.bidirectional else paths[-1:])
    gaps = [(found - output[chosen, : found.shape[1]]).abs().max()]
    gaps += [(path.states[-1] - theirs[chosen]).abs().max() for path, theirs in zip(paths, final, strict=True)]
    return float(torch.stack(gaps).max())


@settings(deadline=None, max_examples=150)
@given(cases())
def test_replay_is_what_torch_computes(case: Case) -> None:
    """Every kind, size, direction, projection, bias and layout gives torch's outputs and final states."""
    assert gap(case) <= 1e-12


@pytest.mark.parametrize(
    ("kind", "bidirectional", "bias", "projected"),
    [each for each in product(KINDS, [False, True], [False, True], [False, True]) if each[0] == "lstm" or not each[3]],
)
def test_replay_holds_in_each_of_twenty_configurations(
    kind: str, bidirectional: bool, bias: bool, projected: bool
) -> None:
    """No kind, direction, bias or projection is left to the luck of the draw."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"proj_size": 2} if projected else {}
    module = build(kind, 3, 5, num_layers=2, bidirectional=bidirectional, bias=bias, **options)
    assert gap(Case(module, torch.randn(6, 3, 3, dtype=torch.float64), None, [6] * 3)) <= 1e-12


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, 2**16))
def test_known_derivatives_are_those_of_autograd(case: Case, seed: int) -> None:
    """The derivative that is written out for each cell equals the one of its equation."""
    torch.manual_seed(seed)
    sequences, _ = Sequences.of(case.module, case.inputs, case.state, limit=4)
    for path in replay(case.module, sequences):
        states, vectors = path.states[-2], torch.randn(len(path.lengths), 3, path.cell.state_size).double()
        unknown = function_cell("unknown", path.cell.step, path.cell.state_size)
        found = pull_back(path.cell, states, path.drives[-1], vectors)
        assert torch.allclose(found, pull_back(unknown, states, path.drives[-1], vectors), rtol=0, atol=1e-12)


@pytest.mark.parametrize("module", [nn.RNNCell(3, 5), nn.RNNCell(3, 5, nonlinearity="relu"), nn.GRUCell(3, 5)])
def test_cells_step_as_torch_does(module: nn.RNNCellBase) -> None:
    """The equation of a cell gives what the module returns."""
    module, inputs, state = module.double(), torch.randn(2, 3).double(), torch.randn(2, 5).double()
    cell = single_cell(module, "cell")
    assert torch.allclose(cell.step(state, cell.drive(inputs)), module(inputs, state), rtol=0, atol=1e-12)


def test_lstm_cell_carries_output_and_memory() -> None:
    """The state of an LSTM is both of its tensors."""
    module, inputs = nn.LSTMCell(3, 5).double(), torch.randn(2, 3).double()
    hidden, memory = torch.randn(2, 5).double(), torch.randn(2, 5).double()
    cell = single_cell(module, "cell")
    found = cell.step(torch.cat([hidden, memory], dim=-1), cell.drive(inputs))
    expected = torch.cat(module(inputs, (hidden, memory)), dim=-1)
    assert (cell.state_size, cell.output_size) == (10, 5)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_other_modules_have_no_cell() -> None:
    """What is no cell is named in the error."""
    with pytest.raises(InputTypeError, match=r"cell Linear: expected nn\.RNNCell"):
        single_cell(nn.Linear(2, 2), "cell")


def test_gates_are_named() -> None:
    """LSTM and GRU show their gates, an RNN has none."""
    state, inputs = torch.zeros(1, 10).double(), torch.zeros(1, 3).double()
    lstm, gru, rnn = (layer_cells(kind(3, 5), "")[0][0] for kind in (nn.LSTM, nn.GRU, nn.RNN))
    assert rnn.gates(state[:, :5], rnn.drive(inputs)) == {}
    assert list(lstm.gates(state, lstm.drive(inputs))) == ["input", "forget", "output"]
    assert list(gru.gates(state[:, :5], gru.drive(inputs))) == ["reset", "update"]


def test_taking_out_the_cells_advances_no_buffer() -> None:
    """A parametrisation that iterates in training mode is not run forward, and the modes come back."""
    module = parametrizations.spectral_norm(nn.LSTM(3, 5), "weight_hh_l0")
    module.parametrizations.eval()  # type: ignore[union-attr]
    module.parametrizations.weight_hh_l0.train()  # type: ignore[union-attr]
    before, modes = {name: value.clone() for name, value in module.state_dict().items()}, modes_of(module)
    layer_cells(module, "")  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert modes_of(module) == modes


def test_modes_come_back_after_an_error() -> None:
    """A fault inside leaves the module in the mode it had."""
    module = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with contextlib.suppress(RuntimeError), evaluating(module):
        assert modes_of(module) == [False, False, False]
        raise RuntimeError
    assert modes_of(module) == [True, True, False]


def test_large_states_are_replayed_where_they_are() -> None:
    """Beyond 512 dimensions the replay keeps float32."""
    small, large = layer_cells(nn.GRU(2, 8), "")[0][0], layer_cells(nn.GRU(2, 520), "")[0][0]
    assert small.drive(torch.zeros(1, 2)).dtype == torch.float64
    assert large.drive(torch.zeros(1, 2)).dtype == torch.float32


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_the_longest_sequences_are_chosen(lengths: list[int]) -> None:
    """At most four, the longest among them, none of them shorter than half of it, in the order of the batch."""
    chosen = choose(torch.tensor(lengths), 4).tolist()
    assert 1 <= len(chosen) <= 4
    assert chosen == sorted(chosen)
    assert max(lengths[index] for index in chosen) == max(lengths)
    assert all(2 * lengths[index] >= max(lengths) for index in chosen)


def test_own_time_of_a_reversed_sequence_starts_at_its_last_step() -> None:
    """Shorter sequences are aligned at the end of a direction's time, their first state held until they begin."""
    module = nn.RNN(1, 2, bidirectional=True, batch_first=True).double()
    inputs = torch.randn(2, 3, 1).double()
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([3, 2]), batch_first=True)
    paths = replay(module, Sequences.of(module, packed, None, limit=4)[0])
    own = [first_inputs(path, 1) for path in paths]
    assert own[0] == inputs[1, :2, 0].tolist()
    assert own[1] == inputs[1, :2, 0].flip(0).tolist()
    assert float(paths[0].states[1][1].abs().sum()) == 0.0


def first_inputs(path: Trajectory, sequence: int) -> list[float]:
    """Return the valid inputs of a sequence in the trajectory's own time."""
    start = path.inputs.shape[0] - int(path.lengths[sequence])
    found: Tensor = path.inputs[start:, sequence, 0]
    return [float(value) for value in found]


def modes_of(module: nn.Module) -> list[bool]:
    """Return the mode of every module within."""
    return [one.training for one in module.modules()]
