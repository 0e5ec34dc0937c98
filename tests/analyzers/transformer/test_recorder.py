"""Hearing attention, in all the ways that it is called, without any trace."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrack.analyzers.transformer import recorder as attention_recorder
from gradtrack.analyzers.transformer.logits import rows_of_attention
from gradtrack.analyzers.transformer.recorder import AttentionRecorder
from gradtrack.analyzers.transformer.statistics import AttentionRows, Limits, measure_heads, weights_of
from tests.analyzers.transformer.attention_models import Bare, HandWrittenAttention, ImportedAttention, SmallGPT, ids

SDPA, SOFTMAX = nn.functional.scaled_dot_product_attention, nn.functional.softmax
ALL = Limits(sequences=1000, rows=1000)


def untouched() -> bool:
    """Tell whether no name, no mode and no hook of the recorder is in place."""
    return (
        nn.functional.scaled_dot_product_attention is SDPA
        and nn.functional.softmax is SOFTMAX
        and not torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        and not torch_module._global_forward_hooks
        and not torch_module._global_forward_pre_hooks
    )


@contextmanager
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AttentionRows]]:
    """Collect the rows that the recorder measures."""
    seen: list[AttentionRows] = []

    def collect(rows: AttentionRows) -> Any:
        seen.append(rows)
        return measure_heads(rows)

    with monkeypatch.context() as patch:
        patch.setattr(attention_recorder, "measure_heads", collect)
        yield seen


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    """Return an encoder of 4 heads that gives up its fused path for nothing but what torch itself asks."""
    settings = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "batch_first": True, **options}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**settings), layers, enable_nested_tensor=False)


def heard(model: nn.Module, call: Callable[[], Any], **options: Any) -> attention_recorder.ForwardPass:
    """Return what a recorder heard of a call."""
    recorder = AttentionRecorder(model, limits=ALL, gradients_only=False, **options)
    with recorder.armed():
        call()
    found = recorder.take()
    assert found is not None
    return found


@pytest.mark.parametrize("need_weights", [False, True])
def test_weights_equal_those_that_torch_returns(monkeypatch: pytest.MonkeyPatch, need_weights: bool) -> None:
    """Golden A6: in one call of MultiheadAttention the recorded weights are those of need_weights, to 1e-6."""
    attention, tokens = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(3, 7, 16)
    expected = attention(tokens, tokens, tokens, average_attn_weights=False)[1]
    with rows_seen(monkeypatch) as seen:
        found = heard(attention, lambda: attention(tokens, tokens, tokens, need_weights=need_weights))
    assert found.num_calls == 1
    assert torch.allclose(weights_of(seen[0].masked), expected, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_every_layer_of_an_encoder_is_heard_once(fused: bool) -> None:
    """Golden A6: two layers are two calls, on the ordinary path and on torch's fused one, with the same numbers."""
    model, tokens = encoder().eval(), torch.randn(3, 7, 16)
    with torch.set_grad_enabled(not fused):
        found = heard(model, lambda: model(tokens))
    assert found.num_calls == 2
    assert list(found.heads) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert list(found.tokens) == ["layers.0", "layers.1"]
    ordinary = heard(model, lambda: model(tokens))
    for name, statistics in found.heads.items():
        assert torch.allclose(statistics[0].entropy, ordinary.heads[name][0].entropy, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "padding", "both"])
