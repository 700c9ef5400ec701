"""What a version keeps on the disk: `python -m tests.support.stored_state FOLDER` writes it with the current code.

tests/process/test_upgrade.py opens what earlier versions wrote, from tests/process/data/VERSION. Before a version is
released, its own state is added there, once; what a released version wrote is never written again.

    spool.tar.gz        of a transformer that was killed: three records that ended, one that did not
    payloads.sqlite3.gz the payload log, with the records of `REQUESTS`
    payloads.sql        the same in PostgreSQL, by pg_dump --inserts
    batches.tar.gz      the folder of batches, with one file
"""

import asyncio
import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from pydantic import SecretStr

from headrace.clients import ANYONE
from headrace_logger.store.store import Store
from headrace_transformer.batches.store import Limits
from headrace_transformer.batches.store import Store as Batches
from tests.support import postgresql
from tests.support.payload_ingest import away, begin, tap_of
from tests.support.payload_records import RECORDS, append_request
from tests.waiting import until

TIME_NS = 1_790_000_000_000_000_000
REQUESTS = [append_request(number, time_ns=TIME_NS + number, **fields) for number, fields in RECORDS.items()]
LIMITS = Limits(2**30, 1, 36_500)
BATCH_FILE = b'{"custom_id": "a"}\n'
SPOOLED = {"r1": "OK", "r2": "INTERNAL", "r3": "OK", "r4": "ABORTED"}  # The status of each request's record.


def write(folder: Path) -> None:
    """Writes all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-") as own:
        asyncio.run(_write_spool(Path(own)))
        _pack(Path(own, "spool"), folder / "spool.tar.gz")
        asyncio.run(_append(Path(own, "payloads.sqlite3")))
        with (
            Path(own, "payloads.sqlite3").open("rb") as file,
            gzip.open(folder / "payloads.sqlite3.gz", "wb") as packed,
        ):
            shutil.copyfileobj(file, packed)
        Path(own, "batches").mkdir()
        Batches(Path(own, "batches"), LIMITS).add_file(ANYONE, "name", "batch", BATCH_FILE)
        _pack(Path(own, "batches"), folder / "batches.tar.gz")
    folder_of_programs = postgresql.programs()
    assert folder_of_programs, postgresql.MISSING
    with postgresql.running() as server:
        url = server.database()
        asyncio.run(_append(SecretStr(url)))
        command = [folder_of_programs / "pg_dump", "--inserts", "--no-owner", "--dbname", url]
        dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line for line in dump.splitlines() if line and not line.startswith(("--", "\\")))
    (folder / "payloads.sql").write_text("\n".join(lines) + "\n")


async def _write_spool(folder: Path) -> None:
    tap = tap_of(away(), spool=folder / "alive", spool_max=1 << 16)
    tap.start()
    for request_id, status in SPOOLED.items():
        recording = begin(tap, request_id, prompt=f"prompt of {request_id}")
        assert await recording.flushed()
        recording.chunk("Once ", [5, 6])
        recording.chunk("upon", [7])
        if status != "ABORTED":
            recording.end(status, finish_reason="stop" if status == "OK" else "")
    await until(lambda: not tap.queued_bytes)
    shutil.copytree(folder / "alive", folder / "spool")  # As if it had been killed now.
    await asyncio.to_thread(tap.close)


async def _append(location: Path | SecretStr) -> None:
    store = Store(location)
    await store.append(REQUESTS)
    await store.close()


def _pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
