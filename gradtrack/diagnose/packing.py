"""A sample as plain data, for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

import numpy as np

from gradtrack.diagnose.sample import ParameterSample, Sample
from gradtrack.measure.elements import Change
from gradtrack.measure.node import Node

_UNITS: Final = ("unit_min", "unit_max")


def pack(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data."""
    plain = {one.name: getattr(sample, one.name) for one in fields(sample)}
    changes = sample.changes
    return {
        **plain,
        "nodes": [_pack_node(node) for node in sample.nodes],
        "params": {name: asdict(param) for name, param in sample.params.items()},
        "without_grad": sorted(sample.without_grad),
        "stale": list(sample.stale),
        "changes": None if changes is None else {name: asdict(change) for name, change in changes.items()},
    }


def unpack(state: Mapping[str, Any]) -> Sample:
    """Return the sample that was packed."""
    changes = state["changes"]
    found = {
        "nodes": [_unpack_node(node) for node in state["nodes"]],
        "params": {name: ParameterSample(**param) for name, param in state["params"].items()},
        "without_grad": set(state["without_grad"]),
        "stale": list(state["stale"]),
        "changes": None if changes is None else {name: Change(**change) for name, change in changes.items()},
    }
    return Sample(**{**state, **found})


def _pack_node(node: Node) -> dict[str, Any]:
    node.rank = node.effective_rank
    plain = {one.name: getattr(node, one.name) for one in fields(node)}
    units = {name: None if plain[name] is None else plain[name].tolist() for name in _UNITS}
    return {**plain, **units, "parents": [[index, list(ops)] for index, ops in node.parents]}


def _unpack_node(state: Mapping[str, Any]) -> Node:
    units = {name: None if state[name] is None else np.array(state[name], dtype=np.float64) for name in _UNITS}
    return Node(**{**state, **units, "parents": [(index, tuple(ops)) for index, ops in state["parents"]]})
