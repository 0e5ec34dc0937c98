"""The state of a component in a checkpoint: its attributes as plain data, each under a public name."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, ClassVar


class Stateful:
    """A component whose state for a checkpoint is made of some of its attributes.

    The key of an attribute is its name without a leading underscore. Attributes are numbers, texts, lists, deques,
    mappings, and components with a state of their own. A checkpoint of an older version may lack some of them; those
    stay as they are.
    """

    kept_in_checkpoints: ClassVar[tuple[str, ...]]
    """The attributes that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data."""
        return {name.lstrip("_"): _plain(getattr(self, name)) for name in self.kept_in_checkpoints}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in self.kept_in_checkpoints:
            key, present = name.lstrip("_"), getattr(self, name)
            if key not in state:
                continue
            if hasattr(present, "load_state_dict"):
                present.load_state_dict(state[key])
            else:
                setattr(self, name, _restored(present, state[key]))


def _plain(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (deque, list)) else value


def _restored(present: Any, saved: Any) -> Any:
    """Return a saved value as the kind of collection or number that the attribute holds now."""
    match present:
        case deque():
            return deque(saved, maxlen=present.maxlen)
        case Counter() | dict() | list() | bool() | int() | float() if saved is not None:
            return type(present)(saved)
        case _:
            return saved
