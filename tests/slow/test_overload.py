"""`overload`: more callers at once than a stack can serve: each is answered or refused, and all are recorded.

1,500 streams at once, a model without cost: no call waits unnoticed until gRPC cancels it.
"""

import asyncio
import sys
from collections import Counter

import grpc
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import query
from tests.waiting import until

CALLERS, CONNECTIONS = 1500, 4
TOKENS = 8
PAGE = 500


@pytest.mark.timeout(180)
async def test_each_of_1500_streams_at_once_is_answered_or_refused_and_recorded(new_stack):
    stack = await new_stack(
        models="storyteller=models/storyteller",
        predictors=2,
        commands={"predictor": (sys.executable, "-m", "bench.instant_predictor")},
        environment={"predictor": {"PACE_MS": "5", "PREDICTOR_MAX_WAITING": "128"}},
    )
    request = headrace_pb2.GenerateRequest(model="storyteller", prompt="Once", max_tokens=TOKENS, ignore_eos=True)
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(stack.gateway, options=own) for _ in range(CONNECTIONS)]

    async def call(number):
        tokens = 0
        try:
            async for response in headrace_pb2_grpc.TextGenerationStub(channels[number % CONNECTIONS]).Generate(
                request
            ):
                tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            signed = {"x-failed-hop", "retry-after-ms"} <= metadata.keys()
            return f"{error.code().name}, {'signed' if signed else 'unsigned'}"
        return "OK" if tokens == TOKENS else f"{tokens} tokens"

    try:
        outcomes = Counter(await asyncio.gather(*(call(number) for number in range(CALLERS))))
    finally:
        for channel in channels:
            await channel.close()
    print(dict(outcomes))
    assert outcomes.keys() <= {"OK", "RESOURCE_EXHAUSTED, signed"}  # Their numbers depend on the machine.
    assert outcomes["OK"] >= 2 * (32 + 128) * 0.5  # Places are used, however calls are distributed.

    statuses = Counter()

    async def all_are_on_record():
        statuses.clear()
        page_token = ""
        while records := await query(stack.gateway, page_size=PAGE, page_token=page_token):
            statuses.update(record.status for record in records if record.model or record.status != "OK")
            page_token = records[-1].page_token
            if not page_token:
                break
        return statuses.total() >= CALLERS

    await until(all_are_on_record)
    print(dict(statuses))
    refused = outcomes["RESOURCE_EXHAUSTED, signed"]
    assert statuses == {"OK": outcomes["OK"]} | ({"RESOURCE_EXHAUSTED": refused} if refused else {})
