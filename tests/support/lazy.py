"""Modules that are imported with their first use: each worker of a run reads all tests, and few run these."""

from importlib import import_module
from typing import Any


class Lazy:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks for such of each name in a module of tests.
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


# sentence-transformers takes seconds of a core.
library, parts = Lazy("sentence_transformers"), Lazy("sentence_transformers.sentence_transformer.modules")
