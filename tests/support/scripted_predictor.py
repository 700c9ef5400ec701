"""A fake Headrace predictor whose calls follow a script: real gRPC, real messages, and fixed tokens.

Its models, by default only `teller`, answer every prompt with `ANSWER`. A continuation gets the rest of it. Each
submission, and each call of `ModelStreamInfer`, takes the next action of the script; without one it answers to the end.
An action is called with (predictor, call) and yields the number of tokens to send next, or raises the error that ends
the call; `Broken` ends the whole connection of a submission. A submission is accepted with the first value that its
action yields.
"""

import asyncio
from collections import deque
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import orjson
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.endpoints import steps_port
from headrace.errors import DrainingError, HeadraceError, HopBrokenError, NotFoundError
from headrace.frames import FrameConnection, write_error
from headrace.oip.model_description import FINGERPRINT
from headrace.oip.tensors import Tensor, add_output
from headrace.rpc.server.handlers import Interceptor
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc, model_config_pb2, steps_pb2
from tests.support.free_ports import free_predictor_port
from tests.waiting import until

MODEL = "teller"
ANSWER = list(range(300, 320))
BEAT_S = 0.05
TOKEN_S = 0.5  # The engine's reported time of each token.
_NOTHING, _RUNS_ALONE = -1, -2
Metadata = pb.ModelMetadataResponse.TensorMetadata


@dataclass
class Call:
    """One received call or submission."""

    request: pb.ModelInferRequest | steps_pb2.Submission
    max_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False
    tells_end: bool = True
    is_leaving: bool = False
    is_silent: bool = False  # No message is sent any more, nor heartbeats on the connection.


class ScriptedPredictor(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, *script, answer=ANSWER, models=(MODEL,), fingerprint=""):
        self.models = models
        self.script = deque(script)
        self.answer = list(answer)
        self.calls = []
        self.is_ready = True
        self.state = "READY"
        self.fingerprint = fingerprint  # That of the weights of later answers.
        self.announced = None  # The fingerprint in the reports of its load, if it differs.
        self.has_model = True
        self.is_mute = False  # Its connections send no heartbeats.
        self.sessions = 0  # How many connections to the port of generations there are.
        self.connections = set()

    async def wait_for_calls(self, count):
        """Waits until so many calls have been received."""
        await until(lambda: len(self.calls) >= count)

    async def ServerReady(self, request, context):  # noqa: N802
        return pb.ServerReadyResponse(ready=self.is_ready)

    async def RepositoryIndex(self, request, context):  # noqa: N802
        response = pb.RepositoryIndexResponse()
        if self.state:
            for name in self.models:
                response.models.add(name=name, version="1", state=self.state)
        return response

    async def ModelMetadata(self, request, context):  # noqa: N802
        if request.name not in self.models:
            raise NotFoundError(f"no model {request.name!r}")
        ids = [Metadata(name=name, datatype="INT32", shape=[-1]) for name in ("input_ids", "output_ids")]
        return pb.ModelMetadataResponse(name=request.name, versions=["1"], inputs=ids, outputs=ids[1:])

    async def ModelConfig(self, request, context):  # noqa: N802
        config = model_config_pb2.ModelConfig(name=request.name)
        config.parameters["context_length"].string_value = "1024"
        config.parameters["is_encoder_decoder"].string_value = "false"
        config.parameters[FINGERPRINT].string_value = self.fingerprint
        return pb.ModelConfigResponse(config=config)

    async def ModelInfer(self, request, context):  # noqa: N802
        action = self.script.popleft() if self.script else None
        self.calls.append(Call(request))
        if action is not None:
            raise action
        return pb.ModelInferResponse(model_name=request.model_name, id=request.id)

    async def ModelStreamInfer(self, requests, context):  # noqa: N802
        request = await anext(aiter(requests))
        call = Call(request, request.parameters["max_tokens"].int64_param)
        action = self.script.popleft() if self.script else whole
        self.calls.append(call)
        try:
            async with aclosing(action(self, call)) as counts:
                async for count in counts:
                    new, reason, _ = self._next(call, count)
                    response = pb.ModelInferResponse(model_name=MODEL, id=request.id)
                    add_output(response, Tensor("output_ids", "INT32", np.array(new, dtype=np.int32)))
                    if reason:
                        response.parameters["finish_reason"].string_param = reason
                        response.parameters["prompt_tokens"].int64_param = 5
                        response.parameters["completion_tokens"].int64_param = len(call.output_ids)
                    yield pb.ModelStreamInferResponse(infer_response=response)
        except Broken:
            # Without a hop, as the transport reports a lost connection.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        except asyncio.CancelledError:
            call.was_cancelled = True
            raise
        finally:
            call.ended.set()

    def connected(self):
        """A transformer's connection to the port of generations."""
        running, tasks = {}, []

        def receive(message):
            request = steps_pb2.StepsRequest.FromString(message)
            for submission in map(steps_pb2.Submission.FromString, request.submissions):
                call = Call(submission, orjson.loads(submission.sampling)["max_tokens"], list(submission.output_ids))
                action = self.script.popleft() if self.script else whole
                self.calls.append(call)
                running[submission.number] = asyncio.create_task(self._act(action, call, connection)), call
                tasks.append(running[submission.number][0])
            for number in request.cancelled:
                task, call = running[number]
                call.was_cancelled = not call.ended.is_set()
                task.cancel()

        def ended(_):
            self.sessions -= 1
            self.connections.discard(connection)
            for task in tasks:
                task.cancel()

        connection = FrameConnection(receive)
        connection.ended.add_done_callback(ended)
        tasks.append(asyncio.create_task(self._beat(connection)))
        self.sessions += 1
        self.connections.add(connection)
        return connection

    async def _beat(self, connection):
        while True:
            if not self.is_mute and not any(call.is_silent and not call.ended.is_set() for call in self.calls):
                send(connection, self._step(any(call.is_leaving for call in self.calls)))
            await asyncio.sleep(BEAT_S)

    def _step(self, is_leaving=False):
        """A message with the load; a predictor that is not ready has no model."""
        step = steps_pb2.Step(loads=steps_pb2.EngineLoads(), leaving=is_leaving or None)
        if self.has_model:
            fingerprint = self.fingerprint if self.announced is None else self.announced
            for name in self.models:
                step.loads.models.add(model=name, fingerprint=fingerprint)
        return step

    async def _act(self, action, call, connection):
        number, is_accepted, has_begun = call.request.number, False, False
        try:
            async with aclosing(action(self, call)) as counts:
                async for count in counts:
                    step = steps_pb2.Step(leaving=call.is_leaving or None)
                    if not is_accepted:
                        is_accepted = True
                        step.accepted.add(number=number, fingerprint=self.fingerprint)
                    if count == _RUNS_ALONE:
                        step.alone.append(number)
                    new, reason, logprobs = self._next(call, count)
                    if (new or reason) and not has_begun:
                        has_begun = True
                        step.begun.add(
                            number=number, cached_tokens=100 + len(self.calls)
                        )  # A different number for each call.
                    step.numbers.extend([number] * len(new))
                    step.token_ids.extend(new)
                    made = len(call.output_ids) - len(call.request.output_ids)
                    step.seconds.extend(TOKEN_S * (made - left) for left in reversed(range(len(new))))
                    for logprob in logprobs:
                        step.logprobs.add(number=number, chosen=logprob)
                    if reason:
                        ended = step.ended.add(number=number, finish_reason=reason)
                        ended.usage.prompt_tokens, ended.usage.completion_tokens = 5, len(call.output_ids)
                        ended.usage.cached_tokens = 100 + len(self.calls)
                    send(connection, step)
                    await asyncio.sleep(0)  # Messages that are written at once are read at once.
        except Broken:
            connection.abort()
        except HeadraceError as error:
            send(connection, steps_pb2.Step(ended=[{"number": number, "error": write_error(error, "predictor")}]))
        finally:
            call.ended.set()

    def _next(self, call, count):
        """The next tokens, the reason if they are the last ones, and log probabilities where requested."""
        begin, limit = len(call.output_ids), call.max_tokens
        ids = self.answer[: min(limit, len(self.answer))]
        new = ids[begin : begin + max(count, 0)]
        call.output_ids += new
        is_last = count > 0 and len(call.output_ids) == len(ids) and call.tells_end
        reason = ("length" if len(ids) == limit else "stop") if is_last else ""
        wants_logprobs = isinstance(call.request, steps_pb2.Submission) and b'"logprobs":true' in call.request.sampling
        logprobs = [-position / 10 for position in range(begin, begin + len(new))] if wants_logprobs else []
        return new, reason, logprobs


