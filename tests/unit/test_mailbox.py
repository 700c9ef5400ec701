"""Functions that other threads post to an event loop: all of them, in order, with few wake-ups."""

import asyncio
import threading
from functools import partial
from unittest.mock import patch

from headrace_predictor.tensor_models.loop_thread import Mailbox
from tests.waiting import until


async def test_every_function_runs_in_the_order_of_its_thread() -> None:
    mailbox, ran = Mailbox(asyncio.get_running_loop()), list[tuple[int, int]]()

    def post(thread: int) -> None:
        for number in range(2000):
            mailbox.post(partial(ran.append, (thread, number)))

    threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: not any(thread.is_alive() for thread in threads))
    await until(lambda: len(ran) == 8000)
    for thread in range(4):
        assert [number for each, number in ran if each == thread] == list(range(2000))


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
