"""A stream of events that is silent for long gets comments, and is otherwise unchanged."""

import asyncio
from contextlib import asynccontextmanager

import grpc
from google.api.httpbody_pb2 import HttpBody

from headrace.errors import FAILED_HOP, OverloadedError
from headrace.rpc.server.handlers import Interceptor
from headrace_protos import rest_pb2_grpc
from headrace_protos.rest_pb2 import ModelBody
from headrace_transformer.frontends.http import EVENTS, Events, event, rest_method
from headrace_transformer.frontends.openai.errors import openai_error
from tests.support.listening import listening
from tests.support.status import refusal
from tests.waiting import HANG_S

AFTER_S = 0.05
COMMENT = b": keep-alive\n\n"


class Numbers(rest_pb2_grpc.OpenInferenceServicer):
    """Writes an event for each number in its queue, and ends with None or an error."""

    def __init__(self, after_s):
        self.events = asyncio.Queue()
        self.after_s = after_s
        self.ended = asyncio.Event()

    @rest_method(openai_error)
    async def GenerateStream(self, request, call):  # noqa: N802
        yield Events(self.after_s)
        try:
            while (item := await self.events.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield HttpBody(content_type=EVENTS, data=event(item))
        finally:
            self.ended.set()


@asynccontextmanager
async def call(after_s=AFTER_S):
    """A servicer, and a call of it."""
    servicer = Numbers(after_s)
    server = grpc.aio.server(interceptors=(Interceptor("transformer"),))
    rest_pb2_grpc.add_OpenInferenceServicer_to_server(servicer, server)
    async with listening(server) as address, grpc.aio.insecure_channel(address) as channel:
        yield servicer, rest_pb2_grpc.OpenInferenceStub(channel).GenerateStream(ModelBody())


async def next_body(call):
    return (await anext(aiter(call))).data


async def test_comments_fill_only_silence_before_and_between_events():
    async with call() as (servicer, made):
        assert (await anext(aiter(made))).content_type == EVENTS, "it is the answer's from now on"
        assert [await next_body(made) for _ in range(3)] == [COMMENT] * 3
        servicer.events.put_nowait(1)
        while (body := await next_body(made)) == COMMENT:
            pass
        assert body == event(1)
        assert await next_body(made) == COMMENT
        servicer.events.put_nowait(None)
        assert {body.data async for body in made} <= {COMMENT}
        assert await made.code() is grpc.StatusCode.OK


async def test_no_event_is_lost_or_moved_among_comments():
    async with call(after_s=0.001) as (servicer, made):

        async def write():
            for number in range(300):
                servicer.events.put_nowait(number)
                await asyncio.sleep(0.001)
            servicer.events.put_nowait(None)

        _, bodies = await asyncio.gather(write(), collected(made))
        assert [body for body in bodies if body != COMMENT] == [event(number) for number in range(300)]


async def collected(call):
    return [body.data async for body in call]


async def test_no_comment_is_written_if_the_setting_is_off():
    async with call(after_s=0) as (servicer, made):
        reading = asyncio.create_task(collected(made))
        await asyncio.sleep(0.2)
        servicer.events.put_nowait(1)
        servicer.events.put_nowait(None)
        assert await reading == [event(1)]


async def test_an_error_is_an_event_after_a_comment_and_a_status_before_one():
    full = OverloadedError("the queue is full", retry_after_ms=20)
    async with call() as (servicer, made):
        assert await next_body(made) == COMMENT
        servicer.events.put_nowait(full)
        while (body := await next_body(made)) == COMMENT:
            pass
        assert body == event(openai_error(full))
        await refusal(next_body(made))
    async with call(after_s=HANG_S) as (servicer, made):
        servicer.events.put_nowait(full)
        assert dict(await made.initial_metadata())[FAILED_HOP] == "transformer"


async def test_a_caller_that_leaves_during_silence_ends_the_stream():
    async with call() as (servicer, made):
        assert await next_body(made) == COMMENT
        made.cancel()
        await servicer.ended.wait()