def send(connection, step):
    connection.send(step.SerializeToString())


class Broken(Exception):  # noqa: N818
    """The connection breaks."""


async def whole(predictor, call):
    """Every token by itself; only the end if all tokens were given before."""
    while True:
        left = len(predictor.answer) - len(call.output_ids)
        yield 1
        if left <= 1 or len(call.output_ids) >= call.max_tokens:
            return


def breaks(after=0):
    """The connection breaks after so many tokens."""
    return raises(Broken(), after)


def dies(after=0):
    """The engine dies after so many tokens; the connection stays."""
    return raises(HopBrokenError("the engine died"), after)


def breaks_before_its_end(after):
    """The connection breaks after so many tokens, even if these are the whole answer."""

    async def action(predictor, call):
        call.tells_end = False
        async for count in breaks(after)(predictor, call):
            yield count

    return action


def hands_back(after=0):
    """The predictor drains after so many tokens."""
    return raises(DrainingError("the predictor stops"), after)


def raises(error: HeadraceError | Broken, after=0):
    """The call ends with an error after so many tokens."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        raise error

    return action


def falls_silent(after=0):
    """No message is sent after so many tokens."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        call.is_silent = True
        await asyncio.Event().wait()

    return action


def alone(action):
    """The request's isolated turn begins before the action."""
    return _behind(_RUNS_ALONE, action)


def is_accepted(action):
    """The submission is accepted before the action."""
    return _behind(_NOTHING, action)


def _behind(first, action):
    async def begins(predictor, call):
        yield first
        async with aclosing(action(predictor, call)) as counts:
            async for count in counts:
                yield count

    return begins


def holds_until(released, after=0):
    """Only heartbeats until an event, then the rest of the answer."""

    async def action(predictor, call):
        for _ in range(after):
            yield 1
        await released.wait()
        async for count in whole(predictor, call):
            yield count

    return action


@asynccontextmanager
async def serving(predictor, port=0, healthy=()):
    """Its address while it runs; cut off at the end. `healthy` are names that its health service reports as serving."""
    options = [("grpc.so_reuseport", 0)]
    server = grpc.aio.server(interceptors=(Interceptor("predictor"),), options=options)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(predictor, server)
    if healthy:
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        for name in healthy:
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    port = port or free_predictor_port()
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    steps = await asyncio.get_running_loop().create_server(predictor.connected, "127.0.0.1", steps_port(port))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        steps.close()
        for connection in tuple(predictor.connections):
            connection.abort()
        await server.stop(0)
