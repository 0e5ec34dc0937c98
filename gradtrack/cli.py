"""The command line: `gradtrack demo`, `backends` and `analyzers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradtrack._version import __version__
from gradtrack.errors import GradtrackError

app = typer.Typer(
    name="gradtrack",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 wrong usage or an input that cannot be used (one line on stderr says which).",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print data for scripts instead of a table.")]


def main() -> None:
    """Run the command line; an error of gradtrack is one line on stderr and the exit code 2."""
    try:
        app()
    except GradtrackError as fault:
        print(f"gradtrack: {fault}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradtrack {__version__}")
        raise typer.Exit


@app.callback()
def gradtrack(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Safe gradients, typed step reports and gradient panels for the experiment tracker that you already use.

    Start with [bold]gradtrack demo[/bold]: it needs no account and no server.
    """


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where the files go. Default: a new directory in gradtrack_runs.")
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="How many optimizer steps to train.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Train a small recurrent network on generated data and show what gradtrack finds.

    Two thirds through, one batch holds an infinity. See how the step is skipped and the training goes on.
    """
    from gradtrack import demo as demonstration

    finding = demonstration.run(out, steps=steps)
    typer.echo(json.dumps(finding.as_dict(), indent=1) if as_json else finding.describe())


@app.command()
def backends(as_json: AsJson = False) -> None:
    """List the trackers that a run can write to, and whether what each needs is installed."""
    _list_plugins("backends", as_json)


@app.command()
def analyzers(as_json: AsJson = False) -> None:
    """List the analyzers that can look beyond the gradients themselves."""
    _list_plugins("analyzers", as_json)


def _list_plugins(kind: str, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gradtrack import registry
    from gradtrack.view.plugins import describe_plugins

    plugins = describe_plugins(getattr(registry, kind))
    if as_json:
        typer.echo(json.dumps([asdict(plugin) for plugin in plugins], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in (kind.removesuffix("s"), "about", "ready"):
        table.add_column(column, overflow="fold")
    for plugin in plugins:
        about = plugin.about if plugin.source == "gradtrack" else f"{plugin.about} ({plugin.source})"
        table.add_row(*(Text(text) for text in (plugin.name, about, plugin.remedy or "yes")))
    Console().print(table)


if __name__ == "__main__":
    main()
