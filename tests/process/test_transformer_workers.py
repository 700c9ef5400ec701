"""Several transformers share a port that no other process can take."""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from headrace import __version__
from headrace.errors import StartupError
from headrace.rpc.server.health_check import serving as health
from headrace.rpc.server.listeners import RETIRE, reserved
from tests.support.http2_client import connected
from tests.waiting import until


def listener(port, shares=True):
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        held.bind(("127.0.0.1", port))
        held.listen()
    except OSError:
        held.close()
        raise
    return held


def test_a_reserved_port_can_be_shared_on_request_and_is_taken_otherwise():
    with reserved("127.0.0.1", 0) as port:
        with closing(listener(port)), closing(listener(port)):
            pass
        with pytest.raises(OSError, match="in use"):
            listener(port, shares=False)


def test_a_port_with_a_listener_cannot_be_reserved():
    for shares in (False, True):
        with closing(listener(0, shares)) as taken, pytest.raises(StartupError, match="is the port taken"):
            reserved("127.0.0.1", taken.getsockname()[1]).__enter__()


def test_a_port_cannot_be_reserved_twice():
    with reserved("127.0.0.1", 0) as port, pytest.raises(StartupError, match="is the port taken"):
        reserved("127.0.0.1", port).__enter__()


def start(port, http_port=0, **environment):
    own = {"TRANSFORMER_WORKERS": "2", "TRANSFORMER_PORT": str(port), "MODELS": "storyteller=models/storyteller"}
    own |= {"TRANSFORMER_HTTP_PORT": str(http_port)}
    own |= {"TRANSFORMER_PREDICTOR": "127.0.0.1:9", "TRANSFORMER_LOGGER": "127.0.0.1:9"}
    command = (sys.executable, "-m", "headrace_transformer")
    return subprocess.Popen(command, env=os.environ | own | environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("names", ["port", "http_port"])
def test_a_taken_port_is_one_line_at_the_start(names):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        process = start(**{"port": 0} | {names: taken.getsockname()[1]})
        _, error_text = process.communicate(timeout=60)
    assert process.returncode == os.EX_TEMPFAIL
    assert error_text.startswith("transformer: 127.0.0.1:")
    assert error_text.count("\n") == 1


NO_TOKENIZERS = {"MODELS": "identity=models/identity"}


def test_a_worker_that_cannot_start_ends_all_with_its_error_line(tmp_path):
    process = start(0, **NO_TOKENIZERS | {"MODELS": f"x={tmp_path}"})
    _, error_text = process.communicate(timeout=60)
    assert process.returncode == os.EX_CONFIG
    assert "has no config.json" in error_text
    assert "Traceback" not in error_text


@pytest.mark.full  # The short form: tests/system/test_transformer_workers.py.
async def test_a_retired_parent_ends_with_its_workers_and_the_successors_serve_until_their_parent_is_killed():
    with closing(listener(0)) as held, closing(listener(0)) as http_held:
        port, http_port = held.getsockname()[1], http_held.getsockname()[1]
    own = NO_TOKENIZERS | {"TRANSFORMER_LISTEN": "shared", "TRANSFORMER_METRICS_PORT": "0"}
    old = start(port, http_port, **own)
    new = None
    try:
        await until(lambda: serving(port), timeout_s=60)
        old_workers = psutil.Process(old.pid).children()
        await until(lambda: len(listening(old, http_port)) == 2, timeout_s=60)
        new = start(port, http_port, **own | {"TRANSFORMER_LISTEN": "take-over"})
        await until(lambda: len(listening(new, port)) == 2, timeout_s=60)
        new_workers = listening(new, port)
        await until(lambda: listening(new, http_port) == new_workers, timeout_s=60)
        old.send_signal(RETIRE)
        old.communicate(timeout=60)
        assert old.returncode == 0
        assert not psutil.wait_procs(old_workers, timeout=0)[1]
        assert serving(port)
        # Connections go to either worker.
        for _ in range(8):
            async with connected(http_port) as client:
                answer = await (await client.request("/headrace.rest.v1.OpenAI/Version", verb="GET")).wait()
                assert (answer.status, json.loads(answer.data)) == (200, {"version": __version__})
        new.kill()
        assert not psutil.wait_procs(new_workers, timeout=30)[1]
    finally:
        for process in (old, new):
            if process is not None:
                process.kill()
                process.communicate(timeout=60)


def listening(parent, port):
    """The workers that listen there."""

    def listens(worker):
        try:
            connections = worker.net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)

    return [worker for worker in psutil.Process(parent.pid).children() if listens(worker)]


def serving(port):
    return health(f"127.0.0.1:{port}")
