"""Limits by group and norms of other orders, against torch's own clipping of each group in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack import GradientClipper, GradientConfig, GradientManager, StepReport, safe_backward, watch
from gradtrack.errors import UsageError
from gradtrack.step import pair
from tests.gradients.gradients import gradients
from tests.training import ENGINES, as_one_vector, batch_loss, look, optimizer_of, small_model, with_gradients

EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)
ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients that a model has."""
    return [param.grad for param in model.parameters() if param.grad is not None]


def precision(grads: list[Tensor]) -> float:
    """Return how exactly norms are measured, which for gradients of float32 may be done in pieces of that type."""
    return 1e-12 if all(grad.dtype == torch.float64 for grad in grads) else 1e-6


@EACH_ENGINE
@given(
    grads=gradients(special=False),
    order=st.sampled_from(ORDERS),
    of_each=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    limits=st.tuples(st.floats(1e-3, 10.0), st.floats(1e-3, 10.0)),
)
def test_each_group_is_clipped_as_torch_clips_it(
    engine: Any, grads: list[Tensor], order: float, of_each: list[int], limits: tuple[float, float]
) -> None:
    """Two groups and a rest, which stays to the bit: norms, coefficients and gradients are torch's in float64."""
    grads = [grad for grad in grads if grad.numel()]  # torch has no norm of order inf of those without an element
    places = [[index for index in range(len(grads)) if of_each[index] == one] for one in (1, 2)]
    keys = {f"^p({'|'.join(map(str, some))})$": limit for some, limit in zip(places, limits, strict=True) if some}
    assume(keys)
    mine, wide = with_gradients([grad.clone() for grad in grads]), [grad.double() for grad in grads]
    before = float(np.linalg.norm(as_one_vector(grads)))
    report = look(mine, engine=engine, max_grad_norm=keys, norm_type=order).clipping
    found = gradients_of(mine)
    for (key, limit), some in zip(keys.items(), filter(None, places), strict=True):
        theirs = with_gradients([wide[index].clone() for index in some])
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit, norm_type=order))
        group = report.groups[key]
        assert group.norm_before == pytest.approx(norm, rel=precision(grads))
        assert group.coefficient == pytest.approx(min(1.0, limit / (norm + 1e-6)), rel=1e-6)
        assert group.clipped == (group.coefficient < 1.0)
        assert group.threshold == limit
        assert group.norm_after == pytest.approx(norm * group.coefficient, rel=1e-6)
        for index, other in zip(some, gradients_of(theirs), strict=True):
            finfo = torch.finfo(found[index].dtype)
            tolerance = max(precision(grads), 2.0 * finfo.eps)
            assert torch.allclose(found[index].double(), other, rtol=tolerance, atol=finfo.smallest_normal)
    for index in set(range(len(grads))) - {index for some in places for index in some}:
        assert torch.equal(found[index], grads[index])
    assert report.clipped == any(group.clipped for group in report.groups.values())
    assert (report.threshold, report.norm_type) == (None, order)
    assert report.norm_before == pytest.approx(before, rel=1e-6)
    factors = np.ones(len(grads))
    for key, some in zip(keys, filter(None, places), strict=True):
        factors[some] = report.groups[key].coefficient
    after = np.linalg.norm([factor * float(one.norm()) for factor, one in zip(factors, wide, strict=True)])
    assert report.norm_after == pytest.approx(after, rel=1e-6)
    assert report.coefficient == pytest.approx(after / before if report.clipped else 1.0, rel=1e-6)


@EACH_ENGINE
@given(grads=gradients(special=False), order=st.sampled_from(ORDERS[:2] + ORDERS[3:]), limit=st.floats(1e-3, 10.0))
def test_another_norm_of_all_gradients(engine: Any, grads: list[Tensor], order: float, limit: float) -> None:
    """One limit is that of all gradients, as torch has it; the norms of the report stay those of order 2."""
    grads = [grad for grad in grads if grad.numel()]
    assume(grads)
    mine, theirs = (
        with_gradients([grad.clone().to(kind or grad.dtype) for grad in grads]) for kind in (None, torch.float64)
    )
    report = look(mine, engine=engine, max_grad_norm=limit, norm_type=order).clipping
    norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit, norm_type=order))
    for one, other in zip(gradients_of(mine), gradients_of(theirs), strict=True):
        finfo = torch.finfo(one.dtype)
        assert torch.allclose(
            one.double(), other, rtol=max(precision(grads), 2.0 * finfo.eps), atol=finfo.smallest_normal
        )
    assert report.groups["all"].norm_before == pytest.approx(norm, rel=precision(grads))
    assert report.threshold == report.groups["all"].threshold == limit
    assert report.coefficient == report.groups["all"].coefficient == pytest.approx(min(1.0, limit / (norm + 1e-6)))
    assert report.norm_before == pytest.approx(float(np.linalg.norm(as_one_vector(grads))), rel=1e-6)


