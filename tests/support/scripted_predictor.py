"""A predictor of ours whose calls end as a test says: real gRPC, real metadata, and tokens that are known beforehand.

Its one model, `teller`, answers every prompt with `ANSWER`. A continuation gets what is left of it. Each call of
`ModelStreamInfer` takes the next action of the script; without one it answers to the end. An action is called with
(predictor, call) and yields how many tokens are to be sent next, or raises what ends the call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np

from millrace.errors import DrainingError, MillraceError, NotFoundError
from millrace.oip.prompt_logprobs import PROMPT_LOGPROBS, PromptLogprobs
from millrace.oip.resumable import FINGERPRINT, HEARTBEAT, LEAVING, RUNS_ALONE, CallOptions, call_options_of
from millrace.oip.tensors import Tensor, add_output, decode_inputs
from millrace.rpc.handlers import ErrorServerInterceptor
from millrace_protos import inference_pb2 as pb
from millrace_protos import inference_pb2_grpc, model_config_pb2
from tests.waiting import until

MODEL = "teller"
ANSWER = list(range(300, 320))
_HEARTBEAT, _RUNS_ALONE = -1, -2
Metadata = pb.ModelMetadataResponse.TensorMetadata


@dataclass
class Call:
    """One call as it came in."""

    request: pb.ModelInferRequest
    options: CallOptions
    output_ids: list[int]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False
    tells_end: bool = True
    is_leaving: bool = False


class ScriptedPredictor(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, *script, answer=ANSWER):
        self.script = deque(script)
        self.answer = list(answer)
        self.calls = []
        self.is_ready = True
        self.state = "READY"
        self.fingerprint = ""  # Of the weights that answer from now on; none is told where it is empty.

    async def wait_for_calls(self, count):
        """Until so many have come in."""
        await until(lambda: len(self.calls) >= count)

    async def ServerReady(self, request, context):  # noqa: N802
        return pb.ServerReadyResponse(ready=self.is_ready)

    async def RepositoryIndex(self, request, context):  # noqa: N802
        response = pb.RepositoryIndexResponse()
        if self.state:
            response.models.add(name=MODEL, version="1", state=self.state)
        return response

    async def ModelMetadata(self, request, context):  # noqa: N802
        if request.name != MODEL:
            raise NotFoundError(f"no model {request.name!r}")
        ids = [Metadata(name=name, datatype="INT32", shape=[-1]) for name in ("input_ids", "output_ids")]
        return pb.ModelMetadataResponse(name=MODEL, versions=["1"], inputs=ids, outputs=ids[1:])

    async def ModelConfig(self, request, context):  # noqa: N802
        config = model_config_pb2.ModelConfig(name=MODEL)
        config.parameters["context_length"].string_value = "1024"
        config.parameters["is_encoder_decoder"].string_value = "false"
        config.parameters[FINGERPRINT].string_value = self.fingerprint
        return pb.ModelConfigResponse(config=config)

    async def ModelInfer(self, request, context):  # noqa: N802
        action = self.script.popleft() if self.script else None
        self.calls.append(Call(request, call_options_of(context.invocation_metadata()), []))
        if action is not None:
            raise action
        return pb.ModelInferResponse(model_name=request.model_name, id=request.id)

    async def ModelStreamInfer(self, requests, context):  # noqa: N802
        request = await anext(aiter(requests))
        inputs = decode_inputs(request)
        output_ids = inputs["output_ids"].array.tolist() if "output_ids" in inputs else []
        call = Call(request, call_options_of(context.invocation_metadata()), output_ids)
        action = self.script.popleft() if self.script else whole
        self.calls.append(call)
        try:
            async with aclosing(action(self, call)) as counts:
                is_first = True
                async for count in counts:
                    made = self._tokens(call, count) if count > 0 else self._heartbeat(request, count == _RUNS_ALONE)
                    if is_first and self.fingerprint:
                        made.infer_response.parameters[FINGERPRINT].string_param = self.fingerprint
                    is_first = False
                    if call.is_leaving:
                        made.infer_response.parameters[LEAVING].bool_param = True
                    yield made
        except Broken:
            # Without a signature, as the transport reports what it lost.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        except asyncio.CancelledError:
            call.was_cancelled = True
            raise
        finally:
            call.ended.set()

    def _heartbeat(self, request, runs_alone):
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.parameters[HEARTBEAT].bool_param = True
        if runs_alone:
            response.parameters[RUNS_ALONE].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response)

    def _tokens(self, call, count):
        """The next tokens, all with what was cached; the last ones with the reason and the usage."""
        begin = len(call.output_ids)
        limit = call.request.parameters["max_tokens"].int64_param
        ids = self.answer[: min(limit, len(self.answer))]
        new = ids[begin : begin + count]
        response = pb.ModelInferResponse(model_name=MODEL, id=call.request.id)
        add_output(response, Tensor("output_ids", "INT32", np.array(new, dtype=np.int32)))
        if call.request.parameters["logprobs"].bool_param:
            logprobs = [-position / 10 for position in range(begin, begin + len(new))]
            add_output(response, Tensor("logprobs", "FP32", np.array(logprobs, dtype=np.float32)))
        if (scored := call.request.parameters.get(PROMPT_LOGPROBS)) is not None and not begin:
            parts = PromptLogprobs.joined([], scored.int64_param)
            for tensor in parts.tensors():
                add_output(response, tensor)
        call.output_ids += new
        cached = 100 + len(self.calls)  # Another number for each call.
        response.parameters["cached_tokens"].int64_param = cached
        if len(call.output_ids) == len(ids) and call.tells_end:
            response.parameters["finish_reason"].string_param = "length" if len(ids) == limit else "stop"
            response.parameters["prompt_tokens"].int64_param = 5
            response.parameters["completion_tokens"].int64_param = len(ids)
        return pb.ModelStreamInferResponse(infer_response=response)


class Broken(Exception):  # noqa: N818
    """The connection breaks."""


async def whole(predictor, call):
    """Every token by itself, then, where all were given before, the end alone."""
    while True:
        left = len(predictor.answer) - len(call.output_ids)
        yield 1
        if left <= 1 or len(call.output_ids) >= call.request.parameters["max_tokens"].int64_param:
            return


def breaks(after=0):
    """The connection breaks after so many tokens."""
    return raises(Broken(), after)


def breaks_before_its_end(after):
    """So many tokens come, and the connection breaks, be they all of the answer."""

    async def action(predictor, call):
        call.tells_end = False
        async for count in breaks(after)(predictor, call):
            yield count

    return action


def hands_back(after=0):
    """The predictor drains after so many tokens."""
    return raises(DrainingError("the predictor stops"), after)


def raises(error: MillraceError | Broken, after=0):
    """The call ends with an error after so many tokens."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        raise error

    return action


def falls_silent(after=0):
    """Nothing comes any more after so many tokens."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        await asyncio.Event().wait()

    return action


def alone(action):
    """The request's turn to run alone comes before the action."""

    async def begins(predictor, call):
        yield _RUNS_ALONE
        async with aclosing(action(predictor, call)) as counts:
            async for count in counts:
                yield count

    return begins


def beats_until(released, every_s=0.05):
    """Heartbeats until an event, then all of the answer."""

    async def action(predictor, call):
        while not released.is_set():
            yield _HEARTBEAT
            await asyncio.sleep(every_s)
        async for count in whole(predictor, call):
            yield count

    return action


def holds_until(released, after=0):
    """Nothing until an event, then the rest of the answer."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        await released.wait()
        async for count in whole(predictor, call):
            yield count

    return action


@asynccontextmanager
async def serving(predictor, port=0):
    """Its address while it runs; cut off at the end."""
    options = [("grpc.so_reuseport", 0)]
    server = grpc.aio.server(interceptors=(ErrorServerInterceptor("predictor"),), options=options)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(predictor, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
