"""The base class of all servicers of the Open Inference Protocol: methods that every server answers alike.

- `TraceSetting` and `LogSettings` (Triton's extensions) return the settings in effect in this process. Each replica is
  a process of its own: a change affects only the one that gets the call.
  - Tracing is set at the start (`OTEL_*`): `trace_mode`, `trace_level` (TIMESTAMPS or OFF), `trace_count`
    (-1: no end) and `trace_sampler`, in OpenTelemetry's terms. A request with the
    current values is answered, one that would change them is refused.
  - Log levels can be changed: `log_error`, `log_warning`, `log_info` (bool) and `log_verbose_level`
    (0, or anything else for debug) are the levels of Python's root logger, each of which takes in those
    above it. `log_file` is empty: logs go to standard error.
- Shared memory (system and CUDA) is UNIMPLEMENTED: clients share none with a server behind a gateway.

What is refused raises InvalidRequestError. Source of the names: Triton's trace and logging extensions.
"""
# The methods' names are the protocol's.

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from opentelemetry import trace

from headrace.errors import InvalidRequestError, NotImplementedMethodError
from headrace.rpc import Context
from headrace.telemetry.setup import exports
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc

logger = logging.getLogger(__name__)

_LEVELS = {"log_error": logging.ERROR, "log_warning": logging.WARNING, "log_info": logging.INFO}
_VERBOSE = "log_verbose_level"
_LOG_FIELDS = {"log_file": "string_param", _VERBOSE: "uint32_param", **dict.fromkeys(_LEVELS, "bool_param")}


class OpenInferenceBase(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """See the module. A subclass answers everything else."""

    def check_model(self, name: str) -> None:
        """Raises NotFoundError where there is no such model; for settings that name one."""

    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        if request.model_name:
            self.check_model(request.model_name)
        in_force = trace_settings()
        for name, setting in request.settings.items():
            if name not in in_force:
                raise InvalidRequestError(f"unknown trace setting {name!r}; there are {', '.join(in_force)}")
            # A request without a value asks for the default, which is always in effect.
            if setting.value and list(setting.value) != [in_force[name]]:
                raise InvalidRequestError(f"{name} is {in_force[name]} and cannot be changed while the server runs")
        values = {name: pb.TraceSettingResponse.SettingValue(value=[value]) for name, value in in_force.items()}
        return pb.TraceSettingResponse(settings=values)

    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        root = logging.getLogger()
        if request.settings:
            level = _level_of(log_settings(root.level) | _given(request.settings))
            if level != root.level:
                logger.warning("the log level is %s from now on", logging.getLevelName(level))
                root.setLevel(level)
        value = pb.LogSettingsResponse.SettingValue
        return pb.LogSettingsResponse(
            settings={
                name: value(**{_LOG_FIELDS[name]: setting})  # type: ignore[arg-type]  # The field fits the name.
                for name, setting in log_settings(root.level).items()
            }
        )

    async def _refuse_shared_memory(self, request: Any, context: Context) -> NoReturn:
        raise NotImplementedMethodError("shared memory is not supported; send tensors in the request")

    SystemSharedMemoryStatus = SystemSharedMemoryRegister = SystemSharedMemoryUnregister = _refuse_shared_memory
    CudaSharedMemoryStatus = CudaSharedMemoryRegister = CudaSharedMemoryUnregister = _refuse_shared_memory


def trace_settings() -> dict[str, str]:
    sampler = getattr(trace.get_tracer_provider(), "sampler", None)
    return {
        "trace_mode": "opentelemetry",
        "trace_level": "TIMESTAMPS" if exports("TRACES") else "OFF",
        "trace_count": "-1",
        "trace_sampler": "none" if sampler is None else sampler.get_description(),
    }


def log_settings(level: int) -> dict[str, bool | int | str]:
    """Triton's settings for a level of Python's."""
    return {
        "log_file": "",
        **{name: level <= least for name, least in _LEVELS.items()},
        _VERBOSE: int(level <= logging.DEBUG),
    }


def _given(settings: Mapping[str, Any]) -> dict[str, bool | int | str]:
    values: dict[str, bool | int | str] = {}
    for name, setting in settings.items():
        if name not in _LOG_FIELDS:
            raise InvalidRequestError(f"unknown log setting {name!r}; there are {', '.join(_LOG_FIELDS)}")
        field = setting.WhichOneof("parameter_choice")
        if field != _LOG_FIELDS[name]:
            raise InvalidRequestError(f"log setting {name!r} needs {_LOG_FIELDS[name]}, not {field or 'nothing'}")
        values[name] = getattr(setting, field)
    return values


def _level_of(wanted: Mapping[str, bool | int | str]) -> int:
    """Python's level for the settings."""
    if wanted["log_file"]:
        raise InvalidRequestError("log_file cannot be set: logs go to standard error")
    if not wanted["log_error"]:
        raise InvalidRequestError("log_error cannot be off")
    level = logging.ERROR
    for name, lower, above in (
        ("log_warning", logging.WARNING, "log_error"),
        ("log_info", logging.INFO, "log_warning"),
        (_VERBOSE, logging.DEBUG, "log_info"),
    ):
        if wanted[name]:
            if not wanted[above]:
                raise InvalidRequestError(f"{name} cannot be on while {above} is off")
            level = lower
    return level
