"""Processors of the user's own: `name=package.module:Class` or `name=folder/file.py:Class`, imported and run.

See headrace/processor.py for the interface. An invalid processor raises StartupError at the start, with one line. Plain
methods run on a pool's threads, async ones on the event loop; their exceptions become HeadraceErrors. A method that the
class has not overridden passes everything on at once.
"""

import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace import plugins
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, RequestFailedError, StartupError
from headrace.models.sources import is_name
from headrace.oip.model_description import declared
from headrace.oip.tensors import Array, RawTensor, Tensor
from headrace.processor import Processor, ProcessorRequest
from headrace.python_tensors import BadResultError, as_mapping, as_tensor
from headrace.rpc.limits.admission import caller_of_call
from headrace.threads import FairThreads

logger = logging.getLogger(__name__)

_ENTRY = re.compile(r"(?P<name>[^=]+)=(?P<where>[^:=]+):(?P<cls>[A-Za-z_]\w*)")
# What a processor has inherited, which takes less than a change of threads.
_PASSING_ON = (Processor.preprocess, Processor.postprocess)
_PASSED = "the deadline passed in the processor"


@dataclass(frozen=True)
class ProcessorSource:
    """A name, and the class behind it; `where` is a module or a file that ends in .py."""

    name: str
    where: str
    class_name: str


def parse_processors(text: str) -> tuple[ProcessorSource, ...]:
    """The processors in a setting; raises ValueError with what is malformed."""
    sources: list[ProcessorSource] = []
    for item in (item.strip() for item in text.split(",") if item.strip()):
        match = _ENTRY.fullmatch(item)
        if match is None or not is_name(match["name"]):
            raise ValueError(f"{item!r} is not name=package.module:Class or name=folder/file.py:Class")
        if any(source.name == match["name"] for source in sources):
            raise ValueError(f"names {match['name']!r} twice")
        sources.append(ProcessorSource(match["name"], match["where"], match["cls"]))
    return tuple(sources)


class RunningProcessor:
    """One processor; `model` is the predictor's that it calls. Its methods raise HeadraceError."""

    def __init__(self, source: ProcessorSource, pool: FairThreads) -> None:
        self.name = source.name
        self._pool = pool
        self._processor = _made(source)
        self.model = self._processor.model or source.name
        self.inputs = declared(self._processor.inputs, f"processor {self.name}: inputs")
        self.outputs = declared(self._processor.outputs, f"processor {self.name}: outputs")

    async def load(self) -> None:
        """Runs the processor's own `load`; raises StartupError."""
        try:
            await self._call(self._processor.load)
        except Exception as error:
            logger.debug("processor %s: load() failed", self.name, exc_info=True)
            raise StartupError(f"processor {self.name}: load() failed: {_in_one_line(error)}") from None

    async def preprocess(self, request: ProcessorRequest, deadline: Deadline) -> list[tuple[str, Tensor | RawTensor]]:
        """The named tensors that go to the model."""
        return await self._tensors(self._processor.preprocess, deadline, request)

    async def postprocess(
        self, request: ProcessorRequest, outputs: Mapping[str, Array], deadline: Deadline
    ) -> list[tuple[str, Tensor | RawTensor]]:
        """The named tensors that go to the caller."""
        return await self._tensors(self._processor.postprocess, deadline, request, outputs)

    async def _tensors(
        self, method: Callable[..., Any], deadline: Deadline, *arguments: Any
    ) -> list[tuple[str, Tensor | RawTensor]]:
        try:
            if getattr(method, "__func__", None) in _PASSING_ON:
                result = method(*arguments)
            else:
                async with deadline.scope(_PASSED):
                    result = await self._call(method, *arguments)
            result = as_mapping(result, "the processor")
            return [(name, as_tensor(name, value, "the processor")) for name, value in result.items()]
        except HeadraceError:
            raise
        except BadResultError as error:
            logger.error("processor %s: %s", self.name, error)
            raise RequestFailedError(str(error)) from None
        except Exception:
            logger.exception("processor %s failed", self.name)
            raise RequestFailedError("the processor failed on this request") from None

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await self._pool.run(caller_of_call(), _without_exits, method, *arguments)


def _without_exits(method: Callable[..., Any], *arguments: Any) -> Any:
    """Converts exits to errors: a user's code can end only its own request."""
    try:
        return method(*arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the code raised {type(error).__name__}") from error


def _made(source: ProcessorSource) -> Processor:
    where = f"processor {source.name}: {source.where}"
    try:
        module = _module(source)
        made = getattr(module, source.class_name)()
    except AttributeError as error:
        raise StartupError(f"{where} has no class {source.class_name}: {error}") from None
    except Exception as error:
        logger.debug("%s cannot be imported", where, exc_info=True)
        raise StartupError(f"{where} cannot be imported: {_in_one_line(error)}") from None
    if not isinstance(made, Processor):
        raise StartupError(f"{where}: {source.class_name} is not a subclass of headrace.processor.Processor")
    return made


def _module(source: ProcessorSource) -> ModuleType:
    plugins.search()
    if not source.where.endswith(".py"):
        return importlib.import_module(source.where)
    # Hexadecimal, because a name may have characters that a module's cannot.
    name = f"headrace_processor_{source.name.encode().hex()}"
    spec = importlib.util.spec_from_file_location(name, Path(source.where))
    if spec is None or spec.loader is None:
        raise ImportError(f"{source.where} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
