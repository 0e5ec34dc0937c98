"""The Hugging Face Trainer under DDP: gradients are seen after they were reduced and before the Trainer clips them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import torchrun

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def train(directory: Path, **arguments: Any) -> list[dict[str, Any]]:
    """Train in two processes and return what each of them has found."""
    out = directory / "found.json"
    result = torchrun(2, "-m", "tests.distributed.trainer", str(out), json.dumps(arguments))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("limit", [0.1, 100.0])
def test_the_norm_is_the_trainers_own(limit: float, accumulation: int, tmp_path: Path) -> None:
    """Both ranks report the norm that the Trainer logs, at every step, though it clips."""
    found = train(tmp_path, max_grad_norm=limit, gradient_accumulation_steps=accumulation)
    theirs = found[0]["theirs"]
    assert list(theirs) == ["1", "2", "3", "4", "5", "6"]
    for rank in found:
        assert rank["wrapped"] == "DistributedDataParallel"
        assert rank["ours"] == pytest.approx(theirs, rel=1e-5)
        assert rank["weights"] == found[0]["weights"]
        assert not any(name.startswith("module") for name in rank["names"])


def test_gradtrack_clips_alike_on_both_ranks(tmp_path: Path) -> None:
    """With max_grad_norm=0 gradtrack clips the reduced gradients, whose norm from before that the Trainer logs."""
    found = train(tmp_path, max_grad_norm=0, settings={"max_grad_norm": 0.2})
    assert found[0]["ours"] == found[1]["ours"]
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["theirs"] == pytest.approx(found[0]["ours"], rel=1e-5)
    assert max(found[0]["theirs"].values()) > 0.2
