"""Users of streams of text: by `Generate`, by Triton's `ModelStreamInfer` and by OpenAI's API; some do not read to the
end, or read slowly.
"""

# ruff: noqa: S311  (random numbers here are not secrets)
import json
import random
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import gevent

from headrace.oip.parameters import set_parameters
from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2, inference_pb2_grpc
from loadtest.gateway import GatewayError
from loadtest.users.base import GrpcUser, HttpUser
from loadtest.users.call import Call, CallFailedError

_UNFINISHED = "the stream ended without tokens or finish_reason"
_READ_BYTES = 65536

_READS_AT_MOST = 8
_LONG_ANSWER = 512
_RECORD_WAIT_S = 5.0
_RECORD_POLL_S = 0.3


class GenerateUser(GrpcUser):
    """Reads the stream of `headrace.v1.TextGeneration/Generate`, with a pause after each message but the last one."""

    abstract = True
    pause_s = 0.0

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._stub = headrace_pb2_grpc.TextGenerationStub(self.channel)

    def messages(self, call: Call, prompt: str, max_tokens: int) -> Generator[Any, None, None]:
        """The messages of an answer, which is cancelled where its reader leaves."""
        request = headrace_pb2.GenerateRequest(
            model=self.model.name, prompt=prompt, max_tokens=max_tokens, ignore_eos=True
        )
        stream = self._stub.Generate(request, timeout=self.options.deadline, metadata=self.metadata_of(call))
        with _reading(call, stream):
            for response in stream:
                if response.token_ids:
                    call.message(len(response.token_ids), response.ByteSize(), gap=not self.pause_s)
                yield response

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        with self.measured(arrival) as call:
            finished = False
            for response in self.messages(call, prompt, max_tokens):
                finished = response.HasField("finish_reason")
                if self.pause_s and not finished:
                    gevent.sleep(self.pause_s)
            if not call.started or not finished:
                raise CallFailedError(_UNFINISHED)


class StreamUser(GenerateUser):
    """Reads as fast as messages come."""

    row = "Generate"
    weight = 4


class SlowReaderUser(GenerateUser):
    """Waits before it reads the next message. Its gaps are its own, so it has no row for them."""

    row = "Slowly read Generate"
    pause_s = 0.2


class TritonStreamUser(GrpcUser):
    """Reads the stream of `ModelStreamInfer`, a call for each request, as clients of Triton's vLLM backend do."""

    row = "ModelStreamInfer"

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        with self.measured(arrival) as call:
            request = inference_pb2.ModelInferRequest(model_name=self.model.name, id=call.request_id)
            text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            text.contents.bytes_contents.append(prompt.encode())
            request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
            set_parameters(request.parameters, {"max_tokens": max_tokens, "ignore_eos": True})
            stream = self._stub.ModelStreamInfer(
                iter([request]), timeout=self.options.deadline, metadata=self.metadata_of(call)
            )
            with _reading(call, stream):
                for response in stream:
                    if response.error_message:
                        raise CallFailedError(response.error_message)
                    # Tokens are not counted in these messages; each has one at least, unless it is the empty last one.
                    call.message(1, response.ByteSize())
            if not call.started:
                raise CallFailedError("the stream ended without a message")


class ChatUser(HttpUser):
    """Reads the server-sent events of OpenAI's chat completions."""

    row = "chat/completions"

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        body = {
            "model": self.model.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with (
            self.measured(arrival) as call,
            self.posted("/v1/chat/completions", json.dumps(body).encode(), call) as answer,
        ):
            if not self._read(call, answer):
                raise CallFailedError("the stream ended without [DONE]")
            if not call.started:
                raise CallFailedError(_UNFINISHED)

    def _read(self, call: Call, answer: Any) -> bool:
        """Reads to the end; whether [DONE] came."""
        rest, done = b"", False
        while block := answer.read1(_READ_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data: ")
                if len(data) == len(line):
                    continue
                if data.rstrip() == b"[DONE]":
                    done = True
                else:
                    _note_event(call, json.loads(data), len(line))
        return done


def _note_event(call: Call, event: dict[str, Any], size: int) -> None:
    if error := event.get("error"):
        raise CallFailedError(str(error.get("code") or error.get("type") or error.get("message")))
    deltas = [choice.get("delta", {}) for choice in event.get("choices", ())]
    if any(delta.get("content") or delta.get("reasoning") or delta.get("tool_calls") for delta in deltas):
        call.message(1, size)
    if usage := event.get("usage"):
        call.more_tokens(max(0, usage["completion_tokens"] - call.tokens))


@contextmanager
def _reading(call: Call, stream: Any) -> Iterator[None]:
    """Cancels what its reader leaves, and notes the trace and the server's own time to the first token.

    Where Locust stops a reader, gRPC drops the event that the reader waited for: the metadata may never come.
    """
    stopped = False
    try:
        yield
    except gevent.GreenletExit:
        stopped = True
        raise
    finally:
        stream.cancel()
        if not stopped:
            _note_metadata(call, stream)


def _note_metadata(call: Call, stream: Any) -> None:
    call.trace_id = dict(stream.initial_metadata() or ()).get("x-trace-id", "")
    if (ttft := dict(stream.trailing_metadata() or ()).get("x-ttft-ms")) is not None:
        call.server_ttft_ms = float(ttft)


class CancelUser(GenerateUser):
    """Cancels a long answer after some messages.

    The cancel's row is how much longer the server worked than this user listened, by the payload log: there is none
    where the log cannot be read.
    """

    row = "Cancelled Generate"

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        reads = random.randint(1, _READS_AT_MOST)
        with self.measured(arrival) as call:
            sent = time.perf_counter()
            with closing(self.messages(call, prompt, max(max_tokens, _LONG_ANSWER))) as messages:
                for _ in islice((message for message in messages if message.token_ids), reads):
                    pass
            listened_ms = (time.perf_counter() - sent) * 1000
            call.over()
            if not call.started:
                raise CallFailedError("the stream ended without tokens")
            if (worked_ms := self._duration_of(call)) is not None:
                call.cancelled(max(0.0, worked_ms - listened_ms))

    def _duration_of(self, call: Call) -> float | None:
        """How long the server worked, in milliseconds; None if the log does not have it in time."""
        deadline = time.perf_counter() + _RECORD_WAIT_S
        while time.perf_counter() < deadline:
            gevent.sleep(_RECORD_POLL_S)
            try:
                records = self.session.gateway.records(request_id=call.request_id)
            except GatewayError:
                return None
            if records:
                return float(records[0]["duration_ms"])
        return None
