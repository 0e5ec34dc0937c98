"""The command line: try it, look at runs, deliver what is missing, and see which plugins there are."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from gradtrack._version import __version__
from gradtrack.cli.plugins import commands as _of_installation
from gradtrack.cli.runs import (
    FAIL_ON,
    HERE,
    AsJson,
    FailOn,
    epilog,
    exit_code,
    find_run,
    find_several,
    folded,
    print_found,
    survive_poor_encodings,
    tell_where_they_part,
    writing,
)
from gradtrack.errors import GradtrackError, UsageError
from gradtrack.support.names import one_line, printable

_EPILOG: Final = (
    "Exit codes: 0 done; 1 done, but the run has an issue (show --check), issues appeared (diff --check), "
    "rows are still missing (replay) or a backend, an analyzer or an alert cannot be used (doctor); 2 wrong usage or "
    "an input that cannot be used: one line on stderr says why; 3 the run failed, was killed or never ended "
    "(show --check); 130 interrupted; 141 the reader of the output has gone."
    "\n\n[bold]gradtrack COMMAND --help[/bold] has examples; "
    "[bold]gradtrack --install-completion[/bold] completes commands and options in your shell."
)


app = typer.Typer(
    name="gradtrack",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
RUN: Final = (
    "A run: its directory (the newest run in it, or RUN_DIR@2 for the second) or its id. "
    f"Default: the newest one in {HERE}."
)
Run = Annotated[Path | None, typer.Argument(help=RUN, show_default=False)]


ExportFormat = StrEnum("ExportFormat", ["csv", "parquet", "jsonl", "sarif"])
ExportTable = StrEnum("ExportTable", ["steps", "issues"])


def main() -> None:
    """Run the command line; an error of gradtrack is one line on stderr and the exit code 2."""
    survive_poor_encodings()
    try:
        app()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.exit(141)  # the reader of the output has gone: the code 1 of our libraries would be a verdict
    except GradtrackError as fault:
        print(printable(f"gradtrack: {fault}"), file=sys.stderr)
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


@app.command(epilog=epilog("gradtrack demo", "gradtrack demo --steps 60 --out my_first_run"))
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
    typer.echo(json.dumps(finding.as_dict(), indent=1) if as_json else folded(finding.describe()))


@app.command(
    epilog=epilog(
        "gradtrack show",
        "gradtrack show gradtrack_runs/exp1 --follow",
        "gradtrack show sweep/*",
        "gradtrack show exp1 --check && ./deploy",
        "gradtrack show exp1 --fail-on critical",
        code_1="with --check the run has an issue that --fail-on names; 3 with --check it failed or never ended",
    )
)
def show(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN...", help=RUN, show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the run ends.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 or 3 if the run is not as it should be: see --fail-on.")
    ] = False,
    fail_on: Annotated[
        FailOn | None, typer.Option("--fail-on", help=f"What --check refuses: {FAIL_ON} Default: open.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run in the terminal: curves, issues with what to do about them, and the norm of each group.

    Several runs are compared, as by gradtrack diff.
    """
    from gradtrack.pages.comparison import Comparison
    from gradtrack.pages.documents import show_document
    from gradtrack.pages.run_data import load_run
    from gradtrack.pages.terminal import overview

    if follow and (as_json or len(runs or ()) > 1):
        raise UsageError("--follow: expected one run, without --json. Read the run's journal for rows as they come.")
    paths = list(map(find_run, runs)) if runs else [find_run(None)]
    if follow:
        from gradtrack.pages.terminal.follow import follow as watch

        found = [watch(paths[0], Console(highlight=False))]
    else:
        found = [load_run(path, watched=True) for path in paths]
        plain = [partial(show_document, one, share=len(found)) for one in found]
        if len(found) == 1:
            print_found(plain[0], lambda: overview.show(found[0]), as_json=as_json)
        else:
            print_found(lambda: [one() for one in plain], lambda: Comparison(*found).show(), as_json=as_json)
    level = fail_on or FailOn.open
    codes = [exit_code(one.faults(), level) for one in found] if check or fail_on is not None else [0]
    raise typer.Exit(max(codes))


