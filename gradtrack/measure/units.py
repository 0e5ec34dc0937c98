"""Watching the units of a network while it runs: which of them are dormant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradtrack.measure.hooks import ModuleHook
from gradtrack.measure.layers import layers, own_parameters
from gradtrack.measure.policy import small_share, unit_sizes

_ACTIVATIONS: Final = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
)


class DormantUnits:
    """The share of dormant units of each activation module, judged by the mean size over all passes watched.

    A unit is a channel after a convolution and a feature elsewhere. A module that is called several times in a pass has
    units at each of its calls, and the mean of their shares.
    """

    def __init__(self, model: nn.Module, threshold: float = 0.025) -> None:
        self._model, self._threshold = model, threshold
        self._axis = -1
        self._calls: Counter[str] = Counter()
        self._sizes: dict[tuple[str, int], list[Tensor]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the forward passes of a `with` block."""
        handles = [self._model.register_forward_pre_hook(ModuleHook(self._model, self._begin))]
        for name, module in layers(self._model):
            look = self._sees(name) if isinstance(module, _ACTIVATIONS) else self._passes(module)
            if look is not None:
                handles.append(module.register_forward_hook(ModuleHook(module, look)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of dormant units by module."""
        found: dict[str, list[float]] = {}
        for (name, _), sizes in self._sizes.items():
            found.setdefault(name, []).append(small_share(torch.stack(sizes).mean(0), self._threshold))
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _begin(self, *_: Any) -> None:
        self._calls.clear()
        self._axis = -1

    def _passes(self, module: nn.Module) -> Callable[..., None] | None:
        """Note, where a module mixes units, on which axis it leaves them."""
        weights = [param for param in own_parameters(module) if param.ndim > 1]
        if not weights:
            return None
        kernel: tuple[int, ...] = getattr(module, "kernel_size", ()) if isinstance(module, _ConvNd) else ()

        def passed(*_: Any) -> None:
            self._axis = -1 - len(kernel)

        return passed

    def _sees(self, name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.numel() or output.ndim < -self._axis:
                return
            self._calls[name] += 1
            known = self._sizes.setdefault((name, self._calls[name]), [])
            sizes = unit_sizes(output, self._axis)
            if not known or known[0].shape == sizes.shape:
                known.append(sizes)

        return look
