"""The colours of the page, as WCAG measures them."""

from __future__ import annotations

import re
from importlib import resources

import pytest

STYLE = (resources.files("gradtrack.pages") / "templates" / "report.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"(--\w+): (#\w+)", STYLE.split("@media")[0]))
DARK = LIGHT | dict(re.findall(r"(--\w+): (#\w+)", STYLE.split(":root[data-theme=dark] {")[1].split("}")[0]))
PRINT = dict(re.findall(r"(--\w+): (#\w+)", STYLE.split("@media print")[1]))


def luminance(colour: str) -> float:
    """Return how bright a colour is."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
def test_texts_and_lines_stand_out(palette: dict[str, str]) -> None:
    """Every text has a contrast of 4.5 on both grounds, and every line one of 3 on its card."""
    for ground in ("--ground", "--card"):
        assert {name for name in ("--ink", "--quiet", "--good", "--bad", "--c0")
                if contrast(palette[name], palette[ground]) < 4.5} == set()  # fmt: skip
    lines = [f"--c{index}" for index in range(6)]
    assert {name for name in (*lines, "--event") if contrast(palette[name], palette["--card"]) < 3} == set()
    assert len({palette[name] for name in lines}) == 6


def test_both_ways_to_be_dark_are_the_same() -> None:
    """A system that is dark and a reader who chose it see the same colours."""
    asked = dict(re.findall(r"(--\w+): (#\w+)", STYLE.split("prefers-color-scheme: dark")[1].split("}")[0]))
    assert LIGHT | asked == DARK
