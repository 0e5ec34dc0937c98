"""The page of Python names: what `gradtrack` offers, and what errors it raises."""

from __future__ import annotations

import inspect
from types import ModuleType

import gradtrack
from gradtrack import errors
from reference.markdown import code, table

_HEAD = """# Python names

What `from gradtrack import ...` offers. Each name is loaded when it is first used, so that the import alone loads
neither torch nor a tracker. `help(name)` has the parameters, and the docstrings of analyzers their formulas, costs and
references.
"""


def page() -> str:
    """Return the page."""
    public = [name for name in gradtrack.__all__ if not name.startswith("__")]
    kinds: dict[str, list[tuple[str, str]]] = {"Classes": [], "Functions": []}
    for name in public:
        value = getattr(gradtrack, name)
        kinds["Classes" if inspect.isclass(value) else "Functions"].append((name, _sentence(value)))
    parts = [_HEAD]
    for title, found in kinds.items():
        rows = [(code(name), sentence) for name, sentence in sorted(found)]
        parts.append(f"\n## {title}\n\n{table(('name', 'what it is' if title == 'Classes' else 'what it does'), rows)}")
    tree = _tree(errors)
    return "".join([*parts, f"\n## Errors\n\nAll are in `gradtrack.errors`.\n\n```text\n{tree}\n```\n"])


def _sentence(value: object) -> str:
    """Return the first sentence of a docstring."""
    first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "."


def _tree(module: ModuleType) -> str:
    """Take the picture of the tree from the module's docstring."""
    return (inspect.getdoc(module) or "").split("```")[1].strip()
