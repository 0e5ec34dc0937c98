"""The gain monitor: a context manager that measures the gain of each block, and which blocks a gradient reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple, Self, final, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradtrack.analyzers.gain.profile import (
    Discontinuity,
    GainFit,
    GainProfile,
    SampleSpread,
    spread,
    summarise,
    write_report,
)
from gradtrack.analyzers.tools.hooks import Faults, Unshared, is_unheard
from gradtrack.analyzers.tools.modules import first_floating, tensors
from gradtrack.analyzers.tools.samples import read_together
from gradtrack.errors import InputTypeError, SecondBackwardError, UsageError
from gradtrack.gradients.native.threads import threads_for
from gradtrack.reports import html
from gradtrack.support.interrupts import Changes

_MOST_NODES: Final = 100_000


class Origin:
    """The output of a block, remembered by a weak reference and by the number of the graph's node that made it."""

    __slots__ = ("_number", "_tensor")

    def __init__(self, output: Tensor) -> None:
        self._tensor = weakref.ref(output)
        self._number = None if output.grad_fn is None else _number(output.grad_fn)

    def reaches(self, inputs: Iterable[Tensor]) -> bool | None:
        """Say whether an input is this output or was computed from it; None where the graph does not show it.

        A recomputation by a reentrant checkpoint starts from detached inputs, and shows nothing about what led there.
        """
        given = list(inputs)
        output = self._tensor()
        if output is not None and any(tensor is output for tensor in given):
            return True
        if self._number is None:
            return True if output is not None and any(_shares(output, tensor) for tensor in given) else None
        nodes = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]
        if nodes:
            return _descends(nodes, self._number)
        return None if inside_backward() else False


