"""Several optimizers over one model: every gradient is measured and clipped once."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradtrack
from gradtrack import GradientManager
from gradtrack.backends.memory import MemoryBackend
from gradtrack.errors import UsageError
from gradtrack.step.pairs import divide
from tests.training import batch_loss, layer, optimizer_of, small_model

Ids = st.sets(st.integers(0, 8))


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of a model and the rest."""
    params = list(model.parameters())
    return [param for param in params if param.ndim > 1], [param for param in params if param.ndim < 2]


def norm_of(params: list[nn.Parameter]) -> float:
    """Return the norm of gradients in float64."""
    grads = [param.grad for param in params]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads if grad is not None))


class Together:
    """A small model with an optimizer for its matrices and another for its biases, each a pair."""

    def __init__(self, *, first: str | None = "matrices", **settings: Any) -> None:
        self.model = small_model()
        self.matrices, self.biases = halves(self.model)
        self.one, self.two = torch.optim.SGD(self.matrices, lr=0.1), torch.optim.AdamW(self.biases, lr=0.01)
        self.manager = GradientManager(**settings)
        self.manager.attach(self.model, self.one, name=first)

    def attach_second(self) -> None:
        """Attach the pair of the biases."""
        self.manager.attach(self.model, self.two, name="biases")

    def backward(self, step: int = 0, scale: float = 1.0) -> Tensor:
        """Compute the gradients of a batch."""
        self.model.zero_grad()
        loss = batch_loss(self.model, step, scale)
        torch.autograd.backward(loss)
        return loss

    def step(self, step: int = 0, scale: float = 1.0) -> Any:
        """Train for one step of both optimizers, and return both reports."""
        loss = self.backward(step, scale)
        found = [self.manager.step(self.model, one, loss, backward=False) for one in (self.one, self.two)]
        self.one.step()
        self.two.step()
        return found


@given(st.lists(st.tuples(Ids, Ids), min_size=1, max_size=4))
def test_every_parameter_belongs_to_the_pair_of_its_optimizer(pairs: list[tuple[set[int], set[int]]]) -> None:
    """A pair measures what its optimizers own; a parameter without an optimizer belongs to the first pair with it."""
    held, owned = [held for held, _ in pairs], [owned for _, owned in pairs]
    found = [mine - left for mine, left in zip(held, divide(held, owned), strict=True)]
    anyone = set[int]().union(*owned)
    for index, (mine, kept) in enumerate(zip(held, found, strict=True)):
        earlier = set[int]().union(*held[:index])
        assert kept == {one for one in mine if one in owned[index] or (one not in anyone and one not in earlier)}


def test_each_pair_measures_what_its_optimizer_owns() -> None:
    """The norms of the pairs are those of their parts, and together that of the whole."""
    both = Together(max_grad_norm=1e9)
    both.attach_second()
    for step in range(3):
        both.backward(step)
        expected = [norm_of(both.matrices), norm_of(both.biases)]
        reports = both.step(step)
        assert [report.clipping.norm_before for report in reports] == pytest.approx(expected, rel=1e-6)
        assert [set(report.groups) for report in reports] == [{"0", "2"}, {"0", "2"}]
        counts = [report.statistics.element_count for report in reports]
        assert counts == [sum(param.numel() for param in part) for part in (both.matrices, both.biases)]
        assert all(report.statistics.missing == [] for report in reports)


def test_each_pair_is_clipped_once_by_its_own_norm() -> None:
    """Clipping one part leaves the other as it is."""
    both = Together(max_grad_norm=0.01)
    both.attach_second()
    loss = both.backward()
    untouched = [param.grad.clone() for param in both.biases if param.grad is not None]
    both.manager.step(both.model, both.one, loss, backward=False)
    assert norm_of(both.matrices) == pytest.approx(0.01, rel=1e-4)
    assert all(torch.equal(param.grad, kept) for param, kept in zip(both.biases, untouched, strict=True))  # type: ignore[arg-type]
    both.manager.step(both.model, both.two, loss, backward=False)
    assert norm_of(both.biases) == pytest.approx(0.01, rel=1e-4)


