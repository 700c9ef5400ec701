"""The payload log, read through the gateway."""

from typing import Any

from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest
from headrace_protos.headrace_pb2_grpc import PayloadLogStub
from tests.system.calls import channel
from tests.waiting import until


async def query(gateway: str, **filters: Any) -> list[PayloadRecord]:
    """The records that pass the filters now."""
    async with channel(gateway) as open_channel:
        found = PayloadLogStub(open_channel).Query(QueryPayloadsRequest(**filters), timeout=10)
        return [record async for record in found]


async def records(gateway: str, count: int = 1, **filters: Any) -> list[PayloadRecord]:
    """The services' records that pass the filters, once there are that many, without the gateway's own records."""
    found: list[PayloadRecord] = []

    async def enough() -> bool:
        found[:] = [record for record in await query(gateway, **filters) if record.model]
        return len(found) >= count

    await until(enough)
    return found
