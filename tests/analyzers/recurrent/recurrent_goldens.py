"""Recurrent systems whose dynamics are known in closed form, each as a check that raises when a number is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradtrack import RecurrentAnalyzer
from gradtrack.analyzers.recurrent.cells import Cell, TorchCell, function_cell, layer_cells
from gradtrack.analyzers.recurrent.dynamics import effective_memory, jacobian, outer_spectrum, step_spectrum, sweep
from gradtrack.analyzers.recurrent.recorder import RecurrentRecorder
from gradtrack.analyzers.recurrent.report import RecurrentReport
from gradtrack.analyzers.recurrent.trajectories import Sequences, Trajectory, follow, replay
from gradtrack.analyzers.tools.spectra import arnoldi


def arnoldi_radius(matvec: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Return the largest magnitude of an eigenvalue by Arnoldi's method."""
    return float(arnoldi(matvec, start).value()[0].abs())


def generator(seed: int = 1) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def orthogonal(size: int) -> Tensor:
    """Draw an orthogonal matrix."""
    found: Tensor = torch.linalg.qr(normal(size, size))[0]
    return found


def zeroed(module: nn.Module, **values: Tensor | float) -> nn.Module:
    """Set every parameter to zero, then those that are named."""
    with torch.no_grad():
        for name, param in module.double().named_parameters():
            param.zero_()
            if name in values:
                param.copy_(torch.as_tensor(values[name], dtype=torch.float64))
    return module


def analyzed(model: nn.Module, num_steps: int, **options: Any) -> RecurrentReport:
    """Analyze a module on one batch of zeros."""
    analyzer = RecurrentAnalyzer(model, **options)
    batch = torch.zeros(num_steps, 1, 1, dtype=torch.float64)
    return analyzer.analyze(lambda: batch, lambda output: output[0].sum(), steps=1)[1]


def mapped(step: Callable[[Tensor, Tensor], Tensor], state: Tensor, num_steps: int, **options: Any) -> Trajectory:
    """Follow a map that takes no input."""
    cell = function_cell("map", step, state.shape[-1])
    return follow(cell, state, torch.zeros(num_steps, state.shape[0], 0, dtype=torch.float64))


def close(found: float | None, expected: float, tolerance: float) -> None:
    """Raise unless a number is within its tolerance."""
    assert found is not None
    assert abs(found - expected) <= tolerance, (found, expected)


def gate(matrix: Tensor, position: int, count: int) -> Tensor:
    """Put a matrix in one of the gates of a weight and zeros in the others."""
    parts = [torch.zeros_like(matrix)] * count
    return torch.cat([*parts[:position], matrix, *parts[position + 1 :]])


def r1_scaled_rotation() -> None:
    """R1: tanh RNN at rest with W = 0.9 times an orthogonal matrix."""
    weight = 0.9 * orthogonal(12)
    model = zeroed(nn.RNN(1, 12), weight_hh_l0=weight)
    found = analyzed(model, 60)
    cell = found.cells["l0"]
    close(found.spectral_radius, 0.9, 1e-9)
    close(cell.decay_profile[10], 0.9**10, 1e-9)
    close(found.effective_memory_length, 9.49122, 1e-5)
    close(found.effective_memory_length, -1 / math.log(0.9), 1e-6)
    close(found.temporal_decay_rate, 0.9, 1e-9)
    close(found.asymptotic_memory_length, -1 / math.log(0.9), 1e-6)
    path = trajectory(model, torch.zeros(60, 1, 1))
    decay = sweep(path, generator(), num_exponents=12).value()
    memory = effective_memory(decay.log_profile.tolist(), 0.1)
    assert memory is not None
    close(memory.length, 21.8543, 1e-4)
    close(memory.length, math.log(0.1) / math.log(0.9), 1e-6)
    for exponent in decay.exponents.tolist():
        close(exponent, math.log(0.9), 1e-9)