def inside_backward() -> bool:
    """Say whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _shares(output: Tensor, tensor: Tensor) -> bool:
    return tensor.numel() > 0 and output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _descends(nodes: list[Any], number: int) -> bool:
    """Walk back from nodes to one with a number; every node on the way was made after it, and has a higher number."""
    seen = set(map(_number, nodes))
    stack = list(nodes)
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if _number(node) == number:
            return True
        for following, _ in node.next_functions:
            if following is None or not following.next_functions:
                continue
            later = _number(following)
            if later >= number and later not in seen:
                seen.add(later)
                stack.append(following)
    return False


def _number(node: Any) -> int:
    return int(node._sequence_nr())


NormType = Literal["l2", "l1", "linf", "mean"]


class _Arrival(NamedTuple):
    """The norms of one gradient: of the whole of it and of each sample, not yet waited for on an accelerator."""

    norm: Tensor
    samples: Tensor
    rms: Tensor
    pass_number: int
    turn: int


@final
class GradientGainMonitor:
    """A monitor of the gradients at the outputs of blocks, and of the gains between neighbours.

    With h_i the output of block i, the gain of the transition i-1 to i is `‖∂L/∂h_{i-1}‖ / ‖∂L/∂h_i‖`: above one the
    gradient grows on its way back. `blocks` is a list, `ModuleList` or `Sequential` of separate modules whose outputs
    are tensors, or tuples, lists, mappings or dataclasses with a tensor in them; `select` picks that tensor where it
    is not the first floating one. Enter the monitor before the forward pass. What it keeps of a block are its norms;
    no gradient, activation or graph stays alive for it. The gain is None where a block does not consume the output of
    the one before it, as sibling heads do not. A mean norm does not depend on the size of the gradient, but does scale
    with it.

    With `strict_single_backward` a second backward pass without a `reset()` raises; without it the later one counts.

    >>> _ = torch.manual_seed(0)
    >>> blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    >>> for block in blocks:
    ...     _ = nn.init.orthogonal_(block.weight, gain=0.5)
    >>> with GradientGainMonitor(blocks) as monitor:
    ...     h = torch.ones(4, 8)
    ...     for block in blocks:
    ...         h = block(h)
    ...     h.sum().backward()
    >>> [round(gain, 4) for gain in monitor.gains()]
    [0.5, 0.5]

    Cost: one reduction of each block's output gradient. Reference: Glorot and Bengio 2010; Schoenholz et al. 2017.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm_type: NormType = "l2",
        strict_single_backward: bool = True,
        eps: float = 1e-30,
        *,
        select: Callable[[Any], Tensor | None] = first_floating,
    ) -> None:
        self._blocks = _checked(blocks)
        if norm_type not in get_args(NormType):
            raise UsageError(f"norm_type {norm_type!r}: expected one of {', '.join(get_args(NormType))}.")
        if not eps >= 0:
            raise UsageError(f"eps {eps!r}: expected a number that is not negative.")
        self.norm_type, self.strict_single_backward, self.eps = norm_type, strict_single_backward, eps
        self._select = select
        self._num_passes = 0
        self._changes = Changes()
        self._closer = weakref.finalize(self, self._changes.undo)
        self.reset()
        with self._changes.or_none():
            for index, block in enumerate(self._blocks):
                watch = _Watch(self, index)
                self._changes.hook(block.register_forward_hook, watch, with_kwargs=True)
                if getattr(block, "_compiled_call_impl", None) is not None:
                    _watch_compiled(block, watch, self._changes)

    def reset(self) -> None:
        """Forget the recorded gradients."""
        count = len(self._blocks)
        self._faults = Faults()
        self._arrivals: list[_Arrival | None] = [None] * count
        self._origins: list[Origin | None] = [None] * count
        self._edges: list[bool | None] = [None] * max(count - 1, 0)
        self._turns = [0] * count
        self.num_forwards = 0

    def close(self) -> None:
        """Remove the hooks; what was recorded stays readable."""
        self._changes.undo()
        self._closer()

    @property
    def closed(self) -> bool:
        """Whether the hooks are gone."""
        return not self._closer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def norms(self) -> list[float | None]:
        """Return the norm of the gradient at each block's output, None where none arrived."""
        return [None if arrival is None else float(arrival.norm) for arrival in self._seen()]

    def rms_norms(self) -> list[float | None]:
        """Return the root mean square of each gradient, which can be compared between outputs of unlike shapes."""
        return [None if arrival is None else float(arrival.rms) for arrival in self._seen()]

    def gains(self) -> list[float | None]:
        """Return the gain of each transition: the norm before it divided by the norm after it."""
        return self.profile().gains()

    def log_gains(self) -> list[float | None]:
        """Return the natural logarithm of each gain."""
        return self.profile().log_gains()

    def cumulative_gains(self) -> list[float | None]:
        """Return the norm at each block over the norm at the last one."""
        return self.profile().cumulative_gains()

    def gain_per_block(self) -> GainFit | None:
        """Fit one gain to the whole depth; None for under three connected blocks."""
        return self.profile().fit()

    def discontinuity(self) -> Discontinuity | None:
        """Find the transition that stands out the most; None for under three transitions."""
        return self.profile().discontinuity()

    def sample_spread(self) -> list[SampleSpread | None]:
        """Describe the norms of the samples of the batch (the first dimension) at each block."""
        return [None if arrival is None else spread(arrival.samples.tolist()) for arrival in self._seen()]

    def profile(self) -> GainProfile:
        """Return the norms and the connections that all gains follow from."""
        return GainProfile(self.norms(), [edge is not False for edge in self._edges], self.eps)

    def summary_stats(self) -> dict[str, float | int]:
        """Return mean, extremes and counts of the gains; NaN where no gain is known."""
        profile = self.profile()
        return summarise(profile.gains(), profile.log_gains())

    def report(self) -> str:
        """Write norms, gains and their summary for a person to read."""
        return write_report(self.profile(), self.norm_type, self.sample_spread(), num_forwards=self.num_forwards)

    def _repr_html_(self) -> str:
        return html.text(self.report())

    def _seen(self) -> list[_Arrival | None]:
        """Return what arrived, whose norms are read together where they are on an accelerator."""
        self._faults.check()
        there = {index: one for index, one in enumerate(self._arrivals) if one is not None and not one.norm.is_cpu}
        read = iter(read_together(norm for one in there.values() for norm in (one.norm, one.samples, one.rms)))
        for index, one in there.items():
            self._arrivals[index] = one._replace(norm=next(read), samples=next(read), rms=next(read))
        return self._arrivals

    def _see(self, index: int, inputs: Any, output: Any) -> None:
        """Look at a block's forward pass, and wait at its output for the gradient."""
        self.num_forwards += 1
        self._connect(index, inputs)
        tensor = self._select(output)
        self._origins[index] = None if tensor is None else Origin(tensor)
        if tensor is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return
        self._turns[index] += 1
        tensor.register_hook(self._waiting(index, self._num_passes, self._turns[index]))  # type: ignore[no-untyped-call]

    def _connect(self, index: int, inputs: Any) -> None:
        if index == 0:
            return
        origin = self._origins[index - 1]
        connected = False if origin is None else origin.reaches(tensors(inputs))
        if connected or not inside_backward():
            self._edges[index - 1] = connected

    def _waiting(self, index: int, pass_number: int, turn: int) -> Callable[[Tensor], None]:
        itself = weakref.ref(self)
        arrived = 0

        @unserializable_hook  # type: ignore[untyped-decorator]
        def take(gradient: Tensor) -> None:
            nonlocal arrived
            arrived += 1
            monitor = itself()
            if monitor is not None and not monitor.closed:
                monitor._take(index, gradient, pass_number, turn, repeated=arrived > 1)

        return take  # type: ignore[no-any-return]

    def _take(self, index: int, gradient: Tensor, pass_number: int, turn: int, *, repeated: bool) -> None:
        """Keep the norms of a gradient; of a block that ran twice in one pass, those of its last output."""
        there = self._arrivals[index]
        same_pass = there is not None and there.pass_number == pass_number and not repeated
        if there is not None and self.strict_single_backward and not same_pass:
            raise SecondBackwardError(
                f"a second gradient at block {index} without a reset: expected one backward pass. "
                "Call reset() after each backward pass, or pass strict_single_backward=False, "
                "as accumulation and gradient checkpointing need it."
            )
        if same_pass and there is not None and there.turn > turn:
            return
        self._faults.guarded(self._keep)(index, gradient, pass_number, turn)

    def _keep(self, index: int, gradient: Tensor, pass_number: int, turn: int) -> None:
        with torch.no_grad(), threads_for(gradient.numel()):
            self._arrivals[index] = _Arrival(*_norms(gradient.detach(), self.norm_type), pass_number, turn)
        self._num_passes += 1


