"""The users of the load test, each with its own connection.

Times are measured around the response iterator: Locust's documented gRPC interceptor waits for a stream's result before
its first message and so hangs. A failure is reported as the gRPC status and the hop that failed, without details that
differ from call to call, so that equal failures count together.
"""

# ruff: noqa: S311  (random numbers here are not secrets)
from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

import grpc
from locust import User, between, task

from millrace.rpc.caller_key import with_key
from millrace_protos import inference_pb2, inference_pb2_grpc, millrace_pb2, millrace_pb2_grpc

PROMPTS = (
    "Once upon a time",
    "The little mill by the river",
    "One morning a fox",
    "Tom had a red kite, and",
    "It was raining, so the children",
    "In the garden there was",
    "The old boat",
    "Lily wanted to bake a cake because",
)
MAX_TOKENS = (16, 32, 64)
PREDICTOR_TOKENS = 16
VOCABULARY = range(3, 512)  # The bundled normalizer's, without its special tokens.
END_OF_TEXT = 1
TIMEOUT_S = 60


class CallFailedError(Exception):
    """The text that Locust lists under failures."""


def target_of(host: str) -> tuple[str, bool]:
    """Converts http://host[:port] or https://host[:port] to (host:port, whether it uses TLS)."""
    url = urlsplit(host)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"host {host!r} is not http://host:port or https://host:port")
    secure = url.scheme == "https"
    name = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{name}:{url.port or (443 if secure else 80)}", secure


class GrpcUser(User):
    """A user with a gRPC channel to the host; its calls have the key of MILLRACE_KEY, and `authority` as authority."""

    abstract = True
    host = "http://127.0.0.1:8080"
    wait_time = between(0.1, 0.5)
    authority: ClassVar[str] = ""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        target, secure = target_of(self.host or "")
        # Without its own pool each user would share one connection with all the others.
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        if self.authority:
            options.append(("grpc.default_authority", self.authority))
        if secure:
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(), options)
        else:
            channel = grpc.insecure_channel(target, options)
        self._channel = channel
        self.channel = with_key(channel)

    def on_stop(self) -> None:
        self._channel.close()

    @contextmanager
    def measured(self, name: str) -> Iterator[dict[str, Any]]:
        """Adds the block as a row of Locust's table; the block sets `response_length`."""
        row: dict[str, Any] = {"response_length": 0, "exception": None}
        started = time.perf_counter()
        try:
            yield row
        except grpc.RpcError as error:
            row["exception"] = CallFailedError(_failure(error))
        except CallFailedError as error:
            row["exception"] = error
        self.report(name, time.perf_counter() - started, **row)

    def report(self, name: str, seconds: float, **row: Any) -> None:
        self.environment.events.request.fire(
            request_type="gRPC", name=name, response_time=seconds * 1000, context={}, **row
        )


class StreamingUser(GrpcUser):
    """Reads stories as they are generated: total time, time to the first token, time between tokens."""

    @task
    def generate(self) -> None:
        request = millrace_pb2.GenerateRequest(
            model="storyteller",
            prompt=random.choice(PROMPTS),
            max_tokens=random.choice(MAX_TOKENS),
            ignore_eos=True,
        )
        with self.measured("Generate") as row:
            started, first, tokens, finished = time.perf_counter(), None, 0, False
            for response in millrace_pb2_grpc.TextGenerationStub(self.channel).Generate(request, timeout=TIMEOUT_S):
                now = time.perf_counter()
                row["response_length"] += response.ByteSize()
                if response.token_ids and first is None:
                    first, first_tokens = now, len(response.token_ids)
                    self.report("Generate TTFT", now - started, response_length=0, exception=None)
                tokens += len(response.token_ids)
                finished = response.HasField("finish_reason")
            if first is None or not finished:
                raise CallFailedError("the stream ended without tokens or finish_reason")
            if tokens > first_tokens:
                pause = (now - first) / (tokens - first_tokens)
                self.report("Generate inter-token", pause, response_length=0, exception=None)


class TensorUser(GrpcUser):
    """Sends token ids as tensors to the predictor, bypassing the transformer."""

    authority = "predictor"

    @task
    def infer(self) -> None:
        ids = [*random.choices(VOCABULARY, k=random.randint(4, 32)), END_OF_TEXT]
        request = inference_pb2.ModelInferRequest(
            model_name="normalizer", raw_input_contents=[struct.pack(f"<{len(ids)}q", *ids)]
        )
        request.inputs.add(name="input_ids", datatype="INT64", shape=[1, len(ids)])
        request.parameters["max_tokens"].int64_param = PREDICTOR_TOKENS
        with self.measured("ModelInfer at the predictor") as row:
            response = inference_pb2_grpc.GRPCInferenceServiceStub(self.channel).ModelInfer(request, timeout=TIMEOUT_S)
            row["response_length"] = response.ByteSize()
            if "output_ids" not in {output.name for output in response.outputs} or not any(
                response.raw_output_contents
            ):
                raise CallFailedError("the response has no output_ids")


def _failure(error: Any) -> str:
    """Status and failed hop of a grpc.RpcError, which is also a call."""
    metadata = dict(error.trailing_metadata() or ())
    hop = metadata.get("x-failed-hop")
    return f"{error.code().name} at the {hop}" if hop else f"{error.code().name}: {error.details()}"
