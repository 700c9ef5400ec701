"""Forbidden actions fail in a unit test, from any library and any thread."""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
from functools import partial

import grpc
import pytest

from tests.unit.guard import NotUnitError


def call_socket(name, address):
    with socket.socket() as opened:
        getattr(opened, name)(address)


ACTIONS = {
    "import torch": lambda: importlib.import_module("torch"),
    "socket.bind": partial(call_socket, "bind", ("127.0.0.1", 0)),
    "socket.connect": partial(call_socket, "connect", ("127.0.0.1", 9)),
    "subprocess.Popen": lambda: subprocess.run(["true"]),
    "os.system": lambda: os.system("true"),
    "os.fork": os.fork,
    "a gRPC server": grpc.aio.server,
    "a gRPC server or channel": lambda: grpc.insecure_channel("127.0.0.1:9"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_forbidden_action_fails_and_is_recorded_even_if_its_error_is_swallowed(refusals, monkeypatch, action):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)  # Tests of other folders may have run in this process.
    with pytest.raises(NotUnitError, match="a test in tests/unit must not"):
        ACTIONS[action]()

    def swallow():
        with contextlib.suppress(NotUnitError):
            ACTIONS[action]()

    thread = threading.Thread(target=swallow)
    thread.start()
    thread.join()
    refused = refusals.take()
    assert len(refused) == 2
    assert all(one.startswith(action) for one in refused)
