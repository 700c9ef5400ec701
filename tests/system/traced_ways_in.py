"""The ways into the stack whose traces are tested, and what is particular to the trace of each."""

from dataclasses import dataclass

from tests.system.request_outcome import TEXT_MODEL, WayIn
from tests.system.ways_in import TEXT

MODEL = TEXT_MODEL


@dataclass(frozen=True)
class TracedWay:
    """`method` is the transformer's; `streams`: chunk by chunk; `has_status`: every error is the call's status."""

    method: str
    protocol: str
    send: WayIn
    streams: bool
    has_status: bool = True
    operation: str = "text_completion"


WAYS: dict[str, TracedWay] = {
    "Generate": TracedWay("headrace.v1.TextGeneration/Generate", "grpc", TEXT["Generate"], streams=True),
    "ModelStreamInfer": TracedWay(
        *("inference.GRPCInferenceService/ModelStreamInfer", "grpc", TEXT["ModelStreamInfer"]),
        streams=True,
        has_status=False,
    ),
    "chat, events": TracedWay(
        *("headrace.rest.v1.OpenAI/ChatCompletions", "http", TEXT["chat, events"]), streams=True, operation="chat"
    ),
    "chat": TracedWay(
        *("headrace.rest.v1.OpenAI/ChatCompletions", "http", TEXT["chat"]), streams=False, operation="chat"
    ),
}
