"""The load test runs headless against a gateway, measures streams as they come, and reports failures by status."""

import asyncio
import csv
import importlib.util
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2

# Not importorskip: importing locust patches the process for gevent.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is missing: install the extra `loadtest`"
)

ROOT = Path(__file__).parents[2]
# Locust 2.47 may write its statistics once more after it has closed their file; they are whole by then.
CSV_CLOSED = b"ValueError: I/O operation on closed file"
TOKENS, PAUSE_S, TENSOR = 5, 0.02, 6
GEVENT_THREADS = 10  # Of gevent's pool, unless someone asks for more.


class Gateway(headrace_pb2_grpc.TextGenerationServicer):
    """Streams `TOKENS` tokens with a pause before each, or refuses; checks the tensors.

    As many streams as `waiting` counts get nothing until `released` is set.
    """

    def __init__(self):
        self.refuse = False
        self.pause_s = PAUSE_S
        self.authorities = set()
        self.prompts = set()
        self.never = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.released = threading.Event()

    def Generate(self, request, context):  # noqa: N802
        if self.refuse:
            context.set_trailing_metadata((("x-failed-hop", "predictor"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no replica of 17")
        self.prompts.add(request.prompt)
        if self.waiting.acquire(blocking=False):
            context.add_callback(self.waiting.release)
            self.released.wait()
        for token_id in range(TOKENS):
            self.never.wait(self.pause_s)
            finish_reason = "length" if token_id == TOKENS - 1 else None
            yield headrace_pb2.GenerateResponse(text="x", token_ids=[token_id], finish_reason=finish_reason)

    def ModelMetadata(self, request, context):  # noqa: N802
        metadata = inference_pb2.ModelMetadataResponse(name=request.name)
        metadata.inputs.add(name="input_ids", datatype="INT64", shape=[-1])
        metadata.inputs.add(name="output_ids", datatype="INT64", shape=[-1])
        return metadata

    def ModelInfer(self, request, context):  # noqa: N802
        # grpcio's servers have no public API for the authority.
        self.authorities.add(context._rpc_event.call_details.host)
        response = inference_pb2.ModelInferResponse(model_name=request.model_name)
        if self.refuse:
            return response
        [description], [raw] = request.inputs, request.raw_input_contents
        assert (description.name, description.datatype, list(description.shape)) == ("input_ids", "INT64", [TENSOR])
        struct.unpack(f"<{TENSOR}q", raw)
        assert request.parameters["max_tokens"].int64_param > 0
        response.outputs.add(name="output_ids", datatype="INT32", shape=[1])
        response.raw_output_contents.append(struct.pack("<i", 7))
        return response


@pytest.fixture
def gateway():
    servicer = Gateway()
    server = grpc.server(ThreadPoolExecutor(64))
    headrace_pb2_grpc.add_TextGenerationServicer_to_server(servicer, server)
    # Generic, because grpcio forgets the authority of calls to methods that it has registered.
    infer = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer,
        inference_pb2.ModelInferRequest.FromString,
        inference_pb2.ModelInferResponse.SerializeToString,
    )
    metadata = grpc.unary_unary_rpc_method_handler(
        servicer.ModelMetadata,
        inference_pb2.ModelMetadataRequest.FromString,
        inference_pb2.ModelMetadataResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": infer, "ModelMetadata": metadata}
    )
    server.add_generic_rpc_handlers((handler,))
    servicer.host = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.released.set()
    server.stop(None).wait()


async def run_locust(host, folder, names, *options, least=1):
    """(exit status, rows of the statistics by name, failures) of a run in which every name has so many requests.

    On a busy machine the users need most of a short run to start.
    """
    for seconds in (3, 12, 48):
        status, rows, failures = await run_locust_for(seconds, host, folder, options)
        if all(name in rows and int(rows[name]["Request Count"]) >= least for name in names):
            break
    return status, rows, failures


async def run_locust_for(seconds, host, folder, options):
    run = f"-u 4 -r 4 -t {seconds}s --only-summary --csv {folder}/run --model mine --tensor-shape {TENSOR}"
    arguments = f"-f loadtest/locustfile.py --headless --host {host} {run}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", *arguments.split(), *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert output.count(b"Traceback") == output.count(CSV_CLOSED), output.decode()
    with (folder / "run_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    with (folder / "run_failures.csv").open() as file:
        failures = {(row["Name"], row["Error"]) for row in csv.DictReader(file)}
    return process.returncode, rows, failures


async def test_failures_are_reported_by_status_and_hop(gateway, tmp_path):
    gateway.refuse = True
    names = {"Generate", "ModelInfer at the predictor"}
    status, rows, failures = await run_locust(gateway.host, tmp_path, names, "StreamUser", "TensorUser")
    assert status == 1
    assert failures == {
        ("Generate", "CallFailedError('UNAVAILABLE at the predictor')"),
        ("ModelInfer at the predictor", "CallFailedError('the response has no tensors')"),
    }
    assert "Generate TTFT" not in rows


async def test_open_load_continues_while_answers_are_late_and_the_check_fails(gateway, tmp_path):
    gateway.pause_s = 0.2
    options = ("--arrivals", "8", "--check", "--objective", "TTFT <= 1 ms", "StreamUser")
    status, rows, failures = await run_locust(gateway.host, tmp_path, {"Generate"}, *options)
    assert (status, failures) == (1, set()), "no request failed, and none was in time"
    # With closed load, four users would get an answer a second each.
    assert int(rows["Generate TTFT"]["Request Count"]) > 25


async def test_streams_that_wait_for_their_first_token_delay_no_other(gateway, tmp_path):
    gateway.waiting.release(2 * GEVENT_THREADS)
    options = ("-u", str(2 * GEVENT_THREADS + 1), "-r", "100", "StreamUser")
    _, rows, failures = await run_locust(gateway.host, tmp_path, {"Generate"}, *options)
    assert failures == set()
    assert int(rows["Generate"]["Request Count"]) > 1