def test_powers_beyond_a_float64() -> None:
    """The norm of order 3 of elements near 1e200, whose cubes overflow, is right, and so is that near 1e-200."""
    for size in (1e200, 1e-200):
        model = with_gradients([torch.full((8,), size, dtype=torch.float64)])
        group = look(model, max_grad_norm=1e-300, norm_type=3.0).clipping.groups["all"]
        assert group.norm_before == pytest.approx(2 * size, rel=1e-12)
    model = with_gradients([torch.full((16,), 1e200, dtype=torch.float64), torch.ones(3)])
    assert look(model, max_grad_norm={"p0": 1.0}).clipping.groups["p0"].norm_before == pytest.approx(4e200)


def test_complex_gradients_count_by_their_size() -> None:
    """The norm of order 1 adds up absolute values, as torch has it, and not those of both parts."""
    models = [nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, dtype=torch.complex128))}) for _ in range(2)]
    for model in models:
        model["a"].grad = torch.full((3,), 3.0 + 4.0j, dtype=torch.complex128)
    norm = torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.5, norm_type=1)
    report = look(models[1], max_grad_norm={"a": 1.5}, norm_type=1)
    assert report.clipping.groups["a"].norm_before == pytest.approx(float(norm)) == 15.0
    assert torch.allclose(models[0]["a"].grad, models[1]["a"].grad)


def test_sparse_gradients() -> None:
    """A group of sparse and dense gradients is scaled as one, by its values."""
    table, head = nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1)
    model = nn.ModuleDict({"table": table, "head": head})
    head(table(torch.tensor([1, 1, 4]))).sum().backward()
    sparse, dense = table.weight, head.weight
    assert sparse.grad is not None
    assert dense.grad is not None
    norm = math.hypot(float(sparse.grad.to_dense().norm()), float(dense.grad.norm()))
    group = look(model, max_grad_norm={"weight$": 0.1}).clipping.groups["weight$"]
    assert group.norm_before == pytest.approx(norm)
    assert math.hypot(float(sparse.grad.to_dense().norm()), float(dense.grad.norm())) == pytest.approx(0.1, rel=1e-5)


