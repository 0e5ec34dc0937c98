"""The calls of torch's fused recurrent modules: their sequences, and the gradients that arrive at their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradtrack.measure.captures import is_evidence, is_same, state_parts
from gradtrack.measure.hooks import Faults
from gradtrack.measure.replay import Sequences, Trajectory, replay
from gradtrack.measure.through_time import backward


@dataclass(slots=True)
class _Segment:
    """One call of a fused module, with the direct gradients that arrive at its outputs later."""

    sequences: Sequences
    chosen: Tensor
    output: Tensor | None = None
    final: list[Tensor | None] = field(default_factory=list)
    seen: bool = False


class FusedCapture:
    """Keeps the calls of an nn.RNN, nn.LSTM or nn.GRU; calls that hand their state on are one sequence."""

    def __init__(self, module: nn.RNNBase, name: str, *, max_sequences: int, max_steps: int) -> None:
        self.faults = Faults()
        self._module, self._name = module, name
        self._max_sequences, self._max_steps = max_sequences, max_steps
        self._segments: list[_Segment] = []
        self._handed_on: tuple[Tensor, ...] = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep the sequences of one call and listen to the gradients of its outputs."""
        if not is_evidence(bool(self._segments)) or (self._segments and self._segments[0].seen):
            return
        inputs = args[0] if args else kwargs["input"]
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        if not (inputs.data if isinstance(inputs, PackedSequence) else inputs).numel():
            return
        with torch.no_grad():  # checkpointing compares what two forwards save, and this one must save nothing
            segment = _Segment(*Sequences.of(self._module, inputs, state, self._max_sequences))
        final = state_parts(output[1])
        follows = self._follows(state_parts(state), segment) and not isinstance(inputs, PackedSequence)
        self._segments = [*self._segments, segment] if follows else [segment]
        self._handed_on = final
        self._listen(segment, output[0], final)

    def trajectories(self) -> list[Trajectory]:
        """Replay what was kept."""
        if not self._segments:
            return []
        first, last = self._segments[0], self._segments[-1]
        sequences = Sequences(
            inputs=torch.cat([segment.sequences.inputs for segment in self._segments], dim=1),
            lengths=torch.stack([segment.sequences.lengths for segment in self._segments]).sum(dim=0),
            state=first.sequences.state,
        )
        found = replay(self._module, sequences, self._name)
        if not any(segment.seen for segment in self._segments):
            return [track.freeze() for track in found.tracks]
        output = torch.cat([self._filled(segment) for segment in self._segments], dim=1)
        return backward(found, output, self._final_gradients(last, len(found.final)), max_steps=self._max_steps)

    def _follows(self, state: tuple[Tensor, ...], segment: _Segment) -> bool:
        if not self._segments or not state or self._module.bidirectional:
            return False
        same = len(state) == len(self._handed_on) and all(map(is_same, state, self._handed_on))
        return same and torch.equal(segment.chosen, self._segments[-1].chosen)

    def _listen(self, segment: _Segment, output: Tensor | PackedSequence, final: tuple[Tensor, ...]) -> None:
        segment.final = [None] * len(final)
        data = output.data if isinstance(output, PackedSequence) else output

        def keep_output(grad: Tensor) -> None:
            whole = output._replace(data=grad) if isinstance(output, PackedSequence) else grad
            segment.output = _batch_first(self._module, whole)[segment.chosen.to(grad.device)].detach()
            segment.seen = True

        def keep_final(position: int) -> Callable[[Tensor], None]:
            def keep(grad: Tensor) -> None:
                batched = grad.unsqueeze(1) if grad.dim() == 2 else grad
                segment.final[position] = batched[:, segment.chosen.to(grad.device)].detach()
                segment.seen = True

            return keep

        if data.requires_grad:
            data.register_hook(self.faults.guarded(keep_output))  # type: ignore[no-untyped-call]
        for position, state in enumerate(final):
            if state.requires_grad:
                state.register_hook(self.faults.guarded(keep_final(position)))  # type: ignore[no-untyped-call]

    def _filled(self, segment: _Segment) -> Tensor:
        """Return the direct gradient at the outputs of a segment, zero where none arrived."""
        if segment.output is not None:
            return segment.output
        inputs, width = segment.sequences.inputs, self._module.proj_size or self._module.hidden_size
        return inputs.new_zeros(*inputs.shape[:2], width * (2 if self._module.bidirectional else 1))

    def _final_gradients(self, segment: _Segment, count: int) -> list[Tensor | None]:
        if all(grad is None for grad in segment.final):
            return [None] * count
        num_sequences = len(segment.chosen)
        sizes = [self._module.proj_size or self._module.hidden_size, self._module.hidden_size]
        like = next(grad for grad in segment.final if grad is not None)
        parts = [
            like.new_zeros(count, num_sequences, size) if grad is None else grad
            for grad, size in zip(segment.final, sizes, strict=False)
        ]
        return list(torch.cat(parts, dim=-1))


def _batch_first(module: nn.RNNBase, values: Tensor | PackedSequence) -> Tensor:
    if isinstance(values, PackedSequence):
        return pad_packed_sequence(values, batch_first=True)[0]
    if values.dim() == 2:
        return values.unsqueeze(0)
    return values if module.batch_first else values.transpose(0, 1)
