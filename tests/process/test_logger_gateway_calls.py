"""The gateway's line of a call is joined to the service's record, or is a record of its own; never both."""

import asyncio
import sqlite3
import uuid

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub

from headrace_logger import gateway_calls
from headrace_logger.gateway_calls import GatewayCalls
from headrace_logger.store import reading
from headrace_logger.tails import Tails
from tests.support.payload_fixtures import BOTH, only_sqlite
from tests.support.payload_records import append_request, everything, following, record_id, serving, stored

STARTED_NS = 1_700_000_000_123_456_789
GENERATE = "/headrace.v1.TextGeneration/Generate"
VALUES = gateway_calls._VALUES
# A successful gRPC call as Envoy logs it; "-" means no value.
FINE = {
    "request_id": "mine",
    "client": "-",
    "path": GENERATE,
    "routed_path": GENERATE,
    "content_type": "application/grpc",
    "grpc_timeout": "-",
    "http_status": "200",
    "grpc_status": "0",
    "failed_hop": "-",
    "failed_hop_trailer": "-",
    "flags": "-",
    "details": "via_upstream",
    "duration_ms": "12",
    "request_bytes": "5",
    "response_bytes": "70",
    "cluster": "transformer",
    "upstream": "10.0.0.2:9001",
    "peer": "10.0.0.9:52094",
}
NO_UPSTREAM = {"cluster": "-", "upstream": "-", "details": "cluster_not_found", "flags": "NC", "failed_hop": "gateway"}
REST = {
    "path": "/v1/completions?key=secret",
    "routed_path": "/headrace.rest.v1.OpenAI/Completions",
    "http_status": "200",
}


def export_request(*calls):
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add().scope_logs.add().log_records
    for call in calls:
        log = logs.add(time_unix_nano=STARTED_NS, trace_id=bytes(range(16)), span_id=bytes(range(8)))
        values = FINE | {"call_id": str(uuid.uuid4())} | call
        log.body.string_value = "\n".join(values[name] for name in VALUES)
    return request


@pytest.fixture
async def logger(store):
    """A stub of the service, its tails, and its channel."""
    tails = Tails(store)
    async with serving(GatewayCalls(store, hold_s=0)) as target, grpc.aio.insecure_channel(target) as channel:
        yield LogsServiceStub(channel), tails, channel


@pytest.fixture(autouse=True)
def records_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(reading, "RECORD_LATE_S", 0)


def service_record(number, call_id, **fields):
    return append_request(number, time_ns=STARTED_NS, call_id=call_id, status="OK", **fields)


async def test_a_call_that_no_service_recorded_is_a_record_of_its_own(store, logger):
    stub, _, _ = logger
    await stub.Export(export_request({"call_id": "c", "client": "someone"}))
    (record,) = await everything(store)
    assert uuid.UUID(record.record_id).version == 7
    assert record.time.ToNanoseconds() == STARTED_NS
    assert (record.request_id, record.client, record.call_id) == ("mine", "someone", "c")
    assert (record.protocol, record.status, record.failed_hop, record.message) == (GENERATE[1:], "OK", "", "")
    assert (record.trace_id, record.span_id) == (bytes(range(16)).hex(), bytes(range(8)).hex())
    assert record.duration_ms == 12
    assert record.gateway.path == GENERATE
    assert (record.gateway.http_status, record.gateway.request_bytes, record.gateway.response_bytes) == (200, 5, 70)
    assert (record.gateway.upstream, record.gateway.peer) == ("10.0.0.2:9001", "10.0.0.9:52094")
    assert await anext(store.get(record.record_id), None) is not None


