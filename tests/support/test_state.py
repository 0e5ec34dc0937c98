"""Tests of the state that components keep in a checkpoint."""

from __future__ import annotations

import json
from collections import Counter, deque

from gradtrack.support.state import Stateful


class _Inner(Stateful):
    kept_in_checkpoints = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Outer(Stateful):
    kept_in_checkpoints = ("recent", "names", "since", "best", "inner", "blind")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=2)
        self.names: Counter[str] = Counter()
        self.since: dict[str, int] = {}
        self.best: float | None = None
        self.inner = _Inner()
        self.blind = False
        self.left_out = 0


def test_a_state_survives_json_and_keeps_the_kinds_of_the_attributes() -> None:
    """What a checkpoint gives back are deques, counters and components as before."""
    first = _Outer()
    first.recent.extend([1.0, 2.0, 3.0])
    first.names.update("ab")
    first.since["a"], first.best, first.inner.count, first.blind, first.left_out = 3, 0.5, 7, True, 9
    second = _Outer()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert vars(second).keys() == vars(first).keys()
    assert second.state_dict() == first.state_dict()
    assert (second.recent, second.recent.maxlen, second.left_out) == (deque([2.0, 3.0]), 2, 0)
    assert isinstance(second.names, Counter)
    assert set(first.state_dict()) == {"recent", "names", "since", "best", "inner", "blind"}


def test_what_a_checkpoint_lacks_stays_as_it_is() -> None:
    """A checkpoint of an older version has fewer keys."""
    outer = _Outer()
    outer.best = 2.0
    outer.load_state_dict({"blind": True})
    assert (outer.best, outer.blind) == (2.0, True)


def test_a_state_shares_no_collection_with_its_component() -> None:
    """Steps after a checkpoint do not change it."""
    outer = _Outer()
    state = outer.state_dict()
    outer.recent.append(1.0)
    outer.since["a"] = 1
    assert (state["recent"], state["since"]) == ([], {})
