"""Watching the units of a network while it runs: which of them are dormant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from gradtrack.measure.hooks import ModuleHook
from gradtrack.measure.policy import dormant_share

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
    """The share of dormant units of each activation module, averaged over the forward passes that were watched."""

    def __init__(self, model: nn.Module, threshold: float = 0.025) -> None:
        self._modules = {name: module for name, module in model.named_modules() if isinstance(module, _ACTIVATIONS)}
        self._threshold = threshold
        self._shares: dict[str, list[float]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the forward passes of a `with` block."""
        hooked = [(module, ModuleHook(module, self._hook(name))) for name, module in self._modules.items()]
        handles = [module.register_forward_hook(hook) for module, hook in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of dormant units by module."""
        return {name: sum(values) / len(values) for name, values in self._shares.items()}

    def _hook(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim >= 2:
                self._shares.setdefault(name, []).append(dormant_share(output, self._threshold))

        return look
