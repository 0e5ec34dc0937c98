"""Agreement of ranks before a collective: settings and parameters must match, or a rank would wait for ever."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from gradtrack.errors import UsageError
from gradtrack.support.names import digest_of

PATIENCE_SECONDS = 600.0
"""How long a rank waits for the others: as long as NCCL does, since one of them may have much to compile."""
_SHOWN: Final = 4
_meetings: dict[tuple[int, ...], int] = {}


def agree(ranks: tuple[int, ...], facts: Mapping[str, Any], offers: Collection[str] = ()) -> dict[str, int]:
    """Check that these ranks all have the same facts; return how many of them make each offer.

    The facts are exchanged through the store in which torch keeps what its groups are made from, so that no collective
    is needed, whose sizes could differ as well. Every rank ends with an error where any two differ, or one is missing.
    """
    store = _store()
    if store is None:
        return dict.fromkeys(offers, len(ranks))
    _meetings[ranks] = _meetings.get(ranks, 0) + 1
    place, known = f"gradtrack/{digest(ranks)}/{_meetings[ranks]}", json.dumps(facts, sort_keys=True)
    same = f"{place}/facts/{digest(known)}"
    for counter in (same, *(f"{place}/offers/{offer}" for offer in offers)):
        store.add(counter, 1)
    store.set(_key(place, torch.distributed.get_rank()), known)
    _wait(store, place, ranks)
    if store.add(same, 0) != len(ranks):
        raise UsageError(_difference(store, place, ranks, facts))
    return {offer: store.add(f"{place}/offers/{offer}", 0) for offer in offers}


def tell_ranks(name: str, text: str) -> None:
    """Tell the other ranks something under a name, without waiting for any."""
    if (store := _store()) is not None:
        store.set(f"gradtrack/told/{name}", text)


def told_by_rank(name: str, patience_seconds: float) -> str | None:
    """Return what a rank tells under a name, None where it has not come after some seconds."""
    key, store = f"gradtrack/told/{name}", _store()
    if store is None:
        return None
    try:
        store.wait([key], timedelta(seconds=patience_seconds))
        return str(store.get(key).decode())
    except RuntimeError:  # as which not every store raises its own error
        return None


def digest(value: object) -> str:
    """Return a short text that differs where the values do."""
    return digest_of(repr(value))


def _store() -> Any:
    """Return the store of the default group, None where it has none that ranks share."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not there or torch.distributed.get_backend() == "fake":
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def _key(place: str, rank: int) -> str:
    return f"{place}/rank/{rank}"


def _wait(store: Any, place: str, ranks: Sequence[int]) -> None:
    patience = min(PATIENCE_SECONDS, store.timeout.total_seconds())  # no longer than the groups themselves wait
    try:
        store.wait([_key(place, rank) for rank in ranks], timedelta(seconds=patience))
    except RuntimeError as fault:  # as which not every store raises its own error
        late = [rank for rank in ranks if not store.check([_key(place, rank)])]
        if not late:
            raise
        named = ", ".join(map(str, late[:_SHOWN])) + (", ..." if len(late) > _SHOWN else "")
        raise UsageError(
            f"rank {named} did not show its gradients within {patience:.0f} seconds: expected all of the "
            f"{len(ranks)} ranks that share the parameters. Call gradtrack in the same way on every rank."
        ) from fault


def _difference(store: Any, place: str, ranks: Sequence[int], facts: Mapping[str, Any]) -> str:
    """Return the first rank whose facts differ, and how they do."""
    mine = json.loads(json.dumps(facts))
    for rank in ranks:
        other = json.loads(store.get(_key(place, rank)))
        unlike = [name for name in mine if mine[name] != other.get(name)]
        if unlike:
            here = torch.distributed.get_rank()
            told = ", ".join(f"{name} {mine[name]!r} here and {other.get(name)!r} there" for name in unlike)
            return (
                f"rank {here} and rank {rank} differ ({told}): expected the same on all ranks that share the "
                "parameters. Make the manager and load its state in the same way on every rank."
            )
    return "ranks differ: expected the same on all that share the parameters."
