"""The command line, in process and as a process of its own."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradtrack import __version__, cli, read_run, registry
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import UsageError
from gradtrack.records import Record, RunInfo
from gradtrack.reports import IssueSeverity, TrainingSummary
from tests.pages.runs import issue, row, write_run
from tests.processes import ROOT, python

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line within this process; return what it wrote and how it ended."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["gradtrack", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def test_version_is_the_package_version() -> None:
    """The version is that of the package, and asking for it succeeds."""
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, f"gradtrack {__version__}")


def test_script_is_the_main_function() -> None:
    """The console script runs `main`."""
    (script,) = [point for point in metadata.entry_points(group="console_scripts") if point.name == "gradtrack"]
    assert script.load() is cli.main


def test_the_package_runs_as_a_module() -> None:
    """`python -m gradtrack` is the same command line, for where the script is not on the path."""
    command = [sys.executable, "-m", "gradtrack", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert shown.strip() == f"gradtrack {__version__}"


def test_help_names_every_command_with_a_sentence() -> None:
    """The help lists each command together with what it does."""
    result = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"})
    for name, command in COMMANDS.items():
        assert name in result.output
        assert (command.help or "").split(".")[0].split(",")[0] in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help_can_be_typed(command: str) -> None:
    """Every command's help has examples of it, each of which the command line takes."""
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output
    examples = [line.strip() for line in shown.splitlines() if line.strip().startswith(f"gradtrack {command}")]
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example.partition("&&")[0])
        assert COMMANDS[words[1]].make_context(words[1], words[2:])


