"""SIGTERM at a predictor: its health changes, its streams move or end there, and no caller gets an error."""

import asyncio
import json
import signal
import socket

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.endpoints import host_and_port, steps_port
from headrace.errors import DRAINING
from headrace.oip.tensors import Tensor, decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2 import ModelReadyRequest, ServerReadyRequest
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.support.steps_caller import StepsCaller
from tests.system.calls import channel, each, http_request, ids_request
from tests.system.gated_stack import gated_stack
from tests.system.predictor_process import predictor_process
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
AS_STATUS = ("triton_grpc_error", "true")
TOKENS = 8
SAMPLING = {"max_tokens": TOKENS, "seed": 1, "ignore_eos": True}
GATED = "tests.system.gated_predictor"


class Stream:
    """A generation by the Open Inference Protocol at the predictor's own port, read as it comes."""

    def __init__(self, stub):
        request = ids_request("storyteller", Tensor("input_ids", "INT64", np.array([1])), max_tokens=TOKENS, seed=1)
        request.parameters["ignore_eos"].bool_param = True
        self.ids = []
        self._call = stub.ModelStreamInfer(each(request), metadata=(AS_STATUS,), timeout=60)
        self._task = asyncio.create_task(self._read())

    async def _read(self):
        async for message in self._call:
            self.ids += decode_outputs(message.infer_response)["output_ids"].array.tolist()

    async def error(self):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self._task
        return raised.value

    async def end(self):
        await self._task
        return self.ids


@pytest.fixture
def gate(tmp_path):
    path = tmp_path / "gate"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opener:
        yield str(path), lambda tokens=1: opener.sendto(b"." * tokens, str(path))


@pytest.mark.parametrize("drain", ["hand-back", "finish"])
async def test_a_stream_may_move_or_ends_and_health_changes_first(tmp_path, gate, drain):
    path, make_tokens = gate
    environment = {"GATE_SOCKET": path, "MODELS": MODELS, "PREDICTOR_DRAIN": drain, "PREDICTOR_DRAIN_S": "30"}
    async with predictor_process(tmp_path / "log", GATED, **environment) as predictor, channel(predictor.target) as own:
        stub, health = GRPCInferenceServiceStub(own), health_pb2_grpc.HealthStub(own)

        async def serving():
            names = ("", "ready", "inference.GRPCInferenceService")
            checks = [await health.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            answers = {answer.status == health_pb2.HealthCheckResponse.SERVING for answer in checks}
            answers.add((await stub.ServerReady(ServerReadyRequest())).ready)
            answers.add((await stub.ModelReady(ModelReadyRequest(name="storyteller"))).ready)
            assert len(answers) == 1
            return answers.pop()

        assert await serving()
        transformer = StepsCaller("storyteller")
        await transformer.connect(steps_port(host_and_port(predictor.target)[1]))
        transformer.submit(1, [1], SAMPLING)
        make_tokens(3)
        await until(lambda: len(transformer.tokens.get(1, ())) == 3)
        stays = Stream(stub)
        await until(lambda: transformer.load().running + transformer.load().waiting == 2)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="ready"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        predictor.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        # It listens as long as a stream runs.
        assert not await serving()
        refused = await Stream(stub).error()
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(refused.trailing_metadata())[DRAINING] == "true"
        transformer.submit(2, [1], SAMPLING)
        assert (await transformer.error_of(2)).class_name == "DrainingError"
        if drain == "hand-back":
            await until(lambda: transformer.leaving)
        make_tokens(3 * TOKENS)
        # A stream that cannot move stays.
        assert (await transformer.end_of(1)).finish_reason == "length"
        assert transformer.tokens[1] == await stays.end()
        assert len(transformer.tokens[1]) == TOKENS
        assert transformer.leaving == (drain == "hand-back")
        await transformer.closed()
        assert await predictor.end() == 0


async def test_a_stream_that_outlasts_the_drain_is_handed_back(tmp_path, gate):
    path, make_tokens = gate
    environment = {"GATE_SOCKET": path, "MODELS": MODELS, "PREDICTOR_DRAIN_S": "1"}
    async with predictor_process(tmp_path / "log", GATED, **environment) as predictor:
        transformer = StepsCaller("storyteller")
        await transformer.connect(steps_port(host_and_port(predictor.target)[1]))
        transformer.submit(1, [1], SAMPLING)
        make_tokens(3)
        await until(lambda: len(transformer.tokens.get(1, ())) == 3)
        predictor.process.send_signal(signal.SIGTERM)
        assert (await transformer.error_of(1)).class_name == "DrainingError"
        assert len(transformer.tokens[1]) == 3
        await transformer.closed()
        # The engine waits in a step for the sequence that was handed back.
        assert await predictor.end() == 0


async def test_a_stream_that_outlasts_the_drain_of_the_transformer_is_recorded_as_its_caller_read_it(tmp_path):
    async with gated_stack(tmp_path, transformer={"TRANSFORMER_DRAIN_S": "1"}) as (stack, make_tokens):
        fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
        request = headrace_pb2.GenerateRequest(**fields, request_id="by gRPC")
        body = {**fields, "stream": True}
        headers, came = {"x-request-id": "by REST"}, asyncio.Event()
        loop = asyncio.get_running_loop()
        arguments = (stack.gateway, "POST", "/v1/completions", body, headers)
        rest = asyncio.create_task(
            asyncio.to_thread(http_request, *arguments, lambda: loop.call_soon_threadsafe(came.set))
        )
        async with channel(stack.gateway) as open_channel:
            call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=60)
            both = asyncio.gather(call.read(), came.wait())
            async with asyncio.timeout(60):
                while not both.done():  # A call that reaches the predictor late misses the first tokens.
                    make_tokens(1)
                    await asyncio.wait((both,), timeout=0.1)
            assert all(both.result())
            await stack.kill("transformer", signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await rest_of(call)
            assert (ended.value.code(), ended.value.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the service is stopping",
            )
        assert "the service is stopping" in json.loads((await rest).events[-1])["error"]["message"]

        async with channel(stack.gateway) as open_channel:
            log = headrace_pb2_grpc.PayloadLogStub(open_channel)
            for request_id in ("by gRPC", "by REST"):
                record = await recorded(log, request_id)
                end = (record.status, record.message, record.failed_hop)
                assert end == ("UNAVAILABLE", "the service is stopping", "transformer")


async def rest_of(call):
    """Reads to the end of a stream, whose status comes after every message."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def recorded(log, request_id):
    """The record of a request, once it is stored."""
    found = []

    async def is_there():
        query = headrace_pb2.QueryPayloadsRequest(request_id=request_id)
        found[:] = [record async for record in log.Query(query)]
        return found and found[0].status

    await until(is_there)
    return found[0]
