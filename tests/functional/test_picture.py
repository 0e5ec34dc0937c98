"""The bar picture: what it holds, how it is ordered and written."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.functional import compute_gradient_norm, detect_gradient_issues, visualize_layer_gradients


@given(st.dictionaries(st.text("ab_1", min_size=1), st.floats(0.0, 1e9), min_size=1))
def test_bars_are_ordered_as_the_norms_are(norms: dict[str, float]) -> None:
    """Output first, a larger norm never has a shorter bar, and the largest one fills its bar."""
    profile = visualize_layer_gradients(norms)
    assert [layer.name for layer in profile] == list(norms)[::-1]
    by_norm = sorted(profile, key=lambda layer: layer.norm)
    assert [layer.bar_cells for layer in by_norm] == sorted(layer.bar_cells for layer in profile)
    assert by_norm[-1].bar_cells == (12 if by_norm[-1].norm > 0.0 else 0)
    assert profile.verdict == detect_gradient_issues(norms)


@given(st.dictionaries(st.text(st.characters(categories=["L", "N"]), min_size=1), st.floats(), min_size=1))
def test_all_bars_stand_in_line(norms: dict[str, float]) -> None:
    """Names of any length and any norm, finite or not, leave the bars aligned."""
    *lines, verdict = str(visualize_layer_gradients(norms)).split("\n")
    starts = {line.index("|") for line in lines}
    assert len(starts) == 1
    assert len({line.rindex("|") - line.index("|") for line in lines}) == 1
    assert len(verdict) - len(verdict.lstrip()) == starts.pop()


def test_layers_hold_the_norm_of_all_that_they_contain() -> None:
    """A layer may be a dict of arrays and tensors; one without a gradient is left out."""
    inner = {"weight": np.full((2, 2), 2.0), "bias": torch.tensor([3.0, math.sqrt(0.0)])}
    profile = visualize_layer_gradients({"stem": inner, "frozen": None, "head": [1.0]})
    assert [(layer.label, layer.norm) for layer in profile] == [
        ("head (output):", 1.0),
        ("stem (input):", compute_gradient_norm(inner)),
    ]
    assert len(profile) == 2


def test_an_explosion_on_the_way_back() -> None:
    """Norms that grow towards the input are called exploding, in numbers of any size."""
    picture = str(visualize_layer_gradients([1e9, 12345.678, 0.5, 2e-8]))
    assert picture.split("\n") == [
        "Layer 3 (output):   |            | norm: 2.00e-08",
        "Layer 2:            |            | norm: 0.50",
        "Layer 1:            |            | norm: 12345.68",
        "Layer 0 (input):    |████████████| norm: 1.00e+09",
        "                    Exploding gradients!",
    ]


def test_non_finite_and_zero_norms_are_drawn() -> None:
    """Infinity fills its bar, NaN and zero have none, and the others keep theirs."""
    lines = str(visualize_layer_gradients({"a": math.inf, "b": math.nan, "c": 0.0, "d": 4.0})).split("\n")
    assert [line.split("|", 1)[1] for line in lines[:4]] == [
        "████████████| norm: 4.00",
        "            | norm: 0.00",
        "            | norm: nan",
        "████████████| norm: inf",
    ]


def test_a_single_layer_is_neither_input_nor_output() -> None:
    """One layer has no flow to show."""
    assert str(visualize_layer_gradients({"only": 1.0})).startswith("only:   |████████████|")


def test_no_layers_say_so() -> None:
    """An empty profile is stable and has a sentence instead of a picture."""
    profile = visualize_layer_gradients({})
    assert (str(profile), len(profile), profile.verdict.status) == ("No gradients to show.", 0, "stable")


def test_html_is_escaped() -> None:
    """A name cannot bring markup into a notebook."""
    markup = visualize_layer_gradients({"<script>": 1.0})._repr_html_()
    assert "&lt;script&gt;" in markup
    assert "<script>" not in markup
