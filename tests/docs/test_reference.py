"""The reference pages: up to date with the code, and complete."""

import inspect
import re
from pathlib import Path

import pytest
import typer.main

from gradtrack import GradientConfig, registry
from gradtrack.cli import app
from gradtrack.reports import StepReport
from reference.pages import FOLDER, PAGES, text_of
from tests.docs.pages import DOCS, ROOT, name_of, spans
from tests.docs.pages import PAGES as ALL_PAGES

METRIC = re.compile(r"(train/grad_|rnn/|rl/|attention/|flow/|gain/|vector/|jacobian/|updates/|precision/)\S+")
OWN = {"gradtrack/step", "gradtrack/exact/<metric>", "gradtrack/nonfinite"}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    """Each page is what `python -m reference` writes."""
    current = (FOLDER / name).read_text(encoding="utf-8") == text_of(name)
    assert current, f"docs/reference/{name} is not what the code says: run `python -m reference`"


def test_folder_holds_nothing_else() -> None:
    """No page of the reference is written by hand."""
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_setting_is_there() -> None:
    """The page of settings has every field."""
    text = text_of("configuration.md")
    assert [name for name in GradientConfig.model_fields if f"| `{name}` |" not in text] == []


def test_every_setting_has_a_sentence() -> None:
    """Every field says what it does."""
    fields = GradientConfig.model_fields
    assert [name for name, field in fields.items() if not (field.description or "").endswith(".")] == []


def test_every_command_is_there() -> None:
    """The page of commands has each of them, and each of its options has a sentence."""
    group = typer.main.get_command(app)
    text = text_of("commands.md")
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"## gradtrack {name}\n" in text
        assert [param.name for param in command.params if not param.help] == []


@pytest.mark.parametrize("kind", ["analyzers", "backends"])
def test_every_plugin_has_a_page(kind: str) -> None:
    """A plugin that ships with gradtrack is described on a page."""
    folder = {"analyzers": "analyzers", "backends": "trackers"}[kind]
    pages = {path.stem for path in (DOCS / folder).glob("*.md")}
    files = {"console", "json", "memory"}
    names = set(getattr(registry, kind).builtin())
    assert names - files <= pages
    assert not names & files or "files" in pages


@pytest.mark.parametrize("page", sorted((DOCS / "analyzers").glob("*.md")), ids=name_of)
def test_analyzer_pages_have_three_parts(page: Path) -> None:
    """Each says what it measures, how to read it and what to do."""
    text = page.read_text(encoding="utf-8")
    parts = ("## What it measures", "## How to read it", "## What to do")
    assert [part for part in parts if f"\n{part}\n" not in text] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_metrics_that_pages_name_exist(page: Path) -> None:
    """A name of a metric in the prose is one that gradtrack emits."""
    described = [*StepReport.described]
    for name in registry.analyzers.builtin():
        described += registry.analyzers.load(name).report_type.described
    known = {metric.name for metric in described}
    wrong = [
        span
        for span in spans(page)
        if METRIC.fullmatch(span)
        and span not in known
        and not span.endswith(("<field>", "/*", "<pair>", "<pair>/<group>"))
        and not any(metric.matches(span) for metric in described)
    ]
    assert wrong == []


def test_errors_that_are_explained_exist() -> None:
    """Each error in the table of troubleshooting is one that the package raises."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gradtrack").rglob("*.py"))
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.M)
    shown = [part for row in rows for span in re.findall(r"`([^`]+)`", row) for part in span.split("...")]
    assert len(shown) > 10
    missing = [part for part in shown if part.strip('")] ') and part.strip('"] ') not in _joined(source)]
    assert missing == []


def _joined(source: str) -> str:
    """Put literals that are broken over lines together, and let templates of plugins read like their outcome."""
    text = re.sub(r'"\s+f?"', "", source)
    return text + "".join(text.replace("{self.singular}", kind) for kind in ("backend", "analyzer"))


@pytest.mark.parametrize("name", ["callable", "mlflow", "otel", "tensorboard", "trackio", "wandb"])
def test_every_option_of_a_tracker_is_explained(name: str) -> None:
    """The page of a tracker has every option that its backend takes."""
    options = inspect.signature(registry.backends.load(name)).parameters
    text = (DOCS / "trackers" / f"{name}.md").read_text(encoding="utf-8")
    assert [option for option in options if f"`{option}`" not in text] == []


def test_every_issue_is_explained() -> None:
    """Each type of issue that something opens is on the page of diagnosis or on that of an analyzer."""
    opened = {
        name
        for path in (ROOT / "gradtrack").rglob("*.py")
        if path.name not in ("causes.py", "issues.py")
        for name in re.findall(r"\b(?:IssueType|T)\.([A-Z_]+)\b", path.read_text(encoding="utf-8"))
    }
    text = "".join(
        path.read_text(encoding="utf-8") for path in [DOCS / "diagnosis.md", *(DOCS / "analyzers").iterdir()]
    )
    assert len(opened) > 20
    assert sorted(name for name in opened if name not in text) == []