def test_fused_and_ordinary_layers_measure_the_same(norm_first: bool, mask: str | None) -> None:
    """Masks mean the same on the fused path, whether the layer normalises first or last."""
    model, tokens = encoder(norm_first=norm_first).eval(), torch.randn(3, 6, 16)
    options: dict[str, Any] = {}
    if mask in ("causal", "both"):
        options["mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    if mask in ("padding", "both"):
        options["src_key_padding_mask"] = torch.arange(6).expand(3, 6) >= 4
    ordinary = heard(model, lambda: model(tokens, **options))
    with torch.no_grad():
        fused = heard(model, lambda: model(tokens, **options))
    for name, statistics in ordinary.heads.items():
        assert torch.allclose(fused.heads[name][0].entropy, statistics[0].entropy, atol=1e-5)
        assert fused.heads[name][0].num_rows == statistics[0].num_rows


def test_nested_tensors_of_the_fused_path_are_read() -> None:
    """A padded batch that torch turns into a nested tensor keeps its lengths."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, tokens = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 6, 16)
    padding = torch.arange(6).expand(3, 6) >= 4
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = heard(model, lambda: model(tokens, src_key_padding_mask=padding))
    assert [statistics[0].num_rows for statistics in found.heads.values()] == [12, 12]
    assert list(found.tokens) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("kind", [ImportedAttention, HandWrittenAttention])
def test_imported_names_and_written_out_softmax_are_heard_once(kind: type[ImportedAttention]) -> None:
    """Attention through `from ... import` and through a softmax method gives one call a layer, and the same numbers."""
    torch.manual_seed(0)
    model = SmallGPT(kind)
    found = heard(model, lambda: model(ids()))
    assert found.num_calls == 2
    assert list(found.heads) == ["blocks.0.attention", "blocks.1.attention"]
    assert list(found.tokens) == ["blocks.0", "blocks.1"]
    torch.manual_seed(0)
    other = SmallGPT(ImportedAttention)
    reference = heard(other, lambda: other(ids()))
    assert torch.allclose(
        found.heads["blocks.1.attention"][0].entropy, reference.heads["blocks.1.attention"][0].entropy
    )


MASKS = {
    "none": None,
    "boolean": torch.ones(5, 5, dtype=torch.bool).tril(),
    "infinite": torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf")),
    "smallest": torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), torch.finfo().min),
    "by batch": torch.ones(3, 1, 5, 5, dtype=torch.bool).tril(),
    "by head": torch.ones(4, 5, 5, dtype=torch.bool).tril(),
    "bias": -torch.arange(5.0).flip(0).expand(5, 5) * 3,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_rows_equal_an_oracle_for_every_mask(name: str, groups: int) -> None:
    """Weights recomputed from the arguments turn the values into the very output of torch, for every mask and group."""
    mask = MASKS[name]
    query, key, value = torch.randn(3, 4, 5, 8), torch.randn(3, groups, 5, 8), torch.randn(3, groups, 5, 8)
    options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": groups != 4, "scale": 0.5}
    expected = SDPA(query, key, value, **options)
    rows = rows_of_attention(query, key, value, **options, limits=ALL)
    assert rows is not None
    repeated = value.repeat_interleave(4 // groups, dim=1)
    assert torch.allclose(weights_of(rows.masked) @ repeated, expected, atol=1e-5)
    causal = name not in ("none", "bias")
    assert rows.visible.sum(-1)[0, 0].tolist() == ([1, 2, 3, 4, 5] if causal else [5] * 5)


def test_few_rows_are_the_same_rows() -> None:
    """Limits choose rows of the first sequences, and always the last row; they change no number in them."""
    query, key = torch.randn(5, 2, 40, 8), torch.randn(5, 2, 40, 8)
    every = rows_of_attention(query, key, key, is_causal=True, limits=ALL)
    some = rows_of_attention(query, key, key, is_causal=True, limits=Limits(2, 7))
    assert every is not None
    assert some is not None
    chosen = Limits(2, 7).chosen_rows(40)
    assert chosen[-1] == 39
    assert some.logits.shape == (2, 2, 7, 40)
    assert torch.allclose(weights_of(some.masked), weights_of(every.masked)[:2, :, chosen])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("opened", [False, True])
def test_padded_queries_are_found_from_the_mask(side: str, opened: bool) -> None:
    """Padding is recognised in causal masks on either side, also where rows without keys were opened to all."""
    real = torch.arange(6) >= 2 if side == "left" else torch.arange(6) < 4
    mask = torch.ones(6, 6, dtype=torch.bool).tril() & real
    if opened:
        mask = mask | ~mask.any(-1, keepdim=True)
    query = torch.randn(1, 2, 6, 4)
    rows = rows_of_attention(query, query, query, attn_mask=mask[None, None], limits=ALL)
    assert rows is not None
    assert rows.genuine[0].tolist() == real.tolist()


CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "imported": lambda: (SmallGPT(), ids()),
    "grouped": lambda: (SmallGPT(groups=2, dropout=0.3), ids()),
    "written out": lambda: (SmallGPT(HandWrittenAttention), ids()),
    "encoder": lambda: (encoder(dropout=0.1), torch.randn(3, 6, 16)),
    "bare": lambda: (Bare(3), torch.randn(3, 6, 16)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_are_bitwise_equal(case: str, grad: bool, training: bool) -> None:
    """A recorded pass returns what an unrecorded one does, in every mode, and draws the same random numbers."""
    model, inputs = CASES[case]()
    model.train(training)
    outputs, states = [], []
    for recorder in (None, AttentionRecorder(model, gradients_only=False)):
        torch.manual_seed(7)
        with torch.set_grad_enabled(grad):
            if recorder is None:
                outputs.append(model(inputs))
            else:
                with recorder.armed():
                    outputs.append(model(inputs))
        states.append(torch.get_rng_state())
    assert torch.equal(*outputs)
    assert torch.equal(*states)
    assert untouched()


def test_fused_kernels_are_still_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening does not take an encoder off its fused path."""
    calls = []
    fused = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return fused(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model = encoder().eval()
    with torch.no_grad():
        heard(model, lambda: model(torch.randn(2, 5, 16)))
    assert len(calls) == 2


class Failing(nn.Module):
    """A model that fails after its attention."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.attention, self.fault = ImportedAttention(), fault

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend, then raise."""
        self.attention(tokens)
        raise self.fault


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), KeyboardInterrupt()])
def test_everything_is_put_back_after_a_fault(fault: BaseException) -> None:
    """An exception in the forward pass, or Ctrl-C, leaves neither names nor modes nor hooks once it is disarmed."""
    model = Failing(fault)
    recorder = AttentionRecorder(model)
    with pytest.raises(type(fault)), recorder.armed():
        model(torch.randn(2, 5, 16))
    assert untouched()
    recorder.disarm()


