"""Text from other people's files made fit for a terminal."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Keep a text on one line, and out of it what controls a terminal or turns round the direction of writing."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
