"""A HeadraceError as a message between transformer and predictor (headrace_protos/steps.proto), and back."""

from headrace import errors
from headrace.errors import HeadraceError, RequestFailedError
from headrace_protos.steps_pb2 import StepsError

_CLASSES = {
    name: error for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, HeadraceError)
}


def write_error(error: HeadraceError, this_hop: str) -> StepsError:
    """The message of an error that `this_hop` raises or passes on."""
    return StepsError(
        class_name=type(error).__name__,
        message=error.message,
        hop=error.hop or this_hop,
        retry_after_ms=error.retry_after_ms,
    )


def error_named(class_name: str, message: str) -> HeadraceError:
    """An error of the class with this name; RequestFailedError if that is unknown."""
    return _CLASSES.get(class_name, RequestFailedError)(message)


def read_error(message: StepsError) -> HeadraceError:
    """The error that a message describes; RequestFailedError if its class is unknown."""
    error = _CLASSES.get(message.class_name, RequestFailedError)
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    return error(message.message, hop=message.hop or None, retry_after_ms=retry_after_ms)
