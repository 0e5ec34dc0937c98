"""Recurrent modules in every configuration, as Hypothesis strategies, and a plain unrolling to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

KINDS = ["rnn_tanh", "rnn_relu", "lstm", "gru"]
LAYOUTS = ["time_first", "batch_first", "unbatched", "packed"]


@dataclass(frozen=True)
class Case:
    """A module in float64, what it is called with, and how."""

    module: nn.RNNBase
    inputs: Any
    state: Any
    lengths: list[int]


def build(kind: str, inputs: int, hidden: int, **options: Any) -> nn.RNNBase:
    """Make a module of a kind in float64."""
    if kind == "lstm":
        return nn.LSTM(inputs, hidden, **options).double()
    if kind == "gru":
        return nn.GRU(inputs, hidden, **options).double()
    return nn.RNN(inputs, hidden, nonlinearity=kind.removeprefix("rnn_"), **options).double()


@st.composite
def cases(draw: st.DrawFn, kinds: list[str] = KINDS, layouts: list[str] = LAYOUTS) -> Case:
    """Draw a module with sizes, layers, directions, bias and projection, and a batch in one of the layouts."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind, layout = draw(st.sampled_from(kinds)), draw(st.sampled_from(layouts))
    num_inputs, hidden, layers = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.integers(1, 3))
    options: dict[str, Any] = {"num_layers": layers, "bidirectional": draw(st.booleans()), "bias": draw(st.booleans())}
    if kind == "lstm" and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, hidden - 1))
    module = build(kind, num_inputs, hidden, batch_first=layout != "time_first", **options)
    batch = 1 if layout == "unbatched" else draw(st.integers(1, 4))
    longest = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, longest), min_size=batch, max_size=batch)) if layout == "packed" else []
    lengths = lengths or [longest] * batch
    padded = torch.randn(batch, max(lengths), num_inputs, dtype=torch.float64)
    state = _state(module, batch) if draw(st.booleans()) else None
    if layout == "unbatched" and state is not None:
        state = tuple(part[:, 0] for part in state) if isinstance(state, tuple) else state[:, 0]
    return Case(module, _laid_out(padded, layout, lengths), state, lengths)


def run(case: Case) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, T, D·P) and the final states (L·D, B, S) that torch itself computes."""
    output, final = case.module(case.inputs, case.state)
    parts = [
        part.unsqueeze(1) if part.dim() == 2 else part for part in (final if isinstance(final, tuple) else [final])
    ]
    return batch_first(case.module, output), torch.cat(parts, dim=-1)


def batch_first(module: nn.RNNBase, values: Tensor | PackedSequence) -> Tensor:
    """Return values of any layout as (B, T, ...)."""
    if isinstance(values, PackedSequence):
        return pad_packed_sequence(values, batch_first=True)[0]
    if values.dim() == 2:
        return values.unsqueeze(0)
    return values if module.batch_first else values.transpose(0, 1)


def cell_like(module: nn.RNNBase, suffix: str) -> nn.RNNCellBase:
    """Return torch's own cell with the weights of one layer and direction."""
    inputs, hidden = getattr(module, f"weight_ih{suffix}").shape[1], module.hidden_size
    made: nn.RNNCellBase
    if module.mode == "LSTM":
        made = nn.LSTMCell(inputs, hidden, bias=module.bias)
    elif module.mode == "GRU":
        made = nn.GRUCell(inputs, hidden, bias=module.bias)
    else:
        made = nn.RNNCell(inputs, hidden, bias=module.bias, nonlinearity=module.mode.removeprefix("RNN_").lower())
    made = made.double()
    with torch.no_grad():
        for name, param in made.named_parameters():
            param.copy_(getattr(module, f"{name}{suffix}"))
    return made


def _state(module: nn.RNNBase, batch: int) -> Any:
    count = module.num_layers * (2 if module.bidirectional else 1)
    hidden = torch.randn(count, batch, module.proj_size or module.hidden_size, dtype=torch.float64)
    if module.mode != "LSTM":
        return hidden
    return hidden, torch.randn(count, batch, module.hidden_size, dtype=torch.float64)


def _laid_out(padded: Tensor, layout: str, lengths: list[int]) -> Any:
    if layout == "packed":
        return pack_padded_sequence(padded, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    if layout == "unbatched":
        return padded[0]
    return padded.transpose(0, 1) if layout == "time_first" else padded
