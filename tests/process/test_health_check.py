"""The command of a container's HEALTHCHECK is correct and quick."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def server() -> Iterator[tuple[health.HealthServicer, str]]:
    servicer, running = health.HealthServicer(), grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield servicer, str(port)
    running.stop(None).wait()


def exit_code(*arguments: str) -> int:
    command = [sys.executable, "-m", "headrace.rpc.server.health_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def test_the_given_health_name_is_checked(server):
    servicer, port = server
    assert exit_code(port) == 0
    assert exit_code(port, "ready") == 1
    servicer.set("ready", SERVING)
    servicer.set("", NOT_SERVING)
    assert exit_code(port, "ready") == 0
    assert exit_code(port) == 1


def test_a_missing_server_is_unhealthy():
    assert exit_code("9") == 1
