"""Requests that other requests' failures must not affect."""

import asyncio

import pytest

from headrace.errors import DeadlineError, HopBrokenError, NotReadyError, RequestFailedError
from headrace_predictor.engine.interface import EngineDeadError
from tests.model.fakes import expected, read_all, request

CROWD = [(i, i + 1, i + 2, i + 3, i + 4) for i in range(3, 12)]


async def dead(engine):
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(engine.died(), 30)
    with pytest.raises(NotReadyError):
        engine.submit(request("late"))


async def outcome(slot):
    """The outcome of a request: its ids, or the class of its error."""
    try:
        return (await read_all(slot))[0]
    except (RequestFailedError, HopBrokenError, NotReadyError, DeadlineError) as error:
        return type(error)


def submit_crowd(engine, **parameters):
    return [engine.submit(request(str(i), prompt=prompt, **parameters)) for i, prompt in enumerate(CROWD)]


async def assert_crowd_is_unharmed(slots, **parameters):
    for prompt, slot in zip(CROWD, slots, strict=True):
        assert (await read_all(slot))[0] == expected(prompt, **parameters)
