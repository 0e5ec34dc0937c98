"""The interception of attention calls of a thread, however their functions were imported."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtrack.support.interrupts import Changes

if TYPE_CHECKING:
    from gradtrack.analyzers.transformer.recorder import AttentionRecorder

_F: Final = torch.nn.functional


class SharedChange:
    """A change of the whole process that several users need: made for the first of them, undone after the last."""

    def __init__(self, change: Callable[[Changes], None]) -> None:
        self._change, self._made = change, Changes()
        self._lock, self._users = threading.Lock(), set[object]()

    def take(self, user: object) -> None:
        """Make the change, unless another user has."""
        with self._lock:
            self._users.add(user)
            if not self._made:
                self._change(self._made)

    def give_back(self, user: object) -> None:
        """Undo the change with its last user; a second call does nothing."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._made.undo()


class _Thread(threading.local):
    """The listeners of this thread, and the calls that it is within."""

    def __init__(self) -> None:
        self.listener: AttentionRecorder | None = None
        self.busy = False
        self.heads: int | None = None


_thread = _Thread()


def _tell(call: Callable[[AttentionRecorder], None], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell the listener once, then run the original with the listener's ears closed."""
    listener = _thread.listener
    if listener is None or _thread.busy:
        return func(*args, **kwargs)
    _thread.busy = True
    try:
        call(listener)
        return func(*args, **kwargs)
    finally:
        _thread.busy = False


class _Mode(TorchFunctionMode):
    """Sees functions that were imported by name, and methods; torch hands it each call before it runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hear = _HEARD.get(func)
        return func(*args, **kwargs) if hear is None else hear(func, args, kwargs)


def _hear_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _tell(lambda listener: listener.on_attention(args, kwargs), func, args, kwargs)


def _hear_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, dim = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "dim")
    heads, listener = _thread.heads, None if _thread.busy else _thread.listener
    result = _tell(lambda listener: listener.on_softmax(logits, dim, heads), func, args, kwargs)
    if listener is not None:
        listener.on_weights(dim, result)
    return result


def _hear_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hear a product of two tensors, of which scores are made and values are summed by."""
    result = func(*args, **kwargs)
    listener = None if _thread.busy else _thread.listener
    if listener is not None and len(args) > 1 and not kwargs:
        listener.on_product(args, result)
    return result


def _hear_multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    heads = _argument(args, kwargs, 4, "num_heads")
    before, _thread.heads = _thread.heads, heads if isinstance(heads, int) else None
    try:
        return func(*args, **kwargs)
    finally:
        _thread.heads = before


def _hear_fused_layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hear `_transformer_encoder_layer_fwd`, which normalises its input first where the layer does so."""

    def told(listener: AttentionRecorder) -> None:
        source: Tensor = args[0]
        if args[8]:
            source = _F.layer_norm(source, (source.shape[-1],), args[10], args[11], args[9])
        listener.on_packed(source, args[2], args[3], args[4], *args[18:20])

    return _tell(told, func, args, kwargs)


def _hear_fused_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hear `_native_multi_head_attention`."""
    packed = (args[0], *args[4:7], args[9], args[12])
    return _tell(lambda listener: listener.on_packed(*packed), func, args, kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


_HEARD: Final[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]] = {
    _F.scaled_dot_product_attention: _hear_attention,
    _F.multi_head_attention_forward: _hear_multi_head,
    **dict.fromkeys((_F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax), _hear_softmax),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum), _hear_product
    ),
}
_REBOUND: Final = (
    (_F, "scaled_dot_product_attention", _hear_attention),
    (_F, "multi_head_attention_forward", _hear_multi_head),
    (_F, "softmax", _hear_softmax),
    (torch, "_transformer_encoder_layer_fwd", _hear_fused_layer),
    (torch, "_native_multi_head_attention", _hear_fused_attention),
)


def _rebound(func: Any, hear: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a function that is heard and otherwise does what the one bound until now does."""

    @functools.wraps(func)
    def heard(*args: Any, **kwargs: Any) -> Any:
        return hear(func, args, kwargs)

    return heard


def _rebind(changes: Changes) -> None:
    """Rebind torch's names to functions that are heard."""
    for home, name, hear in _REBOUND:
        func = getattr(home, name)
        heard = _rebound(func, hear)
        changes.note(functools.partial(_put_back, home, name, func, heard))
        setattr(home, name, heard)


def _put_back(home: Any, name: str, original: Any, heard: Any) -> None:
    if getattr(home, name) is heard:  # else another library has rebound it since, on top of this one
        setattr(home, name, original)


_bindings = SharedChange(_rebind)


class Interception:
    """The time from `open` to `close`, in which a listener hears the attention calls of the thread that made it."""

    def __init__(self, listener: AttentionRecorder) -> None:
        self._listener, self._outer = listener, _thread.listener
        self._mode = _Mode()
        self._open = True
        self._thread = threading.get_ident()

    def open(self) -> None:
        """Begin to hear; the caller keeps the interception before that, so that an interrupt leaves nothing open."""
        _thread.listener = self._listener
        _bindings.take(self)
        self.see_imported(True)

    def see_imported(self, wanted: bool) -> None:
        """Hear functions imported by name too, or not: while torch decides for its fused kernels nothing may."""
        if wanted and self._mode not in _modes():
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif not wanted and _modes()[-1:] == [self._mode]:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Put everything back; a second call does nothing."""
        if not self._open:
            return
        _bindings.give_back(self)
        if threading.get_ident() == self._thread:
            self.see_imported(False)
            _thread.listener, _thread.busy, _thread.heads = self._outer, False, None
        self._open = False


def _modes() -> list[TorchFunctionMode]:
    """Return the modes of this thread, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-any-return, no-untyped-call]
