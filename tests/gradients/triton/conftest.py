"""Triton reads `TRITON_INTERPRET` when it is imported, so one process interprets kernels and another compiles them."""

from tests.training import INTERPRETED

collect_ignore = ["test_interpreter.py", "test_compilation.py"] if INTERPRETED else ["test_engine.py", "test_steps.py"]
