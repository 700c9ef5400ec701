"""An engine whose step hangs ends its streams, names them, and is started again with its process."""

import socket
import sys

import grpc
import pytest

from millrace.protos import millrace_pb2, millrace_pb2_grpc
from tests.system.calls import channel, generate
from tests.waiting import until


async def test_a_hanging_step_ends_its_stream_and_the_process_is_started_again(new_stack, tmp_path):
    gate = tmp_path / "gate"
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "tests.system.gated_predictor")},
        environment={"predictor": {"GATE_SOCKET": str(gate), "PREDICTOR_STEP_TIMEOUT": "1"}},
    )
    request = millrace_pb2.GenerateRequest(model="storyteller", prompt="Once", ignore_eos=True, request_id="hangs")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opener:
        opener.connect(str(gate))
        async with channel(stack.gateway) as open_channel:
            call = millrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=60)
            opener.send(b".")
            assert (await call.read()).token_ids
            # Nobody opens the gate for the second token: the step hangs.
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    log = stack.log("predictor-0")
    assert "a step takes longer than 1 s; in flight: [" in log
    assert "most recent call first" in log

    async def serves_again():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opener:
            try:
                opener.connect(str(gate))
                opener.send(b"." * 100)
                responses = await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=3)
            except (OSError, grpc.aio.AioRpcError):
                return False
        return responses[-1].usage.completion_tokens == 3

    await until(serves_again, 60)
