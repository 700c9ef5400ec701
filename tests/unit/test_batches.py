"""Batches: what a file may contain, who sees what, and that each line gets one result however often processes die."""

import asyncio
import json
import os
import pickle
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import orjson
import pytest
from google.api.httpbody_pb2 import HttpBody

from headrace.clients import ANYONE, Client, Policy
from headrace.errors import InvalidRequestError, NotFoundError, NotImplementedMethodError, OverloadedError
from headrace.rpc.http2.request import Argument
from headrace.rpc.server.call_context import call_context
from headrace_transformer.batches import lines, objects, runner, running, store
from headrace_transformer.batches.lines import parse_upload
from headrace_transformer.batches.servicer import BatchesServicer
from tests.waiting import until

ENDPOINT = "/v1/completions"
ALICE, BOB = Client("alice", Policy()), Client("bob", Policy())
LIMITS = store.Limits(max_bytes=1000, batches_per_client=2, days=7)


def line(custom_id, **changes):
    body = {"model": "m", "prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body} | changes


def text_of(*values):
    return b"".join(value if isinstance(value, bytes) else orjson.dumps(value) + b"\n" for value in values)


def new_batch(file_id, client=ALICE, expires_in_s=3600, now=2**31):
    return objects.Batch(
        id=objects.new_id("batch_"),
        client=client.name,
        policy=client.policy.model_dump_json() if client.name else "",
        traceparent="",
        endpoint=ENDPOINT,
        input_file_id=file_id,
        completion_window="24h",
        created_at=now,
        expires_at=now + expires_in_s,
    )


def test_every_fault_of_a_file_is_named_by_its_line():
    long = b'{"custom_id": "' + b"x" * lines.MAX_LINE_BYTES + b'"}\n'
    faults = (
        line("a"),
        b"\n",
        b"{]\n",
        b"[1]\n",
        line("a"),
        line("b", method="GET"),
        line("c", url="/v1/embeddings"),
        line(7),
        line("x" * (lines.MAX_CUSTOM_ID + 1)),
        line("d", body="text"),
        line("e", body={"model": 7}),
        long,
        line("f", body={"model": "other"}),
        orjson.dumps(line("last")),
    )
    checked = lines.check_lines([text_of(*faults[:3]), text_of(*faults[3:])], ENDPOINT)
    assert [(error.line, error.code) for error in checked.errors] == [
        (3, "invalid_json_line"),
        (4, "invalid_json_line"),
        (5, "duplicate_custom_id"),
        (6, "invalid_method"),
        (7, "mismatched_url"),
        (8, "invalid_custom_id"),
        (9, "invalid_custom_id"),
        (10, "invalid_body"),
        (11, "invalid_model"),
        (12, "line_too_long"),
    ]
    assert (checked.total, checked.models) == (13, {"m": 1, "other": 13})

    many = text_of(*(line(str(number)) for number in range(lines.MAX_LINES + 1)))
    assert [error.code for error in lines.check_lines([many], ENDPOINT).errors] == ["too_many_lines"]
    assert [error.code for error in lines.check_lines([b"\n\n"], ENDPOINT).errors] == ["empty_file"]


FORM = "multipart/form-data; boundary=edge"
PURPOSE = b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a \xc3\xa4.jsonl"\r\n\r\n1\r\n2\r\n'


def test_an_upload_has_a_file_and_a_purpose():
    upload, contents = parse_upload(PURPOSE + FILE + b"--edge--\r\n", FORM)
    assert (upload.filename, upload.purpose, contents) == ("a ä.jsonl", "batch", b"1\r\n2")
    for body, kind in (
        (PURPOSE + FILE, FORM),  # It does not end.
        (PURPOSE + b"--edge--\r\n", FORM),
        (FILE + b"--edge--\r\n", FORM),
        (PURPOSE + PURPOSE + FILE + b"--edge--\r\n", FORM),
        (PURPOSE.replace(b"batch", b"x" * 5000) + FILE + b"--edge--\r\n", FORM),
        (b"{}", FORM),
        (b"{}", "application/json"),
        (b"", "multipart/form-data"),
        (PURPOSE + FILE + b"--edge--\r\n", f"multipart/form-data; boundary={'x' * 100}"),
    ):
        with pytest.raises(InvalidRequestError):
            parse_upload(body, kind)


def test_a_file_comes_back_as_it_was_in_pieces_of_whole_lines(tmp_path):
    kept = store.Store(tmp_path, LIMITS._replace(max_bytes=2**21))
    for contents in (b"", b"\n", b"1\n2", b"a" * 300_000, b"a\n" * 300_000 + b"b"):
        file = kept.add_file(ALICE, "a", "batch", contents)
        pieces = list(kept.contents(ALICE, file.id))
        assert (b"".join(pieces), file.size) == (contents, len(contents))
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    elsewhere = pickle.loads(pickle.dumps(kept))  # As in a process of bodies.
    assert lines.check_stored(b"", elsewhere, file.id, ENDPOINT)[0].errors[0].code == "invalid_json_line"


def test_a_state_and_its_results_are_kept_together_or_not_at_all(tmp_path, monkeypatch):
    kept, batch = created(tmp_path, line("a"))
    result = objects.Result(1, "a", "r", 200, b"{}")
    for results in ([result], [result] * 2):
        with monkeypatch.context() as patched:
            patched.setattr(store, "_save", Mock(side_effect=OSError))
            with pytest.raises(OSError):  # noqa: PT011
                kept.save(batch.with_results(results), results)
        assert (kept.batch(ALICE, batch.id).completed, kept.done(batch)) == (0, set())
    kept.save(batch.with_results([result]), [result])
    assert (kept.batch(ALICE, batch.id).completed, kept.done(batch)) == (1, {"a"})
    assert b"".join(kept.pieces(batch.output_file_id)) == result.line(batch.id)


def test_a_deleted_file_is_downloaded_whole_or_visibly_not(tmp_path):
    kept = store.Store(tmp_path, LIMITS._replace(max_bytes=2**22))
    contents = b"a\n" * 300_000
    deleted, short = (kept.add_file(ALICE, "a", "batch", contents) for _ in range(2))
    pieces = kept.contents(ALICE, deleted.id)
    first = next(pieces)
    kept.delete_file(ALICE, deleted.id)
    assert first + b"".join(pieces) == contents
    assert [path.name for path in (tmp_path / "files").iterdir()] == [short.id]
    os.truncate(tmp_path / "files" / short.id, 300_000)
    with pytest.raises(NotFoundError):
        list(kept.contents(ALICE, short.id))
    kept.delete_file(ALICE, short.id)
    assert (tmp_path / "batches.db").stat().st_size < 2**16
    for name, age_s in (("young", 0), ("unknown", 4000)):  # A process that ends may leave one.
        (tmp_path / "files" / name).touch()
        os.utime(tmp_path / "files" / name, (time.time() - age_s,) * 2)
    kept.remove_old()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["young"]


def test_a_client_sees_its_own_and_an_admin_all(tmp_path):
    kept = store.Store(tmp_path, LIMITS)
    file = kept.add_file(ALICE, "a", "batch", b"1")
    batch = new_batch(file.id)
    kept.create_batch(ALICE, batch)
    for client in (ALICE, ANYONE, Client("root", Policy(role="admin"))):
        assert kept.file(client, file.id) == file
        assert [found.id for found in kept.batches(client, "", 10)] == [batch.id]
    assert (kept.files(BOB, "", "", 10, True), kept.batches(BOB, "", 10)) == ([], [])
    for refused in (
        lambda: kept.file(BOB, file.id),
        lambda: list(kept.contents(BOB, file.id)),
        lambda: kept.delete_file(BOB, file.id),
        lambda: kept.batch(BOB, batch.id),
        lambda: kept.cancel(BOB, batch.id),
        lambda: kept.create_batch(BOB, new_batch(file.id, BOB)),
    ):
        with pytest.raises(NotFoundError):
            refused()
    with pytest.raises(InvalidRequestError, match="needs the file"):
        kept.delete_file(ALICE, file.id)
    with pytest.raises(InvalidRequestError, match="another client's"):
        kept.create_batch(ANYONE, new_batch(file.id, ANYONE))


def test_lists_come_in_pages(tmp_path):
    kept = store.Store(tmp_path, LIMITS)
    ids = [kept.add_file(ANYONE, "a", "batch", b"1").id for _ in range(3)]
    order = sorted(ids)
    assert [file.id for file in kept.files(ANYONE, "batch", "", 1, False)] == order[:2]
    assert [file.id for file in kept.files(ANYONE, "", order[1], 9, False)] == order[2:]
    assert [file.id for file in kept.files(ANYONE, "", order[1], 9, True)] == order[:1]
    assert kept.files(ANYONE, "batch_output", "", 9, True) == []


def test_the_folder_is_bounded(tmp_path, monkeypatch):
    kept = store.Store(tmp_path, LIMITS)
    file = kept.add_file(ALICE, "a", "batch", b"1" * 400)
    with pytest.raises(OverloadedError, match="is full, it has 1000 bytes"):
        kept.add_file(ALICE, "a", "batch", b"1" * 200)  # More than half of it.
    kept.add_file(ANYONE, "a", "batch", b"1" * 200)
    with pytest.raises(OverloadedError, match="is full"):
        kept.add_file(BOB, "a", "batch", b"1" * 401)
    for _ in range(2):
        kept.create_batch(ALICE, new_batch(file.id))
    with pytest.raises(OverloadedError, match="2 batches are in progress"):
        kept.create_batch(ALICE, new_batch(file.id))

    with pytest.raises(OverloadedError, match="the disk"):
        store.Store(tmp_path / "nowhere", LIMITS).add_file(BOB, "a", "batch", b"1")
    monkeypatch.setattr(store, "_BUSY_S", 0.01)
    with closing(sqlite3.connect(tmp_path / "batches.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OverloadedError, match="locked"):
            kept.add_file(BOB, "a", "batch", b"1")
    assert kept.files(BOB, "", "", 9, True) == []


def test_what_is_old_is_removed_unless_it_is_needed(tmp_path):
    now = [0.0]
    kept = store.Store(tmp_path, LIMITS, lambda: now[0])
    needed, old = (kept.add_file(ALICE, "a", "batch", b"1") for _ in range(2))
    waiting, ended = new_batch(needed.id), new_batch(needed.id)
    for batch in (waiting, ended):
        kept.create_batch(ALICE, batch)
    batch, lock = kept.take(ended.id)
    kept.finish(batch.entered("failed", 1))
    lock.close()
    now[0] = LIMITS.days * 86_400
    kept.remove_old()
    assert len(kept.files(ALICE, "", "", 9, True)) == len(kept.batches(ALICE, "", 9)) == 2
    now[0] += 1
    kept.remove_old()
    assert [file.id for file in kept.files(ALICE, "", "", 9, True)] == [needed.id]
    assert [batch.id for batch in kept.batches(ALICE, "", 9)] == [waiting.id]
    with pytest.raises(NotFoundError):
        list(kept.contents(ALICE, old.id))


class Service:
    """Answers lines; those whose prompt is in `held` wait for `go`."""

    def __init__(self, held=()):
        self.held = set(held)
        self.go = asyncio.Event()
        self.calls = []
        self.waiting = asyncio.Event()
        self.at_once = self.most_at_once = 0
        self.failures = {}  # Errors to be raised, by prompt.
        self.accounts = set()

    async def complete(self, request, context):
        call = call_context(context, "test")
        prompt = json.loads(request)["prompt"]
        self.calls.append(prompt)
        account = call.account
        self.accounts.add((call.client.name, account.name, account.policy.weight, call.request_id.rpartition("/")[2]))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if prompt in self.held:
                self.waiting.set()
                await self.go.wait()
            if self.failures.get(prompt):
                raise self.failures[prompt].pop()
            yield HttpBody(data=orjson.dumps({"text": prompt}))
        finally:
            self.at_once -= 1


async def find_model(name, version, call):
    if name != "m":
        raise NotFoundError(f"no model {name}")


@asynccontextmanager
async def taken(kept, batch, service, concurrency=2):
    """A batch as a process runs it that has taken it."""

    shared = running.Resources(kept, None, {ENDPOINT: service.complete}, find_model, concurrency)
    found, lock = kept.take(batch.id)
    with ThreadPoolExecutor(1) as thread:
        yield running.RunningBatch(shared, found, thread).run()
    lock.close()


def created(folder, *values, **fields):
    kept = store.Store(folder, LIMITS._replace(max_bytes=2**20))
    batch = new_batch(kept.add_file(ALICE, "a", "batch", text_of(*values)).id, **fields)
    kept.create_batch(ALICE, batch)
    return kept, batch


def results_of(kept, batch):
    """The results in both files, by custom_id."""
    shown = kept.batch(ALICE, batch.id).shown()
    found = []
    for file_id in filter(None, (shown["output_file_id"], shown["error_file_id"])):
        found += map(json.loads, b"".join(kept.contents(ALICE, file_id)).splitlines())
    names = [result["custom_id"] for result in found]
    assert len(set(names)) == len(names)
    return {result["custom_id"]: result for result in found}


async def test_each_line_has_one_result_though_the_process_changes(tmp_path):
    names = [str(number) for number in range(10)]
    kept, batch = created(tmp_path, *map(line, names))
    first = Service(held=("5", "6"))
    async with taken(kept, batch, first) as run:
        assert store.Store(tmp_path, LIMITS).take(batch.id) is None  # Another process runs it.
        task = asyncio.create_task(run)
        await until(lambda: first.at_once == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert kept.batch(ALICE, batch.id).status == "in_progress"
    second = Service(held=names)
    async with taken(store.Store(tmp_path, LIMITS), batch, second, concurrency=3) as run:
        task = asyncio.create_task(run)
        await until(lambda: second.at_once == 3)
        second.go.set()
        await task
    shown = kept.batch(ALICE, batch.id).shown()
    assert (shown["status"], shown["request_counts"]) == ("completed", {"total": 10, "completed": 10, "failed": 0})
    found = results_of(kept, batch)
    assert found.keys() == set(names)
    assert found["6"]["response"]["body"] == {"text": "6"}
    assert set(first.calls[:5]) == {"0", "1", "2", "3", "4"}
    assert not {"0", "1", "2"} & set(second.calls)
    assert (first.most_at_once, second.most_at_once) == (2, 3)
    assert second.accounts <= {("alice", "~batches alice", 0.001, name) for name in names}
    assert kept.unfinished() == []


async def test_lines_that_cannot_run_now_run_later_and_other_errors_are_results(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_FIRST_DELAY_S", 0.0)
    kept, batch = created(tmp_path, line("busy"), line("wrong"), line("s", body={"prompt": "s", "stream": True}))
    service = Service()
    service.failures = {"busy": [OverloadedError("no"), OverloadedError("no")], "wrong": [InvalidRequestError("bad")]}
    async with taken(kept, batch, service) as run:
        await run
    assert sorted(service.calls) == ["busy", "busy", "busy", "wrong"]
    found = results_of(kept, batch)
    assert {name: result["response"]["status_code"] for name, result in found.items()} == {
        "busy": 200,
        "wrong": 400,
        "s": 400,
    }
    assert found["wrong"]["response"]["body"]["error"]["message"] == "bad"
    counts = kept.batch(ALICE, batch.id).shown()["request_counts"]
    assert counts == {"total": 3, "completed": 1, "failed": 2}


async def test_a_batch_outlives_a_database_that_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_DISK_DELAY_S", 0.01)
    monkeypatch.setattr(running, "_CANCEL_POLL_S", 0.01)
    kept, batch = created(tmp_path, line("a"))
    looks, saves = kept.is_cancelled, kept.save
    service, locked = Service(held="a"), [OverloadedError("locked")]
    monkeypatch.setattr(kept, "is_cancelled", Mock(side_effect=chain(locked, repeat(DEFAULT)), wraps=looks))
    async with taken(kept, batch, service) as run:
        task = asyncio.create_task(run)
        await service.waiting.wait()
        monkeypatch.setattr(kept, "save", Mock(side_effect=chain(locked * 4, repeat(DEFAULT)), wraps=saves))
        service.go.set()
        await task
    assert service.calls == ["a"]
    assert results_of(kept, batch)["a"]["response"]["status_code"] == 200


async def test_lines_that_are_left_are_errors(tmp_path):
    kept, batch = created(tmp_path, *map(line, "abc"), now=1000)
    async with taken(kept, batch, Service(held="abc")) as run:
        await run
    assert kept.batch(ALICE, batch.id).status == "expired"
    assert {result["error"]["code"] for result in results_of(kept, batch).values()} == {"batch_expired"}
    assert results_of(kept, batch).keys() == set("abc")
    with pytest.raises(InvalidRequestError, match="is expired"):
        kept.cancel(ALICE, batch.id)


async def test_a_batch_with_a_wrong_file_fails(tmp_path):
    kept, batch = created(tmp_path, line("a", body={"model": "nobody"}))
    async with taken(kept, batch, Service()) as run:
        await run
    shown = kept.batch(ALICE, batch.id).shown()
    assert (shown["status"], shown["errors"]["data"][0]["code"]) == ("failed", "model_not_found")
    allowed = Client("alice", Policy(models=["other"]))
    batch = new_batch(batch.input_file_id, allowed)
    kept.create_batch(allowed, batch)
    with closing(sqlite3.connect(tmp_path / "batches.db", isolation_level=None)) as sql:
        sql.execute("DELETE FROM files WHERE id = ?", (batch.input_file_id,))
    async with taken(kept, batch, Service()) as run:
        await run
    assert kept.batch(ALICE, batch.id).errors[0].code == "unreadable_file"


async def test_a_process_takes_batches_until_it_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    kept, batch = created(tmp_path, *map(line, "abc"))
    with closing(sqlite3.connect(tmp_path / "batches.db", isolation_level=None)) as sql:
        # It does not keep others from running.
        sql.execute("INSERT INTO batches VALUES ('batch_0', 'bob', '{', 0, 0, NULL)")

    async def run(service, stopping):
        methods = {ENDPOINT: service.complete}
        shared = running.Resources(kept, None, methods, find_model, 2)
        await runner.BatchRunner(shared).run(stopping)

    first, stopping = Service(held="abc"), asyncio.Event()
    task = asyncio.create_task(run(first, stopping))
    await first.waiting.wait()
    stopping.set()
    await task
    assert (first.at_once, kept.batch(ALICE, batch.id).status) == (0, "in_progress")

    second, stopping = Service(), asyncio.Event()
    task = asyncio.create_task(run(second, stopping))
    await until(lambda: kept.batch(ALICE, batch.id).is_final)
    stopping.set()
    await task
    assert results_of(kept, batch).keys() == set("abc")


async def test_without_a_folder_the_error_names_the_setting():
    call = BatchesServicer(None, (), None).GetBatch(Argument("batch_1", {}), _Context())
    body = json.loads((await anext(call)).data)
    assert "TRANSFORMER_BATCHES" in body["error"]["message"]
    with pytest.raises(NotImplementedMethodError):
        await anext(call)


class _Context:
    def invocation_metadata(self):
        return ()

    def time_remaining(self):
        return None
