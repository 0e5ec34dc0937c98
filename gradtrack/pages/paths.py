"""Lists the files of a run directory, each with how to open it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from gradtrack import registry
from gradtrack.analyzers.base import Picture
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.errors import JournalError
from gradtrack.support.names import names_run

_PAGES: Final = (
    ("report.html", "browser: the whole run on one page"),
    ("training_curves.png", "image: loss, norms, non-finite values, clipping"),
    ("gradient_statistics.png", "image: variance, norm, mean, range"),
    ("gradient_flow.png", "image: the norm of each group over time"),
    ("gradient_stats.png", "image: distributions, correlation"),
)
_DATA: Final = (
    ("gradient_statistics.json", "json.load: the global statistics as lists"),
    ("gradient_statistics_weight_matrices.json", "json.load: each group as lists"),
    ("training_log.json", "json.load: configuration, summary, last steps"),
)
_WIDEST: Final = 26


def pictures_of_analyzers() -> list[Picture]:
    """Return the pictures that the built-in analyzers draw."""
    found = (registry.analyzers.load(name).picture for name in registry.analyzers.builtin())
    return [picture for picture in found if picture is not None]


@cache
def _ways() -> Mapping[str, str]:
    """Return how to open each file that a run may leave, by its name."""
    pictures = ((f"{one.name}.png", f"image: {one.about}") for one in pictures_of_analyzers())
    return dict((*_PAGES, *pictures, *_DATA))


def ways_to_open(directory: Path) -> list[tuple[Path, str]]:
    """Return the files of a run that are meant to be read, each with how to open it."""
    found = []
    for name, way in _ways().items():
        head, _, ending = name.partition(".")
        of_pairs = sorted(directory.glob(f"{head}.*.{ending}"))
        found += [(path, way) for path in (directory / name, *of_pairs) if path.is_file()]
    events = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    events = {path for path in events if not any(map(names_run, path.relative_to(directory).parts))}
    highest = sorted(path for path in events if not events & set(path.parents))
    found += [(path, f"tensorboard --logdir {quoted(path)}") for path in highest]
    offline = [path for path in (directory / "wandb").glob("offline-run-*") if path.is_dir()]
    found += [(path, f"wandb leet run {quoted(path)}, or wandb sync") for path in sorted(offline)]
    return found + list(_mlflow_stores(directory))


def way_to_open(name: str) -> str:
    """Return how to open a file of this name, of any pair, and its content; empty for an unknown name."""
    head, _, ending = name.partition(".")
    return _ways().get(f"{head}.{ending.rpartition('.')[2]}", "")


def quoted(path: Path) -> str:
    """Return a path quoted for a shell, relative if it is below the working directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def listing(directory: Path) -> list[str]:
    """Return a line for each of these files: its name within the directory, and how to open it."""
    found = [
        (str(path.relative_to(directory) if path.is_relative_to(directory) else path), way)
        for path, way in ways_to_open(directory)
    ]
    width = max((len(name) for name, _ in found if len(name) <= _WIDEST), default=0)
    return [f"{name:{width}}  {way}" for name, way in found]


def _mlflow_stores(directory: Path) -> Iterator[tuple[Path, str]]:
    """Find the local stores of MLflow that runs in a directory were written to."""
    try:
        backends = [backend for journal in find_journals(directory) for backend in journal.backends]
    except JournalError:
        return
    for uri in dict.fromkeys(str(backend["options"].get("tracking_uri", "")) for backend in backends):
        store = Path(uri.removeprefix("sqlite:///"))
        if uri.startswith("sqlite:///") and store.is_file():
            yield store, f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
