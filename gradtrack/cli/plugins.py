"""The commands about what is installed: the plugins, what each needs, and where a configuration would send its rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gradtrack import registry
from gradtrack.cli.runs import AsJson, epilog, print_found
from gradtrack.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """A plugin by name, with one sentence about it, where it comes from, and the packages that it lacks."""

    name: str
    about: str
    source: str
    missing: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """Return the command that installs what is missing, or nothing."""
        return f'pip install "gradtrack[{self.name}]"' if self.missing else ""


commands = typer.Typer()
"""The commands about what is installed."""


@commands.command(
    epilog=epilog(
        "gradtrack doctor",
        "gradtrack doctor gradtrack.yaml --json",
        code_1="a backend, an analyzer or an alert cannot be used",
    )
)
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML, TOML or JSON file. Default: no file.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what is installed and where a configuration would send its rows, without creating anything there.

    The analyzers and alerts of a configuration are checked as well, and nothing is posted.
    """
    from gradtrack.delivery.preflight import examine
    from gradtrack.pages.terminal.overview import show_diagnosis

    found = examine(config)
    print_found(lambda: {**asdict(found), "healthy": found.healthy}, lambda: show_diagnosis(found), as_json=as_json)
    raise typer.Exit(int(not found.healthy))


@commands.command(epilog=epilog("gradtrack backends", "gradtrack backends --json"))
def backends(as_json: AsJson = False) -> None:
    """List the trackers that a run can write to, and whether what each needs is installed."""
    _list_plugins("backends", as_json)


@commands.command(epilog=epilog("gradtrack analyzers", "gradtrack analyzers --json"))
def analyzers(as_json: AsJson = False) -> None:
    """List the analyzers that can look beyond the gradients themselves."""
    _list_plugins("analyzers", as_json)


def _list_plugins(kind: str, as_json: bool) -> None:
    found = describe_plugins(getattr(registry, kind))
    print_found(lambda: [*map(asdict, found)], lambda: show_plugins(kind.removesuffix("s"), found), as_json=as_json)


def describe_plugins(registry: Registry) -> list[PluginInfo]:
    """Describe the plugins of one kind, built in or installed by others."""
    own = [
        PluginInfo(name=name, about=_sentence(registry.kind, name), source="gradtrack", missing=missing_packages(name))
        for name in registry.builtin()
    ]
    others = [_third_party(point) for point in metadata.entry_points(group=f"gradtrack.{registry.kind}")]
    return own + sorted(others, key=lambda plugin: plugin.name)


def show_plugins(kind: str, plugins: Sequence[PluginInfo]) -> RenderableType:
    """Return a table of plugins as something that a rich console prints."""
    table = Table(box=None, pad_edge=False)
    for column in (kind, "about", "ready"):
        table.add_column(column, overflow="fold", no_wrap=column == kind)
    for plugin in plugins:
        about = plugin.about if plugin.source == "gradtrack" else f"{plugin.about} ({plugin.source})"
        table.add_row(*(Text(text) for text in (plugin.name, about, plugin.remedy or "yes")))
    return table


def missing_packages(name: str) -> tuple[str, ...]:
    """Name what is not installed of the extra that is called like a plugin."""
    try:
        requirements = metadata.requires("gradtrack") or []
    except metadata.PackageNotFoundError:
        return ()
    needed = [
        re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        for requirement in requirements
        if re.search(rf"""extra == ['"]{re.escape(name)}['"]""", requirement)
    ]
    return tuple(package for package in needed if not _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _sentence(kind: str, name: str) -> str:
    files = resources.files(f"gradtrack.{kind}")
    file = files / f"{name}.py"
    source = (file if file.is_file() else files / name / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")


def _third_party(point: metadata.EntryPoint) -> PluginInfo:
    if point.dist is None:
        return PluginInfo(name=point.name, about=point.value, source=point.value)
    summary = point.dist.metadata.json.get("summary")
    return PluginInfo(name=point.name, about=str(summary or point.value), source=point.dist.name)
