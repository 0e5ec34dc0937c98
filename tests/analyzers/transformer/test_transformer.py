"""The analyzer of attention, on models that others wrote and beside a training."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, IssueType, TransformerAnalyzer
from gradtrack.analyzers.transformer.report import AttentionReport
from gradtrack.errors import UsageError
from tests.analyzers.transformer.attention_models import (
    Bare,
    HandWrittenAttention,
    ImportedAttention,
    SmallGPT,
    every_step,
    ids,
    language_loss,
    train,
)
from tests.analyzers.transformer.test_recorder import encoder, untouched

Side = Literal["left", "right"] | None


def hugging_face(kind: str, implementation: str) -> nn.Module:
    """Return a tiny model of Hugging Face, made from its configuration and far from uniform attention."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 23, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    common = {"attn_implementation": implementation, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=16, n_embd=32, n_layer=2, n_head=4, **common))
    elif kind == "bert":
        from transformers.models.bert import BertConfig, BertModel

        model = BertModel(BertConfig(**sizes, intermediate_size=64, max_position_embeddings=16, **common))
    else:
        from transformers.models.llama import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=64, **common))
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(10)
    found: nn.Module = model.train()
    return found


def padding(side: Side, batch: int = 2, length: int = 12) -> Tensor:
    """Return a mask of the tokens that are no padding."""
    places = torch.arange(length).expand(batch, length)
    if side is None:
        return torch.ones(batch, length, dtype=torch.long)
    return ((places >= 3) if side == "left" else (places < 9)).long()


def analyzed(model: nn.Module, inputs: Any, **options: Any) -> AttentionReport:
    """Return the report on one batch."""
    analyzer = TransformerAnalyzer(model, max_rows=1000, **options)
    return analyzer.analyze(lambda: inputs, lambda output: _first(output).square().mean(), steps=1)[1]


def _first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def oracle(attentions: Any, mask: Tensor, *, causal: bool) -> list[list[float]]:
    """Return the entropy of every head over ln of its visible keys, in float64, from what a model returned."""
    length = mask.shape[-1]
    visible = mask.bool()[:, None, :].expand(-1, length, -1)
    visible = visible.tril() if causal else visible
    entropies = []
    for weights in attentions:
        values = weights.detach().double()
        count = visible.sum(-1)
        counted = (count >= 2) & mask.bool()
        entropy = torch.special.entr(values).sum(-1) / count.clamp_min(2).log()[:, None]
        entropies.append([float(entropy[:, head][counted].mean()) for head in range(values.shape[1])])
    return entropies


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_entropy_equals_that_of_returned_attentions(kind: str, implementation: str, side: Side) -> None:
    """With either implementation, padded on either side, entropy is that of an eager model's `output_attentions`."""
    pytest.importorskip("transformers")
    mask = padding(side)
    reference = hugging_face(kind, "eager").eval()
    with torch.no_grad():
        returned = reference(input_ids=ids(batch=2), attention_mask=mask, output_attentions=True).attentions
    model = hugging_face(kind, implementation).eval()
    report = analyzed(model, {"input_ids": ids(batch=2), "attention_mask": mask})
    expected = oracle(returned, mask, causal=kind != "bert")
    assert len(report.layers) == 2
    for layer, entropies in zip(report.layers, expected, strict=True):
        assert [head.entropy for head in layer.heads] == pytest.approx(entropies, abs=1e-5)
    assert [block.name.rsplit(".", 1)[-1] for block in report.blocks] == ["0", "1"]


def test_uniform_causal_attention_through_the_analyzer() -> None:
    """Golden A1, from a model whose keys are zero: entropy 1, diversity 0, sparsity 0, entropy on its floor."""
    model = SmallGPT()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".key." in name:
                param.zero_()
    report = analyzed(model, ids())
    assert report.attention_entropy_mean == pytest.approx(1, abs=1e-6)
    assert report.attention_entropy_min_head == pytest.approx(1, abs=1e-6)
    assert report.attention_entropy_floor == pytest.approx(1, abs=1e-6)
    assert report.head_diversity == pytest.approx(0, abs=1e-6)
    assert report.attention_sparsity == 0
    assert report.attention_max_logit == 0


