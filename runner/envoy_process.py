"""Envoy as a supervised process that can be replaced without losing a call: Envoy's hot restart.

`reload` starts another Envoy, which takes over the listening sockets of the running one and gets every new connection.
The previous one asks its clients by GOAWAY or `connection: close` to reconnect, finishes its calls, and ends after
`PREDECESSOR_LIFE_S`, or at the next reload: Envoy supports two generations at a time, and a third ends the first. So a
reload waits while the oldest of two generations still has calls.

The generations find each other by a base id that Envoy chooses, so two stacks never collide. An Envoy that dies is
restarted with a new id: a dead process cannot hand over.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
from asyncio.subprocess import Process as Running
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import StartupError
from runner.process import Process, ProcessSpec, Say, signal_to
from runner.settings import LOOPBACK

# An hour: the longest idle time of a connection and the longest promised stream. Longer calls are cut.
PREDECESSOR_LIFE_S = 3600

_ACTIVE = r"/stats?format=json&filter=^http\.(ingress|inner)\.downstream_rq_active$"
_POLL_S = 0.05
_CALLS_POLL_S = 0.5
_ADMIN_TIMEOUT_S = 5.0
_LIVE_TIMEOUT_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # Where the C library puts what Envoy shares between its generations.


class EnvoyProcess(Process):
    """A `Process` that runs Envoy's command, with the arguments for hot restart."""

    def __init__(
        self,
        spec: ProcessSpec,
        log_folder: Path,
        working_folder: Path,
        say: Say,
        prepare: Callable[[], None],
        admin_port: int,
    ) -> None:
        super().__init__(spec, log_folder, working_folder, say, prepare)
        self._admin_port = admin_port
        self._base_id_file = log_folder.parent / "envoy.base-id"
        self._epoch = 0
        self._predecessor: _Predecessor | None = None
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> None:
        """Replaces Envoy by one with the current files; returns when it takes all new calls.

        Raises StartupError with one line if it does not start: the running one continues as before.
        """
        async with self._one_at_a_time:
            await self._wait_for_place()
            running = self._process
            if running is None or running.returncode is not None or not self._base_id_file.exists():
                raise StartupError("envoy is starting; reload again")
            # Connected now, because the port of the admin page passes to the new one.
            admin = await asyncio.to_thread(_AdminConnection, self._admin_port)
            try:
                base_id, epoch = self._base_id_file.read_text().strip(), self._epoch + 1
                process = await self._run((*self.spec.command, "--base-id", base_id, "--restart-epoch", str(epoch)))
            except BaseException:
                admin.close()
                raise
            try:
                await self._until_live(process, epoch)
                if self._predecessor is not None:  # The new Envoy has ended it.
                    await self._predecessor.end(self.spec.grace_s)
                if self._process is not running or running.returncode is not None:
                    raise StartupError("envoy ended during the reload and was restarted; reload again")
            except BaseException:
                await _end(process, signal.SIGKILL)
                admin.close()
                raise
            self._predecessor = _Predecessor(running, admin)
            self._epoch = epoch
            self._succeed(process)

    async def stop(self) -> None:
        """Ends both generations."""
        predecessor = self._predecessor
        if predecessor is not None:
            predecessor.terminate()
        await super().stop()
        if predecessor is not None:
            await predecessor.end(self.spec.grace_s)
        self._forget_base_id()

    async def _spawn(self) -> Running:
        self._forget_base_id()
        self._epoch = 0
        if self._predecessor is not None:
            # The Envoy that would have ended it is dead.
            self._predecessor.terminate_after(PREDECESSOR_LIFE_S)
        dynamic = ("--use-dynamic-base-id", "--base-id-path", str(self._base_id_file), "--restart-epoch", "0")
        return await self._run((*self.spec.command, *dynamic))

    async def _wait_for_place(self) -> None:
        """Returns when another generation would not cut a call of the oldest one."""
        predecessor = self._predecessor
        if predecessor is None or not predecessor.is_running:
            return
        calls = await predecessor.calls()
        if calls != 0:
            reported = "unknown" if calls is None else calls
            self._say(f"reload waits, an hour at most: calls in flight in the Envoy before the running one: {reported}")
        while calls != 0 and predecessor.is_running:
            await asyncio.sleep(_CALLS_POLL_S)
            calls = await predecessor.calls()
        if self._epoch == 0:
            # It is not the parent of the running one, which therefore does not end it.
            predecessor.terminate()
            await predecessor.end(self.spec.grace_s)

    async def _until_live(self, process: Running, epoch: int) -> None:
        """Returns when the admin page belongs to this epoch and reports LIVE."""
        try:
            async with asyncio.timeout(_LIVE_TIMEOUT_S):
                while not await asyncio.to_thread(_is_live, self._admin_port, epoch):
                    if process.returncode is not None:
                        raise StartupError(f"the new Envoy did not start: {self.last_line()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StartupError(f"the new Envoy did not serve within {_LIVE_TIMEOUT_S:g} s (see {self.log})") from None

    def _forget_base_id(self) -> None:
        """Removes the files that Envoy leaves for a successor."""
        with suppress(OSError, ValueError):
            base_id = int(self._base_id_file.read_text())
            self._base_id_file.unlink()
            # The last digit is the number of the generation.
            (_SHARED_MEMORY / f"envoy_shared_memory_{base_id * 10}").unlink()


class _Predecessor:
    """The generation before the running one, with a connection to its admin page."""

    def __init__(self, process: Running, admin: _AdminConnection) -> None:
        self._process = process
        self._admin = admin
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def calls(self) -> int | None:
        """The number of its calls in flight; None if it does not answer."""
        return await asyncio.to_thread(self._admin.active_calls)

    def terminate(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        signal_to(self._process, signal.SIGTERM)

    def terminate_after(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.terminate)

    async def end(self, grace_s: float) -> None:
        """Returns when it has ended, killed after the grace period."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        await _end(self._process, signal.SIGKILL)
        self._admin.close()


class _AdminConnection:
    """A connection to an Envoy's admin page, which outlives the page's port; its methods block."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=_ADMIN_TIMEOUT_S)
        with suppress(OSError):
            self._connection.connect()
        self._connection.auto_open = 0  # A new connection would reach the successor.

    def active_calls(self) -> int | None:
        """The number of calls in flight on both listeners; None if it does not answer."""
        try:
            self._connection.request("GET", _ACTIVE)
            stats = json.load(self._connection.getresponse())["stats"]
            return sum(int(stat["value"]) for stat in stats)
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None

    def close(self) -> None:
        self._connection.close()


def _is_live(port: int, epoch: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=_ADMIN_TIMEOUT_S)
    try:
        connection.request("GET", "/server_info")
        reported: dict[str, Any] = json.load(connection.getresponse())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return (reported["state"], reported["command_line_options"]["restart_epoch"]) == ("LIVE", epoch)


async def _end(process: Running, signum: signal.Signals) -> None:
    signal_to(process, signum)
    await process.wait()
