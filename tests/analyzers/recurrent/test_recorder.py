"""Following the states of recurrent modules through a step: what counts, what is found, and what the gradients are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrack import GradientManager, RecurrentAnalyzer
from gradtrack.analyzers.recurrent.recorder import RecurrentRecorder, recurrent_modules
from gradtrack.analyzers.recurrent.trajectories import Trajectory
from gradtrack.errors import UsageError
from tests.analyzers.recurrent.recurrent_models import Case, batch_first, build, cases, cell_like


def follow(model: nn.Module, *calls: Any, **options: Any) -> dict[str, Trajectory]:
    """Run a model on each call's arguments, with the squared sum of its first tensor as the loss."""
    recorder = RecurrentRecorder(model, **options)
    for call in calls:
        torch.autograd.backward(first_tensor(model(*call)).square().sum())
    found = {recorded.trajectory.cell.name: recorded.trajectory for recorded in recorder.recorded()}
    recorder.close()
    return found


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of an output."""
    return output if isinstance(output, Tensor) else first_tensor(output[0])


def unrolled(module: nn.RNNBase, inputs: Tensor) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """Run inputs (B, T, I) through torch's own cells; return outputs, final states and all states by direction."""
    finals, tracks = [], []
    for layer in range(module.num_layers):
        outputs = []
        for suffix in ("", "_reverse") if module.bidirectional else ("",):
            cell, states = cell_like(module, f"_l{layer}{suffix}"), [torch.Tensor()]
            order = range(inputs.shape[1])
            for step in reversed(order) if suffix else order:
                parts = torch.split(states[-1], module.hidden_size, dim=-1) if states[-1].numel() else None
                state = parts if parts is None or len(parts) == 2 else parts[0]
                following = cell(inputs[:, step], state)
                joint = torch.cat(following, dim=-1) if isinstance(following, tuple) else following
                joint.retain_grad()
                states.append(joint)
            finals.append(states[-1])
            tracks.append(states[1:])
            hidden = [state[:, : module.hidden_size] for state in states[1:]]
            outputs.append(torch.stack(hidden[::-1] if suffix else hidden, dim=1))
        inputs = torch.cat(outputs, dim=-1)
    return inputs, finals, tracks


def assert_gradients(found: Trajectory, states: list[Tensor]) -> None:
    """Compare the gradients of a trajectory with what autograd left at every state."""
    assert found.gradients is not None
    for mine, state in zip(found.gradients, states, strict=True):
        theirs = torch.zeros_like(state) if state.grad is None else state.grad
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(cases(layouts=["time_first", "batch_first"]).filter(lambda case: not case.module.proj_size))
def test_gradients_of_all_states_are_those_of_an_unrolled_network(case: Case) -> None:
    """From the direct gradients at outputs and final states the replay finds dL/ds at every state."""
    recorder = RecurrentRecorder(case.module, max_sequences=4)
    output, final = case.module(case.inputs)
    finals = final if isinstance(final, tuple) else (final,)
    weights = [torch.randn_like(part) for part in (output, *finals)]
    pairs = zip((output, *finals), weights, strict=True)
    torch.autograd.backward(torch.stack([(part * weight).sum() for part, weight in pairs]).sum())
    plain, states, tracks = unrolled(case.module, batch_first(case.module, case.inputs))
    loss = (plain * batch_first(case.module, weights[0])).sum() + sum(
        (state * weight).sum() for state, weight in zip(states, torch.cat(weights[1:], dim=-1), strict=True)
    )
    torch.autograd.backward(loss)
    for recorded, expected in zip(recorder.recorded(), tracks, strict=True):
        assert_gradients(recorded.trajectory, expected)
    recorder.close()


@pytest.mark.parametrize("kind", ["rnn_tanh", "lstm", "gru"])
def test_the_gradient_at_the_output_holds_no_memory_and_the_replayed_one_does(kind: str) -> None:
    """R11: with a loss on the last step, output.grad is exactly zero before it although the first input matters."""
    module, inputs = build(kind, 3, 4, batch_first=True), torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    recorder = RecurrentRecorder(module)
    output, _ = module(inputs)
    output.retain_grad()
    torch.autograd.backward(output[:, -1].square().sum())
    plain, _, tracks = unrolled(module, inputs)
    torch.autograd.backward(plain[:, -1].square().sum())
    (recorded,) = recorder.recorded()
    recorder.close()
    assert output.grad is not None
    assert inputs.grad is not None
    assert float(output.grad[:, :-1].abs().max()) == 0.0
    assert float(inputs.grad[:, 0].abs().min()) > 0.0
    assert_gradients(recorded.trajectory, tracks[0])