def r2_jacobian_of_a_random_state() -> None:
    """R2: J = diag(1 - h'^2) W."""
    model = nn.RNN(1, 7).double()
    recurrent = dict(model.named_parameters())["weight_hh_l0"].detach()
    path = trajectory(model, normal(5, 1, 1))
    found = jacobian(path.cell, path.states[2], path.drives[2])[0]
    expected = (1 - path.states[3][0] ** 2).diag() @ recurrent
    assert float((found - expected).abs().max()) <= 1e-12


def r3_saturation() -> None:
    """R3: a bias of 4 saturates tanh; at the state zero the radius of J is 1 - tanh(4)^2 of that of W."""
    weight = normal(8, 8)
    model = zeroed(nn.RNN(1, 8), weight_hh_l0=weight, bias_ih_l0=torch.full((8,), 4.0))
    found = analyzed(model, 1)
    close((found.spectral_radius or 0.0) / radius(weight), 0.00134095, 1e-6)


def r4_gru() -> None:
    """R4: a GRU with W_hn alone has J = 0.5 + 0.25 W."""
    weight = normal(6, 6)
    model = zeroed(nn.GRU(1, 6), weight_hh_l0=gate(weight, 2, 3))
    expected = float((0.5 + 0.25 * torch.linalg.eigvals(weight)).abs().max())
    close(analyzed(model, 8).spectral_radius, expected, 1e-9)


def r5_lstm() -> None:
    """R5: an LSTM with W_hg alone has 0.5 + 0.25 W among its eigenvalues, and as many zeros."""
    weight = normal(6, 6)
    model = zeroed(nn.LSTM(1, 6), weight_hh_l0=gate(weight, 2, 4))
    expected = (0.5 + 0.25 * torch.linalg.eigvals(weight)).abs().sort().values
    close(analyzed(model, 8).spectral_radius, float(expected[-1]), 1e-9)
    path = trajectory(model, torch.zeros(8, 1, 1))
    found = torch.linalg.eigvals(jacobian(path.cell, path.states[3], path.drives[3])[0]).abs().sort().values
    assert float(found[:6].max()) <= 1e-9
    assert float((found[6:] - expected).abs().max()) <= 1e-9


def r6_chrono() -> None:
    """R6: with b_f = ln(T - 1) and no recurrence an LSTM forgets a T-th per step."""
    bias = gate(torch.full((4,), math.log(49.0), dtype=torch.float64), 1, 4)
    found = analyzed(zeroed(nn.LSTM(1, 4), bias_ih_l0=bias), 80)
    close(found.spectral_radius, 0.98, 1e-9)
    close(found.effective_memory_length, 49.4983, 1e-3)
    close(found.cells["l0"].cell_memory_length, 49.4983, 1e-3)
    close(found.cells["l0"].gates["forget"].mean, 0.98, 1e-9)
    seen = analyzed(zeroed(nn.LSTM(1, 4), bias_ih_l0=bias), 50)
    assert seen.censored
    assert not found.censored


def r7_leaky() -> None:
    """R7: the radius of a leaky reservoir at rest is max|1 - a + a g eig W|."""
    weight, leak, gain = normal(9, 9) / 3, 0.3, 1.1
    path = mapped(
        lambda h, _: (1 - leak) * h + leak * gain * torch.tanh(h) @ weight.T, torch.zeros(1, 9, dtype=torch.float64), 3
    )
    expected = float((1 - leak + leak * gain * torch.linalg.eigvals(weight)).abs().max())
    close(float(step_spectrum(path.cell, path.states[1], path.drives[1]).value().abs().max()), expected, 1e-9)


