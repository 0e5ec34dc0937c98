"""The results as a terminal table, a Markdown file and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.timing import Row

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BEGIN, END = "<!-- written by python -m benchmarks --write -->", "<!-- end of what was written -->"
HEAD = """# What it costs

Made by `make bench` on two shared CPU cores: all candidates run interleaved in one process, but for the faults, where
each run is a process of its own; each figure is a ratio of medians, but for those of reading. A bar is what we promise;
a figure above its bar is in bold. Settings are the defaults, unless the name of a case says otherwise.

The section on steps times reports that stay unread, of gradients that are there already. The one on reading times
training loops: plain, with `clip_grad_norm_`, and with gradtrack, whose report is left unread, asked for its
`health.healthy`, or for `metrics()` at every step. A figure is what gradtrack adds to a plain step over what
`clip_grad_norm_` adds to it. The loops take turns of 100 steps, with the step that makes a row; of each step in a turn
the processor time of the training's thread at the lower quartile counts, and of these times the mean.

Figures differ more between machines than between runs, and each section was written when its benchmark last ran.

The section on accelerators is a model and not a measurement, since no GPU was at hand: counted launches and copies at
5 us each, and the bytes of each kernel at 2 TB/s, with nothing overlapping and no cache. On a GPU of yours,
`python -m benchmarks step --device cuda` measures; [on a GPU](gpu.md) says what happens there.
"""


def terminal(rows: Sequence[Row]) -> Table:
    """Return a table that marks what is above its bar."""
    table = Table("benchmark", "case", "what", "ratio", "bar", "note", box=SIMPLE)
    for row in rows:
        style = "" if row.passed is None else "green" if row.passed else "bold red"
        bar = "" if row.bar is None else f"{row.bar:g}{row.unit}"
        table.add_row(row.benchmark, row.case, row.what, f"{number(row)}{row.unit}", bar, row.note, style=style)
    return table


def write(rows: Sequence[Row]) -> list[Path]:
    """Write `docs/benchmarks.md` with its picture, and the table of the README; what was not run stays as it is."""
    DOCS.joinpath("images").mkdir(parents=True, exist_ok=True)
    text, picture = DOCS / "benchmarks.md", DOCS / "images" / "step_cost.png"
    sections = {**_written(text), **_sections(rows)}
    shown = "".join(sections.values())
    text.write_text(f"{HEAD}\n![The cost of a step](images/step_cost.png)\n{shown}", encoding="utf-8")
    steps = [row for row in rows if row.benchmark == "step (native)"]
    if steps:
        draw(steps, picture)
    readme, loops = ROOT / "README.md", {row.case: _shown(row) for row in rows if row.benchmark == "reading"}
    if loops:
        before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n\n{summary(loops)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return [text, *([picture] if steps else []), *([readme] if loops else [])]


def summary(ratios: Mapping[str, str]) -> str:
    """Return a table with a row per model, of cases named `<model>, <what is done>`."""
    shapes = dict.fromkeys(case.split(", ")[0] for case in ratios)
    columns = list(dict.fromkeys(case.partition(", ")[2] for case in ratios))
    lines = [["model", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[shape, *(ratios.get(f"{shape}, {column}", "") for column in columns)] for shape in shapes]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _written(path: Path) -> dict[str, str]:
    """Return the sections that are there, by their headings."""
    _, *parts = path.read_text(encoding="utf-8").split("\n## ") if path.exists() else [""]
    return {part.partition("\n")[0]: f"\n## {part}" for part in parts}


def _sections(rows: Sequence[Row]) -> dict[str, str]:
    """Return a section with a table for each benchmark, by its heading."""
    sections = {}
    for name in dict.fromkeys(row.benchmark for row in rows):
        lines = [f"\n## {name.capitalize()}\n", "| case | what | ratio | bar | |", "| --- | --- | ---: | ---: | --- |"]
        for row in rows:
            if row.benchmark == name:
                bar = "" if row.bar is None else f"{row.bar:g}{row.unit}"
                lines.append(f"| {row.case} | {row.what} | {_shown(row)} | {bar} | {row.note} |")
        sections[name.capitalize()] = "\n".join(lines) + "\n"
    return sections


def _shown(row: Row) -> str:
    """Return a figure with its unit, in bold where it is above its bar."""
    value = f"{number(row)}{row.unit}"
    return f"**{value}**" if row.passed is False else value


def number(row: Row) -> str:
    """Show a ratio with two decimals, and what is far below that with an exponent."""
    return f"{row.ratio:.2f}" if abs(row.ratio) >= 0.005 else f"{row.ratio:.1e}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the cost of a step as bars beside the line of clip_grad_norm_."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 0.42 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([row.case for row in rows], [row.ratio for row in rows], color="#2b6cb0", height=0.6)
    for index, row in enumerate(rows):
        axes.text(0.01, index, f"{row.ratio:.2f}", va="center", color="white", fontsize=9)
        if row.bar is not None:
            axes.plot([row.bar, row.bar], [index - 0.35, index + 0.35], color="#c05621", linewidth=2)
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.15, *(row.ratio + 0.1 for row in rows)))
    axes.set_xlabel("a full report / torch's clip_grad_norm_ (dashed: the same; orange: our bar)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
