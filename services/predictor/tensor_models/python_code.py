"""A user's `model.py`: its import, its `execute` and its hooks, and what it declares of its tensors.

Raises StartupError in one line where the file cannot be used. The folder is the file's package, so
that `from . import other` finds what lies beside it.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from millrace.errors import InvalidRequestError, StartupError
from millrace.model_kinds import PYTHON_FILE
from millrace.tensors import DATATYPES, RawTensor
from services.predictor.served_model import TensorSpec

logger = logging.getLogger(__name__)


class PythonCode:
    """The imported file. `execute` is an async function, or an async generator where `streams` is true.

    `inputs` and `outputs` are None where the file does not declare them.
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
        """Runs the file's `unload()`, if it has one; what it raises is logged."""
        hook = getattr(self._module, "unload", None)
        if hook is not None:
            try:
                await hook()
            except (Exception, SystemExit, KeyboardInterrupt):
                logger.exception("model %s: unload() failed", self._name)

    def _import(self) -> ModuleType:
        # Hexadecimal, because a model's name may hold what a module's must not.
        module_name = f"millrace_model_{self._name.encode().hex()}"
        spec = importlib.util.spec_from_file_location(
            module_name, self._path, submodule_search_locations=[str(self._path.parent)]
        )
        if spec is None or spec.loader is None:
            raise StartupError(f"model {self._name}: {self._path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            self._refuse("cannot be imported", error)
        return module

    def _declared(self, attribute: str) -> Sequence[TensorSpec] | None:
        declared = getattr(self._module, attribute, None)
        if declared is None:
            return None
        try:
            specs = [
                TensorSpec(name, datatype, [int(size) for size in shape])
                for name, (datatype, shape) in declared.items()
            ]
            malformed = not all(isinstance(spec.name, str) and spec.datatype in DATATYPES for spec in specs)
        except (AttributeError, TypeError, ValueError):
            malformed = True
        if malformed:
            raise StartupError(
                f'model {self._name}: {attribute} of {self._path} must look like {{"name": ("FP32", [-1, 3])}}'
            )
        return specs

    def _refuse(self, what: str, error: BaseException) -> NoReturn:
        """Says in one line what the file raised, and where."""
        logger.debug("model %s: %s", self._name, what, exc_info=error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._path)]
        where = f", line {lines[-1]}" if lines else ""
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise StartupError(f"model {self._name}: {self._path}{where} {what}: {text}") from None


def check_inputs(tensors: Mapping[str, RawTensor], declared: Sequence[TensorSpec]) -> None:
    """Refuses inputs that are not those declared."""
    specs = {spec.name: spec for spec in declared}
    for name, tensor in tensors.items():
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequestError(f"unknown input {name!r}; the model takes {', '.join(specs)}")
        if tensor.datatype != spec.datatype:
            raise InvalidRequestError(f"input {name!r} must be {spec.datatype}, not {tensor.datatype}")
        fits = all(size in (-1, given) for size, given in zip(spec.shape, tensor.shape, strict=False))
        if len(spec.shape) != len(tensor.shape) or not fits:
            raise InvalidRequestError(
                f"input {name!r} must have shape {list(spec.shape)}, not {list(tensor.shape)}; -1 is any size"
            )
    for name in specs:
        if name not in tensors:
            raise InvalidRequestError(f"input {name!r} is missing")
