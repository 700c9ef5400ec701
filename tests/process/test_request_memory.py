"""Requests make a process grow by its budget and a fixed bound, and the memory is given back."""

import asyncio
import os
import signal
import struct
import sys

import grpc
import psutil
import pytest

from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_runner.settings import ROOT
from tests.support.forkserver import spawn
from tests.support.http2_client import connected
from tests.waiting import until

MIB = 1 << 20
BUDGET = 512 * MIB
MESSAGE_BYTES = 58_000_000
BEYOND_BUDGET = 300 * MIB
KEPT = 40 * MIB  # Less than one message.
RAW = "/inference.GRPCInferenceService/ModelInfer"
RAW_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
GRPC_HEADERS = [("content-type", "application/grpc"), ("te", "trailers")]
UNFINISHED = struct.pack(">BI", 0, 60_000_000) + bytes(59_999_999)  # A message that lacks its last byte.
LARGE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Process:
    def __init__(self, process, port):
        self._process = process
        self._psutil = psutil.Process(process.pid)
        self.port = port

    @property
    def rss(self):
        return self._psutil.memory_info().rss

    def go(self):
        self._process.send_signal(signal.SIGUSR1)

    async def peak(self, until):
        """The peak of memory until a task ends."""
        most = self.rss
        while not until.done():
            most = max(most, self.rss)
            await asyncio.wait((until,), timeout=0.02)
        return max(most, self.rss)

    async def shrinks_to(self, size):
        while self.rss > size:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
async def process(tmp_path):
    command = (sys.executable, "-m", "tests.process.memory_service", str(BUDGET))
    output = tmp_path / "output"
    with output.open("wb") as log:
        started = await spawn(command, os.environ, ROOT, log)
    await until(lambda: output.read_text().endswith("\n"))
    yield Process(started, int(output.read_text()))
    started.send_signal(signal.SIGKILL)
    await started.wait()


@pytest.fixture
async def channel(process):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}", options=LARGE) as opened:
        await GRPCInferenceServiceStub(opened).ServerLive(pb.ServerLiveRequest())
        yield opened


async def status(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_a_message_of_29_million_empty_messages_is_refused_unparsed(process, channel):
    before = process.rss
    bomb = b"\x2a\x00" * (MESSAGE_BYTES // 2)
    sending = asyncio.create_task(status(channel.unary_unary(RAW)(bomb)))
    peak = await process.peak(sending)
    refused = await sending
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "protobuf fields" in refused.details()
    assert peak - before < BEYOND_BUDGET
    for _ in range(3):
        on_stream = channel.stream_stream(RAW_STREAM)(iter([bomb]))
        assert await on_stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    await process.shrinks_to(before + KEPT)


async def test_requests_in_flight_take_the_budget_at_most_and_their_memory_is_given_back(process, channel):
    before = process.rss
    request = pb.ModelInferRequest(id="x", raw_input_contents=[bytes(MESSAGE_BYTES)]).SerializeToString()
    infer = channel.unary_unary(RAW)
    calls = [asyncio.create_task(status(infer(request, timeout=120))) for _ in range(3)]
    (refusal,), held = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    refused = refusal.result()
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(refused.trailing_metadata())
    assert metadata["x-http-status"] == "429"
    assert "retry-after-ms" in metadata
    small = asyncio.create_task(status(infer(pb.ModelInferRequest(id="small").SerializeToString())))
    assert process.rss - before < BUDGET + BEYOND_BUDGET
    process.go()
    assert await asyncio.gather(small, *held) == [None] * 3
    await process.shrinks_to(before + KEPT)


@pytest.mark.parametrize("path", [pytest.param(RAW, marks=pytest.mark.full), RAW_STREAM])
async def test_incomplete_messages_are_bounded_and_end_no_silent_call(process, channel, path):
    before = process.rss
    silent = channel.stream_stream(RAW_STREAM)()
    await silent.write(pb.ModelInferRequest(id="asked").SerializeToString())
    process.go()
    await silent.read()  # So it is silent for longer than the later ones.
    reading = asyncio.ensure_future(silent.read())
    async with connected(process.port) as client:
        calls = [await client.request(path, headers=GRPC_HEADERS, end=False) for _ in range(24)]
        sending = asyncio.gather(*(call.send_all(UNFINISHED, end=False) for call in calls))
        peak = await process.peak(sending)
        await sending
        assert peak - before < BUDGET + BEYOND_BUDGET
        assert any(call.is_ended for call in calls)
        assert not reading.done()
        # Others are served meanwhile: at once, or, if their messages arrived slowly too, after the retry delay.
        request = pb.ModelInferRequest(raw_input_contents=[bytes(MESSAGE_BYTES)]).SerializeToString()

        async def is_served():
            refused = await status(channel.unary_unary(RAW)(request))
            if refused is not None:
                assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                await asyncio.sleep(int(dict(refused.trailing_metadata())["retry-after-ms"]) / 1000)
            return refused is None

        for _ in range(3):
            await until(is_served)
    await process.shrinks_to(before + KEPT)


@pytest.mark.parametrize("tensors", [10, 2_000, 16_000])
async def test_a_large_request_of_few_or_many_fields_is_read(process, channel, tensors):
    process.go()
    request = pb.ModelInferRequest(id="x", raw_input_contents=[bytes(100_000)])
    for number in range(tensors):
        request.inputs.add(name=str(number), datatype="FP32")
    answer = await channel.unary_unary(RAW)(request.SerializeToString())
    assert pb.ModelInferResponse.FromString(answer).id == "x"
