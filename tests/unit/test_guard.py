"""Forbidden actions fail in a unit test, from any library and any thread."""

import asyncio
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading

import grpc
import pytest

from tests.unit.guard import NotUnitError


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_importing_a_model_library_fails(refusals, monkeypatch, library):
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)  # Tests of other folders may have run in this process.
    with pytest.raises(NotUnitError, match=rf"import {library}: a test in tests/unit must not"):
        importlib.import_module(library)
    assert refusals.take() == [f"import {library}"]


def test_a_socket_can_neither_listen_nor_connect(refusals):
    with socket.socket() as opened:
        with pytest.raises(NotUnitError, match=r"socket\.bind"):
            opened.bind(("127.0.0.1", 0))
        with pytest.raises(NotUnitError, match=r"socket\.connect"):
            opened.connect(("127.0.0.1", 9))
    assert len(refusals.take()) == 2


@pytest.mark.parametrize("start", [lambda: subprocess.run(["true"]), lambda: os.system("true"), os.fork])
def test_starting_a_process_fails(refusals, start):
    with pytest.raises(NotUnitError, match="must not"):
        start()
    assert len(refusals.take()) == 1


def test_grpc_can_neither_listen_nor_connect(refusals):
    for make in (grpc.aio.server, lambda: grpc.server(None), lambda: grpc.insecure_channel("127.0.0.1:9")):
        with pytest.raises(NotUnitError, match="gRPC"):
            make()
    assert len(refusals.take()) == 3


def test_a_refusal_that_a_thread_swallows_is_recorded(refusals):
    def swallow():
        with contextlib.suppress(NotUnitError):
            os.system("true")

    thread = threading.Thread(target=swallow)
    thread.start()
    thread.join()
    assert refusals.take() == ["os.system ()"]


async def test_an_event_loop_is_allowed():
    assert await asyncio.sleep(0, 1) == 1