def test_a_sequence_of_optimizers_is_clipped_by_the_norm_of_the_whole() -> None:
    """One step for both optimizers is what a loop does that clips `model.parameters()`."""
    model, twin = small_model(), small_model()
    matrices, biases = halves(model)
    optimizers = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(biases)]
    report = GradientManager(max_grad_norm=0.01).step(model, optimizers, batch_loss(model))
    torch.autograd.backward(batch_loss(twin))
    whole = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    assert report.clipping.norm_before == pytest.approx(float(whole), rel=1e-6)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4)  # type: ignore[arg-type]


def test_a_step_that_is_left_out_takes_no_gradient_from_the_other_pair() -> None:
    """Each pair decides about its own optimizer's step."""
    both = Together()
    both.attach_second()
    loss = both.backward()
    both.matrices[0].grad.fill_(math.nan)  # type: ignore[union-attr]
    first = both.manager.step(both.model, both.one, loss, backward=False)
    second = both.manager.step(both.model, both.two, loss, backward=False)
    assert (first.skipped, second.skipped) == (True, False)
    assert not any(param.grad.any() for param in both.matrices)  # type: ignore[union-attr]
    assert all(param.grad.any() for param in both.biases)  # type: ignore[union-attr]


def test_a_parameter_without_an_optimizer_is_the_first_pairs() -> None:
    """What no optimizer steps is still measured, once."""
    model = small_model()
    one, two = optimizer_of(layer(model, 0)), torch.optim.SGD([layer(model, 2).weight], lr=0.1)
    manager = GradientManager()
    manager.attach(model, one, name="one")
    manager.attach(model, two, name="two")
    loss = batch_loss(model)
    torch.autograd.backward(loss)
    counts = [
        sum(group.element_count for group in manager.step(model, step, loss, backward=False).groups.values())
        for step in (one, two)
    ]
    assert counts == [5 * 6 + 5 + 3, 3 * 5]


def test_optimizers_that_own_the_same_parameter_take_turns() -> None:
    """A parameter of two optimizers is looked at before the step of each."""
    model = small_model()
    one, two = optimizer_of(model), optimizer_of(model)
    manager = GradientManager()
    manager.attach(model, one, name="one")
    manager.attach(model, two, name="two")
    norms = [manager.step(model, step, batch_loss(model)).clipping.norm_before for step in (one, two)]
    assert norms[0] is not None
    assert norms[1] is not None


def test_a_pair_of_a_part_and_one_of_the_whole() -> None:
    """A decoder with an optimizer of its own is left out of the pair of the whole, whichever came first."""
    model = small_model()
    decoder = layer(model, 2)
    for order in ((0, 1), (1, 0)):
        pairs = [(model, optimizer_of(layer(model, 0)), "whole"), (decoder, optimizer_of(decoder), "decoder")]
        manager = GradientManager()
        for index in order:
            manager.attach(*pairs[index][:2], name=pairs[index][2])
        loss = batch_loss(model)
        torch.autograd.backward(loss)
        found = {name: manager.step(part, step, loss, backward=False) for part, step, name in pairs}
        assert set(found["whole"].groups) == {"0"}
        assert found["decoder"].statistics is not None
        assert found["decoder"].statistics.element_count == 18
        model.zero_grad()


def test_a_late_pair_takes_over_from_then_on() -> None:
    """A pair that is attached during the training takes its parameters over, and the note says so."""
    both = Together(first=None)
    loss = both.backward()
    alone = both.manager.step(both.model, both.one, loss, backward=False)
    both.attach_second()
    first, second = both.step(1)
    assert alone.statistics is not None
    assert alone.statistics.element_count == 53
    assert (first.statistics.element_count, second.statistics.element_count) == (45, 8)
    assert [note for note in first.notes if note.startswith("2 of the 4 parameters are measured and clipped with")]
    assert both.step(2)[0].notes == []
    assert both.manager.diagnose() == []