def test_an_interrupted_pass_is_followed_by_a_good_one() -> None:
    """The pass after an interrupt is heard as if nothing had been."""
    model = SmallGPT()
    model.head.register_forward_hook(interrupt := lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    recorder = AttentionRecorder(model)
    recorder.arm()
    with pytest.raises(KeyboardInterrupt):
        model(ids())
    assert interrupt is not None
    model.head._forward_hooks.clear()
    torch.autograd.backward(model(ids()).sum())
    found = recorder.take()
    recorder.disarm()
    assert found is not None
    assert found.num_calls == 2
    assert untouched()


def test_a_fault_of_the_look_stays_out_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that cannot read attention says so once and lets the pass go on."""

    def fail(_: AttentionRows) -> None:
        raise RuntimeError("a fault of the look")

    monkeypatch.setattr(attention_recorder, "measure_heads", fail)
    model = SmallGPT()
    expected = model(ids())
    found = heard(model, lambda: torch.testing.assert_close(model(ids()), expected, rtol=0, atol=0))
    assert found.heads == {}


def test_only_passes_with_a_backward_are_evidence() -> None:
    """Evaluation without gradients, and a pass that no backward follows, leave the training pass alone."""
    model = SmallGPT()
    recorder = AttentionRecorder(model)
    with recorder.armed():
        with torch.no_grad():
            model(ids(1))
        assert recorder.take() is None
        model(ids(2))
        assert recorder.take() is None
        torch.autograd.backward(model(ids(3, length=9)).sum())
        model(ids(4, length=5))
    found = recorder.take()
    assert found is not None
    assert found.heads["blocks.0.attention"][0].num_keys == 9
    assert recorder.take() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_heard_once(reentrant: bool) -> None:
    """What a block computes again during the backward pass is not heard again."""
    model = SmallGPT()
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
    recorder = AttentionRecorder(model)
    with recorder.armed():
        torch.autograd.backward(model(ids()).sum())
    found = recorder.take()
    assert found is not None
    assert found.num_calls == 2


def test_parts_of_a_model_are_heard_without_its_own_forward() -> None:
    """A model whose parts are called one by one is heard as well."""
    model = SmallGPT()
    recorder = AttentionRecorder(model)
    with recorder.armed():
        tokens = torch.randn(2, 5, 16)
        for block in model.blocks:
            tokens = block(tokens)
        torch.autograd.backward(tokens.sum())
    found = recorder.take()
    assert found is not None
    assert list(found.heads) == ["blocks.0.attention", "blocks.1.attention"]


def test_other_threads_and_other_models_are_not_heard() -> None:
    """While one thread's model is heard, attention elsewhere is not, and gives what it always gives."""
    model, other, tokens = SmallGPT(), Bare(1), torch.randn(2, 5, 16)
    results: list[Tensor] = []

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=lambda: results.append(other(tokens)))
        thread.start()
        thread.join()

    elsewhere()
    model.blocks[1].register_forward_pre_hook(elsewhere)
    found = heard(model, lambda: (model(ids()), other(tokens)))
    assert found.num_calls == 2
    assert torch.equal(*results)


