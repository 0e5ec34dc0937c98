"""Credentials around whole trainings with real trackers: none of them comes out anywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.programs import run

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

SECRET = "s3cr3t-Zq9-0123456789abcdef0123456789abcd"
PROGRAM = f"""
    logging.basicConfig(level=logging.DEBUG)
    uri = "http://user:{SECRET}@127.0.0.1:9/path?token={SECRET}"
    backends = [
        {{"name": "mlflow", "tracking_uri": uri, "experiment": "x", "timeout_seconds": 0.5}},
        {{"name": "wandb", "project": "p", "directory": str(directory)}},
        {{"name": "tensorboard", "log_dir": str(directory / "logs")}},
    ]
    settings = dict(close_timeout_seconds=20.0, save_html_report=True, save_gradient_plots=True, verbose_logging=True)
    loop = Loop(directory / "run", backends, **settings)
    loop.run(5)
    print(loop.manager.status(), loop.manager.config, repr(loop.manager.config), loop.manager.reports)
    print([loop.manager.backend(name) for name in ("mlflow", "wandb", "tensorboard")])
    print([dict(loop.manager.backend(name).address()) for name in ("mlflow", "wandb", "tensorboard")])
    loop.manager.save_training_log(directory / "log.json")
    loop.manager.close()
    print(loop.manager.status())
    from gradtrack.cli import main
    for command, path in (("replay", "run"), ("doctor", "config.yaml"), ("report", "run")):
        sys.argv = ["gradtrack", command, str(directory / path)]
        try:
            main()
        except SystemExit:
            pass
    for wrong in ({{"tracking_uri": uri}}, {{"name": "mlflw", "tracking_uri": uri}}, uri):
        try:
            Loop(directory / "run", [wrong])
        except Exception as fault:
            print(repr(fault), fault)
"""


@pytest.mark.slow
def test_case_24_no_secret_comes_out_of_a_training(tmp_path: Path) -> None:
    """Not from a log, a warning, an error, the journal, a report, a page, a repr, the doctor or the replay."""
    uri = f"http://user:{SECRET}@127.0.0.1:9/path?token={SECRET}"
    (tmp_path / "config.yaml").write_text(f"backends: [{{name: mlflow, tracking_uri: '{uri}'}}]")
    environment: dict[str, Any] = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "online", "MLFLOW_TRACKING_PASSWORD": SECRET}
    environment["WANDB_BASE_URL"] = "http://127.0.0.1:9"
    done = run(PROGRAM, tmp_path, "all", **environment)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1:9/path" in done.stderr
    assert "is kept offline" in done.stderr
    ours = [path for path in (tmp_path / "run").rglob("*") if path.is_file()] + [tmp_path / "log.json"]
    ours += [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert {"journal-000.jsonl", "report.html", "run_end.json", "log.json"} <= {path.name for path in ours}
    for path in ours:
        assert SECRET not in path.read_bytes().decode("latin-1"), path
    assert SECRET not in done.stdout
    assert SECRET not in done.stderr
    found = subprocess.run(
        ["grep", "-rl", SECRET, str(tmp_path / "wandb")], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