@pytest.mark.parametrize("store", BOTH, indirect=True)
@pytest.mark.parametrize("order", ["call first", "record first", "record of two requests"])
async def test_a_call_and_its_record_are_joined_whichever_arrives_first(store, logger, order):
    stub, _, _ = logger
    requests = [service_record(n, "c", prompt="p") for n in ((1, 2) if order == "record of two requests" else (1,))]
    if order == "call first":
        await stub.Export(export_request({"call_id": "c"}, {"call_id": "another"}))
        assert len(await everything(store)) == 2
        await store.append(requests)
    else:
        await store.append(requests)
        await stub.Export(export_request({"call_id": "c"}, {"call_id": "another"}))
    found = {record.record_id: record for record in await everything(store)}
    assert {record.call_id for record in found.values()} == {"c", "another"}
    assert len(found) == len(requests) + 1
    for request in requests:
        record = found[request.record.record_id]
        assert record.prompt == "p"
        assert record.gateway.details == "via_upstream"
        assert (await anext(store.get(record.record_id))).record.gateway == record.gateway


async def test_a_call_that_a_service_may_record_is_shown_alone_only_once_the_record_is_late(store, logger, monkeypatch):
    monkeypatch.setattr(reading, "RECORD_LATE_S", 60)
    stub, _, _ = logger
    await stub.Export(export_request({"call_id": "c"}, {"call_id": "refused", **NO_UPSTREAM}))
    assert [record.call_id for record in await everything(store)] == ["refused"]
    await store.append([service_record(1, "c")])
    assert {record.call_id for record in await everything(store)} == {"c", "refused"}
    await stub.Export(export_request({"call_id": "unrecorded"}))
    assert len(await everything(store)) == 2
    monkeypatch.setattr(reading, "RECORD_LATE_S", 0)
    assert len(await everything(store)) == 3


async def test_readers_of_all_records_get_only_those_of_services_unchanged(store, logger):
    stub, _, _ = logger
    await stub.Export(export_request({"call_id": "alone"}, {"call_id": "c"}))
    request = service_record(1, "c")
    await store.append([request])
    assert [one.record for one in await store.after(0, 10)] == [request.record]


async def test_a_line_is_held_until_its_record_can_have_arrived(store, logger):
    held = GatewayCalls(store, hold_s=0.05)
    request = gateway_calls._ExportRequest.FromString(export_request({"call_id": "c"}).SerializeToString())
    export = asyncio.create_task(held._export(request, None))
    await asyncio.sleep(0)
    await store.append([service_record(1, "c")])
    await export
    (record,) = await everything(store)
    assert (record.record_id, record.gateway.details) == (record_id(1), "via_upstream")


async def test_a_repeat_of_a_call_changes_nothing(store, logger):
    stub, _, _ = logger
    for _ in range(2):
        await stub.Export(export_request({"call_id": "c"}, {"call_id": "c"}))
    assert len(await everything(store)) == 1


async def test_calls_that_never_got_an_id_are_records_of_their_own(store, logger):
    stub, _, _ = logger
    await stub.Export(export_request({"call_id": "-"}, {"call_id": "-"}))
    found = await everything(store)
    assert [record.call_id for record in found] == ["", ""]
    assert found[0].gateway.path == GENERATE


async def test_a_call_is_deleted_with_its_record_and_does_not_return(store, logger):
    stub, _, _ = logger
    await store.append([service_record(n, "shared") for n in (1, 2)])
    await store.append([service_record(3, "late")])
    await stub.Export(export_request({"call_id": "shared"}))
    await store.delete(record_id=record_id(1))
    assert (await stored(store, 2)).HasField("gateway")
    for n in (2, 3):
        await store.delete(record_id=record_id(n))
    await stub.Export(export_request({"call_id": "shared"}, {"call_id": "late"}))
    assert await everything(store) == []


