"""What a scenario is, and the list of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

SCENARIOS: dict[str, Scenario] = {}
STEPS = 40


@dataclass(kw_only=True)
class Run:
    """A training run: forward(step) returns the loss of one (micro-)batch; before(step) may change anything."""

    model: nn.Module
    forward: Callable[[int], Tensor]
    optimizer: Any
    zero: bool = True
    steps: int = STEPS
    accumulate: int = 1
    horizon: int | None = None
    before: list[Callable[[int], object]] = field(default_factory=list)
    after: list[Callable[[int], object]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    observe: Callable[[Any], object] | None = None  # is given the manager between the loss and its backward pass
    scaler: Any = None
    scalable: bool = True  # False where the scale of the loss is real, as with clipping at a fixed norm

    @property
    def optimizers(self) -> Sequence[Any]:
        return self.optimizer if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]


@dataclass(frozen=True)
class Expected:
    """The fault: its type, where it lies (a regex; ".*" is the whole model), and other types that are right too."""

    kind: str
    where: str
    others: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        return {self.kind, *self.others}


@dataclass(frozen=True)
class Scenario:
    """A run by name, with what is wrong with it, or None where it is healthy."""

    name: str
    family: str
    build: Callable[[], Run]
    expected: Expected | None

    @property
    def part(self) -> str:
        """Return `tuned` or `held` for the halves that came first, or the name of a part that came later."""
        for later in ("fresh", "blind", "unseen", "foreign", "corner"):
            if self.family.startswith(f"{later}_"):
                return later
        return "held" if hashlib.sha256(self.name.encode()).digest()[0] % 2 else "tuned"

    @property
    def seed(self) -> int:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[1:3])


def add(name: str, build: Callable[[], Run], expected: Expected | None = None) -> None:
    """List a scenario; its family is what stands before the first slash of its name."""
    if name in SCENARIOS:
        raise ValueError(f"scenario {name!r} is listed twice")
    SCENARIOS[name] = Scenario(name, name.split("/")[0], build, expected)