def sharpened(model: nn.Module, factor: float) -> nn.Module:
    """Multiply the keys of a model."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".key." in name:
                param.mul_(factor)
    return model


def test_collapsed_attention_is_an_issue_at_its_layer() -> None:
    """Attention to one key in one layer is a high issue there, with its numbers, and nowhere else."""
    model = SmallGPT()
    sharpened(model.blocks[1], 1e5)
    issues, report = TransformerAnalyzer(model).analyze(ids, language_loss, steps=2)
    assert [(issue.issue_type, issue.layer) for issue in issues] == [
        (IssueType.ATTN_ENTROPY_COLLAPSE, "blocks.1.attention")
    ]
    assert issues[0].severity.value == "HIGH"
    assert issues[0].value == report.layers[1].entropy_mean < 0.1
    assert report.layers[1].max_logit > 100
    assert report.layers[1].sparsity > 0.3
    assert report.rank_collapse_risk == "LOW"


def test_equal_heads_are_an_issue_once_they_look_somewhere() -> None:
    """Four heads with the same projections are redundant; while they look everywhere they are not."""
    model = SmallGPT()
    with torch.no_grad():
        for name, param in model.blocks.named_parameters():
            if ".query." in name or ".key." in name:
                param.copy_(param[:4].repeat(4, *[1] * (param.ndim - 1)))
    assert TransformerAnalyzer(model).analyze(ids, language_loss, steps=1)[0] == []
    issues, _ = TransformerAnalyzer(sharpened(model, 20.0)).analyze(ids, language_loss, steps=1)
    assert {issue.issue_type for issue in issues} == {IssueType.HEAD_REDUNDANCY}


def test_attention_without_skips_collapses_in_rank() -> None:
    """Golden A4: six bare layers make tokens equal; this is its own issue, with entropy near 1."""
    issues, report = TransformerAnalyzer(Bare(6)).analyze(
        lambda: torch.randn(2, 12, 16), lambda output: output.square().mean(), steps=2
    )
    assert report.rank_collapse_risk == "HIGH"
    assert report.rank_slope is not None
    assert report.rank_slope < -1
    assert report.blocks[-1].residual < 1e-2
    assert report.blocks[-1].mean_cosine > 0.99
    assert [issue.issue_type for issue in issues] == [IssueType.RANK_COLLAPSE]
    assert report.attention_entropy_mean is not None
    assert report.attention_entropy_mean > 0.8


@pytest.mark.parametrize("steps", [0, 60])
def test_a_healthy_model_is_silent(steps: int) -> None:
    """A small language model has no issue, neither fresh nor trained."""
    model = SmallGPT(depth=4)
    train(model, None, steps)
    issues, report = TransformerAnalyzer(model).analyze(ids, language_loss, steps=3)
    assert issues == []
    assert report.rank_collapse_risk == "LOW"


def test_thresholds_judge_only_where_they_are_passed() -> None:
    """The attribute shows the usual value, and an entropy below it is an issue once the user asks for it."""
    model = sharpened(SmallGPT(), 12.0)
    usual, chosen = TransformerAnalyzer(model), TransformerAnalyzer(model, min_entropy_threshold=0.99)
    assert (usual.min_entropy_threshold, usual.min_diversity_threshold) == (0.5, 0.3)
    assert usual.analyze(ids, language_loss, steps=1)[0] == []
    issues, _ = chosen.analyze(ids, language_loss, steps=1)
    assert {issue.issue_type for issue in issues} == {IssueType.ATTN_ENTROPY_COLLAPSE}
    assert {issue.severity.value for issue in issues} == {"MEDIUM"}


def test_switches_turn_their_parts_on_and_off() -> None:
    """The softmax's Jacobian, the gradient's coherence and the weights come and go with their switches."""
    model = SmallGPT()
    report = TransformerAnalyzer(model).analyze(ids, language_loss, steps=3)[1]
    assert report.gradient_coherence is None
    assert report.layers[0].softmax_jacobian is None
    full = TransformerAnalyzer(model, enable_jacobian=True, enable_vector_analysis=True)
    report = full.analyze(ids, language_loss, steps=3)[1]
    assert report.gradient_coherence == pytest.approx(1, abs=0.1)
    assert report.layers[0].softmax_jacobian is not None
    report = TransformerAnalyzer(model, track_attention_weights=False).analyze(ids, language_loss, steps=3)[1]
    assert report.layers == []
    assert report.attention_entropy_mean is None
    assert len(report.blocks) == 2


def test_analysis_leaves_everything_as_it_was() -> None:
    """Weights, buffers, gradients, modes, random numbers and every name of torch are as before."""
    model = SmallGPT()
    torch.autograd.backward(language_loss(model(ids())))
    model.blocks[1].eval()
    before = copy.deepcopy(model.state_dict())
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    state = torch.get_rng_state()
    TransformerAnalyzer(model).analyze(lambda: ids(int(torch.randint(9, ()))), language_loss, steps=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        torch.equal(param.grad, old)
        for param, old in zip(model.parameters(), gradients, strict=True)
        if param.grad is not None
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.blocks[1].training
    assert untouched()


def test_an_optimizer_trains_the_model() -> None:
    """With an optimizer the analysis trains the model."""
    model = SmallGPT()
    before = model.head.weight.detach().clone()
    TransformerAnalyzer(model).analyze(ids, language_loss, 2, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(model.head.weight, before)


def test_a_compiled_model_is_looked_at_eagerly() -> None:
    """Offline the module inside a compiled one is looked at; live the steps with a look run eagerly, with a note."""
    model = SmallGPT()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    report = TransformerAnalyzer(compiled).analyze(ids, language_loss, steps=1)[1]
    assert len(report.layers) == 2
    with GradientManager(analyzers=[TransformerAnalyzer()], max_grad_norm=1.0) as manager:
        train(compiled, manager, 8)
        notes = [note for report in manager.reports for note in report.notes]
        assert any("attention/entropy_mean" in report.metrics() for report in manager.reports)
    assert len(notes) == 1
    assert "run eagerly" in notes[0]
    assert untouched()


def test_a_model_whose_attention_cannot_be_heard_is_named_once() -> None:
    """A model chosen for its looks that calls no attention gets one note and no numbers."""
    model = nn.Sequential(nn.Linear(16, 16))
    with GradientManager(analyzers=[TransformerAnalyzer()], max_grad_norm=1.0) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        manager.attach(model, optimizer)
        for _ in range(8):
            manager.step(model, optimizer, model(torch.randn(2, 16)).square().mean())
        notes = [note for report in manager.reports for note in report.notes]
    (note,) = notes
    assert note == (
        "analyzer transformer can do nothing here, because the forward pass called no attention that can be heard."
    )


def test_live_numbers_reach_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a training the metrics arrive under attention/, by layer, and are those of the offline analysis."""
    every_step(monkeypatch)
    model = SmallGPT()
    offline = TransformerAnalyzer(copy.deepcopy(model)).analyze(ids, language_loss, steps=1)[1]
    with GradientManager(backends=["memory"], analyzers=["transformer"]) as manager:
        train(model, manager, 3)
        records: Any = manager.backend("memory")
        metrics = records.records[0].metrics
    assert metrics["attention/entropy_mean"] == pytest.approx(offline.attention_entropy_mean, abs=1e-6)
    assert metrics["attention/entropy_mean/blocks.0.attention"] == pytest.approx(
        offline.layers[0].entropy_mean, abs=1e-6
    )
    assert metrics["attention/rank_residual/blocks.1"] == pytest.approx(offline.blocks[1].residual, abs=1e-6)
    assert not any(name.split("/")[0] == "train" and "entropy" in name for name in metrics)


