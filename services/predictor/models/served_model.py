"""The contract of every served model.

`infer` answers a request with one response, `stream` with any number of them, each with the parameter
`triton_final_response`. Both raise MillraceError. Cancelling `infer` or closing the generator of `stream` cancels the
request. `options` concerns generation models, whose streams can resume elsewhere; see millrace/oip/resumable.py. Both
run on the event loop and never block it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from millrace.deadline import Deadline
from millrace.oip.model_description import ModelDescription
from millrace.oip.resumable import CallOptions
from millrace_protos import inference_pb2 as pb
from services.predictor.counts import RequestCounts

VERSION = "1"  # Every model has this one version.
NO_OPTIONS = CallOptions()


class ServedModel(Protocol):
    """See the module."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> ModelDescription: ...

    @property
    def statistics(self) -> RequestCounts: ...

    async def infer(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> pb.ModelInferResponse:
        """Returns the one response to a request."""

    def stream(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Yields the responses to a request as they become available; with heartbeats if the options ask for them."""

    def offer(self) -> None:
        """Marks in every resumable stream that its caller may resume elsewhere now; the streams continue."""

    def hand_back(self) -> None:
        """Ends every resumable stream with DrainingError, after the output that it already has."""

    async def warm_up(self) -> None:
        """Runs the model once; raises StartupError if it does not work."""

    async def died(self) -> None:
        """Waits until the model can serve no more, possibly for ever; then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the model; requests in flight end with NotReadyError. Blocks for seconds at most."""