def test_packed_gradients_are_those_of_each_sequence_alone() -> None:
    """In a packed batch every sequence has the gradients that it has by itself."""
    module = build("lstm", 3, 4, bidirectional=True, batch_first=True)
    inputs, lengths = torch.randn(3, 6, 3, dtype=torch.float64), [4, 6, 3]
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    recorder = RecurrentRecorder(module)
    module(packed)[0].data.square().sum().backward()
    together = [recorded.trajectory.gradients for recorded in recorder.recorded()]
    recorder.close()
    for index, length in enumerate(lengths):
        alone = follow(module, (inputs[index : index + 1, :length],))
        for mine, theirs in zip(together, alone.values(), strict=True):
            assert mine is not None
            assert theirs.gradients is not None
            assert torch.allclose(mine[-length:, index], theirs.gradients[:, 0], rtol=0, atol=1e-12)


class Decoder(nn.Module):
    """A cell called once per step."""

    def __init__(self, cell: nn.Module, *, detach: bool = False) -> None:
        super().__init__()
        self.cell, self.detach = cell, detach

    def forward(self, inputs: Tensor) -> Tensor:
        """Run over (B, T, I)."""
        state: Any = None
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
        return first_tensor(state)


class StepByStep(nn.Module):
    """A fused module called once per step with its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()

    def forward(self, inputs: Tensor) -> Tensor:
        """Run over (B, T, I)."""
        state = None
        outputs = []
        for step in range(inputs.shape[1]):
            output, state = self.rnn(inputs[:, step : step + 1], state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("cell", [nn.RNNCell(3, 4), nn.LSTMCell(3, 4), nn.GRUCell(3, 4)])
def test_cells_are_followed_through_the_users_own_loop(cell: nn.RNNCellBase) -> None:
    """A cell in a loop gives the trajectory and the gradients of the fused module of the same weights."""
    cell, inputs = cell.double(), torch.randn(2, 6, 3, dtype=torch.float64)
    (found,) = follow(Decoder(cell), (inputs,)).values()
    assert found.gradients is not None
    fused = {"RNNCell": nn.RNN, "LSTMCell": nn.LSTM, "GRUCell": nn.GRU}[type(cell).__name__](3, 4).double()
    with torch.no_grad():
        for name, param in cell.named_parameters():
            getattr(fused, f"{name}_l0").copy_(param)
    recorder = RecurrentRecorder(fused)
    fused(inputs.transpose(0, 1))[0][-1].square().sum().backward()
    (expected,) = [recorded.trajectory for recorded in recorder.recorded()]
    recorder.close()
    assert torch.allclose(found.states, expected.states, rtol=0, atol=1e-12)
    assert torch.allclose(found.gradients, expected.gradients, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def test_a_fused_module_that_is_handed_its_own_state_is_one_sequence() -> None:
    """Decoding step by step with nn.LSTM is found to be the same as one call over the whole sequence."""
    model, inputs = StepByStep(), torch.randn(2, 5, 3, dtype=torch.float64)
    pieces, whole = follow(model, (inputs,)), follow(model.rnn, (inputs,))
    for found, expected in zip(pieces.values(), whole.values(), strict=True):
        assert torch.allclose(found.states, expected.states, rtol=0, atol=1e-12)
        assert found.gradients is not None
        assert torch.allclose(found.gradients, expected.gradients, rtol=0, atol=1e-12)  # type: ignore[arg-type]


class Leaky(nn.Module):
    """A cell of one's own: it returns a reading and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(7, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by one step."""
        state = 0.5 * h + 0.5 * torch.tanh(self.mix(torch.cat([x, self.drop(h)], dim=-1)))
        return state.sum(dim=-1), state


