"""The transformer before a server that speaks V2 REST: every datatype in both forms, its errors, and its absence."""

import asyncio
import json
import time

import grpc
import numpy as np
import pytest

from headrace.errors import InvalidRequestError
from headrace.oip.tensors import BYTES, Tensor, add_input, bytes_tensor, decode_outputs
from headrace.rpc.call_context import CallContext
from headrace_protos import inference_pb2 as pb
from services.transformer.predictors.v2_rest import transport
from tests.process.foreign_rest_server import ForeignRestServer, breaks, foreign_rest_server, never, says
from tests.support.transformer_fixtures import transformer as any_transformer
from tests.system.calls import each
from tests.waiting import until

Code = grpc.StatusCode
BFLOAT16 = np.array([0x3F80, 0xC000, 0x7F80, 0x0000], np.uint16)  # 1, -2, infinity, 0.
ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 2**16 - 1], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "FP16": np.array([0.1, -65504, 6e-8], np.float16),
    "FP32": np.array([[0.1, 3e38], [np.inf, -0.0]], np.float32),
    "FP64": np.array([0.1, 1e308]),
    "BF16": BFLOAT16,
    BYTES: np.array(["é".encode(), b""], object),
}


def transformer(address, *more, **fields):
    return any_transformer(address, *more, protocol="v2", **fields)


def echo_request(*tensors, **fields):
    request = pb.ModelInferRequest(**{"model_name": "echo", "id": "r", **fields})
    for tensor in tensors or (Tensor("x", "FP32", np.arange(4, dtype=np.float32)),):
        add_input(request, tensor)
    return request


def all_tensors():
    return [Tensor(datatype.lower(), datatype, array) for datatype, array in ARRAYS.items()]


async def refusal(stub, request=None, **fields):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.ModelInfer(request or echo_request(), **fields)
    metadata = dict(raised.value.trailing_metadata())
    return raised.value.code(), raised.value.details(), metadata["x-failed-hop"], metadata["x-http-status"]


@pytest.mark.parametrize("binary", [True, False])
async def test_every_datatype_is_returned_unchanged(binary):
    server = ForeignRestServer(binary=binary)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        request = echo_request(*all_tensors())
        answer = await stub.ModelInfer(request)
    assert list(answer.raw_output_contents) == list(request.raw_input_contents)
    assert [(o.name, o.datatype, o.shape) for o in answer.outputs] == [
        (i.name, i.datatype, i.shape) for i in request.inputs
    ]
    assert (answer.id, answer.model_name, answer.model_version) == ("r", "echo", "7")
    (call,) = server.calls
    assert call.path == "/v2/models/echo/infer"
    assert ("inference-header-content-length" in call.headers) == binary


@pytest.mark.parametrize("binary", [True, False])
async def test_large_tensors_do_not_block_the_event_loop(binary):
    server = ForeignRestServer(binary=binary)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        array = np.random.default_rng(1).standard_normal(500_000).astype(np.float32)
        answer = await stub.ModelInfer(echo_request(Tensor("x", "FP32", array)))
        assert np.array_equal(decode_outputs(answer)["x"].array, array)


async def test_typed_contents_parameters_outputs_and_versions_are_passed_on():
    server = ForeignRestServer()
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        request = pb.ModelInferRequest(model_name="echo", model_version="7", id="r")
        entry = request.inputs.add(name="x", datatype="INT32", shape=[2])
        entry.contents.int_contents.extend([1, -2])
        entry.parameters["unit"].string_param = "m"
        request.outputs.add(name="x")
        request.parameters["k"].int64_param = 3
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        answer = await stub.ModelInfer(request)
    assert decode_outputs(answer)["x"].array.tolist() == [1, -2]
    assert answer.outputs[0].parameters["unit"].string_param == "m"
    document = server.calls[0].document
    assert server.calls[0].path == "/v2/models/echo/versions/7/infer"
    assert document["parameters"] == {"k": 3, "binary_data_output": True}
    assert document["outputs"] == [{"name": "x", "parameters": {"binary_data": True}}]


async def test_a_servers_own_fields_are_passed_or_left_out():
    answer = {
        "id": None,
        "model_name": "echo",
        "model_version": None,
        "parameters": {"none": None, "n": 1.5, "list": [1]},
        "outputs": [{"name": "x", "datatype": "FP16", "shape": [2], "data": [[0.5], [2]], "parameters": None}],
        "unknown": 1,
    }
    server = ForeignRestServer(says(200, json.dumps(answer).encode()))
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        response = await stub.ModelInfer(echo_request())
    assert decode_outputs(response)["x"].array.tolist() == [0.5, 2]
    assert (response.parameters["n"].double_param, response.parameters["list"].string_param) == (1.5, "[1]")
    assert "none" not in response.parameters


