"""A private PostgreSQL: a cluster in a temporary folder, which the tests of one process share.

Debian's package has the programs (`apt-get install postgresql`). They refuse to run as root, so root's cluster runs as
the user `nobody`.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import psycopg
import pytest

from tests.support.logger_process import free_port

MISSING = "PostgreSQL is not installed: no initdb in PATH and /usr/lib/postgresql (Debian's package `postgresql`)"
_PASSWORD = "geheim"
_START_S = 120


@cache
def programs() -> Path | None:
    """The folder of PostgreSQL's programs, of the newest version; None if there is none."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    found = [str(path) for path in reversed(versions)]
    initdb = shutil.which("initdb", path=os.pathsep.join([*found, os.environ["PATH"]]))
    return Path(initdb).resolve().parent if initdb else None


class Postgresql:
    """A running server at 127.0.0.1; `database` creates a database and returns its URL."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._names = count()
        self.last_url = ""  # Of the database that was created last.
        self._shared = ""

    def create(self) -> None:
        password = self._folder / "password"
        password.write_text(_PASSWORD)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            for path in (self._folder, password):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        options = ("-U", "headrace", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
        command = [*self._command("initdb"), "-D", self._data, f"--pwfile={password}", *options]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder)

    def start(self) -> None:
        """Starts the server; returns when it accepts connections."""
        settings = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "shared_buffers=16MB",
            "fsync=off",  # The server may crash, the machine does not.
        )
        options = [part for setting in settings for part in ("-c", setting)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command("postgres"), "-D", self._data, *options], stderr=log, cwd=self._folder
            )
        give_up_at = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < give_up_at, (self._folder / "log").read_text()
                time.sleep(0.05)
            else:
                return

    def stop(self, how: str = "immediate") -> None:
        """Stops the server: `immediate` is its crash, `fast` waits for the transactions."""
        assert self._process
        self._process.send_signal(signal.SIGQUIT if how == "immediate" else signal.SIGINT)
        self._process.wait(_START_S)
        self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def url(self, database: str, password: str = _PASSWORD) -> str:
        return f"postgresql://headrace:{password}@127.0.0.1:{self.port}/{database}"

    def database(self, options: str = "") -> str:
        """The URL of a new database."""
        name = f"payloads_{next(self._names)}"
        self.execute(self.url("postgres"), f"CREATE DATABASE {name} {options}")
        self.last_url = self.url(name)
        return self.last_url

    def emptied(self) -> str:
        """The URL of one database for many stores in turn, without what the last one left; a new one takes longer."""
        if not self._shared:
            self._shared = self.database()
        self.execute(self._shared, "SET lock_timeout = '10s'; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return self._shared

    @staticmethod
    def execute(url: str, statement: str) -> list[tuple[object, ...]]:
        """The rows of a statement, in a transaction of its own."""
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _command(self, program: str) -> list[str]:
        folder = programs()
        assert folder
        as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        return [*as_nobody, str(folder / program)]


@contextmanager
def running() -> Iterator[Postgresql]:
    """A new server, for a block; skips the test if PostgreSQL is not installed."""
    if programs() is None:
        pytest.skip(MISSING)
    # Not below pytest's folder, which only root can enter.
    with tempfile.TemporaryDirectory(prefix="headrace-postgresql-") as folder:
        server = Postgresql(Path(folder))
        server.create()
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.stop()