class Loop(nn.Module):
    """A cell of one's own in a loop, and a module of two arguments that is no cell."""

    def __init__(self, cell: nn.Module, state: Any) -> None:
        super().__init__()
        self.cell, self.state, self.other = cell, state, nn.Bilinear(4, 4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Run over (B, T, I)."""
        state = self.state
        for step in range(inputs.shape[1]):
            _, state = self.cell(inputs[:, step], state)
        last = first_tensor(state)
        read: Tensor = last + 0 * self.other(last, last)
        return read


def test_custom_cells_are_found_by_the_state_that_comes_back() -> None:
    """A module (x, h) -> (y, h') is followed by the identity of its tensors, with the gradients of its states."""
    model = Loop(Leaky(), torch.zeros(2, 4))
    (found,) = follow(model, (torch.randn(2, 6, 3),)).values()
    assert (found.cell.kind, found.cell.state_size, tuple(found.states.shape)) == ("custom", 4, (7, 2, 4))
    assert found.gradients is not None
    assert float(found.gradients[0].abs().max()) > 0.0
    assert model.cell.training
    assert model.cell.drop.training  # type: ignore[union-attr]


class Pair(nn.Module):
    """A cell of one's own around torch's, with a tuple as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Advance by one step."""
        h, c = self.inner(x, state)
        return h, (h, c)


def test_a_cell_around_a_cell_is_one_cell() -> None:
    """A custom cell's tuple state is joined, and the cell inside it is not counted again."""
    model = Loop(Pair(), (torch.zeros(2, 4), torch.zeros(2, 4)))
    found = follow(model, (torch.randn(2, 6, 3),))
    assert list(found) == ["cell"]
    assert found["cell"].cell.state_size == 8
    assert found["cell"].cell.output_size == 4


def test_a_step_function_stands_in_for_a_module_that_hides_its_states() -> None:
    """The user's own state equation is followed over the inputs that the module received."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Flatten(1))
    functions = {"0": (lambda s, x: 0.5 * s + x.sum(dim=-1, keepdim=True), 5)}
    (found,) = follow(model, (torch.ones(2, 6, 3),), step_functions=functions).values()
    assert found.states[:3, 0, 0].tolist() == [0.0, 3.0, 4.5]


def test_a_step_function_for_no_module_is_an_error() -> None:
    """The error names the modules that there are, as soon as the model is known: live when it is attached."""
    model = nn.Sequential(OrderedDict(core=nn.Linear(1, 1)))
    functions: Any = {"cor": (torch.add, 1)}
    said = r"step function of 'cor': expected one of '', 'core'\. Did you mean 'core'\?"
    with pytest.raises(UsageError, match=said):
        RecurrentAnalyzer(model, step_functions=functions)
    manager = GradientManager(analyzers=[{"name": "recurrent", "step_functions": functions}])
    with pytest.raises(UsageError, match=said):
        manager.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("step", "size", "told"),
    [
        (
            lambda module, h, x: torch.tanh(h @ module.weight + x),
            5,
            "states [2, 5] and inputs [2, 4], it raised Runtime",
        ),
        (lambda h, x: x @ torch.ones(4, 3), 5, "called with states [2, 5] and inputs [2, 4], it returned [2, 3]"),
        (lambda h, x: (h, x), 5, "called with states [2, 5] and inputs [2, 4], it returned tuple"),
    ],
)
def test_a_step_function_that_does_not_fit_is_told_in_words(step: Any, size: int, told: str) -> None:
    """With what it was called, what it did, and what to check."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="Check the state size, and that it takes \\(states, inputs\\)") as caught:
        follow(model, (torch.ones(2, 6, 4),), step_functions={"0": (step, size)})
    assert str(caught.value).startswith("step function of '0': called with ")
    assert told in str(caught.value)


def test_step_functions_come_from_import_paths() -> None:
    """What a YAML file can say: the path of a function and the size of its state, or an error that says how."""
    analyzer = RecurrentAnalyzer(step_functions={"a": ("torch:add", 3)})
    assert analyzer.step_functions == {"a": (torch.add, 3)}
    for wrong in (("torch:ad", 3), ("no_such_module:step", 3), ("torch:add", 0), "torch:add", (3, 3)):
        with pytest.raises(UsageError, match=r"step function of 'a': .* its import path such as 'my_cells:step'"):
            RecurrentAnalyzer(step_functions={"a": wrong})  # type: ignore[dict-item]


class CTRNN(nn.Module):
    """A continuous-time network with its loop in the forward pass, which shows no state to a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.recurrent = nn.Parameter(torch.randn(3, 4)), nn.Parameter(0.5 * torch.randn(4, 4))

    def step(self, states: Tensor, inputs: Tensor) -> Tensor:
        """Advance by one step."""
        return 0.8 * states + 0.2 * torch.tanh(states @ self.recurrent + inputs @ self.inward)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last state."""
        state = inputs.new_zeros(inputs.shape[0], 4)
        for x in inputs.unbind(1):
            state = self.step(state, x)
        return state


def test_a_step_function_of_three_arguments_gets_the_module() -> None:
    """The method of a network is its state equation, with the weights of now, also by its path."""
    model, inputs = CTRNN(), torch.randn(2, 6, 3)
    path = f"{__name__}:CTRNN.step"
    functions = RecurrentAnalyzer(model, step_functions={"": (path, 4)}).step_functions
    (found,) = follow(model, (inputs,), step_functions=functions).values()
    assert torch.allclose(found.states[-1], model(inputs))


class Swapped(nn.Module):
    """A cell `(h, x, c) -> (h, c)`: its state comes first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(3, 4)

    def forward(self, h: Tensor | None, x: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advance by one step."""
        found: tuple[Tensor, Tensor] = self.inner(x, None if h is None or c is None else (h, c))
        return found


class SwappedLoop(nn.Module):
    """A loop over such a cell, with or without a first state."""

    def __init__(self, *, starts_empty: bool = False) -> None:
        super().__init__()
        self.cell, self.starts_empty = Swapped().double(), starts_empty

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last output."""
        state: Any = (None, None) if self.starts_empty else (inputs.new_zeros(len(inputs), 4),) * 2
        for x in inputs.unbind(1):
            state = self.cell(state[0], x, state[1])
        return first_tensor(state)


@pytest.mark.parametrize("starts_empty", [False, True])
def test_the_state_is_the_argument_that_is_fed_back(starts_empty: bool) -> None:
    """Wherever the state stands among the arguments, a cell is followed as the one of torch inside of it is."""
    model, inputs = SwappedLoop(starts_empty=starts_empty), torch.randn(2, 6, 3, dtype=torch.float64)
    found, inner = follow(model, (inputs,))["cell"], follow(Decoder(model.cell.inner), (inputs,))["cell"]
    assert torch.allclose(found.states, inner.states[starts_empty:], rtol=0, atol=1e-12)
    assert found.gradients is not None
    assert inner.gradients is not None
    assert torch.allclose(found.gradients, inner.gradients[starts_empty:], rtol=0, atol=1e-12)
    rows = found.cell.step(found.states[:-1].flatten(0, 1), found.drives.flatten(0, 1))
    assert torch.allclose(rows, found.states[1:].flatten(0, 1), rtol=0, atol=1e-12)


class Gated(nn.Module):
    """A cell `(token, gain, h) -> h` of token numbers and a number for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, token: Tensor, gain: Tensor, h: Tensor) -> Tensor:
        """Advance by one step."""
        state: Tensor = torch.tanh(gain[:, None] * self.mix(h) + self.embed(token))
        return state


def test_inputs_of_any_shape_are_replayed() -> None:
    """Arguments that are one number for each sequence, whole or not, come back to the cell as they were."""
    cell = Gated()
    model = nn.Module()
    model.cell = cell
    recorder = RecurrentRecorder(model)
    state, tokens, gains = torch.zeros(3, 4), torch.randint(5, (6, 3)), torch.rand(6, 3)
    for token, gain in zip(tokens, gains, strict=True):
        state = cell(token, gain, state)
    state.square().sum().backward()  # type: ignore[no-untyped-call]
    (found,) = [recorded.trajectory for recorded in recorder.recorded()]
    recorder.close()
    rows = found.cell.step(found.states[:-1].flatten(0, 1), found.drives.flatten(0, 1))
    assert torch.allclose(rows, found.states[1:].flatten(0, 1), atol=1e-6)


def test_only_forwards_that_belong_to_a_backward_count() -> None:
    """Neither an evaluation before nor one after the training forward is taken for it."""
    module, training = build("gru", 3, 4), torch.randn(5, 2, 3, dtype=torch.float64)
    recorder = RecurrentRecorder(module)
    module(torch.zeros_like(training))
    module(training)[0].sum().backward()
    with torch.no_grad():
        module(torch.zeros_like(training))
    module(torch.zeros_like(training))
    (recorded,) = recorder.recorded()
    recorder.close()
    assert torch.equal(recorded.trajectory.inputs, training)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant: bool) -> None:
    """What is computed again for the backward pass is the same sequence, not a second one."""
    module, inputs = build("gru", 3, 4), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    recorder = RecurrentRecorder(module)
    checkpoint(module, inputs, use_reentrant=reentrant)[0].sum().backward()
    (recorded,) = recorder.recorded()
    recorder.close()
    assert torch.equal(recorded.trajectory.inputs, inputs)


