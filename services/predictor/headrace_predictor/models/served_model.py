"""The contract of every served model.

`infer` answers a request with one response, `stream` with any number of them, each with the parameter
`triton_final_response`. Both raise HeadraceError. Cancelling `infer` or closing the generator of `stream` cancels the
request. Both run on the event loop and never block it. A model that cannot be loaded raises
StartupError with one line of text.
"""

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from headrace.clients import ANYONE, Client
from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import StartupError
from headrace.oip.model_description import ModelDescription
from headrace_predictor.engine.interface import RequestCounts
from headrace_protos import inference_pb2 as pb

logger = logging.getLogger(__name__)

Responses = AsyncGenerator[pb.ModelInferResponse, None]
VERSION = "1"  # Every model has this one version.


@dataclass(frozen=True)
class Caller:
    """The caller of a request: what it may use, and how long it waits."""

    client: Client = ANYONE
    deadline: Deadline = NO_DEADLINE
    first_token_timeout_s: float | None = None


ANY_CALLER = Caller()


class ServedModel(Protocol):
    name: str
    description: ModelDescription
    statistics: RequestCounts

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        """Returns the one response to a request."""

    def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        """Yields the responses to a request as they become available."""

    def hand_back(self) -> None:
        """Ends with DrainingError every sequence that can resume elsewhere; most models have none."""
        return

    async def warm_up(self) -> None:
        """Runs the model once; raises StartupError if it does not work."""

    async def died(self) -> None:
        """Waits until the model can serve no more, possibly for ever; then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the model; requests in flight end with NotReadyError (HopBrokenError if it has died).

        Blocks for seconds at most.
        """


@contextmanager
def as_startup_error(model: str) -> Iterator[None]:
    """Converts any error to a StartupError, whose context it is: damaged files raise errors of many types."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        logger.debug("model %s cannot be loaded", model, exc_info=True)
        text = str(error).strip() or type(error).__name__
        raise StartupError(f"model {model} cannot be loaded: {text.splitlines()[0]}") from None
