"""A run in the terminal."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from gradtrack.pages.run_data import RunData
from gradtrack.pages.terminal import overview
from gradtrack.records import Panel
from gradtrack.reports import IssueType
from tests.pages.runs import HOSTILE, gather, issue, row


def shown(run: RunData, *, colour: bool = False) -> str:
    """Return what a console prints."""
    console = Console(file=io.StringIO(), width=100, force_terminal=colour, highlight=False)
    console.print(overview.show(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_run_is_summed_up() -> None:
    """Health, curves with their last value, groups with bars, and issues with advice are shown."""
    text = shown(gather(row(1), row(250, norm=4.0, issues=[issue("encoder")])))
    assert "Run a-run  stopped without an end, 250 steps  unhealthy" in text
    assert "gradtrack replay delivers what its trackers are missing." in " ".join(text.split())
    assert "gradient norm   ▁█" in text
    assert "W_in   |█████████   | norm: 2.4" in text
    assert "W_out  |████████████| norm: 3.2" in text
    assert "HIGH EXPLODING at encoder  from step 250" in text
    assert "What to do: Lower the learning rate." in text


def test_issues_of_a_run_that_goes_on_come_before_its_groups() -> None:
    """On a low terminal the bottom is cut off, so it is not what tells of a fault."""
    console = Console(file=io.StringIO(), width=100)
    console.print(overview.show(gather(row(1, issues=[issue("encoder")])), live=True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert 0 < text.index("gradient norm") < text.index("HIGH EXPLODING") < text.index("W_in")


def test_long_names_do_not_break_their_line() -> None:
    """The middle of a name that is too long is left out, and every group keeps its bar."""
    groups = {f"train/grad_norm/{'x' * 90}.{index}.{'y' * 90}": 1.0 + index for index in range(3)}
    lines = shown(gather(row(1, metrics=groups))).splitlines()
    assert len([line for line in lines if "…" in line and "norm: " in line]) == 3
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_numbers_are_whole_at_every_width(width: int) -> None:
    """On a narrow terminal the line is drawn shorter, and no number or bar is cut off or pushed to the next line."""
    metrics = {"train/grad_norm": 1.234e-12, f"train/grad_norm/{'encoder.layers.7.' * 4}": 1.234e-7}
    console = Console(file=io.StringIO(), width=width)
    rows = [row(step, metrics=metrics | {"train/grad_norm": norm}) for step, norm in ((1, 12345.678), (2, 1.234e-12))]
    console.print(overview.show(gather(*rows)))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0:2] + line.split()[3:] for line in lines if line.startswith("gradient norm")] == [
        ["gradient", "norm", "1.234e-12", "1.234e-12", "12346"]
    ]
    assert len([line for line in lines if "…" in line and line.endswith("norm: 1.234e-07")]) == 1
    assert max(map(len, lines)) <= width


def test_names_lose_what_all_begin_with() -> None:
    """The modules around all groups are named once, and the bars are as long as the norms are large."""
    norms = {"model.transformer.h.0.attn": 1.0, "model.transformer.h.1.attn": 4.0, "model.transformer.wte": 0.01}
    record = row(1)
    metrics = {name: value for name, value in record.metrics.items() if "/W_" not in name}
    metrics |= {f"train/grad_norm/{name}": norm for name, norm in norms.items()}
    text = shown(gather(dataclasses.replace(record, metrics=metrics)))
    assert "Gradient norm of each group at step 1, within model.transformer\n" in text
    assert "h.0.attn  |███         | norm: 1\n" in text
    assert "h.1.attn  |████████████| norm: 4\n" in text
    assert "wte       |█           | norm: 0.01\n" in text
    assert overview.common_prefix(norms) == "model.transformer."
    assert overview.common_prefix(["a.b", "a.b"]) == "a."
    assert overview.common_prefix(["a.b", "c"]) == overview.common_prefix(["a.b"]) == ""


def test_curves_of_analyzers_are_there() -> None:
    """What the panels of analyzers draw has a line each, the first curve of every panel before any second one."""
    names = [f"flow/curve{index}" for index in range(20)]
    panels = [Panel(title=name, section="flow", metrics=(name, f"{name}/b"), kind="multi-line") for name in names[:8]]
    metrics = {name: 1.0 for panel in panels for name in panel.metrics}
    text = shown(gather(dataclasses.replace(row(1, metrics=metrics), panels=tuple(panels))))
    found = [line.split()[0] for line in text.splitlines() if line.startswith("flow/")]
    assert found == [
        name for index in range(8) for name in (names[index], f"{names[index]}/b")[: 2 if index < 4 else 1]
    ]


def test_a_wide_terminal_has_longer_curves() -> None:
    """Where there is room a curve is drawn finer, twice as fine at the most."""
    lengths = {}
    for width in (80, 140, 300):
        console = Console(file=io.StringIO(), width=width)
        console.print(overview.show(gather(*(row(step, norm=float(step)) for step in range(1, 201)))))
        assert isinstance(console.file, io.StringIO)
        curve = next(line for line in console.file.getvalue().splitlines() if line.startswith("gradient norm"))
        lengths[width] = len(curve.split()[2])
    assert lengths == {80: 40, 140: 56, 300: 56}


def test_a_narrow_terminal_keeps_what_came_last() -> None:
    """Where not all fits, the last numbers stay whole."""
    console = Console(file=io.StringIO(), width=40)
    console.print(overview.show(gather(row(1, norm=12345.678), row(2, norm=1.234e-12))))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[3:] for line in lines if line.startswith("gradient norm")] == [["1.234e-12"]]


def test_both_ends_of_a_deep_network_are_shown() -> None:
    """Of many groups, so many over the whole depth have a bar, the first and the last among them."""
    groups = {f"train/grad_norm/block{index}": 1.0 + index for index in range(40)}
    text = shown(gather(row(1, metrics=groups)))
    assert "block0 " in text
    assert "block39" in text
    assert text.count("norm: ") == 24
    assert "and 16 more between them: see gradtrack report" in text


def test_norms_that_are_never_finite_are_told() -> None:
    """A run of NaN has no curve, and says so; a run without a loss says nothing of it."""
    text = shown(gather(row(1, norm=math.nan, loss=math.nan), row(2, norm=math.nan, loss=math.nan)))
    assert "gradient norm  never finite" in text
    assert "loss           never finite" in text
    assert "loss" not in shown(gather(row(1, loss=None)))


def test_numbers_that_are_not_of_the_last_row_name_their_step() -> None:
    """A loss, a norm and a group that end as NaN tell how old their number is, and an infinity is no gap."""
    lines = shown(gather(row(1), row(2, norm=4.0), row(3, norm=math.nan, loss=math.nan))).splitlines()
    for name, old in (
        ("loss", "█▁×  NaN (0.5 at step 2)"),
        ("gradient norm", "▁█×  NaN (4 at step 2)"),
        ("W_in", "2.4 (step 2)"),
        ("W_out", "3.2 (step 2)"),
    ):
        found = [" ".join(line.split()) for line in lines if line.startswith(f"{name} ")]
        assert [" ".join(old.split()) in line for line in found] == [True]
    fresh = shown(gather(row(1, loss=math.nan), row(2, norm=math.inf)))
    assert "(step" not in fresh
    assert " inf " in next(line for line in fresh.splitlines() if line.startswith("gradient norm "))


def test_plain_output_has_no_control_characters() -> None:
    """Without a terminal there is no colour, and a name cannot send commands to the terminal."""
    text = shown(gather(row(1, issues=[issue("\x1b[2Jlayer\r\n")])))
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    assert "\x1b[" in shown(gather(row(1)), colour=True)


def test_names_are_not_markup() -> None:
    """A name in brackets is shown as it is."""
    text = shown(gather(row(1, issues=[issue("[red]layer[/]")]), row(2, metrics={f"train/grad_norm/{HOSTILE}": 1.0})))
    assert "[red]layer[/]" in text
    assert "<script>" in text


def test_consequences_are_a_line_below_their_cause() -> None:
    """What followed is named and not advised on; an episode that is over is named with its time alone."""
    after = issue("b").model_copy(update={"explained_by": "EXPLODING:a", "message": "what b did"})
    old = issue("old", IssueType.DISCONNECTED)
    text = shown(gather(row(1, issues=[issue("a"), old]), row(2, issues=[issue("a"), after])))
    assert "Followed by EXPLODING at b" in text
    assert "what b did" not in text
    assert text.count("What to do") == 1
    assert text.index("DISCONNECTED at old  steps 1 to 2, closed") > text.index("Followed by")


@pytest.mark.parametrize("rows", [[], [row(1, loss=None, metrics={})], [row(1, norm=math.nan, loss=math.nan)]])
def test_nothing_to_show_is_no_error(rows: list[object]) -> None:
    """A run without a row, or without a number, is shown all the same."""
    assert "Run a-run" in shown(gather(*rows))  # type: ignore[arg-type]
