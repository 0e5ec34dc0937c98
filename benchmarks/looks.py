"""What an analyzer's look costs on an accelerator that is not there: its operations, and how often it waits.

Tensors lie on the CPU. To the analyzers all of them are on a device, but those that were made on the host or copied to
it; a mixture of both raises, as do numpy's views of what is on the device. The processor waits for the device where it
reads a value or copies to the host, where it copies to the device without `non_blocking`, and in what torch documents
to synchronise: most decompositions, and indices by a mask.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.analyzers import gpt, lstm
from benchmarks.timing import Row
from gradtrack import GradientManager, registry
from gradtrack.reports import Report

MOST_WAITS: Final = 3
EVERY: Final = 4
_DEVICE: Final = torch.device("cuda", 0)
_HOST: Final = torch.device("cpu")
_VALUES: Final = frozenset(
    ("item", "tolist", "cpu", "nonzero", "argwhere", "masked_select", "equal", "allclose", "unique", "bincount")
)
_MAGIC: Final = frozenset(f"__{name}__" for name in ("bool", "float", "int", "index", "complex", "contains", "repr"))
_ARRAYS: Final = ("numpy", "__array__")
_DECOMPOSED: Final = frozenset(
    f"linalg_{name}"
    for name in ("cholesky", "cond", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "pinv", "solve", "svd")
) | {"linalg_svdvals", "linalg_matrix_rank", "linalg_lu_factor", "linalg_slogdet"}
_INDICES: Final = ("__getitem__", "__setitem__", "index_put_", "index_put", "index")
_BETWEEN: Final = ("to", "copy_", "type_as", "backward", "grad", "set_", "__set__")
_FREE: Final = frozenset(
    ("view", "select", "detach", "split", "split_with_sizes", "narrow", "slice", "alias", "unbind", "t", "expand")
) | {"_unsafe_view", "transpose", "unsqueeze", "squeeze", "permute", "diagonal", "as_strided", "view_as_real"}
"""What starts no kernel."""


class Look(NamedTuple):
    """What one look of an analyzer costs: operations on the device, and the places where the processor waits."""

    operations: int
    places: Counter[str]

    @property
    def waits(self) -> int:
        """Return how often the processor waits."""
        return self.places.total()


class Accelerator(TorchFunctionMode):
    """Shows tensors to the analyzers as if they were on a device, and counts what they do with it."""

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, Tensor] = {}
        self.places: Counter[str] = Counter()
        self.operations = _Operations(self)
        self.counts_operations = False

    def put_on_device(self, tensors: Any) -> None:
        """Move tensors to the device, which were made on the host."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._host.pop(_storage(tensor), None)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the processor has a tensor."""
        return _storage(tensor) in self._host

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count inside of a block, also in the hooks of its backward passes."""
        run, array = torch.autograd._engine_run_backward, torch.from_numpy  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        def from_numpy(values: Any) -> Tensor:
            found = array(values)
            self._host[_storage(found)] = found
            return found

        with (
            patch.object(torch, "from_numpy", from_numpy),
            patch.object(
                torch.random, "fork_rng", lambda devices=(): nullcontext()
            ),  # the generators of a device keep their state here
            patch.object(torch.autograd, "_engine_run_backward", run_backward),
            patch.object(torch._C, "DisableTorchFunction", self._alone),
            self.operations if self.counts_operations else nullcontext(),
            self,
        ):
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Disable the modes of an analyzer, but not this one."""
        with ExitStack() as stack:
            while _get_current_function_mode() not in (self, None):  # type: ignore[no-untyped-call]
                stack.enter_context(_pop_mode_temporarily())
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        frame = _analyzer()
        if name == "__get__":
            return self._attribute(func, args, frame)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in inputs if self.is_on_host(tensor)]
        target = _target(name, args, kwargs)
        if frame is not None:
            args, kwargs = tree_map(_real, (args, kwargs))
            self._check(name, args, kwargs, len(host), len(inputs))
        if isinstance(target, Tensor):
            target = _HOST if self.is_on_host(target) else _DEVICE
        elif target is None:
            target = _HOST if len(host) == len(inputs) else _DEVICE
        moved = (args[0] if name != "copy_" else args[1]) if name in ("to", "cpu", "copy_", "type_as") else None
        crosses = isinstance(moved, Tensor) and self.is_on_host(moved) != (target.type == "cpu")
        if frame is not None and self._waits(name, args, kwargs, inputs, host, target, crosses):
            self.places[f"{_place(frame)} {name}"] += 1
        result = func(*args, **kwargs)
        if (
            moved is not None
            and crosses
            and name != "copy_"
            and result.untyped_storage()._cdata == moved.untyped_storage()._cdata
        ):
            result = result.clone()
        if target.type == "cpu" and name not in _MAGIC:
            self._host |= {_storage(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _attribute(self, func: Any, args: Any, frame: FrameType | None) -> Any:
        name = func.__self__.__name__
        if frame is None or name not in ("device", "is_cpu", "is_cuda") or self.is_on_host(args[0]):
            return func(*args)
        return {"device": _DEVICE, "is_cpu": False, "is_cuda": True}[name]

    def _check(self, name: str, args: Any, kwargs: Any, num_host: int, num_all: int) -> None:
        if name in _ARRAYS and num_host < num_all:
            raise TypeError(f"{name} of a tensor on the device")
        if not 0 < num_host < num_all or name in (*_INDICES, *_BETWEEN):
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.is_on_host(leaf) and leaf.dim() for leaf in leaves):
            raise RuntimeError(f"{name} of tensors on the device and on the host")

    def _waits(
        self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], host: list[Tensor], target: Any, crosses: bool
    ) -> bool:
        if crosses:
            return not kwargs.get("non_blocking", False) or target.type == "cpu"
        if len(host) == len(inputs):
            return target.type != "cpu" and name in ("tensor", "as_tensor", "from_numpy")
        if name in _INDICES:
            indices = [leaf for leaf in tree_leaves(args[1]) if not isinstance(leaf, (slice, type(None), type(...)))]
            masks = [leaf for leaf in indices if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
            given = [leaf for leaf in indices if isinstance(leaf, Tensor) and leaf.dim() and self.is_on_host(leaf)]
            return bool(masks or given) or _has_list(args[1])
        if name == "where" and len(args) == 1:
            return True
        return name in _VALUES or name in _MAGIC or name in _DECOMPOSED


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that analyzers start on the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator, self.number = accelerator, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _FREE and not name.startswith("empty") and _analyzer(anywhere=True) is not None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.number += any(not self._accelerator.is_on_host(tensor) for tensor in tensors)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _analyzer(*, anywhere: bool = False) -> FrameType | None:
    """Return the innermost frame of this package where it is one of an analyzer, or any such frame."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if "/gradtrack/analyzers/" in name:
            return frame
        if "/gradtrack/gradients/distributed/" not in name and "/gradtrack/" in name and not anywhere:
            return None
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/analyzers/')[2]}:{frame.f_lineno}"


def _real(leaf: Any) -> Any:
    return _HOST if isinstance(leaf, torch.device) and leaf.type == _DEVICE.type else leaf


def _target(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return where the result of a call is to be, as a device or as a tensor that is there; None where nothing says."""
    if name in ("cpu", "tolist", "item", *_ARRAYS):
        return _HOST
    if name in ("copy_", "__setitem__"):
        return args[0]
    if name in ("to", "type_as"):
        named = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, (str, torch.device, Tensor))]
        return (torch.device(named[0]) if isinstance(named[0], str) else named[0]) if named else args[0]
    device = kwargs.get("device")
    return device if device is None else torch.device(device)


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def small_gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a GPT of four blocks."""
    return gpt(batch=4, vocabulary=256, width=64, depth=4, length=32)


def small_lstm() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return an LSTM of two layers."""
    return lstm(inputs=16, hidden=32, layers=2, batch=8, length=16)


