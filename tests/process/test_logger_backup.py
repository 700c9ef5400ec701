"""Backup and restore: whole, beside a logger that writes, never a partial file, and never under a running logger."""

import asyncio
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from headrace_logger import backup as module
from headrace_logger.backup import backup, main, restore
from headrace_logger.store.store import Store
from headrace_logger.store.tables import SCHEMA_VERSION
from headrace_protos.headrace_pb2 import AppendRequest, PayloadRecord

ROOT = Path(__file__).parents[2]
SOURCE = str(uuid.uuid4())


def append_requests(first, last):
    return [
        AppendRequest(
            source=SOURCE,
            sequence=number,
            record=PayloadRecord(record_id=str(uuid.UUID(int=number)), prompt="p" * 3000, client="c"),
        )
        for number in range(first, last + 1)
    ]


async def fill(path, first, last):
    """Appends records with a logger's store, which is closed again."""
    store = Store(path)
    await store.append(append_requests(first, last))
    await store.close()


def numbers(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT record_id FROM records ORDER BY position").fetchall()
    return [uuid.UUID(row[0]).int for row in rows]


@pytest.fixture
def database(tmp_path):
    return tmp_path / "payloads.sqlite3"


@pytest.fixture
def run(database):
    """Runs a command in this process; the exit code."""
    return lambda command, *arguments: main(command, ("--database", str(database), *map(str, arguments)))


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


async def test_a_backup_is_the_state_at_its_begin_though_the_logger_commits_after_every_page(
    store, database, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_PAGES", 1)
    await store.append(append_requests(1, 20))
    loop = asyncio.get_running_loop()
    written = 20

    def commit(status, remaining, total):
        # A backup that starts again after a commit would never end; one that blocks the logger would not go on.
        nonlocal written
        written += 1
        assert written < 1000
        asyncio.run_coroutine_threadsafe(store.append(append_requests(written, written)), loop).result(10)

    count = await asyncio.to_thread(backup, database, tmp_path / "copy", commit)
    assert count == 20
    assert numbers(tmp_path / "copy") == list(range(1, 21))
    assert written > 40
    assert numbers(database) == list(range(1, written + 1))


async def test_a_backup_is_one_private_file_that_appears_when_it_is_complete(store, database, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAGES", 1)
    await store.append(append_requests(1, 20))
    folder = tmp_path / "backups"
    folder.mkdir()
    (folder / "copy").write_text("the one before")

    def interrupt(status, remaining, total):
        assert (folder / "copy").read_text() == "the one before"
        if remaining < total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(database, folder / "copy", interrupt)
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_text() == "the one before"
    backup(database, folder / "copy")
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert stat.S_IMODE((folder / "copy").stat().st_mode) == 0o600
    assert numbers(folder / "copy") == list(range(1, 21))


async def test_a_logger_goes_on_with_a_restored_database(database, run, tmp_path, capsys):
    await fill(database, 1, 3)
    assert run("backup", tmp_path / "copy") == 0
    assert one_line(capsys) == "backup: 3 records\n"
    new = tmp_path / "new" / "payloads.sqlite3"
    assert main("restore", (str(tmp_path / "copy"), "--database", str(new))) == 0
    assert one_line(capsys) == "restore: 3 records\n"
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    await fill(new, 3, 4)  # The third has arrived before.
    assert numbers(new) == [1, 2, 3, 4]


async def test_a_database_is_replaced_by_force_only(database, run, tmp_path, capsys):
    await fill(database, 1, 3)
    run("backup", tmp_path / "copy")
    await fill(database, 4, 40)
    capsys.readouterr()
    assert run("restore", tmp_path / "copy") == 1
    assert "exists: --force replaces it" in one_line(capsys)
    assert len(numbers(database)) == 40
    assert run("restore", "--force", tmp_path / "copy") == 0
    assert numbers(database) == [1, 2, 3]


async def test_what_a_killed_logger_left_in_its_write_ahead_log_does_not_return(database, run, tmp_path):
    await fill(database, 1, 3)
    run("backup", tmp_path / "copy")
    script = (
        "import asyncio, os, sys; from pathlib import Path; from tests.process import test_logger_backup as t\n"
        "async def main():\n"
        "    await t.Store(Path(sys.argv[1])).append(t.append_requests(4, 9)); os._exit(0)\n"
        "asyncio.run(main())"
    )
    await asyncio.to_thread(
        subprocess.run, (sys.executable, "-c", script, str(database)), cwd=ROOT, check=True, timeout=60
    )
    assert "payloads.sqlite3-wal" in os.listdir(tmp_path)
    assert run("restore", "--force", tmp_path / "copy") == 0
    assert numbers(database) == [1, 2, 3]


async def test_a_restore_refuses_while_a_logger_uses_the_database(store, database, run, tmp_path):
    await store.append(append_requests(1, 3))
    backup(database, tmp_path / "copy")
    await store.append(append_requests(4, 4))
    # In a process of its own, as the locks of one process know each other.
    command = (sys.executable, "-m", "headrace_logger", "restore", "--force", str(tmp_path / "copy"))
    environment = os.environ | {"LOGGER_DATABASE": str(database)}
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"restore: [^\n]* is in use: stop its logger[^\n]*\n", done.stderr)
    await store.append(append_requests(5, 5))
    assert numbers(database) == [1, 2, 3, 4, 5]
    await store.close()
    assert run("restore", "--force", tmp_path / "copy") == 0
    assert numbers(database) == [1, 2, 3]


async def test_a_restore_that_fails_leaves_what_was_there(database, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAGES", 1)
    await fill(database, 1, 30)
    backup(database, tmp_path / "copy")
    await fill(database, 31, 60)

    def interrupt(status, remaining, total):
        if remaining < total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "copy", database, True, interrupt)
    assert len(numbers(database)) == 60
    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "copy", tmp_path / "new", False, interrupt)
    assert not (tmp_path / "new").exists()


async def test_a_restore_that_is_killed_leaves_what_was_there(database, tmp_path):
    await fill(database, 1, 1200)
    backup(database, tmp_path / "copy")
    await fill(database, 1201, 1203)
    script = (
        "import os, signal, sys; from pathlib import Path; from headrace_logger import backup\n"
        "backup._PAGES = 50\n"
        "def die(status, remaining, total):\n"
        "    if remaining < total / 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.restore(Path(sys.argv[1]), Path(sys.argv[2]), True, die)"
    )
    command = (sys.executable, "-c", script, str(tmp_path / "copy"), str(database))
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    # It had begun to overwrite pages.
    assert (tmp_path / "payloads.sqlite3-journal").stat().st_size > 100_000
    assert numbers(database) == list(range(1, 1204))


def damage(path):
    """Overwrites the second half of the file."""
    half = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(half)
        file.write(b"\xff" * half)


async def test_damaged_files_are_neither_backed_up_nor_restored(database, run, tmp_path, capsys):
    await fill(database, 1, 40)
    run("backup", tmp_path / "copy")
    damage(database)
    damage(tmp_path / "copy")
    capsys.readouterr()
    assert run("backup", tmp_path / "second") == 1
    assert re.search(r"second(: database disk image is malformed| is damaged: )", one_line(capsys))
    assert not (tmp_path / "second").exists()
    assert run("restore", "--force", tmp_path / "copy") == 1
    assert re.search(r"copy(: database disk image is malformed| is damaged: )", one_line(capsys))


async def test_impossible_commands_are_refused_in_one_line(database, run, tmp_path, capsys):
    other, newer = tmp_path / "other", tmp_path / "newer"
    other.write_bytes(b"x" * 5000)
    assert run("backup", tmp_path / "copy") == 1
    assert "payloads.sqlite3: no such file" in one_line(capsys)
    await fill(database, 1, 1)
    backup(database, newer)
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("UPDATE schema_version SET version = version + 1")
        connection.commit()
    sqlite3.connect(tmp_path / "empty").close()
    (tmp_path / "empty").touch()
    for command, file, message in (
        ("backup", database, "is the database itself"),
        ("backup", tmp_path / "nowhere" / "copy", "copy: No such file or directory"),
        ("restore", database, "is the database itself"),
        ("restore", tmp_path / "missing", "missing: no such file"),
        ("restore", other, "other: file is not a database"),
        ("restore", tmp_path / "empty", "empty is not a payload log"),
        ("restore", newer, f"newer has schema version {SCHEMA_VERSION + 1}, this logger knows {SCHEMA_VERSION}"),
    ):
        assert run(command, *(("--force",) if command == "restore" else ()), file) == 1
        assert message in one_line(capsys)
    assert numbers(database) == [1]
