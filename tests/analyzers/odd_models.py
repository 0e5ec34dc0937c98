"""Models that are built in unusual ways, each as (model, batch, loss); a batch is what `input_fn` may return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

Odd = tuple[nn.Module, Callable[[], Any], Callable[[Any], Tensor]]
ODD: dict[str, Callable[[], Odd]] = {}


def odd(make: Callable[[], Odd]) -> Callable[[], Odd]:
    """Add a model to the collection."""
    ODD[make.__name__.replace("_", " ")] = make
    return make


def squared(output: Any) -> Tensor:
    """Return a loss of whatever tensors an output has."""
    if isinstance(output, Tensor):
        return output.abs().float().square().mean()
    parts = output.values() if isinstance(output, dict) else output
    return torch.stack([squared(part) for part in parts if part is not None]).sum()


def own_loss(output: Any) -> Tensor:
    """Return the loss that a model has computed itself."""
    found: Tensor = output.loss
    return found


class Runs(nn.Module):
    """A module whose forward pass is a function of its parts."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.run(self, *args, **kwargs)


class Tree(nn.Module):
    """Lists of modules in lists of modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Tree(depth - 1) if depth else nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run them all."""
        for part in self.inner:
            x = x + 0.1 * part(x).tanh()
        return x


@odd
def nested_lists() -> Odd:
    """Return a tree of modules."""
    return Tree(2), lambda: torch.randn(4, 8), squared


@odd
def shared_modules() -> Odd:
    """Return one layer and one activation in place, used three times."""
    layer, relu = nn.Linear(8, 8), nn.ReLU(inplace=True)
    return nn.Sequential(layer, relu, layer, relu, layer), lambda: torch.randn(4, 8), squared


def _thrice(model: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        for block in model.blocks:
            x = block(x)
        x = model.rnn(x)[0]
        x = x + model.attention(x, x, x, need_weights=False)[0]
    return x


def _everything() -> Runs:
    return Runs(
        _thrice,
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)),
        rnn=nn.GRU(8, 8, batch_first=True),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )


@odd
def several_calls() -> Odd:
    """Return blocks, a GRU and attention that all run three times in a pass."""
    return _everything(), lambda: torch.randn(2, 5, 8), squared


@odd
def double_precision() -> Odd:
    """Return the same in float64."""
    return _everything().double(), lambda: torch.randn(2, 5, 8, dtype=torch.float64), squared


@odd
def half_precision() -> Odd:
    """Return the same in bfloat16."""
    return _everything().bfloat16(), lambda: torch.randn(2, 5, 8).bfloat16(), squared


@odd
def one_of_everything() -> Odd:
    """Return the same with a batch of one sequence of one token."""
    return _everything(), lambda: torch.randn(1, 1, 8), squared


class Counting(nn.Module):
    """A layer that counts its calls, in evaluation too, and passes a state through."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Run the layer."""
        self.calls += 1
        return (self.layer(x) + (0.0 if h is None else h)).tanh()  # type: ignore[no-any-return]


@odd
def counted_calls() -> Odd:
    """Return blocks and a cell that count how often they were called."""

    def run(model: Any, x: Tensor) -> Tensor:
        h = x[:, 0]
        for inputs in model.blocks(x).unbind(1):
            h = model.cell(inputs, h)
        return h

    model = Runs(run, blocks=nn.Sequential(*(Counting() for _ in range(3))), cell=Counting())
    return model, lambda: torch.randn(2, 5, 8), squared


