"""The page of commands: every command of the terminal with its arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main
from rich.text import Text

from gradtrack.cli import app
from reference.markdown import code, table


def page() -> str:
    """Return the page."""
    whole = typer.main.get_command(app)
    parts = [f"# Commands\n\n{_plain(whole.help)}\n\n{_plain(whole.epilog)}\n"]
    parts.append("\nErrors are one line on stderr. Every command has `--help`.\n")
    commands: dict[str, Any] = whole.commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        usage = " ".join(["gradtrack", name, *_places(command)])
        parts.append(f"\n## gradtrack {name}\n\n`{usage}`\n\n{_plain(command.help)}\n")
        rows = list(_rows(command))
        parts.append(f"\n{table(('argument', 'default', 'meaning'), rows)}" if rows else "")
        parts.append(f"\n{_after(command.epilog)}\n" if command.epilog else "")
    return "".join(parts)


def _places(command: Any) -> Iterator[str]:
    yield "[OPTIONS]"
    for param in command.params:
        if param.param_type_name == "argument":
            yield _name(param) if param.required else f"[{_name(param)}]"


def _rows(command: Any) -> Iterator[tuple[str, str, str]]:
    for param in command.params:
        argument = param.param_type_name == "argument"
        names = code(_name(param)) if argument else ", ".join(map(code, param.opts))
        flag = getattr(param, "is_flag", False)
        default = "" if flag or param.default is None or param.required else code(param.default)
        yield names, default, _plain(param.help)


def _name(param: Any) -> str:
    return str(param.metavar or param.name).upper()


def _after(text: str) -> str:
    """Return what follows the help of a command, its examples as a list."""
    parts = [re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", part) for part in text.split("\n\n")]
    lines = [f"- {part}" if part.startswith("`") else f"\n{part}\n" for part in parts]
    return "\n".join(lines).strip()


def _plain(text: str | None) -> str:
    """Take the markup of the terminal out."""
    marked = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text or "")
    return "\n\n".join(" ".join(part.split()) for part in Text.from_markup(marked).plain.split("\n\n"))