class _Watch(Unshared):
    """A forward hook that does not keep its monitor alive."""

    def __init__(self, monitor: GradientGainMonitor, index: int) -> None:
        self._monitor, self._index = weakref.ref(monitor), index

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_unheard() or torch.compiler.is_compiling():  # a hook cannot wait for a gradient inside a compiled region
            return
        monitor = self._monitor()
        if monitor is not None and not monitor.closed:
            monitor._faults.guarded(monitor._see)(self._index, (args, kwargs), output)


def _watch_compiled(block: nn.Module, watch: _Watch, changes: Changes) -> None:
    """Look at a block that was compiled in place from outside of what was compiled."""
    compiled: Any = block._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        watch(block, args, kwargs, output)
        return output

    changes.note(lambda: setattr(block, "_compiled_call_impl", compiled))
    block._compiled_call_impl = call


def _checked(blocks: Any) -> list[nn.Module]:
    if isinstance(blocks, nn.Module) and not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        raise InputTypeError(
            f"blocks {type(blocks).__name__}: expected a list, ModuleList or Sequential of modules. "
            "Pass the model's own list of blocks."
        )
    found = list(blocks)
    for block in found:
        if not isinstance(block, nn.Module):
            raise InputTypeError(f"block {block!r}: expected a torch.nn.Module.")
    if not found:
        raise UsageError("blocks are empty: expected at least one module.")
    if len(set(map(id, found))) < len(found):
        raise UsageError("a block is given twice: expected separate modules. Leave out the second of them.")
    return found


def _sizes(gradient: Tensor) -> Tensor:
    """Return what has the same norms: the absolute values of complex numbers, and real ones as they are."""
    if not gradient.is_complex():
        return gradient
    on_cpu = gradient.device.type == "cpu"
    return gradient.to(torch.complex128 if on_cpu else torch.complex64).abs()


def _rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row for each sample, with zeros after the shorter parts of a nested tensor, and their lengths."""
    if gradient.is_nested:
        parts = [_sizes(part).reshape(-1) for part in gradient.unbind()]
        lengths = torch.tensor([len(part) for part in parts], device=gradient.device)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), lengths
    values = _sizes(gradient)
    rows = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
    return rows, torch.full((rows.shape[0],), rows.shape[1], device=rows.device)


def _norms(gradient: Tensor, norm_type: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of a gradient, that of each sample, and the root mean square."""
    rows, lengths = _rows(gradient)
    dtype = torch.float64 if rows.device.type == "cpu" else torch.float32
    if not rows.numel():
        nothing = rows.new_zeros((), dtype=dtype)
        return nothing, nothing.reshape(1), nothing
    squares = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    whole = torch.linalg.vector_norm(squares)
    rms = whole / lengths.sum().to(dtype).sqrt()
    if norm_type == "l2":
        return whole, squares, rms
    if norm_type == "linf":
        peaks = torch.linalg.vector_norm(rows, float("inf"), dim=1, dtype=dtype)
        return peaks.max(), peaks, rms
    sums = torch.linalg.vector_norm(rows, 1, dim=1, dtype=dtype)
    if norm_type == "mean":
        return sums.sum() / lengths.sum(), sums / lengths, rms
    return sums.sum(), sums, rms
