"""The house: where files may be, how long and how many, and that each analyzer's folder can be deleted."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import gradtrack
from gradtrack import registry
from tests.processes import python

PACKAGE: Final = Path(gradtrack.__file__).parent
ANALYZERS: Final = registry.analyzers.builtin()

MOST_MODULES_AT_THE_TOP: Final = 8
MOST_FILES: Final = 235
MOST_LINES: Final = 400
LONGER: Final = {"gradients/native/kernels.py": "numba's cache looks at one file: a change of any kernel makes it anew"}
PUBLIC: Final = "the lazy public names of the package"
ALLOWED: Final = {
    ("__init__.py", name): PUBLIC
    for name in (
        *("flow", "gain", "jacobian", "loss_graph", "precision"),
        *("recurrent", "rl_policy", "transformer", "updates", "vector"),
    )
} | {
    ("analyzers/flow/__init__.py", "jacobian"): "`enable_jacobian` of flow runs it, by its name in the registry",
    ("analyzers/flow/__init__.py", "recurrent"): "`enable_rnn_analyzer` of flow runs it, by its name in the registry",
    ("analyzers/flow/__init__.py", "vector"): "`enable_vector_analysis` of flow runs it, by its name in the registry",
    ("analyzers/jacobian/report.py", "gain"): "the heading of a column: the gain of a block",
    ("analyzers/recurrent/__init__.py", "flow"): "its offline analysis adds that of flow, by its name in the registry",
}
"""Where an analyzer is named outside of its folder, and why."""

WITHOUT = """
import importlib, json, os, pkgutil, sys, tempfile

copies, names = sys.argv[1], sys.argv[2:]
os.environ["NUMBA_DISABLE_JIT"] = "1"  # else the kernels of each copy are compiled; they say so, and are passed over
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)

class PolicyNetwork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block(), Block())
        self.rnn = torch.nn.LSTM(4, 4, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        x = self.rnn(self.blocks(x))[0]
        return self.attention(x, x, x)[0]

def work(name):
    sys.path[:] = [os.path.join(copies, name), *(path for path in sys.path if not path.startswith(copies))]
    os.chdir(tempfile.mkdtemp(dir=copies))
    import gradtrack
    assert gradtrack.__file__.startswith(copies), gradtrack.__file__
    broken = []
    for found in pkgutil.walk_packages(gradtrack.__path__, "gradtrack."):
        try:
            importlib.import_module(found.name)
        except Exception as fault:
            if "NUMBA_DISABLE_JIT" in str(fault):
                continue
            broken.append(f"{found.name}: {type(fault).__name__}: {fault}")
    model = PolicyNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradtrack.GradientManager(analyzers="auto", backends=["memory"], engine="torch") as manager:
        for _ in range(2):
            optimizer.zero_grad()
            report = gradtrack.safe_backward(model(torch.ones(2, 3, 4)).square().mean(), model, optimizer, manager)
            optimizer.step()
        chosen = [note.split()[1] for note in manager.reports[0].notes if " was chosen: " in note]
    return {"broken": broken, "step": report.step, "chosen": chosen}

for name in names:
    for module in [known for known in sys.modules if known.partition(".")[0] == "gradtrack"]:
        del sys.modules[module]
    try:
        answer = work(name)
    except Exception as fault:
        answer = {"broken": [f"{type(fault).__name__}: {fault}"]}
    with open(os.path.join(copies, name + ".json"), "w") as file:
        json.dump(answer, file)
"""
AUTO: Final = {"flow", "gain", "loss_graph", "recurrent", "rl_policy", "transformer", "updates"}
"""The analyzers that `auto` chooses for that network."""


def test_at_most_eight_modules_lie_at_the_top() -> None:
    """A part of a feature lies in the folder of the feature, not at the top."""
    found = [path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("_")]
    assert len(found) <= MOST_MODULES_AT_THE_TOP, found


def test_the_package_has_few_files() -> None:
    """A file ends where an idea ends: files that are always read together are one."""
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert len(files) <= MOST_FILES


def test_no_file_is_long() -> None:
    """A file that has more lines has two reasons to change."""
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, count in lines.items() if count > MOST_LINES} == LONGER.keys()


def named(tree: ast.AST) -> Iterator[str]:
    """Yield the analyzers that a file names: a text that is a name, the way to its module, or a part of an import."""
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [node.value]
        elif isinstance(node, ast.Import):
            texts = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            texts = [f"{node.module}.{alias.name}" for alias in node.names]
        for text in texts:
            parts = text.removeprefix("gradtrack.").split(".")
            if len(parts) > 1 and parts[0] == "analyzers":
                parts = parts[1:2]
            if len(parts) == 1 and parts[0] in ANALYZERS:
                yield parts[0]


def test_nothing_names_an_analyzer_outside_of_its_folder() -> None:
    """An analyzer is known by its folder alone; where it is named elsewhere, there is a reason."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        own = name.split("/")[1] if name.startswith("analyzers/") else ""
        found |= {(name, analyzer) for analyzer in named(ast.parse(path.read_text())) if analyzer != own}
    assert found == ALLOWED.keys()


@cache
def without_each(copies: Path) -> dict[str, dict[str, object]]:
    """Delete the folder of each analyzer from a copy of the package, and use the copy."""
    for name in ANALYZERS:
        shutil.copytree(PACKAGE, copies / name / "gradtrack")
        shutil.rmtree(copies / name / "gradtrack" / "analyzers" / name)
    ended = python("-W", "ignore", "-c", WITHOUT, str(copies), *ANALYZERS)
    assert ended.returncode == 0, ended.stderr
    return {name: json.loads((copies / f"{name}.json").read_text()) for name in ANALYZERS}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for all copies of the package."""
    return tmp_path_factory.mktemp("copies")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYZERS)
def test_the_folder_of_an_analyzer_can_be_deleted(name: str, copies: Path) -> None:
    """Every other module still imports, and `auto` chooses among the analyzers that are left."""
    answer = without_each(copies)[name]
    assert answer["broken"] == []
    assert answer["step"] == 2
    assert set(str(answer["chosen"]).strip("[]").replace("'", "").split(", ")) == AUTO - {name}
