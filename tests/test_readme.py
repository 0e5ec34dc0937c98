"""The README: what it shows runs, and what it points to is there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradtrack import GradientConfig

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str) -> None:
    """Every block runs once its placeholders, a model with data and a configuration file, are there."""
    Path("gradtrack.yaml").write_text("backends: [memory]\n")
    model = nn.Linear(4, 1)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.functional.mse_loss,
        "loader": [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)],
    }
    exec(compile(code, "README.md", "exec"), names)
    if "manager" in names:
        names["manager"].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_valid(text: str) -> None:
    """Every configuration that is shown can be loaded."""
    path = Path("shown.yaml")
    path.write_text(text)
    assert GradientConfig.load(path).max_grad_norm == 1.0


def test_links_lead_somewhere() -> None:
    """Pictures and pages of the repository that are linked exist."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link.split("#")[0]).exists()] == []
