"""What the doctor found, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradtrack.record.doctor import Diagnosis

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS: Final = {"ready": "green", "not installed": "dim"}


def show_diagnosis(found: Diagnosis) -> RenderableType:
    """Return versions, the run directory and every backend as something that a rich console prints."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    where = found.run_dir_fault or found.run_dir or "a new directory in gradtrack_runs, where a backend needs one"
    head = Text(f"{versions}, rank {found.rank}\nrun directory: {where}\n")
    table = Table(box=None, pad_edge=False)
    for column in ("backend", "configured", "state", "where to, or why not"):
        table.add_column(column, overflow="fold", no_wrap=column == "backend")
    for one in found.backends:
        colour = _COLOURS.get(one.state, "red" if one.configured else "yellow")
        cells = (one.name, "yes" if one.configured else "", (one.state, colour), one.destination or one.reason)
        table.add_row(*(Text(*cell) if isinstance(cell, tuple) else Text(cell) for cell in cells))
    return Group(head, table)