def test_a_compiled_model_beside_is_left_in_peace() -> None:
    """Another model that is compiled runs as ever while this one is listened to, without a warning."""
    model, other, tokens = SmallGPT(), torch.compile(Bare(1), backend="eager"), torch.randn(2, 5, 16)
    expected = other(tokens)
    recorder = AttentionRecorder(model)
    with recorder.armed():
        assert torch.equal(other(tokens), expected)
        torch.autograd.backward(model(ids()).sum())
    found = recorder.take()
    assert found is not None
    assert found.num_calls == 2


@pytest.mark.parametrize("kind", [ImportedAttention, HandWrittenAttention])
def test_mixed_precision_is_read_and_left_alone(kind: type[ImportedAttention]) -> None:
    """Under autocast outputs stay bitwise the same, and entropies are those of the rounded logits."""
    model = SmallGPT(kind)
    full = heard(model, lambda: model(ids()))
    outputs = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs.append(model(ids()))
        found = heard(model, lambda: outputs.append(model(ids())))
    assert torch.equal(*outputs)
    for name, statistics in found.heads.items():
        assert torch.allclose(statistics[0].entropy, full.heads[name][0].entropy, atol=5e-3)


def test_sequence_first_models_are_read_the_right_way_round() -> None:
    """Tokens of a sequence-first encoder are compared along the sequence, as those of a batch-first one."""
    model, tokens = encoder().eval(), torch.randn(3, 6, 16)
    other = encoder(batch_first=False).eval()
    other.load_state_dict(model.state_dict())
    first = heard(model, lambda: model(tokens)).tokens["layers.1"][0]
    second = heard(other, lambda: other(tokens.transpose(0, 1))).tokens["layers.1"][0]
    assert first.residual == pytest.approx(second.residual, abs=1e-5)
    assert first.rank == pytest.approx(second.rank, abs=1e-3)


def test_dropout_is_left_out_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In train mode weights are those before dropout: rows still sum to one."""
    attention, tokens = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, 7, 16)
    with rows_seen(monkeypatch) as seen:
        heard(attention, lambda: attention(tokens, tokens, tokens))
    assert torch.allclose(weights_of(seen[0].masked).sum(-1), torch.ones(()), atol=1e-6)


def test_per_sample_gradients_are_passed_by() -> None:
    """Inside vmap nothing can be read, and nothing is disturbed."""
    model = SmallGPT()
    params: dict[str, Tensor] = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], batch: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, values, (batch[None],)).square().mean()
        return found

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = per_sample(params, ids())
        recorder = AttentionRecorder(model)
        with recorder.armed():
            found = per_sample(params, ids())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_filter_of_warnings_goes_with_the_last_recorder() -> None:
    """While any recorder is armed, torch's warning of global hooks is ignored; then the filters are those of before."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        first, second = AttentionRecorder(Bare()), AttentionRecorder(Bare())
        first.arm()
        first.arm()
        second.arm()
        first.disarm()
        first.disarm()
        assert len(warnings.filters) == len(before) + 1
        warnings.warn("Using `torch.compile(module)` when there are global hooks on modules", stacklevel=1)
        second.disarm()
        assert list(warnings.filters) == before


def test_filter_of_the_user_stays() -> None:
    """A filter that the user has installed for the same warning is there after the recorder has gone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile.* when there are global hooks")
        before = list(warnings.filters)
        with AttentionRecorder(Bare()).armed():
            pass
        assert list(warnings.filters) == before
