"""Importing gradtrack costs next to nothing."""

import subprocess
import sys

import gradtrack

HEAVY = (
    "wandb",
    "mlflow",
    "tensorboard",
    "numba",
    "matplotlib",
    "pandas",
    "lightning",
    "transformers",
    "rich",
    "jinja2",
)


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running code."""
    show = f"{code}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True).stdout.split())


def test_import_loads_nothing() -> None:
    """Neither torch nor pydantic nor any tracker is loaded by the import alone."""
    assert not modules_after("import gradtrack") & {*HEAVY, "torch", "pydantic", "numpy"}


def test_a_training_loads_no_tracker() -> None:
    """A manager with the memory backend loads no tracker and nothing for pictures."""
    code = (
        "import torch, gradtrack\n"
        "model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with gradtrack.GradientManager(backends=['memory'], engine='torch') as manager:\n"
        "    gradtrack.safe_backward(model(torch.ones(1, 2)).sum(), model, optimizer, manager)\n"
    )
    assert not modules_after(code) & set(HEAVY)


def test_every_public_name_loads() -> None:
    """Each name of `__all__` is there, and no other name is."""
    assert all(getattr(gradtrack, name) is not None for name in gradtrack.__all__)
    assert set(gradtrack.__all__) <= set(dir(gradtrack))
    assert not hasattr(gradtrack, "GradientManger")
