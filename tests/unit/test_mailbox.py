"""Functions that other threads post to an event loop, with few wake-ups."""

import asyncio
from functools import partial
from unittest.mock import patch

from headrace_predictor.tensor_models.loop_thread import Mailbox
from tests.waiting import until


async def test_functions_that_are_posted_together_wake_the_loop_once() -> None:
    loop, ran = asyncio.get_running_loop(), list[int]()
    mailbox = Mailbox(loop)
    with patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as woken:
        for number in range(3):
            mailbox.post(partial(ran.append, number))
        assert woken.call_count == 1
    await until(lambda: ran == [0, 1, 2])


async def test_a_loop_that_has_closed_runs_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    Mailbox(loop).post(lambda: None)