def test_between_its_steps_nothing_is_in_place() -> None:
    """On its own schedule the analyzer looks at steps 4 and 8 of ten, and leaves no trace in between."""
    model, looked = SmallGPT(), []
    with GradientManager(analyzers=["transformer"]) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        manager.attach(model, optimizer)
        for step in range(1, 11):
            if step not in (4, 8):
                assert untouched()
            optimizer.zero_grad()
            report = manager.step(model, optimizer, language_loss(model(ids(step))))
            optimizer.step()
            looked += [step] if "transformer" in report.analyzers else []
    assert looked == [4, 8]
    assert untouched()


def test_evaluation_and_accumulation_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of evaluation passes and two micro-batches, the first micro-batch is what the step reports."""
    every_step(monkeypatch)
    model = SmallGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=["transformer"]) as manager:
        manager.attach(model, optimizer)
        with torch.no_grad():
            model(ids(length=3))
        manager.step(model, optimizer, language_loss(model(ids(length=8))), accumulate=True)
        report = manager.step(model, optimizer, language_loss(model(ids(length=10))))
    found = report.analyzers["transformer"]
    assert isinstance(found, AttentionReport)
    assert [layer.num_keys for layer in found.layers] == [8, 8]
    assert found.num_passes == 1


def test_training_is_bitwise_the_same_beside_the_analyzer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty steps of a small GPT with dropout, looked at on every one, end in the same weights and random state."""
    every_step(monkeypatch)
    results = []
    for analyzers in ([], [TransformerAnalyzer(enable_jacobian=True, enable_vector_analysis=True)]):
        torch.manual_seed(1)
        model = SmallGPT(dropout=0.2)
        with GradientManager(analyzers=analyzers) as manager:
            train(model, manager, 50)
            looked = sum("transformer" in report.analyzers for report in manager.reports)
        results.append((model.state_dict(), torch.get_rng_state(), looked))
    assert [looked for _, _, looked in results] == [0, 50]
    assert all(torch.equal(value, results[1][0][name]) for name, value in results[0][0].items())
    assert torch.equal(results[0][1], results[1][1])


def test_live_issues_are_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last look found is in the manager's diagnosis."""
    every_step(monkeypatch)
    model = sharpened(SmallGPT(), 1e5)
    with GradientManager(analyzers=["transformer"]) as manager:
        train(model, manager, 1)
        found = {issue.issue_type for issue in manager.diagnose()}
    assert IssueType.ATTN_ENTROPY_COLLAPSE in found


