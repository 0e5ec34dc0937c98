"""The command line, in process and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradtrack import __version__, cli, registry


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process."""
    command = [sys.executable, "-m", "gradtrack.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_version_is_the_package_version() -> None:
    """The version is that of the package, and asking for it succeeds."""
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, f"gradtrack {__version__}")


def test_script_is_the_main_function() -> None:
    """The console script runs `main`."""
    (script,) = [point for point in metadata.entry_points(group="console_scripts") if point.name == "gradtrack"]
    assert script.load() is cli.main


def test_help_names_every_command_with_a_sentence() -> None:
    """The help lists each command together with what it does."""
    result = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"})
    for command in cli.app.registered_commands:
        assert command.callback is not None
        assert str(command.callback.__name__) in result.output
        assert (command.callback.__doc__ or "").split(".")[0].split(",")[0] in result.output


@pytest.mark.parametrize("kind", ["backends", "analyzers"])
def test_plugins_are_listed_with_a_sentence(kind: str) -> None:
    """Every plugin of the registry is listed with a sentence about it, as a table and as data."""
    names = getattr(registry, kind).names()
    listed = json.loads(CliRunner().invoke(cli.app, [kind, "--json"]).output)
    assert sorted(plugin["name"] for plugin in listed) == names
    assert all(plugin["about"].endswith(".") for plugin in listed if plugin["source"] == "gradtrack")
    table = CliRunner().invoke(cli.app, [kind], env={"COLUMNS": "200"}).output
    assert all(name in table for name in names)


def test_demo_trains_and_shows_what_it_found(tmp_path: Path) -> None:
    """The demo skips its bad batch, learns, and names files that exist, each with how to open it."""
    result = run("demo", "--out", str(tmp_path), "--steps", "60")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Trained for 60 steps" in result.stdout
    assert "Step 40 was skipped" in result.stdout
    assert "NUMERICAL" in result.stdout
    for name in ("training_curves.png", "gradient_statistics.png", "training_log.json"):
        assert (tmp_path / name).is_file()
        assert name in result.stdout


def test_demo_prints_data_for_scripts(tmp_path: Path) -> None:
    """With --json the findings are one JSON document."""
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--steps", "30", "--json"])
    found = json.loads(result.output)
    assert found["skipped_steps"] == [20]
    assert found["last_loss"] < found["first_loss"]
    assert all(Path(path).exists() for path in found["files"])


def test_errors_are_one_line_and_a_code(tmp_path: Path) -> None:
    """An error of gradtrack is one line on stderr without a traceback, and the code is 2."""
    (tmp_path / "file").touch()
    result = run("demo", "--out", str(tmp_path / "file" / "run"))
    assert result.returncode == 2
    assert result.stderr.startswith("gradtrack: run_dir ")
    assert len(result.stderr.splitlines()) == 1


def test_wrong_usage_has_code_2() -> None:
    """A command that does not exist is wrong usage."""
    assert CliRunner().invoke(cli.app, ["dmeo"]).exit_code == 2


def test_start_loads_nothing_heavy() -> None:
    """Help and plugin lists load neither torch nor a tracker."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom gradtrack import cli\n"
        "for arguments in (['--help'], ['backends'], ['analyzers']):\n"
        "    assert CliRunner().invoke(cli.app, arguments).exit_code == 0\n"
        "print([name for name in ('torch', 'numpy', 'mlflow', 'wandb') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