Build = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
CASES: Final[dict[str, Build]] = {"GPT": small_gpt, "LSTM": small_lstm}


def train(
    analyzer: str, build: Build, steps: int, accelerator: Accelerator | None = None, **options: Any
) -> Iterator[Report | None]:
    """Train a model, on an accelerator or on the CPU, and yield what an analyzer reports after each step."""
    torch.manual_seed(0)
    model, loss_of = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chosen = {"name": analyzer, "every": EVERY, **options}
    with GradientManager(backends=[], analyzers=[chosen], engine="torch", save_gradient_plots=False) as manager:
        for _ in range(steps):
            with nullcontext() if accelerator is None else accelerator.running():
                optimizer.zero_grad()
                loss = loss_of()
                report = manager.step(model, optimizer, loss)
                optimizer.step()
                if accelerator is not None:
                    accelerator.put_on_device((loss, dict(optimizer.state)))
            found = (report.analyzers or {}).get(analyzer)
            yield found if isinstance(found, Report) else None


def look(analyzer: str, build: Build, **options: Any) -> Look | None:
    """Return what the second look of an analyzer costs, with the steps around it; None where it finds nothing there."""
    accelerator, found = Accelerator(), None
    last = 3 * EVERY - 2
    for step, report in enumerate(train(analyzer, build, last, accelerator, **options), start=1):
        found = found or report
        if step == last - EVERY:  # in the middle between two looks
            accelerator.places.clear()
            accelerator.counts_operations, found = True, None
    return None if found is None else Look(accelerator.operations.number, accelerator.places)


def run() -> Iterator[Row]:
    """Count the operations and the waits of a look of each analyzer."""
    for name in sorted(registry.analyzers.builtin()):
        for case, build in CASES.items():
            found = look(name, build)
            if found is not None:
                yield Row(
                    benchmark="A look on an accelerator: counted",
                    case=f"{name}, {case}",
                    what="waits for the device in a look",
                    ratio=found.waits,
                    bar=MOST_WAITS,
                    unit="",
                    note=f"{found.operations} operations",
                )
