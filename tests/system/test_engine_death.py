"""An engine whose step hangs is reported with its requests, and its process ends; its streams continue in the next one.

The predictor stays, with its port: only the engine's process is replaced.
"""

import asyncio
import socket
import sys
from contextlib import suppress

import grpc

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import channel, generate
from tests.waiting import until


async def test_a_stream_survives_the_hanging_step_of_its_engine(new_stack, tmp_path):
    gate = tmp_path / "gate"
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "tests.system.gated_predictor")},
        environment={
            "predictor": {"GATE_SOCKET": str(gate), "PREDICTOR_STEP_TIMEOUT": "1"},
            "transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": "100"},
        },
    )
    fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 6, "ignore_eos": True, "seed": 3}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opener:
        opener.connect(str(gate))
        async with channel(stack.gateway) as open_channel:
            request = headrace_pb2.GenerateRequest(**fields, request_id="hangs")
            call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=120)
            opener.send(b".")
            first = await call.read()
            assert len(first.token_ids) == 1
            predictor = stack.pid("predictor-0")
            # The gate stays closed for the second token: the step hangs.
            await until(lambda: "a step takes longer than 1 s; in flight: [" in stack.log("predictor-0"))
            opening = asyncio.create_task(_keep_open(gate))
            ids = list(first.token_ids)
            while (response := await call.read()) is not grpc.aio.EOF:
                ids += response.token_ids
    assert "most recent call first" in stack.log("predictor-0")
    assert stack.pid("predictor-0") == predictor
    undisturbed = await generate(stack.gateway, **fields)
    opening.cancel()
    assert ids == [token for response in undisturbed for token in response.token_ids]


async def _keep_open(gate):
    """Lets the model continue, in whichever process it is."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opener, suppress(OSError):
            opener.connect(str(gate))
            opener.send(b"." * 10)
        await asyncio.sleep(0.05)