def test_no_hook_stays() -> None:
    """Closing removes what was placed, a second time too, and lets go of the tensors."""
    model = Decoder(nn.LSTMCell(3, 4))
    recorder = RecurrentRecorder(model)
    assert model.cell._forward_hooks
    model(torch.randn(2, 3, 3)).sum().backward()
    recorder.close()
    recorder.close()
    assert not any(module._forward_hooks for module in model.modules())
    assert recorder.recorded() == []


def test_the_batch_may_be_changed_in_place_after_the_forward() -> None:
    """What was kept is a copy."""
    module, inputs = build("rnn_tanh", 3, 4), torch.ones(5, 2, 3, dtype=torch.float64)
    recorder = RecurrentRecorder(module)
    module(inputs)[0].sum().backward()
    inputs.zero_()
    (recorded,) = recorder.recorded()
    recorder.close()
    assert bool((recorded.trajectory.inputs == 1).all())


def test_autocast_is_followed() -> None:
    """A module that ran in bfloat16 is replayed in full precision."""
    model = Loop(Leaky(), torch.zeros(2, 4))
    recorder = RecurrentRecorder(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 6, 3)).float().sum()
    loss.backward()
    (recorded,) = recorder.recorded()
    recorder.close()
    assert recorded.trajectory.states.dtype == torch.float32


