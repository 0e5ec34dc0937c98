"""The recorder of attention during a forward pass, by layer, without hooks on the model's own modules."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradtrack.analyzers.tools.hooks import is_unheard
from gradtrack.analyzers.tools.modules import tensors
from gradtrack.analyzers.transformer.interception import Interception, SharedChange
from gradtrack.analyzers.transformer.logits import (
    contraction,
    is_attention_softmax,
    rows_of_attention,
    rows_of_packed,
    rows_of_softmax,
)
from gradtrack.analyzers.transformer.statistics import (
    AttentionRows,
    HeadStatistics,
    Limits,
    TokenSample,
    TokenStatistics,
    are_alike,
    call_sizes,
    measure_heads,
    sample_tokens,
    sequences_of,
    token_statistics,
)
from gradtrack.analyzers.transformer.wiring import (
    Wiring,
    judge_blind,
    judge_block,
    judge_mask,
    wrong_scale,
)
from gradtrack.gradients.native.threads import one_thread, threads_for
from gradtrack.reports import Issue
from gradtrack.support.interrupts import Changes, pass_on

_logger = logging.getLogger("gradtrack")
_GLOBAL_HOOKS: Final = "Using `torch.compile.* when there are global hooks"
_FUSED: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass(slots=True)
class ForwardPass:
    """The record of one forward pass: attention by the module that called it, tokens by block, both in order."""

    heads: dict[str, list[HeadStatistics]] = field(default_factory=dict)
    tokens: dict[str, list[TokenStatistics]] = field(default_factory=dict)
    wiring: Wiring = field(default_factory=Wiring)
    samples: dict[str, list[list[TokenSample]]] = field(default_factory=dict)
    scopes: set[int] = field(default_factory=set)
    num_calls: int = 0
    num_unread: int = 0
    watched: bool = False
    confirmed: bool = False

    def read(self) -> None:
        """Read the statistics of all heads and the samples of all tokens together, and measure the samples."""
        reading, heads, tokens = self.wiring.reading, self.heads, self.samples
        self.heads, self.samples = {}, {}
        for name, found in heads.items():
            for one in found:
                reading.add(one.tensors(), partial(self._add_heads, name, one))
        for name, calls in tokens.items():
            for call in calls:
                reading.add([part for sample in call for part in sample], partial(self._add_tokens, name))
        reading.read()

    def _add_heads(self, name: str, one: HeadStatistics, *values: Tensor) -> None:
        read = one.of(iter(values))
        if read.num_rows:
            self.heads.setdefault(name, []).append(read)

    def _add_tokens(self, name: str, *values: Tensor) -> None:
        found = token_statistics([*map(TokenSample, values[::2], values[1::2])])
        if found is not None:
            self.tokens.setdefault(name, []).append(found)


@dataclass(slots=True)
class _Frame:
    module: nn.Module
    name: str
    attended: list[tuple[str, AttentionRows | None, tuple[int, int] | None]] = field(default_factory=list)


def _ignore_warning(changes: Changes) -> None:
    """Ignore torch's warning of global hooks, which it gives whenever a compiled module, any one, runs under them."""
    before = list(warnings.filters)

    def take_back() -> None:
        filters = cast("list[Any]", warnings.filters)
        filters[:] = [one for one in filters if one in before or getattr(one[1], "pattern", "") != _GLOBAL_HOOKS]

    changes.note(take_back)
    warnings.filterwarnings("ignore", message=_GLOBAL_HOOKS)


_silence: Final = SharedChange(_ignore_warning)