async def test_a_stream_has_the_one_answer_marked_as_the_last():
    async with foreign_rest_server(ForeignRestServer()) as address, transformer(address) as (stub, _):
        responses = [r.infer_response async for r in stub.ModelStreamInfer(each(echo_request()))]
        assert [r.parameters["triton_final_response"].bool_param for r in responses] == [True]
        assert decode_outputs(responses[0])["x"].array.tolist() == [0, 1, 2, 3]
        (failed,) = [r async for r in stub.ModelStreamInfer(each(echo_request(model_name="nobody")))]
        assert (failed.error_message, failed.infer_response.id) == ("nobody is not here", "r")


async def test_readiness_and_metadata_are_the_servers():
    server = ForeignRestServer()
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo", version="7"))).ready
        assert server.probes[-1].path == "/v2/models/echo/versions/7/ready"
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="a/../b"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name=".."))).ready
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="ids"))
        assert (metadata.platform, metadata.versions, metadata.inputs[0].shape) == ("foreign", ["7"], [1, -1])
        for ask in (stub.ModelConfig(pb.ModelConfigRequest(name="echo")), stub.ModelStatistics(
            pb.ModelStatisticsRequest(name="echo"))):  # fmt: skip
            with pytest.raises(grpc.aio.AioRpcError, match="TRANSFORMER_PROTOCOL=v2") as raised:
                await ask
            assert raised.value.code() is Code.UNIMPLEMENTED


async def test_a_model_of_ids_is_relayed_and_the_log_has_the_reason_why_it_takes_no_text(caplog):
    models = "ids=models/storyteller"
    async with foreign_rest_server(ForeignRestServer()) as address, transformer(address, models) as (stub, _):
        await stub.ModelInfer(echo_request(Tensor("input_ids", "INT64", np.array([[1]])), model_name="ids"))
        with pytest.raises(InvalidRequestError, match="takes tensors, not text; text needs TRANSFORMER_PROTOCOL"):
            await stub.router.get("ids", "", CallContext("test", "r"))
    assert [r.levelname for r in caplog.records if "TRANSFORMER_PROTOCOL=grpc-v2" in r.getMessage()] == ["ERROR"]


async def test_a_processor_calls_its_model_by_rest():
    server = ForeignRestServer()
    processors = "doubles=tests/process/doubling_processor.py:Doubles"
    async with foreign_rest_server(server) as address, transformer(address, "", processors) as (stub, _):
        answer = await stub.ModelInfer(echo_request(model_name="doubles"))
        assert decode_outputs(answer)["x"].array.tolist() == [0, 2, 4, 6]
        (response,) = [r async for r in stub.ModelStreamInfer(each(echo_request(model_name="doubles")))]
        assert response.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(
    ("status", "code", "http_status"),
    [
        (400, Code.INVALID_ARGUMENT, "400"),
        (404, Code.NOT_FOUND, "404"),
        (413, Code.RESOURCE_EXHAUSTED, "413"),
        (422, Code.INVALID_ARGUMENT, "400"),
        (429, Code.RESOURCE_EXHAUSTED, "429"),
        (500, Code.INTERNAL, "500"),
        (501, Code.UNIMPLEMENTED, "501"),
        (502, Code.UNAVAILABLE, "502"),
        (504, Code.DEADLINE_EXCEEDED, "504"),
        (302, Code.UNAVAILABLE, "502"),
    ],
)
async def test_its_errors_keep_their_meaning(status, code, http_status):
    server = ForeignRestServer(says(status, b'{"error": "no luck"}', Location="http://127.0.0.1:1/"))
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        text = "no luck" if status >= 400 else "the predictor answered 302"
        assert await refusal(stub) == (code, text, "predictor", http_status)
        assert await stub.ModelInfer(echo_request())
    assert len(server.calls) == 2


@pytest.mark.parametrize("body", [b'{"detail": [{"msg": "x"}]}', b"", b"<html>", b'{"error": "' + b"x" * 200_000])
async def test_an_error_in_any_form_has_a_message(body):
    server = ForeignRestServer(says(400, body))
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        code, details, hop, _ = await refusal(stub)
    assert (code, bool(details), hop) == (Code.INVALID_ARGUMENT, True, "predictor")


@pytest.mark.parametrize("status", [499, 503])
async def test_a_call_of_a_server_that_is_not_ready_is_retried(status):
    server = ForeignRestServer(says(status), says(status))
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        assert await stub.ModelInfer(echo_request())
    assert len(server.calls) == 3


async def test_an_absent_server_is_waited_for_and_may_be_replaced_by_another():
    async with foreign_rest_server(ForeignRestServer()) as address, transformer(address) as (stub, catalogue):
        port = int(address.rpartition(":")[2])
        await stub.ModelInfer(echo_request())
    server = ForeignRestServer(binary=False)
    async with transformer(address, ready=False) as (stub, catalogue):
        call = stub.ModelInfer(echo_request())
        await asyncio.sleep(0.1)
        async with foreign_rest_server(server, port):
            await call
            await until(lambda: catalogue.ready)
        gone = stub.ModelInfer(echo_request())
        await asyncio.sleep(0.1)
        async with foreign_rest_server(back := ForeignRestServer(), port):
            assert await gone
    assert "inference-header-content-length" not in server.calls[0].headers
    assert "inference-header-content-length" in back.calls[0].headers