STATUSES = (
    ({}, "OK", ""),
    ({"grpc_status": "8", "failed_hop": "predictor"}, "RESOURCE_EXHAUSTED", "predictor"),
    ({"grpc_status": "13", "failed_hop_trailer": "predictor"}, "INTERNAL", "predictor"),
    ({"grpc_status": "12", **NO_UPSTREAM}, "UNIMPLEMENTED", "gateway"),
    ({"grpc_status": "14", **NO_UPSTREAM, "flags": "UH", "failed_hop": "transformer"}, "UNAVAILABLE", "transformer"),
    ({"grpc_status": "14", "flags": "URX,UF", "failed_hop": "transformer"}, "UNAVAILABLE", "transformer"),
    ({"grpc_status": "2", "flags": "UC"}, "UNAVAILABLE", "transformer"),
    ({"grpc_status": "-", "http_status": "0", "flags": "DR", "details": "http2.remote_reset"}, "CANCELLED", ""),
    ({"grpc_status": "2", "flags": "DR", "grpc_timeout": "900m"}, "CANCELLED", ""),
    ({"grpc_status": "2", "flags": "DR", "grpc_timeout": "12m"}, "DEADLINE_EXCEEDED", "transformer"),
    ({"grpc_status": "2", "flags": "DR", "grpc_timeout": "15000u"}, "DEADLINE_EXCEEDED", "transformer"),
    ({"grpc_status": "-", "http_status": "200"}, "UNKNOWN", "transformer"),
    (REST, "OK", ""),
    ({**REST, "http_status": "0", "flags": "DC", "grpc_status": "-"}, "CANCELLED", ""),
    ({**REST, "http_status": "429", "failed_hop": "predictor"}, "RESOURCE_EXHAUSTED", "predictor"),
    ({**REST, "http_status": "413", "failed_hop": "gateway"}, "RESOURCE_EXHAUSTED", "gateway"),
    ({**REST, "http_status": "503", "flags": "UH", "upstream": "-"}, "UNAVAILABLE", "gateway"),
    ({**REST, "http_status": "504", "flags": "UT"}, "DEADLINE_EXCEEDED", "transformer"),
    ({**REST, "http_status": "418", "failed_hop": "transformer"}, "INTERNAL", "transformer"),
    (
        {"path": "/no", "routed_path": "/no", "content_type": "-", "http_status": "404", **NO_UPSTREAM},
        "NOT_FOUND",
        "gateway",
    ),
)


async def test_status_and_hop_are_those_that_the_caller_got(store, logger):
    stub, _, _ = logger
    await stub.Export(export_request(*(call | {"request_id": str(n)} for n, (call, _, _) in enumerate(STATUSES))))
    found = {int(record.request_id): record for record in await everything(store)}
    assert len(found) == len(STATUSES)
    for number, (call, status, hop) in enumerate(STATUSES):
        record, line = found[number], FINE | call
        assert (record.status, record.failed_hop) == (status, hop), call
        assert record.message == ("" if status == "OK" else f"{line['details']} ({line['flags']})"), call


async def test_the_protocol_is_the_method_if_there_is_one_and_no_query_is_kept(store, logger):
    stub, _, _ = logger
    expected = {
        (GENERATE[1:], GENERATE): {},
        ("headrace.rest.v1.OpenAI/Completions", "/v1/completions"): REST,
        ("/v1/no", "/v1/no"): {"path": "/v1/no?x=1", "routed_path": "/v1/no?x=1", "content_type": "-"},
        ("x" * 1023, "/" + "x" * 1023): {"path": "/" + "x" * 5000, "routed_path": "/" + "x" * 5000},
    }
    await stub.Export(export_request(*expected.values()))
    assert {(record.protocol, record.gateway.path) for record in await everything(store)} == expected.keys()


async def test_tail_shows_calls_that_no_service_can_record(store, logger):
    stub, tails, _ = logger
    unrecorded = [
        NO_UPSTREAM,
        {"flags": "URX,UF", "grpc_status": "14"},
        {"failed_hop": "gateway", "grpc_status": "8"},
        {"cluster": "predictor"},
    ]
    async with following(tails) as records:
        await stub.Export(export_request({}, {"flags": "DR"}, {"grpc_status": "8", "failed_hop": "predictor"}))
        await stub.Export(export_request(*({"request_id": f"r{n}"} | call for n, call in enumerate(unrecorded))))
        shown = [(await anext(records)).request_id for _ in unrecorded]
    assert shown == [f"r{n}" for n in range(len(unrecorded))]