def named() -> nn.ModuleDict:
    """Return an encoder and a head whose parameters have gradients of ones."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 3), "head": nn.Linear(3, 2)})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


class TestKeys:
    """What a key means."""

    def test_the_first_that_matches_wins(self) -> None:
        """A parameter that two keys match belongs to the first."""
        report = look(named(), max_grad_norm={"bias": 1.0, "encoder": 2.0, ".*": 3.0}).clipping
        squares = {key: group.norm_before**2 for key, group in report.groups.items()}
        assert squares == pytest.approx({"bias": 5.0, "encoder": 12.0, ".*": 6.0})

    def test_a_group_of_the_optimizer_comes_first(self) -> None:
        """Its name is not looked for in those of parameters, nor among the groups of reports."""
        model = named()
        groups = [
            {"params": list(model["head"].parameters()), "name": "encoder"},
            {"params": list(model["encoder"].parameters()), "name": "other"},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        manager = GradientManager(max_grad_norm={"encoder": 1.0})
        report = manager.step(model, optimizer, None, backward=False)
        assert report.clipping.groups["encoder"].norm_before ** 2 == pytest.approx(8.0)

    def test_then_a_group_of_reports(self) -> None:
        """The setting `groups` names it."""
        report = look(named(), groups={"bias": "encoder"}, max_grad_norm={"bias": 1.0})
        assert report.clipping.groups["bias"].norm_before == report.groups["bias"].norm == pytest.approx(15**0.5)

    def test_every_name_of_a_tied_parameter(self) -> None:
        """A pattern that is found in the second name finds the parameter."""
        model = named()
        model["tied"] = nn.Linear(4, 3)
        model["tied"].weight = model["encoder"].weight
        report = look(model, max_grad_norm={"^tied.weight": 1.0}).clipping
        assert report.groups["^tied.weight"].norm_before ** 2 == pytest.approx(12.0)

    @pytest.mark.parametrize(
        ("limits", "text"),
        [
            ({"encodr": 1.0}, "'encodr' limits nothing.* Did you mean 'encoder'"),
            ({"encoder": 1.0, "zzz": 1.0}, "'zzz' limits nothing.* There are 'encoder', 'encoder.weight'"),
            ({".*": 1.0, "head": 1.0}, r"'head' limits nothing.* '\.\*' has them. Write 'head' first"),
        ],
    )
    def test_a_key_without_a_parameter_is_refused_at_once(self, limits: dict[str, float], text: str) -> None:
        """At the first step, before a gradient changes or the step counts; what is left may be none."""
        model, manager = named(), GradientManager(max_grad_norm=limits)
        optimizer = optimizer_of(model)
        with pytest.raises(UsageError, match=text):
            manager.step(model, optimizer, None, backward=False)
        assert all(bool((grad == 1.0).all()) for grad in gradients_of(model))
        manager.config.max_grad_norm = {"encoder": 1.0, "head": 1.0, ".*": 1.0}
        assert manager.step(model, optimizer, None, backward=False).step == 1

    def test_a_frozen_part_is_known(self) -> None:
        """A key of parameters that are frozen for now is none that nothing matches, and limits them once they train."""
        model = named()
        model["head"].requires_grad_(False)
        manager, optimizer = GradientManager(max_grad_norm={"encoder": 1.0, "head": 0.5}), optimizer_of(model)
        assert manager.step(model, optimizer, None, backward=False).clipping.groups["head"].norm_before == 0.0
        model["head"].requires_grad_(True)
        assert manager.step(model, optimizer, None, backward=False).clipping.groups["head"].clipped

    def test_each_pair_has_its_own(self) -> None:
        """Of two models each is limited by the keys that it has; a key must be known to one of them."""
        models = {"generator": nn.Linear(4, 4), "critic": nn.Sequential(nn.Linear(4, 1))}
        manager = GradientManager(max_grad_norm={"^weight": 1.0, "^0.weight": 0.5})
        for name, model in models.items():
            model.requires_grad_(True)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            manager.attach(model, optimizer_of(model), name=name)
        reports = {}
        for one in list(manager._pairs):
            reports[one.name] = manager.step(one.model, one.optimizers, None, backward=False).clipping.groups
        assert [group.clipped for group in reports["generator"].values()] == [True, False]
        assert [group.clipped for group in reports["critic"].values()] == [False, True]

    def test_a_group_that_is_added_later(self) -> None:
        """The optimizer's new group is found at the next step."""
        model = named()
        optimizer = torch.optim.SGD([{"params": list(model["head"].parameters()), "name": "top"}], lr=0.1)
        manager = GradientManager(max_grad_norm={"top": 1.0, ".*": 9.0})
        first = manager.step(model, optimizer, None, backward=False)
        assert first.clipping.groups["top"].norm_before ** 2 == pytest.approx(8.0)
        manager.config.max_grad_norm = {"top": 1.0, "bottom": 2.0}
        optimizer.add_param_group({"params": list(model["encoder"].parameters()), "name": "bottom"})
        report = manager.step(model, optimizer, None, backward=False)
        assert report.clipping.groups["bottom"].norm_before ** 2 == pytest.approx(15.0)