async def test_without_any_server_models_are_not_ready():
    async with transformer("127.0.0.1:9", ready=False, wait_s=0.2) as (stub, catalogue):
        assert (await refusal(stub))[0] is Code.UNAVAILABLE
        assert not catalogue.ready


NO_ANSWERS = [
    b"[]",
    b"{}",
    b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}',
    b'{"outputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [300]}]}',
    b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]}',
]


@pytest.mark.parametrize(
    "action",
    [
        breaks(),
        breaks(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"),
        breaks(b"SSH-2.0\r\n\r\n"),
        says(200, b"{}", content_encoding="gzip"),
        says(200, b"{}", inference_header_content_length="many"),
        says(200, b"{}", inference_header_content_length="100"),
        *(says(200, body) for body in NO_ANSWERS),
    ],
)
async def test_a_protocol_error_is_the_hops_fault_and_not_retried(action):
    server = ForeignRestServer(action)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        code, _, hop, status = await refusal(stub)
        assert (code, hop, status) == (Code.UNAVAILABLE, "predictor", "502")
        assert len(server.calls) == 1
        assert await stub.ModelInfer(echo_request())


@pytest.mark.parametrize("declared", [True, False])
async def test_an_answer_is_read_to_its_bound(monkeypatch, declared):
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 100_000)
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    more = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    action = says(200, b"x" * 100_001) if declared else breaks(chunked + more * 4)
    async with foreign_rest_server(ForeignRestServer(action)) as address, transformer(address) as (stub, _):
        assert (await refusal(stub))[2:] == ("predictor", "413")


async def test_metadata_is_read_to_a_smaller_bound(monkeypatch):
    monkeypatch.setattr(transport, "MAX_DOCUMENT_BYTES", 150)
    async with foreign_rest_server(ForeignRestServer()) as address, transformer(address) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="more than 150 bytes") as raised:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="ids"))
        assert raised.value.code() is Code.RESOURCE_EXHAUSTED


async def test_a_deadline_ends_the_call_and_closes_the_connection():
    server = ForeignRestServer(never)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        begun = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ModelInfer(echo_request(), timeout=0.5)
        assert raised.value.code() is Code.DEADLINE_EXCEEDED
        assert time.monotonic() - begun < 3
        await asyncio.wait_for(server.calls[0].left.wait(), 5)
        assert 1 <= int(server.calls[0].headers["x-timeout-ms"]) <= 500


async def test_a_cancel_closes_the_connection():
    server = ForeignRestServer(never)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        call = stub.ModelInfer(echo_request())
        await until(lambda: server.calls)
        call.cancel()
        await asyncio.wait_for(server.calls[0].left.wait(), 5)


async def test_connections_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(transport, "CONNECTIONS", 4)
    server = ForeignRestServer()
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        await asyncio.gather(*(stub.ModelInfer(echo_request()) for _ in range(40)))
    assert len(server.calls) == 40
    assert server.connections <= 4


async def test_a_wait_for_a_connection_ends(monkeypatch):
    monkeypatch.setattr(transport, "CONNECTIONS", 1)
    spare = transport.HttpTransport
    monkeypatch.setattr(transport, "HttpTransport", lambda address, wait_s: spare(address, 0.2))
    monkeypatch.setattr("services.transformer.predictors.v2_rest.client.HttpTransport", transport.HttpTransport)
    server = ForeignRestServer(never)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        held = stub.ModelInfer(echo_request())
        await until(lambda: server.calls)
        code, details, _, status = await refusal(stub)
        assert (code, status) == (Code.RESOURCE_EXHAUSTED, "429")
        assert "connections" in details
        held.cancel()


async def test_values_that_json_cannot_hold_are_refused_before_they_are_sent():
    server = ForeignRestServer(binary=False)
    async with foreign_rest_server(server) as address, transformer(address) as (stub, _):
        code, details, *_ = await refusal(stub, echo_request(bytes_tensor("x", [b"\xff"])))
        assert (code, "not UTF-8" in details) == (Code.INVALID_ARGUMENT, True)
        code, *_ = await refusal(stub, echo_request(parameters={"k": pb.InferParameter(string_param="")}, id="x" * 257))
        assert code is Code.INVALID_ARGUMENT
        unequal = echo_request()
        unequal.raw_input_contents.append(b"")
        assert (await refusal(stub, unequal))[0] is Code.INVALID_ARGUMENT
    assert server.calls == []


async def test_the_callers_trace_is_passed_on_and_background_calls_are_not_traced():
    server = ForeignRestServer()
    models = "ids=models/storyteller"
    async with foreign_rest_server(server) as address, transformer(address, models) as (stub, _):
        await stub.ModelInfer(echo_request(id=""), metadata=(("x-request-id", "mine"),))
    assert server.probes[0].headers["traceparent"].endswith("-00")
    assert server.calls[0].headers["x-request-id"] == "mine"