@app.command(epilog=epilog("gradtrack report", "gradtrack report gradtrack_runs/exp1 --out exp1.html"))
def report(
    run: Run = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes. Default: report.html in the run's directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as one HTML page that needs no network, and print where it is."""
    from gradtrack.pages.documents import report_document
    from gradtrack.pages.html import REPORT, write_html_report
    from gradtrack.pages.run_data import load_run

    found = load_run(find_run(run), watched=True)
    path = found.directory / REPORT if out is None else out
    with writing(path, "--out"):
        write_html_report(found, path)
    typer.echo(json.dumps(report_document(found, path), indent=1) if as_json else one_line(str(path)))


@app.command(
    epilog=epilog(
        "gradtrack export exp1 --format parquet",
        "gradtrack export exp1 --table issues --out issues.csv",
        "gradtrack export exp1 --format sarif --out gradients.sarif",
    )
)
def export(
    run: Run = None,
    kind: Annotated[ExportFormat, typer.Option("--format", help="How the table is written.")] = ExportFormat.csv,
    table: Annotated[ExportTable, typer.Option(help="Rows of steps, or of the times that issues were open.")] = (
        ExportTable.steps
    ),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the file goes, - for standard output. Default: steps.csv and the like in the run's directory."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the recorded steps of a run, or its issues, as a table, and print where it is.

    parquet needs pyarrow or polars. sarif is for code hosts and pipelines, and holds the issues. In Python
    gradtrack.read_run gives the same tables.
    """
    from gradtrack.delivery.run_files import write_atomically
    from gradtrack.pages.run_data import load_run
    from gradtrack.pages.sarif import to_sarif
    from gradtrack.pages.tables import tables_of, to_text, write_table

    recorded, is_sarif = load_run(find_run(run)), kind is ExportFormat.sarif
    tables, table = tables_of(recorded), ExportTable.issues if is_sarif else table
    found = getattr(tables, table.value)
    if out == Path("-"):
        if kind is ExportFormat.parquet or as_json:
            raise UsageError("--out -: expected csv, jsonl or sarif without --json. Name a file with --out.")
        text = to_sarif(recorded) if is_sarif else to_text(found, kind.value)
        typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
        return
    path = Path(tables.run.run_dir or "") / f"{table.value}.{kind.value}" if out is None else out
    with writing(path, "--out"):
        if is_sarif:
            write_atomically(path, to_sarif(recorded))
        else:
            write_table(found, kind.value, path)
    numbers = {"rows": len(found["source"]), "columns": len(found)}
    typer.echo(
        json.dumps({"run": tables.run.run_dir, "file": str(path), **numbers}) if as_json else one_line(str(path))
    )


@app.command(
    epilog=epilog(
        "gradtrack diff good_run bad_run",
        "gradtrack diff good_run bad_run --html diff.html --check",
        "gradtrack diff sweep/* --html sweep.html",
        "gradtrack diff good_run bad_run --first",
        code_1="with --check an issue appeared, or with --first the runs part",
    )
)
def diff(
    runs: Annotated[
        list[Path], typer.Argument(help="The runs, the one to compare with first; or one directory with several.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write the comparison as an HTML page as well.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the first run lacks an issue.")] = False,
    first: Annotated[
        bool,
        typer.Option("--first", help="Name the first step and parameter in which two runs, or the ranks of one, part."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Lay runs side by side: numbers, settings, groups, curves, and the issues that appeared or went.

    With --first it is told at which step and parameter they part, by how much, and whether data, random numbers, a
    gradient or an update came first. The runs need the setting fingerprints.
    """
    if first and html is not None:
        raise UsageError("--first with --html: expected one of them. Leave out the other.")
    if first:
        parts = tell_where_they_part(runs, as_json=as_json)
        raise typer.Exit(int(check and parts))
    from gradtrack.pages.comparison import Comparison
    from gradtrack.pages.run_data import load_run

    found = Comparison(*(load_run(run, watched=True) for run in find_several(runs)))
    if html is not None:
        with writing(html, "--html"):
            found.write_html(html)
    print_found(found.to_plain, found.show, as_json=as_json)
    raise typer.Exit(int(check and bool(found.appeared)))


@app.command(
    epilog=epilog(
        "gradtrack replay exp1",
        "gradtrack replay exp1 --to mlflow --tracking-uri http://127.0.0.1:5000",
        code_1="rows are still missing",
    )
)
def replay(
    run: Run = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="One backend only; it may be one that the run did not have.", autocompletion=lambda: _backend_names()
        ),
    ] = None,
    tracking_uri: Annotated[str | None, typer.Option(help="Where the tracker is now.")] = None,
    allow: Annotated[
        list[Path] | None,
        typer.Option(help="A directory beside the run's in which files that the journal names may be written."),
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="The function that the backend callable calls, as in my_module:log.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Deliver the rows that the trackers of a run are missing. Every row arrives once, however often this is called.

    Where they go is printed first. Credentials come from the environment, as the tracker itself reads them. A server
    that only the journal names gets none: name it with --tracking-uri, unless it is on this machine or the environment
    names it. Files are written in the run's directory, and elsewhere only below --allow. Code is imported, here or from
    where Python looks, only for --log. A run of MLflow that gradtrack began, and that a kill left open, is ended.
    """
    from gradtrack.delivery.replay import replay as deliver

    if log is not None:
        sys.path.append("")  # a module of this directory, which the script of a command does not look in

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def advance(backend: str, done: int, total: int) -> None:
            if backend not in bars:
                bars[backend] = progress.add_task(backend)
            progress.update(bars[backend], completed=done, total=total)

        def announce(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        found = deliver(
            find_run(run, every=True),
            to=to,
            tracking_uri=tracking_uri,
            options={} if log is None else {"log": log},
            progress=advance,
            tell=announce,
            allowed=allow or (),
        )
    if as_json:
        told = [{**asdict(one), "waiting": one.waiting, "complete": one.complete} for one in found]
        typer.echo(json.dumps(told, indent=1))
    for one in [] if as_json else found:
        typer.echo(one_line(str(one)))
    raise typer.Exit(int(not all(one.complete for one in found)))


@app.command(
    epilog=epilog(
        "gradtrack replay-step gradtrack_runs/exp1/capture-00120 train.py:make",
        "gradtrack replay-step capture-00120 my_package.training:make --json",
    )
)
def replay_step(
    capture: Annotated[Path, typer.Argument(help="A captured step: a directory like RUN_DIR/capture-00120.")],
    make: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help="A function, as FILE.py:NAME or package.module:NAME, that returns the model of the training, or the "
            "model and a function loss(model, batch). Its file is imported: run only what you would run anyway.",
        ),
    ] = "",
    max_bytes: Annotated[int, typer.Option(min=1, help="The largest file that is read.")] = 4 * 10**9,
    as_json: AsJson = False,
) -> None:
    """Compute a captured step again, and name the first operation whose result was not finite.

    A training writes such steps with the setting capture. The model gets the weights and random numbers of the step,
    and the same batch: on the same machine the loss is the same to the last bit.
    """
    from gradtrack.capture.replay import replay_step as compute

    found = compute(capture, make, most_bytes=max_bytes)
    print_found(found.as_dict, lambda: Text(str(found)), as_json=as_json)


@app.command(epilog=epilog("gradtrack mcp", "gradtrack mcp gradtrack_runs /data/runs"))
def mcp(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIRECTORY...", help="Where runs are read. Default: this directory.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve runs to an agent by the Model Context Protocol, on standard input and output. Needs the extra mcp."""
    from gradtrack.cli.mcp_server import serve

    serve(directories or [Path()])


app.add_typer(_of_installation)


def _backend_names() -> list[str]:
    from gradtrack import registry

    return list(registry.backends.names())