def run(change: Callable[[int, Tensor], Tensor] = lambda step, loss: loss, **settings: Any) -> list[StepReport]:
    """Train a small model for eight steps."""
    model, manager = small_model(), GradientManager(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reports = []
    for step in range(8):
        optimizer.zero_grad()
        reports.append(manager.step(model, optimizer, change(step, batch_loss(model, step))))
        optimizer.step()
    return reports


def test_one_group_of_everything_is_the_ordinary_limit() -> None:
    """Every step, also those that the fast path would take, has the same numbers."""
    plain, grouped = run(max_grad_norm=0.1, engine="native"), run(max_grad_norm={".*": 0.1}, engine="native")
    for one, other in zip(plain, grouped, strict=True):
        assert other.clipping.groups[".*"].coefficient == pytest.approx(one.clipping.coefficient, rel=1e-12)
        assert other.clipping.norm_after == pytest.approx(one.clipping.norm_after, rel=1e-9)
        assert other.clipping.clip_rate == one.clipping.clip_rate
        assert other.loss == pytest.approx(one.loss, rel=1e-6)


def test_a_step_that_is_not_finite_is_not_clipped() -> None:
    """None of its groups is scaled, and the next step is clipped as usual."""
    reports = run(
        lambda step, loss: loss * (math.nan if step == 3 else 1.0), max_grad_norm={"0": 0.01}, nonfinite_action="skip"
    )
    assert (reports[3].clipping.groups, reports[3].skipped) == ({}, True)
    assert reports[4].clipping.groups["0"].clipped


def test_replaced_values_count() -> None:
    """The norm of a group is that after NaN was replaced, of whatever order."""
    for order, norm in ((1.0, 7.0), (2.0, 5.0), (math.inf, 4.0)):
        model = with_gradients([torch.tensor([math.nan, 4.0]), torch.tensor([math.nan])])
        settings: dict[str, Any] = {"norm_type": order, "replace_nan_with": 3.0}
        group = look(model, max_grad_norm={"p0": 1.0}, **settings).clipping.groups["p0"]
        assert group.norm_before == pytest.approx(norm)


class TestOneStep:
    """A limit of one step alone."""

    @pytest.mark.parametrize("limit", [0.01, {"0": 0.01, "2": 0.5}])
    @pytest.mark.parametrize("setting", [1.0, {".*": 1.0}])
    def test_it_is_in_the_place_of_the_setting(self, limit: Any, setting: Any) -> None:
        """On that step, on which it may come after quiet ones, and on no other."""
        model, manager = small_model(), GradientManager(max_grad_norm=setting, engine="native")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        expected = GradientManager(max_grad_norm=limit)
        for step in range(40):
            optimizer.zero_grad()
            other = copy.deepcopy(model)
            ours = {"max_grad_norm": limit} if step == 35 else {}
            report = safe_backward(batch_loss(model, step % 4), model, optimizer, manager, **ours)
            if step == 35:
                theirs = expected.step(other, optimizer_of(other), batch_loss(other, step % 4))
                assert report.clipping.groups == theirs.clipping.groups
                assert report.clipping.threshold == theirs.clipping.threshold
                assert all(map(torch.equal, gradients_of(model), gradients_of(other)))
            else:
                assert report.clipping.threshold == (setting if isinstance(setting, float) else None)
            optimizer.step()
        assert manager.config.max_grad_norm == setting

    @pytest.mark.parametrize(
        ("settings", "limit", "text"),
        [
            ({"enable_gradient_clipping": False}, 1.0, "enable_gradient_clipping=False: expected a clip_type"),
            ({"clip_type": "agc"}, 1.0, "with agc: expected a clip_type"),
            ({"clip_type": "value"}, {"0": 1.0}, "limits by group are norms"),
            ({}, -1.0, "expected greater than 0"),
            ({}, {"5": 1.0}, "'5' limits nothing"),
        ],
    )
    def test_what_cannot_be_meant(self, settings: dict[str, Any], limit: Any, text: str) -> None:
        """It is refused, and the next step is as if it had not been asked for."""
        model, manager = small_model(), GradientManager(**settings)
        optimizer = optimizer_of(model)
        with pytest.raises(UsageError, match=text):
            manager.step(model, optimizer, batch_loss(model), max_grad_norm=limit)
        assert manager.step(model, optimizer, batch_loss(model)).step == 1

    def test_a_limit_of_values(self) -> None:
        """With `clip_type: value` it limits each element of this step."""
        model = with_gradients([torch.tensor([3.0, -2.0, 0.1])])
        manager = GradientManager(clip_type="value", max_grad_norm=10.0)
        manager.step(model, optimizer_of(model), None, backward=False, max_grad_norm=1.0)
        assert gradients_of(model)[0].tolist() == pytest.approx([1.0, -1.0, 0.1])


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": {"0": 0.05, "2": 0.02}}, {"norm_type": 1, "max_grad_norm": 0.1}]
)
def test_gradients_on_a_device_are_clipped_there_and_then(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a norm of all gradients would wait, groups are decided by the host, with the same numbers."""
    expected = run(**settings)
    monkeypatch.setattr(pair, "on_device", lambda grads: True)
    for one, other in zip(expected, run(**settings), strict=True):
        assert one.clipping == other.clipping


def test_watch_clips_where_a_norm_is_asked_for() -> None:
    """The setting alone says that gradtrack is to clip."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = watch(model, optimizer, norm_type=1, max_grad_norm={"0": 1e-3})
    batch_loss(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert manager.reports[-1].clipping.groups["0"].clipped


def test_a_clipper_of_its_own() -> None:
    """Without a manager the keys are groups and patterns of the model."""
    report = GradientClipper(GradientConfig(max_grad_norm={"encoder": 1.0})).clip_gradients(named())
    assert report.groups["encoder"].norm_after == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(UsageError, match="Did you mean 'encoder'"):
        GradientClipper(GradientConfig(max_grad_norm={"encodr": 1.0})).clip_gradients(named())


def test_the_report_is_kept_exactly(tmp_path: Any) -> None:
    """As JSON, with an infinite order, and in the file of the run."""
    report = look(named(), max_grad_norm={"encoder": 1.0}, norm_type="inf")
    assert StepReport.model_validate_json(report.model_dump_json()).clipping == report.clipping
    with GradientManager(run_dir=tmp_path, norm_type=math.inf, backends=["json"]) as manager:
        model = named()
        manager.step(model, optimizer_of(model), None, backward=False)
    assert manager.config.model_dump(mode="json")["norm_type"] == "inf"