def test_long_sequences_are_differentiated_at_their_end() -> None:
    """Beyond the limit the states are replayed but carry no gradient."""
    module, inputs = build("gru", 3, 4), torch.randn(9, 2, 3, dtype=torch.float64)
    whole, cut = (next(iter(follow(module, (inputs,), max_steps=limit).values())) for limit in (9, 4))
    assert whole.gradients is not None
    assert cut.gradients is not None
    assert torch.equal(cut.states, whole.states)
    assert torch.allclose(cut.gradients[-4:], whole.gradients[-4:], rtol=0, atol=1e-12)
    assert float(cut.gradients[:-4].abs().max()) == 0.0


def test_frozen_reservoirs_are_followed_without_gradients() -> None:
    """A module that nothing requires gradients of still has dynamics."""
    model = nn.Sequential(nn.RNN(3, 4).requires_grad_(False))
    recorder = RecurrentRecorder(model)
    model(torch.randn(5, 2, 3))
    (recorded,) = recorder.recorded()
    recorder.close()
    assert recorded.trajectory.gradients is None
    assert recorded.trajectory.window == 5


class Vanilla(nn.Module):
    """The network of a tutorial: two layers, a loop, and a list of what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2h, self.read = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Read every state."""
        s, outputs = inputs.new_zeros(len(inputs), 4), []
        for t in range(inputs.shape[1]):
            drive = self.i2h(inputs[:, t])
            new = torch.relu(drive + self.h2h(s))
            s = 0.9 * s + 0.1 * new
            outputs.append(self.read(s))
        return torch.stack(outputs)


class Deep(nn.Module):
    """Layers in a loop with one activation, which is no recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        """Go through the layers."""
        for layer in self.layers:
            x = self.norm(layer(x))
        for index in range(3):
            x = self.norm(self.layers[index](x))
        return x


class Scales(nn.Module):
    """One head for several inputs, whose results are added up and refined within a turn: no recurrence either."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.mix, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Add up."""
        total = torch.zeros(4)
        for one in x.unbind(0):
            seen = self.head(one)
            seen = self.mix(seen)
            total = self.act(total + seen)
        return total

    def generate(self, x: Tensor) -> Tensor:
        """Feed outputs back, beside the training."""
        while len(x) < 9:
            x = self.head(x)
        return x


def test_a_loop_that_feeds_its_state_back_is_seen_in_the_source() -> None:
    """Whatever the names: weights that are applied to what the turn before left are a recurrence, nothing else is."""
    found = recurrent_modules(nn.ModuleList([CTRNN(), Vanilla(), SwappedLoop(), Deep(), Scales()]))
    assert found == ["0", "1", "2.cell.inner"]
