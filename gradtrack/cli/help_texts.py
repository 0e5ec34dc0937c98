"""What the help of the command line tells besides arguments and options: examples, and what the exit codes mean."""

from __future__ import annotations

from typing import Final

EPILOG: Final = (
    "Exit codes: 0 done; 1 done, but the run is unhealthy (show --check), issues appeared (diff --check), "
    "rows are still missing (replay) or a backend cannot be used (doctor); 2 wrong usage or an input that cannot be "
    "used: one line on stderr says why; 130 interrupted; 141 the reader of the output has gone."
    "\n\n[bold]gradtrack COMMAND --help[/bold] has examples; "
    "[bold]gradtrack --install-completion[/bold] completes commands and options in your shell."
)
"""What follows the list of all commands."""

# What the help of each command shows, and when the command ends with another code than 0 or 2.
_EXAMPLES: Final = {
    "demo": ("gradtrack demo", "gradtrack demo --steps 60 --out my_first_run"),
    "show": (
        "gradtrack show",
        "gradtrack show gradtrack_runs/exp1 --follow",
        "gradtrack show exp1 --check && ./deploy",
    ),
    "report": ("gradtrack report", "gradtrack report gradtrack_runs/exp1 --out exp1.html"),
    "diff": ("gradtrack diff good_run bad_run", "gradtrack diff good_run bad_run --html diff.html --check"),
    "replay": ("gradtrack replay exp1", "gradtrack replay exp1 --to mlflow --tracking-uri http://127.0.0.1:5000"),
    "doctor": ("gradtrack doctor", "gradtrack doctor gradtrack.yaml --json"),
    "backends": ("gradtrack backends", "gradtrack backends --json"),
    "analyzers": ("gradtrack analyzers", "gradtrack analyzers --json"),
}
_CODES: Final = {
    "show": "with --check the run is unhealthy",
    "diff": "with --check an issue appeared",
    "replay": "rows are still missing",
    "doctor": "a backend cannot be used",
}


def epilog(command: str) -> str:
    """Return what follows the help of a command; an empty line is a line break there."""
    lines = ["Examples:", *(f"[bold]{example}[/bold]" for example in _EXAMPLES[command])]
    if command in _CODES:
        lines += [f"Exit codes: 0 done; 1 {_CODES[command]}; 2 wrong usage or input."]
    return "\n\n".join(lines)