def test_a_group_that_is_added_to_an_optimizer_goes_with_it() -> None:
    """Ownership is that of the step, not that of the beginning."""
    model = small_model()
    one, two = optimizer_of(layer(model, 0)), torch.optim.SGD([layer(model, 2).weight], lr=0.1)
    manager = GradientManager()
    manager.attach(model, one, name="one")
    manager.attach(model, two, name="two")
    two.add_param_group({"params": [layer(model, 2).bias]})
    loss = batch_loss(model)
    torch.autograd.backward(loss)
    found = manager.step(model, two, loss, backward=False)
    assert sum(group.element_count for group in found.groups.values()) == 18


def test_the_metrics_of_each_pair_are_its_own() -> None:
    """The names end in the pair's, and a name may be that of a group which the pair takes over."""
    model = small_model()
    manager = GradientManager(backends=["memory"], grad_log_every_n_steps=1)
    one, two = optimizer_of(layer(model, 0)), optimizer_of(layer(model, 2))
    manager.attach(model, one)
    manager.attach(model, two, name="2")
    loss = batch_loss(model)
    torch.autograd.backward(loss)
    for step in (one, two):
        manager.step(model, step, loss, backward=False)
    memory = manager.backend("memory")
    assert isinstance(memory, MemoryBackend)
    first, second = (dict(record.metrics) for record in memory.records)
    assert {"train/grad_norm", "train/grad_norm/0"} <= first.keys()
    assert {"train/grad_norm/2", "train/grad_norm/2/2"} <= second.keys()
    assert not first.keys() & second.keys()


def test_a_name_that_is_a_group_of_what_stays_is_refused() -> None:
    """Two curves must not have one name."""
    both = Together(first=None)
    with pytest.raises(UsageError, match="also a group of the unnamed pair"):
        both.manager.attach(both.model, both.two, name="0")


def test_a_checkpoint_finds_both_pairs_again() -> None:
    """Counts and windows of each pair go on, whether the state comes before its pairs or after them."""
    whole = Together(clip_type="zscore")
    whole.attach_second()
    for step in range(20):
        whole.step(step)
    state = copy.deepcopy(whole.manager.state_dict())
    expected = [report.model_dump() for report in whole.step(20, scale=50.0)]
    for before in (True, False):
        again = Together(clip_type="zscore")
        if before:
            again.manager.load_state_dict(state)
        again.attach_second()
        if not before:
            again.manager.load_state_dict(state)
        again.model.load_state_dict(whole.model.state_dict())
        found = again.step(20, scale=50.0)
        assert [report.step for report in found] == [21, 21]
        assert [report.clipping.threshold for report in found] == [
            pytest.approx(report["clipping"]["threshold"], rel=0.5) for report in expected
        ]


def test_nothing_is_wrong_with_a_training_of_two_pairs() -> None:
    """Every analyzer looks at its pair's own parameters, so none of them seems to be without optimizer or gradient."""
    both = Together(analyzers="auto")
    both.attach_second()
    for step in range(70):
        first, second = both.step(step)
    assert first.health.issues == second.health.issues == []
    assert both.manager.diagnose() == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whichever_optimizer_steps_first_is_looked_before(order: tuple[int, int]) -> None:
    """Watching a sequence makes all of its gradients safe before any of them is used, once per step of all."""
    model = small_model()
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in halves(model)]
    manager = gradtrack.watch(model, optimizers, max_grad_norm=0.01)
    for step in range(3):
        model.zero_grad()
        torch.autograd.backward(batch_loss(model, step))
        before = [param.detach().clone() for param in model.parameters()]
        for index in order:
            optimizers[index].step()
        moved = [after.detach() - param for after, param in zip(model.parameters(), before, strict=True)]
        assert math.hypot(*(float(move.norm()) for move in moved)) == pytest.approx(0.01, rel=1e-3)
    assert [report.step for report in manager.reports] == [1, 2, 3]
    manager.close()
    assert not any(one._optimizer_step_pre_hooks for one in optimizers)
