"""The picture of attention, read back from its figure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradtrack.analyzers.transformer import picture
from gradtrack.drawing import figures
from tests.analyzers.pictured import drawn, train
from tests.pages.runs import HOSTILE
from tests.pages.test_pictures import PNG, texts


def test_attention_is_a_map_of_layers_and_heads() -> None:
    """Each cell is the entropy of one head; a head that is missing in a layer is a dash."""
    axes = picture.draw_attention_entropy([[0.1, 0.9], [0.5]]).axes[0]
    shown = np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()), np.nan)
    assert np.array_equal(shown, [[0.1, 0.9], [0.5, np.nan]], equal_nan=True)
    assert texts(axes) == ["0.10", "0.90", "0.50", "–"]


def test_layers_of_attention_have_their_names() -> None:
    """With names the rows are called by them."""
    axes = picture.draw_attention_entropy([[0.1], [0.5]], names=["first", "second"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]


def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head of every layer has its entropy."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    reports = train(model, "transformer", lambda: torch.randn(2, 6, 8))
    entropy, options = drawn(reports, "attention_entropy.png", picture, "draw_attention_entropy", monkeypatch)
    assert [len(heads) for heads in entropy] == [2, 2, 2]
    assert all(0.0 < value <= 1.0 for heads in entropy for value in heads)
    assert options["names"] == [f"layers.{index}.self_attn" for index in range(3)]


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    for figure in (
        picture.draw_attention_entropy([]),
        picture.draw_attention_entropy([[math.nan]], names=[HOSTILE]),
    ):
        assert figures.save(figure, tmp_path / "picture.png").read_bytes().startswith(PNG)
