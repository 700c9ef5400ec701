"""Errors keep their class, text and origin over any number of hops, and reveal no internals."""

import errno
import os
import sqlite3
from contextlib import asynccontextmanager, closing

import grpc
import pytest
from grpc import StatusCode

from headrace import errors
from headrace.errors import (
    DrainingError,
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
    StartupError,
    StartupFault,
    TooLargeError,
    from_rpc_error,
)
from headrace.rpc.client.channel import open_channel
from headrace.rpc.server.handlers import Interceptor
from tests.support.listening import listening
from tests.support.methods import METHODS, Methods, answers_of
from tests.support.status import refusal

CLASSES = sorted(HeadraceError.__subclasses__(), key=lambda cls: cls.__name__)
KINDS = ("unary", "stream", "bidi")


@asynccontextmanager
async def serving(hop, then, options=()):
    """A channel to a server whose calls end in `then(context)`."""
    server = grpc.aio.server(interceptors=(Interceptor(hop),), options=options)
    server.add_generic_rpc_handlers((Methods(then),))
    async with listening(server) as address, open_channel(address, hop) as channel:
        yield channel


def raising(error):
    async def then(context):
        raise error

    return then


async def nothing(context):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", CLASSES)
async def test_every_error_class_is_kept(cls, kind):
    async with serving("predictor", raising(cls("what happened"))) as channel:
        with pytest.raises(cls) as caught:
            await answers_of(channel, kind)
    assert type(caught.value) is cls
    assert (caught.value.message, caught.value.hop, caught.value.retry_after_ms) == ("what happened", "predictor", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [DrainingError("stopping"), OverloadedError("queue full", retry_after_ms=1500)])
async def test_class_origin_and_retry_delay_are_kept_over_two_hops(kind, error):
    async with serving("predictor", raising(error)) as inner:

        async def relay(context):
            await answers_of(inner, kind)

        async with serving("transformer", relay) as outer:
            with pytest.raises(type(error), match=error.message) as caught:
                await answers_of(outer, kind)
    assert (caught.value.hop, caught.value.retry_after_ms) == ("predictor", error.retry_after_ms)


async def test_an_error_leaves_the_trailing_metadata_of_its_handler():
    async def then(context):
        context.set_trailing_metadata((("x-request-id", "r1"),))
        raise OverloadedError("queue full", retry_after_ms=20)

    server = grpc.aio.server(interceptors=(Interceptor("predictor"),))
    server.add_generic_rpc_handlers((Methods(then),))
    async with listening(server) as address, grpc.aio.insecure_channel(address) as channel:
        caught = await refusal(answers_of(channel, "stream"))
    wanted = {"x-request-id": "r1", "x-failed-hop": "predictor", "x-http-status": "429", "retry-after-ms": "20"}
    assert dict(caught.trailing_metadata()) == wanted


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_reveals_no_internals(kind, caplog):
    async with serving("predictor", raising(ZeroDivisionError("secret/path.py"))) as channel:
        with pytest.raises(RequestFailedError) as caught:
            await answers_of(channel, kind)
    assert (caught.value.message, caught.value.hop) == ("internal error", "predictor")
    assert "secret/path.py" in caplog.text, "the log has what the client must not see"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_may_abort_by_itself(kind):
    async def then(context):
        await context.abort(StatusCode.NOT_FOUND, "gone")

    async with serving("predictor", then) as channel:
        with pytest.raises(errors.NotFoundError, match="gone"):
            await answers_of(channel, kind)


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_call_that_ends_without_its_message_is_refused(kind):
    async with serving("predictor", nothing) as channel:
        with pytest.raises(InvalidRequestError, match="no message"):
            async for _ in channel.stream_stream(f"/{METHODS[kind]}")(iter(())):
                pass


async def test_a_message_beyond_the_limit_is_too_large():
    async with serving("predictor", nothing, (("grpc.max_receive_message_length", 1000),)) as channel:
        with pytest.raises(TooLargeError):
            await answers_of(channel, "unary", b"x" * 2000)


def rpc_error(code, details, **metadata):
    trailing = grpc.aio.Metadata(*((name.replace("_", "-"), value) for name, value in metadata.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (rpc_error(StatusCode.UNAVAILABLE, "no healthy upstream"), NotReadyError),
        (rpc_error(StatusCode.UNAVAILABLE, "upstream connect error"), HopBrokenError),
        (rpc_error(StatusCode.UNKNOWN, ""), HopBrokenError),
        (rpc_error(StatusCode.INTERNAL, "RST_STREAM"), HopBrokenError),
        (rpc_error(StatusCode.CANCELLED, ""), HopBrokenError),
        (rpc_error(StatusCode.RESOURCE_EXHAUSTED, "rate limited"), OverloadedError),
        (rpc_error(StatusCode.DATA_LOSS, "?"), RequestFailedError),
        (rpc_error(StatusCode.INVALID_ARGUMENT, "bad", x_failed_hop="a", x_http_status="4oo"), InvalidRequestError),
        (rpc_error(StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: x"), NotReadyError),
        (rpc_error(StatusCode.UNAVAILABLE, "draining", x_failed_hop="a", x_http_status="503"), NotReadyError),
        (
            rpc_error(
                *(StatusCode.UNAVAILABLE, "?"), x_failed_hop="a", x_http_status="503", x_headrace_draining="true"
            ),
            DrainingError,
        ),
        (rpc_error(StatusCode.UNAVAILABLE, "broke", x_failed_hop="a", x_http_status="502"), HopBrokenError),
    ],
)  # fmt: skip
def test_a_status_without_a_class_gets_the_most_likely_class(error, cls):
    assert type(from_rpc_error(error, "predictor")) is cls


def started(cause, text="it cannot start"):
    """The StartupError that was raised while `cause` was handled."""
    try:
        try:
            raise cause
        except BaseException:
            raise StartupError(text) from None
    except StartupError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        *(OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)),
        *(OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)),
        OSError(errno.EADDRINUSE, "taken"),
        MemoryError(),
        TimeoutError(),
        StartupFault("the engine host died"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_what_the_machine_lacks_may_pass(cause):
    assert started(cause).is_fault


@pytest.mark.parametrize(
    "cause", [FileNotFoundError(errno.ENOENT, "no such file"), PermissionError(errno.EACCES, "denied"), KeyError("x")]
)
def test_what_a_setting_names_wrongly_does_not_pass(cause):
    assert not started(cause).is_fault
    assert not StartupError("PREDICTOR_THREADS=many").is_fault


@pytest.mark.parametrize(("statement", "passes"), [("full", True), ("not a database", False)])
def test_of_the_errors_of_a_database_only_those_of_the_disk_may_pass(tmp_path, statement, passes):
    path = tmp_path / "file"
    if not passes:
        path.write_bytes(b"no database at all" * 100)
    script = "PRAGMA max_page_count = 2; CREATE TABLE one (x); CREATE TABLE two (x)"
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.DatabaseError, match=statement) as failed:
        connection.executescript(script)
    assert started(failed.value).is_fault is passes
