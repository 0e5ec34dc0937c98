"""The servers that these tests share with those of the backends."""

from tests.backends.conftest import mlflow_server

__all__ = ["mlflow_server"]
