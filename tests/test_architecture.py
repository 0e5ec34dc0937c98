"""The direction of imports, checked on the package and on small packages that break it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

LAYOUT = """
    _version errors records config reports registry manager functional demo cli support.names
    gradients.engine protection.strategy health.rules delivery.run pages.pictures integrations.framework
    step.pair step.data step.measure step.protect step.judge step.analyzers step.history step.rows
    backends.base backends.mlflow backends.first backends.second
    analyzers.base analyzers.tools.hooks analyzers.first analyzers.second
    alerts.base alerts.first
"""

PERMITTED = [
    ("gradtrack", "gradtrack.manager"),
    ("backends.first", "gradtrack.backends.base"),
    ("backends.first", "gradtrack.delivery.run"),
    ("backends.mlflow", "mlflow"),
    ("analyzers.first", "gradtrack.analyzers.base"),
    ("analyzers.first", "gradtrack.health.rules"),
    ("analyzers.first", "torch"),
    ("gradients.engine", "gradtrack.analyzers.base"),
    ("protection.strategy", "gradtrack.gradients.engine"),
    ("health.rules", "gradtrack.analyzers.base"),
    ("delivery.run", "gradtrack.backends.base"),
    ("delivery.run", "gradtrack.alerts.base"),
    ("alerts.first", "gradtrack.alerts.base"),
    ("backends.base", "gradtrack.records"),
    ("analyzers.first", "gradtrack.analyzers.tools.hooks"),
    ("step.pair", "gradtrack.health.rules"),
    ("step.pair", "gradtrack.step.measure"),
    ("step.measure", "gradtrack.step.data"),
    ("manager", "gradtrack.step.pair"),
    ("integrations.framework", "gradtrack.manager"),
    ("cli", "gradtrack.demo"),
]

VIOLATIONS = [
    ("errors", "gradtrack.config"),
    ("errors", "gradtrack.analyzers.base"),
    ("config", "gradtrack.gradients.engine"),
    ("registry", "gradtrack.backends.base"),
    ("backends.base", "gradtrack.gradients.engine"),
    ("gradients.engine", "gradtrack.protection.strategy"),
    ("delivery.run", "gradtrack.backends.first"),
    ("gradients.engine", "gradtrack.analyzers.first"),
    ("protection.strategy", "gradtrack.backends.first"),
    ("health.rules", "gradtrack.analyzers.first"),
    ("delivery.run", "gradtrack"),
    ("backends.first", "gradtrack.backends.second"),
    ("backends.first", "torch"),
    ("backends.first", "gradtrack.analyzers.first"),
    ("analyzers.first", "gradtrack.analyzers.second"),
    ("analyzers.base", "gradtrack.analyzers.first"),
    ("delivery.run", "gradtrack.alerts.first"),
    ("alerts.first", "gradtrack.backends.first"),
    ("alerts", "gradtrack.alerts.first"),
    ("analyzers.first", "gradtrack.manager"),
    ("backends", "gradtrack.backends.first"),
    ("backends.first", "mlflow"),
    ("manager", "gradtrack.integrations.framework"),
    ("health.rules", "gradtrack.step.pair"),
    ("delivery.run", "gradtrack.pages.pictures"),
    ("support.names", "gradtrack.config"),
    ("step.judge", "gradtrack.step.measure"),
    ("step.history", "gradtrack.step.rows"),
]


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of this repository on the package gradtrack in a directory."""
    options = ["--no-cache", "--no-logo", "--config", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-c", LINT, *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def file_of(module: str, root: Path) -> Path:
    """Return the file of a module of the small package; packages are the names with children."""
    path = root / "gradtrack" / module.replace(".", "/").removeprefix("gradtrack")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Lay out a package with every layer and no imports."""
    for module in LAYOUT.split():
        path = tmp_path / "gradtrack" / module.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.with_suffix(".py").touch()
    (tmp_path / "gradtrack" / "__init__.py").write_text("from gradtrack.manager import GradientManager\n")
    return tmp_path


def test_package_keeps_its_layers() -> None:
    """The imports of gradtrack go down only and no plugin knows another."""
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_permitted_imports_pass(small: Path) -> None:
    """Imports that go down pass, all of them at once."""
    for module, target in PERMITTED:
        with file_of(module, small).open("a") as file:
            file.write(f"import {target}\n")
    result = lint(small)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("module", "target"), VIOLATIONS)
def test_forbidden_imports_are_named(small: Path, module: str, target: str) -> None:
    """An import that goes up or sideways fails, even inside a function, and is named."""
    file_of(module, small).write_text(f"def late() -> None:\n    import {target}\n")
    result = lint(small)
    assert result.returncode == 1, result.stderr
    assert f"gradtrack.{module} -> {target} (" in result.stdout


def test_module_without_a_layer_is_named(small: Path) -> None:
    """A new module at the top of the package must be given a layer."""
    (small / "gradtrack" / "stray.py").touch()
    result = lint(small)
    assert result.returncode == 1
    assert "- gradtrack.stray" in result.stdout