@odd
def no_samples() -> Odd:
    """Return blocks and attention with a batch of nothing."""
    model = Runs(
        lambda model, x: model.attention(*3 * [model.blocks(x)])[0],
        blocks=nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    return model, lambda: torch.randn(0, 5, 8), lambda output: output.sum()


@odd
def cells_by_name() -> Odd:
    """Return a ModuleDict of three kinds of cells."""

    def run(model: Any, x: Tensor) -> Tensor:
        lstm, gru = (x.new_zeros(3, 6), x.new_zeros(3, 6)), x.new_zeros(3, 6)
        last = gru
        for inputs in x.unbind(1):
            lstm = model.cells["lstm"](inputs, lstm)
            gru = model.cells["gru"](lstm[0], gru)
            last = model.cells["rnn"](gru, last)
        return last

    cells = nn.ModuleDict({"lstm": nn.LSTMCell(4, 6), "gru": nn.GRUCell(6, 6), "rnn": nn.RNNCell(6, 6)})
    return Runs(run, cells=cells), lambda: torch.randn(3, 7, 4), squared


@odd
def packed_sequences() -> Odd:
    """Return a stacked bidirectional LSTM with projections on packed sequences."""

    def run(model: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([2, 6, 4]), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(model.rnn(packed)[0], batch_first=True)[0]

    rnn = nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True, proj_size=3, dropout=0.2)
    return Runs(run, rnn=rnn), lambda: torch.randn(3, 6, 4), squared


@odd
def keywords_only() -> Odd:
    """Return blocks that take all they get by keyword."""

    def run(model: Any, *, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(input=x)
        return model.rnn(input=x, hx=None)[0]  # type: ignore[no-any-return]

    model = Runs(run, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), rnn=nn.GRU(4, 4))
    return model, lambda: {"x": torch.randn(3, 2, 4)}, squared


@dataclass
class Held:
    """An output that is a dataclass."""

    hidden: Tensor
    extra: None = None


@odd
def dataclasses_and_mappings() -> Odd:
    """Return blocks that give dataclasses, and a model that gives a mapping with things that are no tensors."""

    def run(model: Any, x: Tensor) -> dict[str, Any]:
        for block in model.blocks:
            x = block(x).hidden
        return {"hidden": x, "none": None}

    def block() -> Runs:
        return Runs(lambda self, x: Held(self.layer(x).tanh()), layer=nn.Linear(8, 8))

    return Runs(run, blocks=nn.ModuleList(block() for _ in range(4))), lambda: torch.randn(4, 8), squared


@odd
def nothing_returned() -> Odd:
    """Return blocks that put what they make into a list and return None."""

    def run(model: Any, x: Tensor) -> list[Tensor]:
        made = [x]
        for block in model.blocks:
            block(made)
        return made[-1:]

    def block() -> Runs:
        return Runs(lambda self, made: made.append(self.layer(made[-1]).tanh()), layer=nn.Linear(8, 8))

    return Runs(run, blocks=nn.ModuleList(block() for _ in range(4))), lambda: torch.randn(4, 8), squared


def _nested(layout: torch.layout) -> Odd:
    def run(model: Any, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2], x[2:5]], layout=layout)
        for block in model.blocks:
            nested = block(nested)
        return torch.cat(nested.unbind())

    return Runs(run, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))), lambda: torch.randn(5, 4), squared


@odd
def nested_tensors() -> Odd:
    """Return blocks between which sequences of unlike length run as one jagged tensor."""

    return _nested(torch.jagged)


@odd
def nested_tensors_of_the_first_kind() -> Odd:
    """Return the same with the layout that nested tensors had first."""
    return _nested(torch.strided)


@odd
def complex_numbers() -> Odd:
    """Return layers with complex weights."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = x.to(torch.complex64)
        for block in model.blocks:
            x = block(x)
        return model.read(x.abs())  # type: ignore[no-any-return]

    layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.complex64) for _ in range(3))
    return Runs(run, blocks=layers, read=nn.Linear(4, 2)), lambda: torch.randn(4, 4), squared


@odd
def quantised_weights() -> Odd:
    """Return frozen weights of eight bits, and activations that are rounded."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = x @ (0.1 * model.frozen.float())
        for block in model.blocks:
            x = torch.fake_quantize_per_tensor_affine(block(x), 0.1, 0, -8, 7)
        return x

    model = Runs(run, blocks=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    model.frozen = nn.Parameter(torch.randint(-3, 3, (8, 8), dtype=torch.int8), requires_grad=False)
    return model, lambda: torch.randn(4, 8), squared


@odd
def sizes_that_are_found_later() -> Odd:
    """Return lazy layers that have run once."""
    layers = (nn.LazyConv2d(4, 3), nn.ReLU(), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(8))
    model = nn.Sequential(*layers)
    model(torch.randn(4, 3, 6, 6))
    return model, lambda: torch.randn(4, 3, 6, 6), squared


@odd
def odd_parameters() -> Odd:
    """Return parameters of no dimension, of no element, of one element and without a use."""
    model = Runs(lambda model, x: model.layer(x) * model.scale + model.empty.sum(), layer=nn.Linear(1, 1))
    model.scale, model.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0))
    model.unused, model.still = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), nn.LSTM(3, 3).requires_grad_(False)
    return model, lambda: torch.randn(1, 1), squared


@odd
def layers_left_out_by_chance() -> Odd:
    """Return residual blocks of which each pass runs some."""

    def run(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block(x) if torch.rand(()) < 0.6 else x
        return x + model.blocks[0](x)  # type: ignore[no-any-return]

    return Runs(run, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(6))), lambda: torch.randn(2, 4), squared


def _checkpointed(*, reentrant: bool) -> Odd:
    def run(model: Any, x: Any) -> Any:
        for block in (*model.blocks, lambda x: model.rnn(x)[0]):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
    model = Runs(run, blocks=blocks, rnn=nn.LSTM(16, 16, batch_first=True))
    return model, lambda: torch.randn(2, 5, 16, requires_grad=True), squared


@odd
def checkpointing() -> Odd:
    """Return blocks and an LSTM whose activations are computed again."""
    return _checkpointed(reentrant=False)


@odd
def reentrant_checkpointing() -> Odd:
    """Return the same, computed again inside of a backward pass of its own."""
    return _checkpointed(reentrant=True)


