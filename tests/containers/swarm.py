"""The stack on a swarm of this machine's engine alone, by the commands of docs/swarm.md."""

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.containers.stack import ROOT, ComposeStack, Container, docker

_NAME = "headrace-swarm-test"
_PAGE = ROOT / "docs" / "swarm.md"
_SERVICE = "com.docker.swarm.service.name"
_ENDS_S = 120.0
_POLL_S = 0.5


class SwarmStack:
    """Blocks, like ComposeStack; `begin` makes the engine a swarm, `end` leaves nothing of it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty, as ComposeStack has it."""
        compose = ComposeStack(folder)
        self.gateway = compose.gateway
        self.environment = compose.environment | {
            "COMPOSE_PROJECT_NAME": _NAME,
            "GATEWAY_BIND": "0.0.0.0",
            "GATEWAY_INSECURE": "true",  # The load calls without keys.
            "PREDICTORS": "2",
        }

    def begin(self) -> None:
        """Needs an engine that is in no swarm."""
        docker("swarm", "init", "--advertise-addr", "127.0.0.1")

    def deploy(self) -> None:
        """Returns once every task is healthy and a generation would work."""
        (label,) = (line for line in _block("swarm init").splitlines() if "--label-add" in line)
        self._run(label)
        self._run(
            _block("stack deploy")
            .replace("-f deploy/compose/swarm.yaml", "-f tests/containers/offline.yaml -f deploy/compose/swarm.yaml")
            .replace("--compose-file - headrace", f"--compose-file - {_NAME}")
        )
        _until(self._is_ready, 300)

    def end(self) -> None:
        docker("stack", "rm", _NAME)
        _until(lambda: not docker("ps", "--all", "--quiet", "--filter", f"label={_SERVICE}").split(), _ENDS_S)
        docker("swarm", "leave", "--force")
        volumes = docker("volume", "ls", "--quiet", "--filter", f"name={_NAME}").split()
        if volumes:
            docker("volume", "rm", *volumes)

    def containers(self, service: str) -> list[Container]:
        """Those that run or are ending, in no order."""
        label = f"label={_SERVICE}={_NAME}_{service}"
        return [Container(line) for line in docker("ps", "--quiet", "--filter", label).split()]

    def execute(self, service: str, *command: str) -> str:
        """The output of a command in the only container of a service."""
        (container,) = self.containers(service)
        return docker("exec", container.id, *command)

    def update(self, service: str, *changes: str) -> str:
        """How an update of a service ended, such as `completed`, once it has."""
        name = f"{_NAME}_{service}"
        docker("service", "update", "--quiet", "--detach", *changes, name)

        def state() -> str:
            return self.service(service).get("UpdateStatus", {}).get("State", "")

        _until(lambda: state() in ("completed", "paused", "rollback_completed", "rollback_paused"), 420)
        return state()

    def service(self, name: str) -> dict[str, Any]:
        return json.loads(docker("service", "inspect", f"{_NAME}_{name}"))[0]

    def logs(self, service: str) -> str:
        return docker("service", "logs", "--tail", "40", f"{_NAME}_{service}")

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def _is_ready(self) -> bool:
        services = docker("service", "ls", "--format", "{{.Replicas}}").split()
        return all(len(set(counts.split("/"))) == 1 for counts in services) and self._answers()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.gateway}/v2/health/ready", timeout=5):
                return True
        except OSError:
            return False


def _block(word: str) -> str:
    """The page's first block of commands with a word."""
    return next(block for block in re.findall(r"```sh\n(.*?)```", _PAGE.read_text(), re.DOTALL) if word in block)


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the swarm did not get there in time"
        time.sleep(_POLL_S)
