"""Records for the logger's tests, and what its store has of them."""

import uuid
from contextlib import aclosing, asynccontextmanager
from functools import partial

import grpc
import sqlalchemy as sql
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.dialects import sqlite

from headrace.rpc.server.handlers import Interceptor
from headrace_logger.read_limits import Readers
from headrace_logger.store.filters import Filters
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord, QueryPayloadsRequest, TailPayloadsRequest
from tests.support.listening import listening

SOURCE = str(uuid.uuid4())

# By number, for filters.
RECORDS = {
    1: {"model": "a", "status": "OK", "finish_reason": "stop", "prompt": "a needle", "duration_ms": 10, "ttft_ms": 1},
    2: {
        "model": "b",
        "status": "INTERNAL",
        "parameters": "needle",
        "request_id": "same",
        "duration_ms": 20,
        "ttft_ms": 2,
    },
    3: {"model": "a", "status": "OK", "finish_reason": "length", "text": "groß", "duration_ms": 30, "ttft_ms": 3},
    4: {"model": "b", "status": "OK", "request_id": "same", "text": "hay, needle, hay", "duration_ms": 40},
}
for _number, _fields in RECORDS.items():
    _fields["trace_id"] = f"t{_number}"


class LoggedCall:
    """A line of the gateway's access log, whose own record is given."""

    def __init__(self, record, may_be_recorded=False):
        self.call_id, self.gateway = record.call_id, record.gateway
        self._record, self._may_be_recorded = record, may_be_recorded

    def record(self):
        return self._record

    def may_be_recorded(self, record):
        assert record is self._record
        return self._may_be_recorded


def record_id(number):
    return str(uuid.UUID(int=number))


def number_of(record):
    return uuid.UUID(record.record_id).int


def append_request(number, source=SOURCE, time_ns=0, **fields):
    record = PayloadRecord(record_id=record_id(number), **fields)
    record.time.FromNanoseconds(time_ns)
    return AppendRequest(source=source, sequence=number, record=record)


def answered(number, **fields):
    """As `append_request`, with a prompt and an answer."""
    return append_request(number, **({"status": "OK", "prompt": "p", "text": "t"} | fields))


def timestamp(time_ns):
    result = Timestamp()
    result.FromNanoseconds(time_ns)
    return result


async def stored(store, number):
    """The record; None if there is none."""
    found = await anext(store.get(record_id(number)), None)
    return found and found.record


async def everything(store):
    return [found.record async for found in store.query(Filters(QueryPayloadsRequest()), None, 1000)]


async def numbers(store, limit=1000, **filters):
    found = store.query(Filters(QueryPayloadsRequest(**filters)), None, limit)
    return [number_of(one.record) async for one in found]


@asynccontextmanager
async def following(tails, caller="c", **filters):
    """The records of a new tail, as they come."""
    lend = partial(Readers().lend, caller)
    async with (
        tails.open(Filters(TailPayloadsRequest(**filters)), caller) as tail,
        aclosing(tail.records(lend)) as serialized,
        aclosing(PayloadRecord.FromString(each) async for each in serialized) as records,
    ):
        yield records


def client(name, policy='{"role": "admin"}'):
    """The metadata that the gateway sets for a client's call."""
    return (("x-headrace-client", name), ("x-headrace-policy", policy))


async def append_to(channel, requests):
    """Sends requests to a logger; returns what it acknowledged."""
    call = headrace_pb2_grpc.PayloadIngestStub(channel).Append(iter(requests))
    return [response.sequence async for response in call]


@asynccontextmanager
async def serving(*services, options=()):
    """The target of a server of some of the logger's services."""
    server = grpc.aio.server(interceptors=(Interceptor("logger"),), options=options)
    for service in services:
        service.add_to(server)
    async with listening(server) as address:
        yield address


def explained(folder, statement):
    """SQLite's query plan of a statement."""
    text = str(statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    engine = sql.create_engine(f"sqlite:///{folder / 'payloads.sqlite3'}")
    with engine.connect() as connection:
        lines = [row.detail for row in connection.execute(sql.text(f"EXPLAIN QUERY PLAN {text}"))]
    engine.dispose()
    return lines