def r8_stacked() -> None:
    """R8: the eigenvalues of two stacked layers are those of each."""
    model = nn.RNN(2, 5, num_layers=2).double()
    inputs = normal(4, 1, 2)
    (first,), (second,) = layer_cells(model, "")
    paths = replay(model, sequences(model, inputs))

    def joint(states: Tensor, inputs: Tensor) -> Tensor:
        lower = first.step(states[:, :5], first.drive(inputs))
        return torch.cat([lower, second.step(states[:, 5:], second.drive(lower))], dim=-1)

    state = torch.cat([path.states[2] for path in paths], dim=-1)
    whole = torch.linalg.eigvals(jacobian(function_cell("joint", joint, 10), state, inputs[2])[0])
    parts = torch.cat([torch.linalg.eigvals(jacobian(path.cell, path.states[2], path.drives[2])[0]) for path in paths])
    assert all(float((parts - value).abs().min()) <= 1e-8 for value in whole)
    assert all(float((whole - value).abs().min()) <= 1e-8 for value in parts)


def r9_growth_without_radius() -> None:
    """R9: two nilpotent matrices in turn have radius zero at every step and grow by 2 per step."""
    matrix = torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    turns = torch.arange(40, dtype=torch.float64).remainder(2).reshape(40, 1, 1)
    issues, found = RecurrentAnalyzer().analyze_step(
        lambda s, x: torch.where(x > 0, s @ matrix.T, s @ matrix), torch.ones(1, 2, dtype=torch.float64), turns
    )
    close(found.spectral_radius, 0.0, 1e-6)
    close(found.growth_rate, 2.0, 1e-6)
    assert found.criticality == "SUPERCRITICAL"
    assert [issue.issue_type.value for issue in issues] == ["SUPERCRITICAL"]


def r10_complex_pair() -> None:
    """R10: a scaled rotation has a complex pair of magnitude 0.9, dense and by Arnoldi's method."""
    turn = 0.9 * torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64)
    state = torch.zeros(1, 2, dtype=torch.float64)
    _, found = RecurrentAnalyzer().analyze_step(lambda s, _: s @ turn.T, state, torch.zeros(5, 1, 0).double())
    close(found.spectral_radius, 0.9, 1e-9)
    cell = function_cell("turn", lambda s, _: s @ turn.T, 2)
    close(float(outer_spectrum(cell, state[0], state[0, :0], generator()).value().abs().max()), 0.9, 1e-9)


def ginibre() -> None:
    """Arnoldi's method finds the radius of a random matrix, here a complex pair, within 1 %."""
    matrix = normal(400, 400, seed=3) / 20
    close(arnoldi_radius(lambda vector: matrix @ vector, normal(400)) / radius(matrix), 1.0, 0.01)


def r11_gradients_through_time() -> None:
    """R11: the loss on the last output reaches the first state, although output.grad is zero there."""
    model, inputs = nn.RNN(3, 5, batch_first=True).double(), normal(2, 8, 3).requires_grad_()
    into, recurrent, bias, other_bias = model.parameters()
    recorder = RecurrentRecorder(model)
    output, _ = model(inputs)
    output.retain_grad()
    output[:, -1].square().sum().backward()
    (recorded,) = recorder.recorded()
    recorder.close()
    assert output.grad is not None
    assert inputs.grad is not None
    assert float(output.grad[:, :-1].abs().max()) == 0.0
    assert float(inputs.grad[:, 0].abs().max()) > 0.0
    found, hidden, states = recorded.trajectory.gradients, torch.zeros(2, 5, dtype=torch.float64), []
    for step in range(8):
        hidden = torch.tanh(inputs[:, step] @ into.T + bias + other_bias + hidden @ recurrent.T)
        states.append(hidden)
    expected = torch.stack(torch.autograd.grad(hidden.square().sum(), states))
    assert found is not None
    assert float((found - expected).abs().max()) <= 1e-12


