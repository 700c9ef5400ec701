"""Upgrade: what each earlier version kept on the disk is opened by this one, and what is not is refused by name."""

import gzip
import logging
import shutil
import tarfile
from pathlib import Path

import pytest
from pydantic import SecretStr

from headrace.clients import ANYONE
from headrace.payload.outbox import open_outboxes
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import UsageRequest
from headrace_transformer.batches.store import Store as Batches
from tests.support import postgresql
from tests.support.payload_ingest import Ingest, Taps, begin
from tests.support.payload_records import append_request, everything, number_of, record_id
from tests.support.stored_state import BATCH_FILE, LIMITS, REQUESTS, SPOOLED, TIME_NS
from tests.waiting import HANG_S

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir())


def unpacked(version: str, name: str, folder: Path) -> Path:
    with tarfile.open(DATA / version / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_records_of_a_spool_are_shipped(version: str, tmp_path: Path, ingest: Ingest) -> None:
    taps = Taps(unpacked(version, "spool", tmp_path))
    try:
        tap = taps.start(ingest.target)
        begin(tap, "new").end("OK")
        assert await tap.drain(HANG_S)
        assert tap.dropped == {}
    finally:
        await taps.close_all()
    assert {record.request_id: record.status for record in ingest.records} == SPOOLED | {"new": "OK"}
    (first,) = (record for record in ingest.records if record.request_id == "r1")
    assert (first.prompt, first.text, [*first.chunks[0].token_ids]) == ("prompt of r1", "Once upon", [5, 6])


async def has_all(store: Store) -> None:
    """The stored records are there, and new ones, a sum and a deletion work."""
    try:
        await store.append([append_request(9, time_ns=TIME_NS + 9, model="a", prompt="new"), REQUESTS[0]])
        found = {number_of(record): record for record in await everything(store)}
        for record in found.values():
            record.ClearField("page_token")
        assert [found[number_of(request.record)] for request in REQUESTS] == [request.record for request in REQUESTS]
        assert found.keys() == {1, 2, 3, 4, 9}
        assert await store.delete(record_id=record_id(1)) == 1
        groups = (await store.usage(UsageRequest(group="model"))).groups
        assert {group.model: group.requests for group in groups} == {"a": 3, "b": 2}
    finally:
        await store.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_payload_log_in_sqlite_goes_on(version: str, tmp_path: Path) -> None:
    database = tmp_path / "payloads.sqlite3"
    with gzip.open(DATA / version / "payloads.sqlite3.gz") as packed, database.open("wb") as file:
        shutil.copyfileobj(packed, file)
    await has_all(Store(database))


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_payload_log_in_postgresql_goes_on(version: str, postgresql: postgresql.Postgresql) -> None:
    url = postgresql.database()
    postgresql.execute(url, (DATA / version / "payloads.sql").read_text())
    await has_all(Store(SecretStr(url)))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_files_of_batches_are_there(version: str, tmp_path: Path) -> None:
    batches = Batches(unpacked(version, "batches", tmp_path), LIMITS)
    (file,) = batches.files(ANYONE, "", "", 9, False)
    assert (file.filename, b"".join(batches.contents(ANYONE, file.id))) == ("name", BATCH_FILE)


def test_a_spool_of_a_later_version_is_named_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "01928374-0000-7000-8000-000000000000"
    folder.mkdir()
    (folder / "00000000000000000001.segment-2").write_bytes(b"later")
    with caplog.at_level(logging.WARNING):
        own, orphans = open_outboxes(tmp_path, 1 << 16)
    own.remove()
    assert orphans == []
    assert f"{folder} has 00000000000000000001.segment-2, which this version does not read" in caplog.text
    assert (folder / "00000000000000000001.segment-2").read_bytes() == b"later"
