"""The stack of compose.yaml on a real Docker engine, with its own project name and ports.

It differs from a user's stack by offline.yaml, the ports, and the tag of the images. All functions block
except `async` ones, so that a load can run beside them.
"""

import asyncio
import io
import json
import os
import signal
import ssl
import subprocess
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.free_ports import free_settings

ROOT = Path(__file__).parents[2]
BASE_IMAGE = "python:3.11-slim-bookworm"

PROJECT = "headrace-test"
# Where the predictor keeps compiled kernels, and those of them that it compiles in these tests too, by their names.
KERNELS, OWN_KERNELS = "/var/cache/headrace/numba", "norm."
FILES = ("compose.yaml", "tests/containers/offline.yaml")
_COMMAND_TIMEOUT_S = 900
_POLL_S = 0.2  # Calls of the engine use the cores that the stack needs.


def docker(*arguments: str) -> str:
    """The output of `docker …`; AssertionError with its error output."""
    return _output(["docker", *arguments])


class Container:
    """One container, by its id; every property calls the engine again."""

    def __init__(self, container_id: str) -> None:
        self.id = container_id

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(docker("inspect", self.id))[0]

    @property
    def addresses(self) -> list[str]:
        """Its addresses in the stack's networks, which this machine reaches on Linux."""
        return [network["IPAddress"] for network in self.facts["NetworkSettings"]["Networks"].values()]

    def is_healthy(self) -> bool:
        return _is_healthy(self.facts)

    def limit_memory(self, limit: int) -> bool:
        """Limits its memory from now on; returns whether it needs no more at the moment."""
        command = ("docker", "update", f"--memory={limit}", f"--memory-swap={limit}", self.id)
        return subprocess.run(command, capture_output=True, timeout=_COMMAND_TIMEOUT_S).returncode == 0

    def kill_9(self) -> Callable[[], Awaitable[bool]]:
        """Kills the main process as a crash would; returns a check whether it has been restarted and is healthy.

        `docker kill` would count as a manual stop, on which no restart policy acts.
        """
        facts = self.facts
        os.kill(facts["State"]["Pid"], signal.SIGKILL)

        async def returned() -> bool:
            await asyncio.sleep(_POLL_S)
            now = await asyncio.to_thread(lambda: self.facts)
            return now["RestartCount"] > facts["RestartCount"] and _is_healthy(now)

        return returned


class ComposeStack:
    """`times` has the durations of steps, in order; `sizes` the images' sizes in MB over their base."""

    def __init__(self, folder: Path, files: tuple[str, ...] = FILES, project: str = PROJECT) -> None:
        """`folder` is empty: it replaces a wheelhouse if this machine has none."""
        self._files = files
        # Ports outside the ephemeral range; their assignment does not matter.
        ports = free_settings(folder)
        self.gateway = f"127.0.0.1:{ports.gateway_port}"
        self.management = f"127.0.0.1:{ports.management_port}"
        self.jaeger_page = f"http://127.0.0.1:{ports.gateway_inner_port}"
        self.locust_page = f"http://127.0.0.1:{ports.gateway_admin_port}"
        self.times: list[tuple[str, float]] = []
        self.sizes: dict[str, float] = {}
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        self.environment = os.environ | {
            "COMPOSE_PROJECT_NAME": project,
            "IMAGE_TAG": "test",
            "GATEWAY_PORT": str(ports.gateway_port),
            "MANAGEMENT_PORT": str(ports.management_port),
            "JAEGER_PORT": str(ports.gateway_inner_port),
            "LOCUST_PORT": str(ports.gateway_admin_port),
            "CA_BUNDLE": os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile or os.devnull,
            "WHEELHOUSE": wheels if Path(wheels).is_dir() and wheels else str(folder),
        }

    def compose(self, *arguments: str, files: tuple[str, ...] = (), sent: bytes | None = None) -> str:
        """The output of `docker compose …`, with the stack's own files by default; AssertionError with its errors."""
        named = [part for file in files or self._files for part in ("--file", file)]
        command = ["docker", "compose", "--project-directory", str(ROOT), *named, *arguments]
        return _output(command, env=self.environment, sent=sent)

    def copy_kernels(self) -> None:
        """Gives the predictor those that this machine has compiled for its other tests, but not OWN_KERNELS."""
        from headrace_predictor.engine.cpu.compiled import CODE, config  # It imports torch.

        def chosen(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if Path(file.name).name.startswith(OWN_KERNELS) else file

        with io.BytesIO() as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                if Path(config.CACHE_DIR).is_dir():
                    archive.add(config.CACHE_DIR, f"{KERNELS[1:]}/{CODE}", filter=chosen)
            unpack = ("tar", "predictor", "--extract", "--directory=/", "--no-same-owner", "--no-overwrite-dir")
            self.compose("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", *unpack, sent=packed.getvalue())

    async def compose_beside(self, *arguments: str) -> str:
        """`compose` without blocking the event loop."""
        return await asyncio.to_thread(self.compose, *arguments)

    def containers(self, service: str) -> list[Container]:
        """A service's containers, stopped ones too."""
        return [Container(line) for line in self.compose("ps", "--all", "--quiet", service).split()]

    def container(self, service: str) -> Container:
        (only,) = self.containers(service)
        return only

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "30")

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Records the duration of a step for the closing table."""
        begun = time.monotonic()
        yield
        self.times.append((step, time.monotonic() - begun))

    def took(self, step: str) -> float:
        return dict(self.times)[step]


def _is_healthy(facts: dict[str, Any]) -> bool:
    return facts["State"]["Running"] and facts["State"]["Health"]["Status"] == "healthy"


def size_mb(image: str) -> float:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def _output(command: list[str], env: Mapping[str, str] | None = None, sent: bytes | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, input=sent, timeout=_COMMAND_TIMEOUT_S)
    output = done.stdout.decode()
    assert done.returncode == 0, f"{' '.join(command)}\n{output}\n{done.stderr.decode()}"
    return output
