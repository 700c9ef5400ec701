"""The contract of every served model, whatever its kind.

A request is answered by `infer` with one response or by `stream` with any number of them, each with
the parameter `triton_final_response`. Both raise MillraceError; cancelling the one and closing the
other cancels the request. What `options` say concerns models that generate, whose streams can go on
elsewhere; see millrace/oip/resumable.py. They run on the event loop and never block it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from millrace.deadline import Deadline
from millrace.oip.model_description import ModelDescription
from millrace.oip.resumable import CallOptions
from millrace_protos import inference_pb2 as pb

VERSION = "1"  # The one version that each model has.
NO_OPTIONS = CallOptions()


class Counts(Protocol):
    """What only the model itself can count, since it was made; durations in nanoseconds."""

    steps: int
    queue_ns: int
    compute_ns: int

    @property
    def ended(self) -> int:
        """Requests that are done, however they ended; what was refused at once is not among them."""


class ServedModel(Protocol):
    """See the module."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> ModelDescription: ...

    @property
    def statistics(self) -> Counts: ...

    async def infer(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> pb.ModelInferResponse:
        """The one answer to a request."""

    def stream(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The answers to a request, as they are made; heartbeats among them, where the options ask for them."""

    def offer(self) -> None:
        """Says in each stream whose caller can go on elsewhere that it may do so now; the streams go on."""

    def hand_back(self) -> None:
        """Ends each stream whose caller goes on elsewhere with DrainingError, after what has been made of it."""

    async def warm_up(self) -> None:
        """Proves that the model works; raises StartupError."""

    async def died(self) -> None:
        """Waits until the model can serve no more, for ever if need be, then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the model; what is in flight ends with NotReadyError; blocks for seconds at most."""