def test_the_help_tells_what_the_codes_mean() -> None:
    """Every command that can end with 1 says when."""
    for command in ("show", "diff", "replay", "doctor"):
        shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert "Exit codes: 0 done; 1 " in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str, tmp_path: Path) -> None:
    """The script of a shell names the program, and the program answers it."""
    program = "import sys; sys.argv[0] = 'gradtrack'; from gradtrack.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}

    def output(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment | more).stdout

    assert "_GRADTRACK_COMPLETE" in output("--show-completion", shell)
    answers = {
        "bash": {"COMP_WORDS": "gradtrack re", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "gradtrack re"},
        "fish": {"_TYPER_COMPLETE_ARGS": "gradtrack re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    found = output(_GRADTRACK_COMPLETE=f"complete_{shell}", **answers[shell])
    assert "report" in found
    assert "replay" in found
    assert "show" not in found
    if shell == "bash":
        words = {"COMP_WORDS": "gradtrack replay --to ml", "COMP_CWORD": "3"}
        assert output(_GRADTRACK_COMPLETE="complete_bash", **words).split() == ["mlflow"]
    output("--install-completion", shell)
    assert any("gradtrack" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


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
    result = python("-m", "gradtrack", "demo", "--out", str(tmp_path), "--steps", "60")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Trained for 60 steps" in result.stdout
    assert "Step 40 was skipped" in result.stdout
    assert "NUMERICAL" in result.stdout
    for name in ("report.html", "training_curves.png", "gradient_statistics.png", "training_log.json"):
        assert (tmp_path / name).is_file()
        assert name in result.stdout


def test_demo_prints_data_for_scripts(tmp_path: Path) -> None:
    """With --json the findings are one JSON document."""
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--steps", "30", "--json"])
    found = json.loads(result.output)
    assert found["skipped_steps"] == [20]
    assert found["last_loss"] < found["first_loss"]
    assert all(Path(path).exists() for path in found["files"])


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """Return the directory of a run that ended with an issue."""
    return write_run(tmp_path / "sick", row(1), row(2, norm=4.0, issues=[issue("encoder")]))


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Return a directory that two trainings were given, one after the other, and a third at another place."""
    write_run(tmp_path / "twice", row(1), run_id="first", created=1.0)
    write_run(tmp_path / "twice" / "second", row(1), row(2, norm=4.0), run_id="second", created=2.0)
    write_run(tmp_path / "twice" / "other", row(1), run_id="elsewhere", created=3.0)
    return tmp_path / "twice"


@pytest.mark.parametrize(
    ("at", "steps"), [("", 2), ("@2", 2), ("@second", 2), ("/second", 2), ("@1", 1), ("@first", 1)]
)
def test_every_run_of_a_directory_can_be_shown(twice: Path, at: str, steps: int) -> None:
    """A run is named by its directory, its number or its identity; without a name the others are listed."""
    result = CliRunner().invoke(cli.app, ["show", f"{twice}{at}", "--json"])
    assert json.loads(result.stdout)["steps"] == steps
    assert (
        ("holds 2 runs" in result.stderr) == (f"{twice}@1" in result.stderr) == ("first" in result.stderr) == (not at)
    )
    report = CliRunner().invoke(cli.app, ["report", f"{twice}{at}"]).stdout.strip()
    assert Path(report).parent == (twice / "second" if steps == 2 else twice)
    table = json.loads(CliRunner().invoke(cli.app, ["export", f"{twice}{at}", "--json"]).stdout)
    assert (table["rows"], Path(table["file"]).parent) == (steps, Path(report).parent)
    told = json.loads(CliRunner().invoke(cli.app, ["diff", f"{twice}@1", f"{twice}{at}", "--json"]).stdout)
    assert told["numbers"]["steps"] == [1, steps]
    assert len(read_run(f"{twice}{at}").steps["step"]) == steps


def test_a_run_is_found_by_its_identity_alone(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity leads to a run of this directory, and one that no run has is an error."""
    monkeypatch.chdir(twice)
    assert json.loads(CliRunner().invoke(cli.app, ["show", "second", "--json"]).stdout)["steps"] == 2
    assert json.loads(CliRunner().invoke(cli.app, ["show", "first", "--json"]).stdout)["steps"] == 1
    for wrong in ("third", ".@3", ".@0", ".@elsewhere"):
        assert CliRunner().invoke(cli.app, ["show", wrong]).exit_code == 1


def test_any_number_of_runs_is_compared(twice: Path, sick: Path, tmp_path: Path) -> None:
    """`show` and `diff` take as many runs as are given, and `diff` one directory with several."""

    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, [*map(str, arguments)], env={"COLUMNS": "120"})
        return result.exit_code, result.stdout

    ids = ["first", "second", "a-run"]
    runs = f"{twice}@1", f"{twice}@2", sick
    code, text = invoke("diff", *runs, "--json", "--html", tmp_path / "page.html", "--check")
    assert (code, json.loads(text)["runs"]) == (1, ids)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    code, text = invoke("show", *runs, "--json")
    assert (code, [run["run_id"] for run in json.loads(text)]) == (0, ids)
    assert all(name in invoke("show", *runs)[1] for name in ids)
    assert json.loads(invoke("diff", twice, "--json")[1])["runs"] == ids[:2]
    assert invoke("show", ended(tmp_path / "sick"), sick, "--check")[0] == 1
    assert invoke("show", *runs, "--check")[0] == 3
    for wrong in (["diff", sick], ["show", *runs, "--follow"]):
        assert invoke(*wrong)[0] == 1


def ended(directory: Path, *, failed: bool = False) -> Path:
    """Leave in a run's directory what a manager leaves there at its close."""
    RunEnd(run_id="a-run", summary=TrainingSummary(), failed=failed).save(directory / RUN_END)
    return directory


@pytest.fixture
def well(tmp_path: Path) -> Path:
    """Return the directory of a healthy run."""
    return ended(write_run(tmp_path / "well", row(1), row(2)))


def test_show_tells_about_a_run(sick: Path) -> None:
    """The run is shown as text, and as data for scripts."""
    result = CliRunner().invoke(cli.app, ["show", str(sick)])
    assert (result.exit_code, "EXPLODING at encoder" in result.output) == (0, True)
    found = json.loads(CliRunner().invoke(cli.app, ["show", str(sick), "--json"]).output)
    assert (found["run_id"], found["steps"], found["healthy"]) == ("a-run", 2, False)


def test_a_command_to_copy_stays_on_one_line(well: Path) -> None:
    """However narrow the terminal is, what opens a file is not broken into two lines."""
    (well / "tensorboard").mkdir()
    (well / "tensorboard" / "events.out.tfevents.1").touch()
    shown = CliRunner().invoke(cli.app, ["show", str(well)], env={"COLUMNS": "40"}).output
    assert "tensorboard --logdir well/tensorboard\n" in shown


def test_show_follows_a_run_to_its_end(well: Path) -> None:
    """Following a run that has ended tells its rows and leaves."""
    result = CliRunner().invoke(cli.app, ["show", str(well), "--follow"])
    assert [line.split("  ")[0] for line in result.output.splitlines()] == ["step 1", "step 2"]


def test_health_is_an_exit_code_for_who_asks(sick: Path, well: Path) -> None:
    """With --check an unhealthy run is the exit code 1, and stderr names its issue."""
    found = CliRunner().invoke(cli.app, ["show", str(ended(sick)), "--check"])
    assert (found.exit_code, found.stderr) == (1, "gradtrack: It has an open issue: EXPLODING:encoder.\n")
    found = CliRunner().invoke(cli.app, ["show", str(well), "--check"])
    assert (found.exit_code, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("well", [0, 0, 0, 0]),
        ("low", [0, 0, 0, 1]),
        ("closed", [0, 0, 0, 1]),
        ("open", [0, 0, 1, 1]),
        ("critical and closed", [0, 1, 1, 1]),
        ("failed", [3, 3, 3, 3]),
        ("killed", [3, 3, 3, 3]),
        ("running", [0, 0, 0, 0]),
    ],
)
def test_what_the_check_refuses_is_chosen(case: str, codes: list[int], tmp_path: Path) -> None:
    """Each value of --fail-on refuses what its help says, and what those before it refuse."""
    severity = {"low": IssueSeverity.LOW, "critical and closed": IssueSeverity.CRITICAL}.get(case, IssueSeverity.HIGH)
    found = issue("encoder").model_copy(update={"severity": severity})
    issues = [] if case in ("well", "failed", "killed", "running") else [found]
    rows = [row(1, issues=issues), row(2, issues=[] if case.endswith("closed") else issues)]
    journal = None
    if case == "running":
        journal = Journal(tmp_path, RunInfo(run_id="a-run", created=1.8e9, config={}))
        for number, record in enumerate(rows):
            journal.append(number, record)
    else:
        write_run(tmp_path, *rows)
        if case != "killed":
            ended(tmp_path, failed=case == "failed")
    levels = ("failed", "critical", "open", "any")
    told = [CliRunner().invoke(cli.app, ["show", str(tmp_path), "--fail-on", level]) for level in levels]
    assert [one.exit_code for one in told] == codes
    assert CliRunner().invoke(cli.app, ["show", str(tmp_path), "--check", "--json"]).exit_code == codes[2]
    assert CliRunner().invoke(cli.app, ["show", str(tmp_path)]).exit_code == 0
    if journal is not None:
        journal.close(5.0)


def test_the_newest_run_is_the_default(well: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RUN the newest directory in gradtrack_runs is meant; where there is none the error says so."""
    monkeypatch.chdir(well.parent)
    result = CliRunner().invoke(cli.app, ["show"])
    assert isinstance(result.exception, UsageError)
    assert "expected a run's directory" in str(result.exception)
    (well.parent / "gradtrack_runs").mkdir()
    well.rename(well.parent / "gradtrack_runs" / "well")
    assert "Run a-run" in CliRunner().invoke(cli.app, ["show"]).output


def test_runs_without_a_row_are_not_called_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trainings were too short for a row, the error says so instead of denying them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gradtrack_runs" / "short").mkdir(parents=True)
    (tmp_path / "gradtrack_runs" / "short" / "run_end.json").touch()
    result = CliRunner().invoke(cli.app, ["show"])
    assert isinstance(result.exception, UsageError)
    assert "Lower grad_log_every_n_steps" in str(result.exception)


@pytest.mark.parametrize("place", [".", "lightning_logs/version_3"])
def test_runs_are_found_where_frameworks_leave_them(place: str, tmp_path: Path) -> None:
    """A run in this directory or in Lightning's is the newest one as well."""
    write_run(tmp_path / "gradtrack_runs" / "older", row(1), run_id="older")
    for path in (tmp_path / "gradtrack_runs" / "older").iterdir():
        os.utime(path, (1.0, 1.0))
    write_run(tmp_path / place, row(1))
    assert "Run a-run" in CliRunner().invoke(cli.app, ["show"]).output


def test_report_prints_where_its_page_is(well: Path, tmp_path: Path) -> None:
    """The page lies in the run's directory, or where it was asked for."""
    assert CliRunner().invoke(cli.app, ["report", str(well)]).output.strip() == str(well / "report.html")
    other = tmp_path / "other.html"
    assert CliRunner().invoke(cli.app, ["report", str(well), "--out", str(other)]).output.strip() == str(other)
    assert "Run a-run" in other.read_text(encoding="utf-8")
    told = json.loads(CliRunner().invoke(cli.app, ["report", str(well), "--json"]).output)
    assert {"run": "a-run", "report": str(well / "report.html"), "healthy": True}.items() <= told.items()


def test_every_command_prints_data_for_scripts() -> None:
    """None is without --json, but for the server of agents, which answers in JSON alone."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {name for name, command in commands.items() if any("--json" in one.opts for one in command.params)} == (
        commands.keys() - {"mcp"}
    )


def test_diff_tells_what_appeared(well: Path, sick: Path, tmp_path: Path) -> None:
    """The issue of the second run appeared; --check makes that an exit code, in one direction only."""
    page = tmp_path / "diff.html"
    result = CliRunner().invoke(cli.app, ["diff", str(well), str(sick), "--check", "--html", str(page)])
    assert (result.exit_code, "EXPLODING:encoder" in result.output) == (1, True)
    assert "EXPLODING" in page.read_text(encoding="utf-8")
    back = CliRunner().invoke(cli.app, ["diff", str(sick), str(well), "--check", "--json"])
    assert (back.exit_code, json.loads(back.output)["gone"]) == (0, ["EXPLODING:encoder"])


def test_what_is_no_number_is_valid_json(tmp_path: Path) -> None:
    """A run that ends in NaN and infinity is data that every JSON parser reads."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run = str(write_run(tmp_path / "broken", row(1), row(2, loss=math.nan, norm=math.inf)))
    for command in (["show", run, "--json"], ["diff", run, run, "--json"]):
        found = CliRunner().invoke(cli.app, command).output
        json.loads(found, parse_constant=refuse)
        assert '"NaN"' in found
        assert '"Infinity"' in found


def test_replay_delivers_a_run_to_a_backend(well: Path, tmp_path: Path) -> None:
    """A backend that the run did not have gets its rows, and the outcome is told as text and as data."""
    result = CliRunner().invoke(cli.app, ["replay", str(well), "--to", "json"])
    assert result.exit_code == 0, result.output
    assert "json: 2 rows" in result.output
    assert json.loads((well / "gradient_statistics.json").read_text())["step"] == [1, 2]
    (again,) = json.loads(CliRunner().invoke(cli.app, ["replay", str(well), "--to", "json", "--json"]).stdout)
    assert (again["complete"], again["rows"], again["waiting"]) == (True, 2, 0)


def test_doctor_tells_where_rows_would_go(tmp_path: Path) -> None:
    """The backends of a configuration are told with their destination; one that cannot be used is the exit code 1."""
    config = tmp_path / "gradtrack.yaml"
    config.write_text("backends: [{name: json, directory: somewhere}]")
    result = CliRunner().invoke(cli.app, ["doctor", str(config), "--json"])
    found = json.loads(result.output)
    (configured,) = [backend for backend in found["backends"] if backend["configured"]]
    assert (result.exit_code, found["healthy"], configured["state"]) == (0, True, "ready")
    assert "somewhere" in configured["destination"]
    config.write_text(f"backends: [json]\nrun_dir: {config}/below")
    result = CliRunner().invoke(cli.app, ["doctor", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "expected a directory that can be written" in result.output
    assert {"json", "memory", "configured"} <= set(result.output.split())
    config.write_text("backends: [json]\nalerts: [{name: webhook, url: $NO_SUCH_ADDRESS}]")
    result = CliRunner().invoke(cli.app, ["doctor", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "NO_SUCH_ADDRESS, which is empty" in result.output


def test_errors_are_one_line_and_a_code(tmp_path: Path) -> None:
    """An error of gradtrack is one line on stderr without a traceback, and the code is 2."""
    (tmp_path / "file").touch()
    result = python("-m", "gradtrack", "demo", "--out", str(tmp_path / "file" / "run"))
    assert result.returncode == 2
    assert result.stderr.startswith("gradtrack: run_dir ")
    assert len(result.stderr.splitlines()) == 1


def test_wrong_usage_has_code_2(well: Path) -> None:
    """A command or an option that does not exist is wrong usage, and the nearest one is named."""
    for arguments, nearest in ((["dmeo"], "demo"), (["show", "--jsn"], "--json"), (["bakends"], "backends")):
        result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
        assert (result.exit_code, nearest in result.output) == (2, True)
    both = command("show", str(well), "--follow", "--json")
    assert (both.returncode, "expected one run, without --json" in both.stderr) == (2, True)


def test_an_input_that_cannot_be_used_has_code_2(tmp_path: Path, well: Path) -> None:
    """Every command that reads something says on one line of stderr why it cannot."""
    (tmp_path / "bad.yaml").write_text("max_gradnorm: 1")
    for arguments, why in (
        (["show", "nowhere"], "expected a run's directory"),
        (["report", "nowhere"], "expected a run's directory"),
        (["diff", str(well), "nowhere"], "expected a run's directory"),
        (["replay", "nowhere"], "expected a run's directory"),
        (["replay", str(well), "--to", "mlfow"], "Did you mean 'mlflow'"),
        (["doctor", "bad.yaml"], "Did you mean 'max_grad_norm'"),
    ):
        result = command(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert why in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_page_that_cannot_be_written_has_code_2(tmp_path: Path, well: Path) -> None:
    """A path below a file or one that is a directory is told on one line, with the option that chooses another."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    for page in (tmp_path / "file" / "page.html", tmp_path / "directory"):
        for arguments, option in ((["report", str(well)], "--out"), (["diff", str(well), str(well)], "--html")):
            result = command(*arguments, option, str(page))
            assert (result.returncode, result.stdout) == (2, ""), arguments
            assert result.stderr.startswith(f"gradtrack: {str(page)!r}: expected a file that can be written (")
            assert result.stderr.endswith(f"Choose another with {option}.\n")
            assert len(result.stderr.splitlines()) == 1
    assert not list((tmp_path / "directory").iterdir())


@pytest.mark.parametrize(
    "encoding", ["ascii", "utf-8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latin-1", "cp1252"))]
)
def test_output_survives_every_encoding(tmp_path: Path, encoding: str) -> None:
    """Where an encoding lacks the characters of curves and bars they are drawn with others, as wide, and names stay."""
    write_run(tmp_path, *(row(step, norm=float(step), issues=[issue("größe")]) for step in range(1, 9)))
    for command in ("show", "diff"):
        arguments = [str(tmp_path)] * (2 if command == "diff" else 1)
        result = subprocess.run(
            [sys.executable, "-m", "gradtrack", command, *arguments],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        text = result.stdout.decode(encoding)
        lines = [line.split() for line in text.splitlines() if line.startswith("gradient norm  ")]
        assert len(lines[0][2]) == 8
        assert set(lines[0][2]) <= set("▁▂▃▄▅▆▇█" if encoding == "utf-8" else "_.-=+*#")
        assert ("größe" in text) == (command == "show" and encoding != "ascii")


def test_lines_are_folded_for_a_person_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal long lines break between words, below where they began; a pipe gets them whole."""
    text = "Found:\n  one two three four\n"
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setattr("gradtrack.demo.run", lambda out, *, steps: SimpleNamespace(describe=lambda: text))
    assert shown_by_demo(monkeypatch, watched=False) == f"{text}\n"
    assert shown_by_demo(monkeypatch, watched=True) == "Found:\n  one two\n    three\n    four\n"


def shown_by_demo(monkeypatch: pytest.MonkeyPatch, *, watched: bool) -> str:
    """Return what the demo prints, on a terminal or into a pipe."""
    stream = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(stream, "isatty", lambda: watched)
        patch.setattr(sys, "stdout", stream)
        cli.app(["demo"], standalone_mode=False)
    return stream.getvalue()


def test_start_loads_nothing_heavy() -> None:
    """Help and plugin lists load neither torch nor a tracker."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom gradtrack import cli\n"
        "for arguments in (['--help'], ['backends'], ['analyzers']):\n"
        "    assert CliRunner().invoke(cli.app, arguments).exit_code == 0\n"
        "print([name for name in ('torch', 'numpy', 'mlflow', 'wandb') if name in sys.modules])"
    )
    found = python("-c", code)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [["backends", "--json"], ["backends"], ["show", "RUN", "--json"], ["show", "RUN"]]
)
def test_a_reader_that_has_gone_is_no_verdict(arguments: list[str], well: Path) -> None:
    """Where the pipe is closed the command ends without a word, with the code that other programs have then."""
    command = [sys.executable, "-m", "gradtrack", *(str(well) if word == "RUN" else word for word in arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment) as process:
        os.close(writing)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (141, b"")


def test_a_directory_of_runs_names_the_newest(well: Path, sick: Path) -> None:
    """Who passes the directory above the runs is told which one to pass."""
    older, newer = sorted((well, sick), key=lambda run: next(run.glob("journal-*.jsonl")).stat().st_mtime_ns)
    assert older.parent == newer.parent
    result = command("show", str(well.parent))
    assert result.returncode == 2
    assert result.stderr.endswith(f"It holds others; the newest is {str(newer)!r}.\n")


@pytest.mark.parametrize("name", ["show", "report", "diff", "replay"])
@pytest.mark.parametrize("content", [b"", b'{"gradtrack_jour', b"\xff\x00\xfe\n" * 50])
def test_a_journal_without_a_beginning_has_code_2(name: str, content: bytes, tmp_path: Path) -> None:
    """A run that ended before its first line was whole, or a file that is no journal, is one line on stderr."""
    (tmp_path / "journal-000.jsonl").write_bytes(content)
    result = command(name, *([str(tmp_path)] * (2 if name == "diff" else 1)))
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1


def test_a_torn_row_is_told_and_left_out(well: Path) -> None:
    """The rows before it are shown."""
    journal = next(well.glob("journal-*.jsonl"))
    journal.write_bytes(journal.read_bytes()[:-20])
    result = command("show", str(well))
    assert result.returncode == 0
    assert "1 damaged row left out" in result.stdout
    replayed = CliRunner().invoke(cli.app, ["replay", str(well), "--to", "json"])
    assert replayed.exit_code == 0
    assert "1 line(s) of the journal left out: journal-000.jsonl" in replayed.output


@pytest.mark.parametrize("arguments", [["show", "RUN"], ["backends"], ["doctor"], ["diff", "RUN", "RUN"]])
def test_a_narrow_terminal_keeps_numbers_and_names_whole(arguments: list[str], well: Path) -> None:
    """At 40 columns nothing is cut but what a command could not be copied from, and no code colours it."""
    words = [str(well) if word == "RUN" else word for word in arguments]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "40", "NO_COLOR": "1"})
    shown = result.output.split("Files in")[0]
    assert all(len(line) <= 40 or str(well.name) in line for line in shown.splitlines())
    assert "…" not in shown
    assert "\x1b" not in shown
    assert "tensorboard" in shown or arguments[0] in ("show", "diff")


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def test_text_of_a_run_directory_controls_no_terminal(tmp_path: Path) -> None:
    """Types of issues, names of files, directories, backends and groups, and addresses are letters and no commands."""
    directory = tmp_path / f"run{ESCAPE}"
    backends = [
        {"name": f"own{ESCAPE}", "options": {}},
        {"name": "mlflow", "options": {"tracking_uri": f"https://tracking.example/{ESCAPE}"}},
    ]
    run = RunInfo(run_id=f"run{ESCAPE}", run_dir=str(directory), config={f"key{ESCAPE}": ESCAPE})
    journal = Journal(directory, run, backends=backends)
    issue = {"issue_type": f"DEAD{ESCAPE}", "severity": "HIGH", "layer": ESCAPE, "message": f"a{ESCAPE}\nb"}
    for step in range(3):
        metrics = {"train/grad_norm": 1.0, f"train/grad_norm/layer{ESCAPE}": 1.0, "train/grad_healthy": 0.0}
        journal.append(step, Record(step=step, time=1.0, metrics=metrics, issues=(issue,), source=f"pair{ESCAPE}"))
    journal.close(10.0)
    (directory / f"journal-{ESCAPE}.jsonl").write_text("garbage\n")
    (directory / f"gradient_statistics.{ESCAPE}.json").write_text("{}")
    (directory / "gradtrack.yaml").write_text(f"run_dir: {str(directory)!r}\n".replace("\x1b", "\\x1b"))
    told = ""
    for command in (["show"], ["report"], ["diff", str(directory)], ["replay"], ["export"], ["show", "--follow"]):
        result = CliRunner().invoke(cli.app, [command[0], str(directory), *command[1:]])
        assert "Traceback" not in result.output
        told += result.output
    result = CliRunner().invoke(cli.app, ["doctor", str(directory / "gradtrack.yaml")])
    told += result.output
    assert "DEAD" in told
    assert "layer" in told
    assert "If you trust it" in told
    assert not [letter for letter in told if not letter.isprintable() and letter != "\n"]