async def test_values_of_callers_need_not_be_utf8(store, logger):
    _, _, channel = logger
    raw = export_request({"request_id": "PLACE"}).SerializeToString().replace(b"PLACE", b"a\xff\xfeb!")
    export = channel.unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export")
    await export(raw)
    (record,) = await everything(store)
    assert record.request_id == "a��b!"


@only_sqlite
async def test_records_of_calls_expire_with_their_lines(store, logger, tmp_path):
    stub, _, _ = logger
    await stub.Export(export_request({}, {}))
    await store.append([service_record(1, "c")])
    await stub.Export(export_request({"call_id": "c"}))
    expired = await store.expire(STARTED_NS // 1000 + 1, None)
    assert sorted(expired)[:2] == [0, 0]
    assert len(expired) == 3
    connection = sqlite3.connect(tmp_path / "payloads.sqlite3")
    assert connection.execute("SELECT count(*) FROM calls").fetchone() == (0,)
    connection.close()


GARBAGE = ["9" * 5000, "-1", "1e400", "nan", "\u0663", "x" * 60_000, "\x00", "\udcff", "5000S" * 1000, "", " 7 "]


async def test_a_line_with_garbage_in_a_field_is_kept_and_affects_no_other(store, logger):
    export, known = logger[2].unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export"), set()
    for field in FINE:
        left = {"flags": "DC"} if field == "grpc_timeout" else {}  # A cancelled call's deadline decides its status.
        request = export_request(*({"request_id": f"r{n}"} | left for n in range(len(GARBAGE) + 1)))
        logs = request.resource_logs[0].scope_logs[0].log_records
        for log, garbage in zip(logs, GARBAGE, strict=False):
            values = log.body.string_value.encode().split(b"\n")
            values[VALUES.index(field)] = garbage.encode(errors="surrogateescape")
            log.body.bytes_value = b"\n".join(values)
        # Envoy sends any bytes as a string: field 1 of AnyValue instead of 7.
        parsed = gateway_calls._ExportRequest.FromString(request.SerializeToString())
        for log in parsed.resource_logs[0].scope_logs[0].log_records:
            if log.body.WhichOneof("value") == "bytes_value":
                log.body.string_value = log.body.bytes_value
        await export(parsed.SerializeToString())
        records = [record for record in await everything(store) if record.record_id not in known]
        known |= {record.record_id for record in records}
        assert len(records) == len(GARBAGE) + 1, field
        assert all(record.ByteSize() < 8000 for record in records), field
        assert any(record.status == ("CANCELLED" if left else "OK") for record in records), field


async def test_a_call_with_any_trace_id_is_recorded(store, logger):
    stub, tails, _ = logger
    trace_ids = [(1).to_bytes(16), bytes(16), b"", bytes(range(40))]
    request = export_request(*(NO_UPSTREAM | {"request_id": repr(trace_id)} for trace_id in trace_ids))
    for log, trace_id in zip(request.resource_logs[0].scope_logs[0].log_records, trace_ids, strict=True):
        log.trace_id = trace_id
    async with following(tails) as records:
        await stub.Export(request)
        shown = [(await anext(records)).request_id for _ in trace_ids]
    assert shown == [repr(trace_id) for trace_id in trace_ids]
    assert {record.request_id: record.trace_id for record in await everything(store)} == {
        repr(trace_id): trace_id.hex() if len(trace_id) == 16 else "" for trace_id in trace_ids
    }


async def test_an_unreadable_line_affects_no_other(store, logger, caplog):
    stub, _, _ = logger
    bodies = ("", "bad", "\n" * len(VALUES))
    request = export_request({"request_id": "good"}, *({"request_id": "bad"} for _ in bodies), {"request_id": "well"})
    for log, body in zip(request.resource_logs[0].scope_logs[0].log_records[1:], bodies, strict=False):
        log.body.string_value = body
    await stub.Export(request)
    assert {record.request_id for record in await everything(store)} == {"good", "well"}
    assert "cannot be read" in caplog.text
