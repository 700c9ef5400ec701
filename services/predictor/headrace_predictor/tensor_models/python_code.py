"""A user's `model.py`: imports it and finds its `execute`, its hooks and its tensor declarations.

Raises StartupError with one line of text if the file cannot be used. The folder becomes the file's package, so that
`from . import other` imports files beside it.
"""

import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from headrace import plugins
from headrace.errors import StartupError
from headrace.models.kinds import PYTHON_FILE
from headrace.oip.model_description import TensorSpec, declared

logger = logging.getLogger(__name__)

_imports = count()


class PythonCode:
    """The imported file. `execute` is an async function, or an async generator if `streams` is true.

    `inputs` and `outputs` are None if the file does not declare them.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._path = folder / PYTHON_FILE
        self._module = self._import()
        execute = getattr(self._module, "execute", None)
        self.streams = inspect.isasyncgenfunction(execute)
        if execute is None or not (self.streams or inspect.iscoroutinefunction(execute)):
            raise StartupError(f"model {name}: {self._path} has no `async def execute(request)`")
        self.execute: Callable[[Any], Coroutine[Any, Any, Any] | AsyncGenerator[Any, None]] = execute
        self.inputs = self._declared("INPUTS")
        self.outputs = self._declared("OUTPUTS")

    async def load(self) -> None:
        """Runs the file's `load(folder)`, if it has one."""
        hook = getattr(self._module, "load", None)
        if hook is not None:
            try:
                await hook(self._path.parent)
            except BaseException as error:
                self._refuse("load() failed", error)

    async def unload(self) -> None:
        """Runs the file's `unload()`, if it has one; logs its exceptions."""
        hook = getattr(self._module, "unload", None)
        if hook is not None:
            try:
                await hook()
            except (Exception, SystemExit, KeyboardInterrupt):
                logger.exception("model %s: unload() failed", self._name)

    def _import(self) -> ModuleType:
        # Hexadecimal, because a model's name may contain characters that a module's must not; numbered, because the
        # model that this one replaces may still be running.
        module_name = f"headrace_model_{self._name.encode().hex()}_{next(_imports)}"
        plugins.search()
        importlib.invalidate_caches()  # Files beside it may be new.
        spec = importlib.util.spec_from_file_location(
            module_name,
            self._path,
            loader=_FreshLoader(module_name, str(self._path)),
            submodule_search_locations=[str(self._path.parent)],
        )
        if spec is None or spec.loader is None:
            raise StartupError(f"model {self._name}: {self._path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            _forget(module_name)
            self._refuse("cannot be imported", error)
        return module

    def forget(self) -> None:
        """Removes the file's modules from `sys.modules`."""
        _forget(self._module.__name__)

    def _declared(self, attribute: str) -> Sequence[TensorSpec] | None:
        return declared(getattr(self._module, attribute, None), f"model {self._name}: {attribute} of {self._path}")

    def _refuse(self, what: str, error: BaseException) -> NoReturn:
        """Raises a StartupError that states in one line which error the file raised, and where."""
        logger.debug("model %s: %s", self._name, what, exc_info=error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._path)]
        where = f", line {lines[-1]}" if lines else ""
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise StartupError(f"model {self._name}: {self._path}{where} {what}: {text}") from None


class _FreshLoader(SourceFileLoader):
    """Ignores cached bytecode: its time stamps cannot distinguish two versions of a file within one second."""

    def path_stats(self, path: Any) -> Any:
        raise OSError


def _forget(module_name: str) -> None:
    for name in [name for name in sys.modules if name == module_name or name.startswith(f"{module_name}.")]:
        del sys.modules[name]
