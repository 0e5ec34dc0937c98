"""`make test-fast` runs the tests that start nothing and take no seconds, and the others run after them."""

import sys
from pathlib import Path

import pytest

from tests.selection import LONG, PROCESS, marks_of

ROOT = Path(__file__).parent.parent
pytest_plugins = ("pytester",)


@pytest.mark.parametrize("entry", [*PROCESS, *LONG])
def test_an_entry_names_a_test(entry: str) -> None:
    """What was renamed or removed leaves the list."""
    path, _, function = entry.partition("::")
    function = function.rpartition("::")[2]
    assert (ROOT / path).exists(), f"remove {entry} from tests/selection.py"
    assert not function or f"def {function}(" in (ROOT / path).read_text(), f"rename or remove {entry}"


def test_a_test_is_marked_by_its_folder_file_or_function() -> None:
    """An entry holds for everything in it, and for nothing that only begins alike."""
    assert marks_of("tests/faults/test_ends.py::test_one[x]") == ["process"]
    assert marks_of("tests/faults_of_others/test_ends.py::test_one") == []
    assert marks_of("tests/test_import.py::test_import_loads_nothing") == ["process"]


def test_a_test_that_starts_a_process_has_to_be_marked(pytester: pytest.Pytester) -> None:
    """The message says where the mark is set."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(f"import subprocess\ndef test_one():\n    subprocess.run([{sys.executable!r}, '-c', ''])")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*expected a test marked process. Add it to PROCESS in tests/selection.py.*"])
