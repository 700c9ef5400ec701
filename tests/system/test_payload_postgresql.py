"""A whole stack with its payload log in PostgreSQL: answers need no database, and each has one record."""

import asyncio
from collections import Counter

import grpc
import pytest

from tests.support import postgresql
from tests.system.calls import rest
from tests.system.payload_log import records
from tests.waiting import until

COUNT = 12


@pytest.fixture
def server():
    with postgresql.running() as server:
        yield server


@pytest.mark.full  # The short form: tests/system/test_payload_log.py and tests/process/test_logger_append.py.
async def test_streams_do_not_need_the_database_and_it_gets_every_record_later(new_stack, server):
    environment = {"logger": {"LOGGER_DATABASE_URL": server.database()}}
    stack = await new_stack(models="storyteller=models/storyteller", environment=environment)

    async def ask():
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 5, "stream": True}
        calls = (rest(stack.gateway, "POST", "/v1/completions", body) for _ in range(COUNT // 3))
        answers = await asyncio.gather(*calls)
        assert all(answer.status == 200 and answer.events[-1] == "[DONE]" for answer in answers)

    await ask()
    await records(stack.gateway, COUNT // 3, model="storyteller")
    await asyncio.to_thread(server.stop)
    await ask()
    await asyncio.to_thread(server.start)
    await ask()

    async def all_are_there():
        # Until the gateway knows that the logger is ready again, it does not forward the query.
        try:
            return len(await records(stack.gateway, COUNT, model="storyteller")) >= COUNT
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    await until(all_are_there, timeout_s=30)
    found = await records(stack.gateway, COUNT, model="storyteller")
    assert set(Counter(one.record_id for one in found).values()) == {1}
    assert len(found) == COUNT