class AttentionRecorder:
    """Records the attention of one model while it is armed, in forward passes that a backward pass follows.

    Armed, it has one hook on entering and one on leaving any module, so that no module of the model carries a hook and
    torch keeps its fused kernels; the names of attention functions are rebound during the model's own forward only.
    """

    def __init__(
        self, model: nn.Module, *, limits: Limits | None = None, weights: bool = True, gradients_only: bool = True
    ) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._kinds = Counter(type(module) for module in model.modules())
        self._limits = limits or Limits()
        self._weights, self._gradients_only = weights, gradients_only
        self._pass: ForwardPass | None = None
        self._frames: list[_Frame] = []
        self._interception: Interception | None = None
        self._owner: int | None = None
        self._changes = Changes()
        self._faulty = False

    def arm(self) -> None:
        """Start to listen for forward passes of the model."""
        if not self._changes:
            self._changes.note(partial(_silence.give_back, self))
            _silence.take(self)
            self._changes.hook(register_module_forward_pre_hook, self._enter)
            self._changes.hook(register_module_forward_hook, self._leave, always_call=True)

    def disarm(self) -> None:
        """Remove every hook and put every name back; a second call does nothing."""
        self._stop()
        self._changes.undo()

    @contextmanager
    def armed(self) -> Iterator[AttentionRecorder]:
        """Listen within a `with` block."""
        try:
            self.arm()
            yield self
        finally:
            self.disarm()

    def take(self) -> ForwardPass | None:
        """Return the last pass that a backward pass followed and forget it, or None."""
        found, self._pass = self._pass, None
        if found is None or (self._gradients_only and found.watched and not found.confirmed):
            return None
        with one_thread():
            self._guard(found.read)
        return found

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        if self._interception is not None and self._owner != threading.get_ident():
            return
        if self._interception is not None and (not self._frames or module is self._frames[0].module):
            self._stop()  # a pass that was interrupted, by Ctrl-C for example, and never left its modules
        if self._interception is None and not (name is not None and self._begin(module)):
            return
        if name is None or (isinstance(module, nn.Softmax) and self._frames):
            name = self._frames[-1].name  # attention is named by the module that computes it
        self._frames.append(_Frame(module, name))
        self._see_imported()
        self._keep_tokens(module, inputs)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._frames or self._owner != threading.get_ident():
            return
        while self._frames[-1].module is not module:
            if not any(frame.module is module for frame in self._frames):
                return
            self._frames.pop()
        frame = self._frames.pop()
        if frame.attended:
            with one_thread():
                self._guard(lambda: self._close_block(frame, inputs, output))
        if self._frames:
            self._see_imported()
            return
        self._stop()
        for tensor in tensors(output):
            if tensor.requires_grad and self._pass is not None:
                self._watch(tensor, self._pass)

    def _begin(self, module: nn.Module) -> bool:
        """Start a pass at the outermost module, unless the present pass is the evidence already."""
        present = self._pass
        if is_unheard() or (self._gradients_only and not torch.is_grad_enabled()):
            return False
        if (present is not None and present.confirmed) or torch._C._current_graph_task_id() != -1:
            return False
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return False
        if present is None or id(module) in present.scopes:
            self._pass = present = ForwardPass()
        present.scopes.add(id(module))
        self._owner = threading.get_ident()
        self._interception = Interception(self)
        self._interception.open()
        return True

    def _stop(self) -> None:
        self._frames = []
        if self._pass is not None:
            self._pass.wiring.release()
        if self._interception is not None:
            self._interception.close()
            self._interception = None
        self._owner = None

    def _see_imported(self) -> None:
        """Let torch's own attention modules choose their fused kernels as if nothing listened."""
        if self._interception is not None:
            module = self._frames[-1].module
            fused = type(module) in _FUSED and not module.training
            self._interception.see_imported(not fused)

    def _watch(self, tensor: Tensor, found: ForwardPass) -> None:
        def reached(_: Tensor) -> None:
            found.confirmed = True
            handle.remove()

        found.watched = True
        handle = tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def on_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments of `scaled_dot_product_attention`."""
        query = args[0] if args else kwargs["query"]
        self._hear(query, lambda: rows_of_attention(*args, **kwargs, limits=self._limits))
        scale = kwargs.get("scale")
        if scale is not None and len(args) > 1 and _has_numbers(args[0]) and _has_numbers(args[1]):
            self._look(lambda wiring: wiring.add(_given_scale(self._name, float(scale), args[0], args[1])))

    def on_softmax(self, logits: Any, dim: int | None, num_heads: int | None) -> None:
        """Take a softmax if it is one of attention."""
        module = self._frames[-1].module if self._frames else None
        named = f"{self._name}.{type(module).__name__}"
        three = num_heads is not None and isinstance(logits, Tensor) and logits.ndim == 3
        made = self._pass is not None and _has_numbers(logits) and self._pass.wiring.matches(logits)
        if three or is_attention_softmax(logits, dim, named, is_product=made):
            self._hear(
                logits, lambda: rows_of_softmax(logits, num_heads, limits=self._limits), num_heads, is_softmax=True
            )
        if made:
            self._look(lambda wiring: wiring.on_logits(self._name, logits))

    def on_weights(self, dim: int | None, result: Any) -> None:
        """Take the result of a softmax."""
        if _has_numbers(result) and result.ndim >= 3:
            self._look(lambda wiring: wiring.on_weights(self._name, dim, result))

    def on_product(self, args: tuple[Any, ...], result: Any) -> None:
        """Take a product: of queries and keys, of attention weights and values, or any other."""
        operands = args[-2:] if len(args[-2:]) == 2 else ()
        if not operands or not _has_numbers(result) or not all(_has_numbers(one) and one.ndim > 2 for one in operands):
            return
        first, second = operands
        axes = contraction(args[0], first, second) if isinstance(args[0], str) else (first.ndim - 1, second.ndim - 2)
        if axes is not None:
            self._look(lambda wiring: wiring.on_product((first, second), axes, result))

    def on_packed(
        self, source: Tensor, heads: int, weight: Tensor, bias: Tensor | None, mask: Tensor | None, kind: int | None
    ) -> None:
        """Take the input and the weights of one of torch's fused attentions."""
        self._hear(source, lambda: rows_of_packed(source, heads, weight, bias, mask, kind, limits=self._limits))

    @property
    def _name(self) -> str:
        return self._frames[-1].name if self._frames else ""

    def _look(self, see: Callable[[Wiring], None]) -> None:
        """Look at how attention is wired."""
        found = self._pass
        if found is not None and self._weights:
            self._guard(lambda: see(found.wiring))

    def _keep_tokens(self, module: nn.Module, inputs: Any) -> None:
        """Keep the tokens that an embedding was given first, which tell what is padding."""
        given = inputs[0] if isinstance(module, nn.Embedding) and inputs else None
        if self._pass is not None and self._pass.wiring.ids is None and isinstance(given, Tensor) and given.ndim == 2:
            self._pass.wiring.ids = given

    def _hear(
        self,
        first: Any,
        read: Callable[[], AttentionRows | None],
        num_heads: int | None = None,
        *,
        is_softmax: bool = False,
    ) -> None:
        found = self._pass
        if found is None or not self._frames or not isinstance(first, Tensor) or first.device.type == "meta":
            return
        found.num_calls += 1
        frame = self._frames[-1]
        with threads_for(first.numel()):
            rows = None if torch._C._functorch.is_functorch_wrapped_tensor(first) else self._guard(read)
            statistics = self._guard(lambda: measure_heads(rows)) if rows is not None and self._weights else None
        found.num_unread += rows is None
        name = f"{frame.name}.self_attn" if isinstance(frame.module, nn.TransformerEncoderLayer) else frame.name
        if statistics is not None:
            found.heads.setdefault(name, []).append(statistics)
        if rows is not None:
            self._look(lambda wiring: wiring.wait(judge_mask(name, rows, wiring.ids)))
            self._look(lambda wiring: wiring.wait(judge_blind(name, rows)) if is_softmax else None)
        frame.attended.append((name, rows, call_sizes(first, num_heads)))

    def _close_block(self, frame: _Frame, inputs: Any, output: Any) -> None:
        """Look at the tokens that leave a block, or leave that to the module around it."""
        if self._pass is None:
            return
        before, after = (next(filter(Tensor.is_floating_point, tensors(side)), None) for side in (inputs, output))
        if after is not None and (before is None or are_alike(before, after)) and self._is_block(frame):
            if before is not None and self._weights and self._kinds[type(frame.module)] > 1:
                heads = {name: 1 if rows is None else rows.logits.shape[1] for name, rows, _ in frame.attended}
                for issue in judge_block(frame.name, frame.module, heads, before, after):
                    self._pass.wiring.add(issue)
            _, rows, sizes = frame.attended[-1]
            found = sample_tokens(sequences_of(after, sizes, frame.module), rows, self._limits)
            if found:
                self._pass.samples.setdefault(frame.name, []).append(found)
                return
        if self._frames:
            self._frames[-1].attended += frame.attended

    def _is_block(self, frame: _Frame) -> bool:
        """Tell whether a module is a block: an item of a list of modules, or where there is none, around attention."""
        if frame.name.rsplit(".", 1)[-1].isdigit():
            return True
        above = any(part.isdigit() for part in frame.name.split("."))
        return not above and bool(self._frames) and all(name != frame.name for name, _, _ in frame.attended)

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Keep a fault of the look out of the user's forward pass."""
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad(), _full_precision():  # first: a mode hears the others
                return call()
        except Exception as fault:
            pass_on(fault)
            if not self._faulty:
                self._faulty = True
                _logger.warning("attention could not be read; training goes on", exc_info=True)
            return None


def _has_numbers(given: Any) -> TypeGuard[Tensor]:
    """Whether something is a tensor whose numbers can be read as one block."""
    if not isinstance(given, Tensor) or given.is_nested or given.device.type == "meta":
        return False
    return given.is_floating_point() and not torch._C._functorch.is_functorch_wrapped_tensor(given)


def _given_scale(layer: str, scale: float, query: Tensor, key: Tensor) -> Issue | None:
    """Judge a scale that was passed to the fused function."""
    heads = query.shape[1] if query.ndim == 4 else 1
    return wrong_scale(layer, scale, query.shape[-1], heads, [query.norm(dim=-1), key.norm(dim=-1)])


@contextmanager
def _full_precision() -> Iterator[None]:
    """Switch autocast off where it is on."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
