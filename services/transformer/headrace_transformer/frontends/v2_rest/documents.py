"""JSON bodies of the other paths: the protocol's messages as JSON, and back.

Names and shapes are Triton's: fields by their names in the .proto files, whole numbers of 64 bits as numbers,
enumerations by name. A message that is not set is left out; in statistics it is all zeros.

Source: Triton's extensions for model configuration, repository, statistics, trace and logging, and the bodies that
tritonclient.http sends and reads.
"""

import base64
from typing import Any, TypeVar

from google.protobuf.message import Message

from headrace.clients import Client
from headrace.errors import InvalidRequestError, TooLargeError
from headrace.oip.json_text import load_object
from headrace_protos import inference_pb2 as pb
from headrace_transformer.predictors.link.link import PredictorLink

MAX_DOCUMENT_BYTES = 64 * 1024  # More than any settings take; parsed on the event loop.
_FILE = "file:"
_TRACE_LEVEL = "trace_level"

LoadT = TypeVar("LoadT", pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest)


def predictor(link: PredictorLink, client: Client) -> dict[str, Any]:
    """A predictor of ours; for each model that is ready there and that the client may use, its latest report of the
    load."""
    models = [
        {
            "model": load.model,
            "running": load.running,
            "waiting": load.waiting,
            "waiting_tokens": load.waiting_tokens,
            "cache_free": round(load.cache_free, 4),
        }
        for load in link.loads.values()
        if client.may_use(load.model)
    ]
    return {"name": link.name, "ready": bool(link.loads), "leaving": link.is_leaving, "models": models}


def plain(message: Message, unset: bool = False) -> dict[str, Any]:
    """A message as JSON has it; with `unset`, messages inside it that are not set are there too."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            values[field.name] = {str(key): _plain_value(inner, value[key], unset) for key in value}
        elif field.is_repeated:
            values[field.name] = [_plain_value(field, item, unset) for item in value]
        elif not field.has_presence or message.HasField(field.name) or (unset and field.message_type is not None):
            values[field.name] = _plain_value(field, value, unset)
    return values


def _plain_value(field: Any, value: Any, unset: bool) -> Any:
    if field.message_type is not None:
        return plain(value, unset)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def index_of(response: pb.RepositoryIndexResponse) -> list[dict[str, str]]:
    """The models of a repository; unknown fields are left out."""
    return [{name: value for name, value in plain(model).items() if value} for model in response.models]


def index_request(data: bytes) -> pb.RepositoryIndexRequest:
    ready = _document(data).get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidRequestError("ready must be true or false")
    return pb.RepositoryIndexRequest(ready=ready)


def repository_request(kind: type[LoadT], model: str, data: bytes) -> LoadT:
    """The request to load or unload a model, with the parameters in a body; those of files are contents in base64."""
    request = kind(model_name=model)
    given = _document(data).get("parameters") or {}
    if not isinstance(given, dict):
        raise InvalidRequestError("parameters must be an object")
    for name, value in given.items():
        parameter = request.parameters[name]
        if name.startswith(_FILE):
            try:
                parameter.bytes_param = base64.b64decode(value, validate=True)
            except (TypeError, ValueError):
                raise InvalidRequestError(f"parameter {name!r} must be a file's contents in base64") from None
        else:
            refusal = f"parameter {name!r} must be true, false, a string or a whole number"
            _set_scalar(parameter, "int64_param", value, refusal)
    return request


def trace_request(model: str, data: bytes) -> pb.TraceSettingRequest:
    """The settings that a body changes; null resets a setting to its default."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in _document(data).items():
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, (str, int)) and not isinstance(item, bool) for item in items):
            raise InvalidRequestError(
                f"trace setting {name!r} must be a string, a whole number, null or a list of them"
            )
        request.settings[name].value.extend(map(str, items))
    return request


def trace_settings(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """The level is a list, the others are one string each."""
    return {
        name: list(setting.value) if name == _TRACE_LEVEL else ",".join(setting.value)
        for name, setting in response.settings.items()
    }


def log_request(data: bytes) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    for name, value in _document(data).items():
        refusal = f"log setting {name!r} must be true, false, a string or a number of 32 bits"
        _set_scalar(request.settings[name], "uint32_param", value, refusal)
    return request


def log_settings(response: pb.LogSettingsResponse) -> dict[str, Any]:
    return {
        name: getattr(setting, choice)
        for name, setting in response.settings.items()
        if (choice := setting.WhichOneof("parameter_choice")) is not None
    }


def _set_scalar(target: Any, whole: str, value: Any, refusal: str) -> None:
    """Sets the field of a parameter that a value in JSON belongs in; whole numbers fit the field `whole`, or not."""
    field = {bool: "bool_param", int: whole, str: "string_param"}.get(type(value), "")
    try:
        setattr(target, field, value)
    except (AttributeError, ValueError):
        raise InvalidRequestError(refusal) from None


def _document(data: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises InvalidRequestError, and TooLargeError by only its size."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise TooLargeError(f"the body has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are allowed here")
    return load_object(data)
