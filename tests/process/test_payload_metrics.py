"""The metrics of a payload tap: what waits, for how long, and what was lost; reading them affects no request."""

import logging
import threading

from headrace.payload import shipper as payload_shipper
from headrace.payload.drops import DAMAGED, FULL, MEMORY, REASONS
from headrace.payload.tap import REASON
from tests.support.measured import Measured
from tests.support.payload_ingest import away, begin, listening, segments
from tests.waiting import HANG_S, until

GAUGES = ("headrace.payload.queued_bytes", "headrace.payload.spool_bytes", "headrace.payload.spool_age")


class Shown:
    """The metrics of a tap, as a reader sees them."""

    def __init__(self, tap):
        self._measured = Measured()
        tap.observe(self._measured.meter)

    @property
    def names(self):
        return self._measured.names

    def value(self, name):
        [point] = self._measured.points(f"headrace.payload.{name}").values()
        return point.value

    @property
    def dropped(self):
        return self._measured.values_by(REASON, "headrace.payload.dropped")


async def test_records_that_wait_for_an_absent_logger_are_counted_until_it_has_them(taps):
    tap = taps.start(target := away())
    shown = Shown(tap)
    assert (shown.value("spool_bytes"), shown.value("spool_age"), shown.value("spooled")) == (0, 0, 0)
    for number in range(3):
        begin(tap, f"r{number}", prompt="p" * 1000).end("OK")
    open_one = begin(tap, "open")
    await until(lambda: shown.value("spooled") == 3)
    assert shown.value("spool_bytes") > 3000
    await until(lambda: shown.value("spool_age") > 0)
    earlier = shown.value("spool_age")
    await until(lambda: shown.value("spool_age") > earlier)
    async with listening(target) as ingest:
        await ingest.until(lambda: len(ingest.records) == 3)
        # The record of a running answer does not wait for the logger yet.
        await until(lambda: shown.value("spool_age") == 0)
        open_one.end("OK")
        await until(lambda: shown.value("spooled") == 4)
        assert await tap.drain(HANG_S)
        assert shown.value("spool_age") == 0
    assert shown.dropped == dict.fromkeys(REASONS, 0)


async def test_the_age_counts_from_the_end_of_a_record_and_survives_a_restart(taps, monkeypatch):
    tap = taps.start(target := away())
    begin(tap).end("OK")
    await until(lambda: tap.spooled == 1)
    await taps.close(tap)
    now = payload_shipper.time.time
    monkeypatch.setattr(payload_shipper.time, "time", lambda: now() + 3600)
    tap = taps.start(target)
    shown = Shown(tap)
    await until(lambda: 3600 <= shown.value("spool_age") < 3700)
    assert shown.value("spooled") == 0, "it is the earlier process that wrote it"
    # If the clock is set back it is never below zero.
    monkeypatch.setattr(payload_shipper.time, "time", lambda: now() - 3600)
    assert shown.value("spool_age") == 0


async def test_dropped_records_are_counted_by_reason(taps):
    tap = taps.start(memory=4000)
    shown = Shown(tap)
    for _ in range(3):
        begin(tap, prompt="p" * 5000)
    assert shown.dropped == dict.fromkeys(REASONS, 0) | {MEMORY: 3}
    full = taps.start(spool_max=1)
    shown = Shown(full)
    begin(full).end("OK")
    await until(lambda: shown.dropped[FULL] == 1)
    assert shown.value("spooled") == 0


async def test_a_damaged_spool_is_counted_and_logged(taps, caplog):
    tap = taps.start(target := away())
    for number in range(3):
        begin(tap, f"r{number}", prompt="prompt").end("OK")
    await until(lambda: tap.spooled == 3)
    await taps.close(tap)
    [path] = segments(taps.spool)
    path.write_bytes(path.read_bytes().replace(b"r1", b"r0"))
    shown = Shown(taps.start(target))
    async with listening(target) as ingest:
        await ingest.until(lambda: {record.request_id for record in ingest.records} == {"r0", "r2"})
    assert shown.dropped == dict.fromkeys(REASONS, 0) | {DAMAGED: 1}
    assert any("is damaged before byte" in record.getMessage() for record in caplog.records)


async def test_reading_metrics_during_writes_never_fails(taps, ingest, caplog):
    tap = taps.start(ingest.target, memory=20_000)
    shown, stopping, names_seen = Shown(tap), threading.Event(), []

    def ask():
        while not stopping.is_set():
            names_seen.append(shown.names)

    reader = threading.Thread(target=ask)
    reader.start()
    for number in range(500):
        begin(tap, f"r{number}", prompt="p" * 100).end("OK")
    assert await tap.drain(HANG_S)
    stopping.set()
    reader.join()
    assert all(names == {*GAUGES, "headrace.payload.spooled", "headrace.payload.dropped"} for names in names_seen)
    assert not [entry for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert shown.value("spooled") + shown.dropped[MEMORY] >= 500
    assert shown.value("spooled") == len(ingest.records)