def l1_henon() -> None:
    """L1: the Henon map."""

    def step(s: Tensor, _: Tensor) -> Tensor:
        return torch.stack([1 - 1.4 * s[:, 0] ** 2 + s[:, 1], 0.3 * s[:, 0]], dim=-1)

    start = mapped(step, torch.tensor([[0.1, 0.1]], dtype=torch.float64), 100).states[-1]
    found = sweep(mapped(step, start, 1500), generator(), warm_up=0).value().exponents
    close(float(found[0]), 0.4192, 0.02)
    close(float(found.sum()), math.log(0.3), 1e-9)


def l2_cat_map() -> None:
    """L2: Arnold's cat map."""
    matrix = torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    path = mapped(lambda s, _: (s @ matrix.T).remainder(1.0), torch.tensor([[0.1, 0.7]], dtype=torch.float64), 100)
    found = sweep(path, generator()).value().exponents
    expected = math.log((3 + math.sqrt(5)) / 2)
    close(expected, 0.962424, 1e-6)
    close(float(found[0]), expected, 1e-9)
    close(float(found[1]), -expected, 1e-9)


def l3_logistic() -> None:
    """L3: the logistic map at r = 4."""
    path = mapped(lambda s, _: 4 * s * (1 - s), torch.tensor([[0.3], [0.41]], dtype=torch.float64), 1500)
    close(float(sweep(path, generator()).value().exponents[0]), math.log(2), 0.03)


def mean_field(gain: float) -> float:
    """Return the Lyapunov exponent of a large random tanh network: 0.5 ln chi above the transition, ln g below it."""
    points, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()
    variance = 1.0
    for _ in range(20000):
        variance = gain**2 * float(weights @ np.tanh(math.sqrt(variance) * points) ** 2)
    slope = float(weights @ (1 - np.tanh(math.sqrt(variance) * points) ** 2) ** 2)
    return 0.5 * math.log(gain**2 * slope)


def random_network_exponent(gain: float, size: int = 500) -> float:
    """Measure the first Lyapunov exponent of h' = tanh(W h), over 250 steps after 150."""
    model = zeroed(nn.RNN(1, size, bias=False), weight_hh_l0=normal(size, size) * gain / math.sqrt(size))
    assert isinstance(model, nn.RNN)
    found = sequences(model, torch.zeros(400, 1, 1), normal(1, 1, size))
    path = replay(model, found)[0]
    return float(sweep(path, generator(), max_steps=250, num_probes=1, num_exponents=1).value().exponents[0])


L4_GAINS = {0.5: -0.693, 0.9: -0.105, 1.1: 0.005, 1.5: 0.065, 2.0: 0.155, 3.0: 0.312}


def l4_random_network(gain: float, expected: float) -> None:
    """L4: a random network follows mean-field theory."""
    close(mean_field(gain), expected, 2e-3)
    close(random_network_exponent(gain), expected, 0.05)


def sequences(model: nn.RNNBase, inputs: Tensor, state: Tensor | None = None) -> Sequences:
    """Wrap inputs (T, B, I)."""
    return Sequences.of(model, inputs.double(), state, limit=4)[0]


def trajectory(model: nn.Module, inputs: Tensor) -> Trajectory:
    """Replay the first layer of a module."""
    assert isinstance(model, nn.RNNBase)
    return replay(model, sequences(model, inputs))[0]


def radius(matrix: Tensor) -> float:
    """Return the spectral radius by numpy."""
    return float(np.abs(np.linalg.eigvals(matrix.numpy())).max())


def weight_of(cell: Cell) -> Tensor:
    """Return the recurrent matrix of a cell."""
    assert isinstance(cell, TorchCell)
    return cell.weight_hh


GOLDENS = [
    r1_scaled_rotation,
    r2_jacobian_of_a_random_state,
    r3_saturation,
    r4_gru,
    r5_lstm,
    r6_chrono,
    r7_leaky,
    r8_stacked,
    r9_growth_without_radius,
    r10_complex_pair,
    ginibre,
    r11_gradients_through_time,
    l1_henon,
    l2_cat_map,
    l3_logistic,
]