@pytest.mark.parametrize("model", [SmallGPT(), encoder(), nn.Transformer(8, 2, 1, 1, batch_first=True)])
def test_models_with_attention_are_chosen(model: nn.Module) -> None:
    """The automatic choice takes models with attention and says which module it is."""
    reason = TransformerAnalyzer.suits(model)
    assert reason is not None
    assert "ttention" in reason


def test_other_models_are_not_chosen() -> None:
    """Layers without attention do not suit."""
    assert TransformerAnalyzer.suits(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))) is None


def test_a_model_without_attention_has_nothing_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made up where no attention is called, and the summary says so."""
    analyzer = TransformerAnalyzer(nn.Linear(4, 2))
    issues, report = analyzer.analyze(lambda: torch.randn(3, 4), lambda output: output.sum(), steps=2)
    analyzer.print_summary(issues, report)
    assert "no attention was heard" in capsys.readouterr().out
    assert issues == []
    assert report.attention_entropy_mean is None
    assert report.rank_collapse_risk is None
    assert report.metrics() == {}


def test_the_report_survives_json() -> None:
    """A report reads back from its JSON as it was."""
    report = analyzed(sharpened(SmallGPT(), 1e5), ids())
    assert AttentionReport.model_validate_json(report.model_dump_json()) == report


def test_many_layers_make_few_charts() -> None:
    """Of a hundred layers 32 are charted, the first and the last among them, and all are in the report."""
    layer = analyzed(SmallGPT(), ids()).layers[0]
    report = AttentionReport(layers=[layer.model_copy(update={"name": f"layers.{index}"}) for index in range(100)])
    charted = [name for name in report.metrics() if name.startswith("attention/entropy_mean/")]
    assert len(charted) == 32
    assert charted[0].endswith("layers.0")
    assert charted[-1].endswith("layers.99")


def test_the_summary_names_layers_and_issues(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed summary has a line per layer and every issue."""
    analyzer = TransformerAnalyzer(sharpened(SmallGPT(), 1e5))
    analyzer.print_summary(*analyzer.analyze(ids, language_loss, steps=1))
    printed = capsys.readouterr().out
    assert "blocks.1.attention: entropy 0.0" in printed
    assert "ATTN_ENTROPY_COLLAPSE" in printed
    assert "rank collapse risk: LOW" in printed


def test_wrong_use_is_named() -> None:
    """Analyzing without a model, and looking at nothing, are errors that say what to do."""
    with pytest.raises(UsageError, match=r"Construct TransformerAnalyzer\(model\)"):
        TransformerAnalyzer().analyze(ids, language_loss)
    with pytest.raises(UsageError, match="expected at least 1 of each"):
        TransformerAnalyzer(max_rows=0)


@pytest.mark.parametrize("kind", [ImportedAttention, HandWrittenAttention])
def test_attention_that_is_not_finite_is_named_once(
    kind: type[ImportedAttention], caplog: pytest.LogCaptureFixture
) -> None:
    """NaN from one place on is one numerical issue at the first layer, and no metric is made up from it."""
    model = SmallGPT(kind)
    with torch.no_grad():
        model.places.weight[3] = float("nan")
    issues, report = TransformerAnalyzer(model).analyze(ids, language_loss, steps=1)
    assert [(issue.issue_type, issue.layer) for issue in issues] == [(IssueType.NUMERICAL, "blocks.0.attention")]
    assert all(math.isfinite(value) for value in report.metrics().values())
    assert not caplog.records


def test_loss_scale_changes_nothing() -> None:
    """At ten thousand times the loss the report is the same."""
    model = SmallGPT()
    plain = TransformerAnalyzer(model).analyze(ids, language_loss, steps=2)[1]
    scaled = TransformerAnalyzer(model).analyze(ids, lambda output: 1e4 * language_loss(output), steps=2)[1]
    assert scaled == plain
    assert math.isfinite(plain.layers[0].max_logit)


def test_suits_a_model_that_calls_attention_itself() -> None:
    """A block of any name is chosen for its call of the attention function."""

    class Mixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    assert "Mixer" not in (TransformerAnalyzer.suits(nn.Sequential(nn.Linear(4, 4))) or "")
    assert "scaled_dot_product_attention" in (TransformerAnalyzer.suits(nn.Sequential(nn.Linear(4, 4), Mixer())) or "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_can_be_looked_at() -> None:
    """A ScriptModule, whose class has no forward pass to read, is not chosen and does no harm."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    assert TransformerAnalyzer.suits(nn.Sequential(scripted, nn.Linear(4, 4))) is None
