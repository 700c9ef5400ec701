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

from millrace_protos import inference_pb2, millrace_pb2, millrace_pb2_grpc

# Not importorskip: importing locust patches the process for gevent.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is missing: install the extra `loadtest`"
)

ROOT = Path(__file__).parents[2]
TOKENS, PAUSE_S = 5, 0.02


class Gateway(millrace_pb2_grpc.TextGenerationServicer):
    """Streams `TOKENS` tokens with a pause before each, or refuses; checks what the tensors are."""

    def __init__(self):
        self.refuse = False
        self.authorities = set()
        self.prompts = set()
        self.never = threading.Event()

    def Generate(self, request, context):  # noqa: N802
        if self.refuse:
            context.set_trailing_metadata((("x-failed-hop", "predictor"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no replica of 17")
        self.prompts.add(request.prompt)
        for token_id in range(TOKENS):
            self.never.wait(PAUSE_S)
            finish_reason = "length" if token_id == TOKENS - 1 else None
            yield millrace_pb2.GenerateResponse(text="x", token_ids=[token_id], finish_reason=finish_reason)

    def ModelInfer(self, request, context):  # noqa: N802
        # The authority has no public door in grpcio's servers.
        self.authorities.add(context._rpc_event.call_details.host)
        response = inference_pb2.ModelInferResponse(model_name="normalizer")
        if self.refuse:
            return response
        [description], [raw] = request.inputs, request.raw_input_contents
        assert (description.name, description.datatype, description.shape[0]) == ("input_ids", "INT64", 1)
        struct.unpack(f"<{description.shape[1]}q", raw)
        assert request.parameters["max_tokens"].int64_param > 0
        response.outputs.add(name="output_ids", datatype="INT32", shape=[1])
        response.raw_output_contents.append(struct.pack("<i", 7))
        return response


@pytest.fixture
def gateway():
    servicer = Gateway()
    server = grpc.server(ThreadPoolExecutor(8))
    millrace_pb2_grpc.add_TextGenerationServicer_to_server(servicer, server)
    # Generic, because grpcio forgets the authority of calls to methods that it has registered.
    infer = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer,
        inference_pb2.ModelInferRequest.FromString,
        inference_pb2.ModelInferResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": infer})
    server.add_generic_rpc_handlers((handler,))
    servicer.host = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


async def run_locust(host, folder, names):
    """(exit status, rows of the statistics by name, failures) of a run in which every name has a row.

    On a busy machine the users need most of a short run to start.
    """
    for seconds in (3, 12, 48):
        status, rows, failures = await run_locust_for(seconds, host, folder)
        if names <= rows.keys():
            break
    return status, rows, failures


async def run_locust_for(seconds, host, folder):
    run = f"-u 4 -r 4 -t {seconds}s --only-summary --csv {folder}/run"
    arguments = f"-f loadtest/locustfile.py --headless --host {host} {run}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", *arguments.split()),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert b"Traceback" not in output, output.decode()
    with (folder / "run_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    with (folder / "run_failures.csv").open() as file:
        failures = {(row["Name"], row["Error"]) for row in csv.DictReader(file)}
    return process.returncode, rows, failures


async def test_both_users_run_without_a_failure(gateway, tmp_path):
    names = {"Generate", "Generate TTFT", "Generate inter-token", "ModelInfer at the predictor"}
    status, rows, failures = await run_locust(gateway.host, tmp_path, names)
    assert (status, failures) == (0, set())
    assert set(rows) - {"Aggregated"} == names
    for row in rows.values():
        assert int(row["Request Count"]) > 0
        assert int(row["Failure Count"]) == 0
    least = {name: float(row["Min Response Time"]) for name, row in rows.items()}
    assert PAUSE_S * 1000 <= least["Generate TTFT"] < least["Generate"]
    assert least["Generate"] >= TOKENS * PAUSE_S * 1000
    assert float(rows["Generate"]["Average Content Size"]) > TOKENS
    assert gateway.authorities == {b"predictor"}
    assert len(gateway.prompts) > 1, "prompts vary"


async def test_failures_are_reported_by_status_and_hop(gateway, tmp_path):
    gateway.refuse = True
    names = {"Generate", "ModelInfer at the predictor"}
    status, rows, failures = await run_locust(gateway.host, tmp_path, names)
    assert status == 1
    assert failures == {
        ("Generate", "CallFailedError('UNAVAILABLE at the predictor')"),
        ("ModelInfer at the predictor", "CallFailedError('the response has no output_ids')"),
    }
    assert "Generate TTFT" not in rows