@odd
def compiled() -> Odd:
    """Return a compiled model."""
    model: Any = torch.compile(Tree(1), backend="eager")
    return model, lambda: torch.randn(4, 8), squared


@odd
def attention_as_a_function() -> Odd:
    """Return a model without any attention module that calls the function."""

    def run(model: Any, x: Tensor) -> Tensor:
        query, key, value = model.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return model.blocks(x)  # type: ignore[no-any-return]

    blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return Runs(run, project=nn.Linear(8, 24), blocks=blocks), lambda: torch.randn(2, 5, 8), squared


@odd
def encoder_and_decoder() -> Odd:
    """Return nn.Transformer."""
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    return model, lambda: (torch.randn(2, 7, 16), torch.randn(2, 5, 16)), squared


def _ids(first: int = 0, length: int = 9) -> Tensor:
    return torch.randint(first, 50, (2, length))


def _text() -> dict[str, Tensor]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids}


@odd
def gpt2() -> Odd:
    """Return a tiny GPT-2."""
    return (
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)),
        _text,
        own_loss,
    )


_SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


@odd
def bert() -> Odd:
    """Return a tiny BERT with padding."""

    def padded() -> dict[str, Tensor]:
        batch = _text()
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -3:] = 0
        return {**batch, "attention_mask": mask}

    return BertForMaskedLM(BertConfig(**_SMALL, num_attention_heads=2)), padded, own_loss


@odd
def llama() -> Odd:
    """Return a tiny Llama with grouped heads."""
    return LlamaForCausalLM(LlamaConfig(**_SMALL, num_attention_heads=4, num_key_value_heads=2)), _text, own_loss


@odd
def t5() -> Odd:
    """Return a tiny T5, whose attention is a softmax with learned biases."""
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    return model, lambda: {"input_ids": _ids(), "labels": _ids(length=7)}, own_loss


@odd
def bart() -> Odd:
    """Return a tiny BART."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 3, "attention_heads": 2, "ffn_dim": 32}.items()
    }
    config: Any = BartConfig(vocab_size=50, d_model=16, max_position_embeddings=32, **sides)
    model = BartForConditionalGeneration(config)
    return model, lambda: {"input_ids": _ids(4), "labels": _ids(4, 7)}, own_loss


@odd
def checkpointed_gpt2() -> Odd:
    """Return a tiny GPT-2 that computes its activations again, with an input that asks for no gradient."""
    model, batch, loss = gpt2()
    any_model: Any = model
    any_model.activation_checkpointing_enable()
    return model, lambda: {**batch(), "use_cache": False}, loss


@odd
def tied_weights() -> Odd:
    """Return an embedding that is also the output layer, and blocks and recurrent layers that share their weights."""

    def run(model: Any, tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = x + block(x).relu()
        return model.head(model.second(model.first(x)[0])[0])  # type: ignore[no-any-return]

    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    model = Runs(
        run, embed=nn.Embedding(11, 8), blocks=blocks, first=nn.GRU(8, 8), second=nn.GRU(8, 8), head=nn.Linear(8, 11)
    )
    tied: Any = model
    tied.head.weight = tied.embed.weight
    for block in tied.blocks:
        block.weight = tied.blocks[0].weight
    for name, param in list(tied.first.named_parameters()):
        setattr(tied.second, name, param)
    return model, lambda: torch.randint(11, (5, 3)), squared


@odd
def parametrized_weights() -> Odd:
    """Return weights that are functions of others, some of which move buffers whenever they are read in training."""

    def run(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x).tanh()
        h = x[:, 0]
        for inputs in x.unbind(1):
            h = model.cell(inputs, h)
        return model.old(model.rnn(x)[0][:, -1] + h)  # type: ignore[no-any-return]

    blocks = nn.ModuleList(parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(3))
    rnn = nn.GRU(6, 6, batch_first=True)
    parametrizations.weight_norm(rnn, "weight_hh_l0")
    cell = parametrizations.orthogonal(nn.RNNCell(6, 6), "weight_hh")
    return (
        Runs(run, blocks=blocks, rnn=rnn, cell=cell, old=nn.utils.spectral_norm(nn.Linear(6, 2))),
        lambda: torch.randn(3, 5, 6),
        squared,
    )


@odd
def scripted_parts() -> Odd:
    """Return blocks that are scripts, among blocks that are not."""
    scripted: Any = torch.jit.script
    blocks = (scripted(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(3))
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 2)), lambda: torch.randn(4, 8), squared


@odd
def scripted() -> Odd:
    """Return a model that is one script."""
    model: Any = torch.jit.script(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    )
    return model, lambda: torch.randn(4, 8), squared


@odd
def data_parallel() -> Odd:
    """Return a recurrent model with attention as one rank of several would run it."""
    model = _everything()
    wrapped: Any = nn.parallel.DistributedDataParallel(model)
    return wrapped, lambda: torch.randn(2, 5, 8), squared
