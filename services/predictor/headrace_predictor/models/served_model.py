"""The contract of every served model.

`infer` answers a request with one response, `stream` with any number of them, each with the parameter
`triton_final_response`. Both raise HeadraceError. Cancelling `infer` or closing the generator of `stream` cancels the
request. Both run on the event loop and never block it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from headrace.clients import ANYONE, Client
from headrace.deadline import NO_DEADLINE, Deadline
from headrace.oip.model_description import ModelDescription
from headrace_predictor.counts import RequestCounts
from headrace_protos import inference_pb2 as pb

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
    @property
    def name(self) -> str: ...

    @property
    def description(self) -> ModelDescription: ...

    @property
    def statistics(self) -> RequestCounts: ...

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        """Returns the one response to a request."""

    def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        """Yields the responses to a request as they become available."""

    def hand_back(self) -> None:
        """Ends with DrainingError every sequence that can resume elsewhere."""

    async def warm_up(self) -> None:
        """Runs the model once; raises StartupError if it does not work."""

    async def died(self) -> None:
        """Waits until the model can serve no more, possibly for ever; then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the model; requests in flight end with NotReadyError. Blocks for seconds at most."""
