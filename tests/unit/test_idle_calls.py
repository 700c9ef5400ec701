"""Too many idle calls: which of them end. A caller with more calls never costs one with fewer a call."""

import asyncio
import random
import time
from collections import Counter

from headrace.errors import OverloadedError
from headrace.rpc.limits import idle_calls
from headrace.rpc.limits.byte_budget import ByteBudget
from headrace.rpc.limits.idle_calls import IdleCalls
from tests.waiting import until

MOST, MOST_OF_ONE = 12, 4


class Call:
    """A stream that waits, or a call whose message has yet to come."""

    def __init__(self, calls, caller, may_be_idle=True):
        self.calls = calls
        self.caller = caller
        self.may_be_idle = may_be_idle
        self.may_arrive = True
        self.idle_limit_s = 3600.0
        self.error = None

    def end(self, error):
        self.calls.discard(self)
        self.error = error


def new():
    return IdleCalls(MOST, MOST_OF_ONE, max_unfinished=1 << 30, budget=ByteBudget())


def opened(calls, caller, count, may_be_idle=True):
    made = [Call(calls, caller, may_be_idle) for _ in range(count)]
    for call in made:
        calls.add(call)
    return made


def ended(made):
    return [number for number, call in enumerate(made) if call.error is not None]


async def test_a_call_whose_request_is_arriving_ends_no_stream():
    calls = new()
    streams = opened(calls, "alice", MOST_OF_ONE)
    unsent = opened(calls, "alice", MOST_OF_ONE + 1, may_be_idle=False)
    assert (ended(streams), ended(unsent)) == ([], [0])


async def test_calls_that_sent_a_request_make_room_for_idle_ones():
    calls = new()
    alice = opened(calls, "alice", MOST_OF_ONE)
    for call in alice[:2]:
        calls.discard(call)
    opened(calls, "alice", 2)
    assert ended(alice) == []
    for call in alice[:2]:
        calls.add(call)  # Idle again, and for a shorter time than the others.
    assert ended(alice) == [2, 3]


async def test_the_bounds_hold_for_any_sequence_of_calls():
    draw = random.Random(7)
    calls, made = new(), []
    for _ in range(5000):
        if draw.random() < 0.4 and made:
            calls.discard(made.pop(draw.randrange(len(made))))
        else:
            before = Counter(call.caller for call in made)
            [call] = opened(calls, draw.choice(["a", "a", "a", "b", "c", "d", ""]), 1)
            made.append(call)
            lost = [call for call in made if call.error is not None]
            before[call.caller] += 1
            if before[call.caller] > MOST_OF_ONE and call.caller:
                assert lost == [next(one for one in made if one.caller == call.caller)], "its longest idle call"
            elif sum(before.values()) > MOST:
                most = [caller for caller, count in before.items() if count == max(before.values())]
                assert lost == [next(one for one in made if one.caller in most)], "of callers with most, the longest"
            else:
                assert not lost
            assert all(isinstance(one.error, OverloadedError) and one.error.retry_after_ms for one in lost)
            made = [call for call in made if call.error is None]
        assert len(calls) == len(made) <= MOST
        of_each = Counter(call.caller for call in made)
        assert all(count <= MOST_OF_ONE for caller, count in of_each.items() if caller)


def growing(monkeypatch):
    """The resident bytes of a process, to be changed, and the calls that it has."""
    resident = [100 << 20]
    monkeypatch.setattr(idle_calls, "resident_bytes", lambda: resident[0])
    return resident, IdleCalls(MOST, MOST_OF_ONE, max_unfinished=128 << 20, budget=ByteBudget())


async def test_growth_ends_the_calls_that_began_last_and_growth_that_stays_ends_no_more(monkeypatch):
    resident, calls = growing(monkeypatch)
    waiting = [call for caller in ("alice", "bob", "carol") for call in opened(calls, caller, 3)]
    await until(lambda: calls._least is not None)
    resident[0] += 400 << 20
    first = await until(lambda: ended(waiting))
    assert first == [*range(9 - len(first), 9)]
    assert len(first) >= 7
    more = opened(calls, "dave", 3)
    await asyncio.sleep(0.3)
    assert not ended(more)


async def test_growth_of_calls_that_are_too_recent_ends_them_once_they_are_not(monkeypatch):
    """Else those few that are old enough would end alone, and what the others hold would count as growth that stays."""
    resident, calls = growing(monkeypatch)
    old = opened(calls, "alice", 3)
    await until(lambda: calls._least is not None)
    await asyncio.sleep(idle_calls._ARRIVAL_S)
    recent = [call for caller in ("bob", "carol") for call in opened(calls, caller, 3)]
    resident[0] += 400 << 20
    await until(lambda: len(ended([*old, *recent])) >= 6)
    assert ended(recent)


async def test_a_busy_machine_believes_longer_that_messages_arrive(monkeypatch):
    resident, calls = growing(monkeypatch)
    waiting = [call for caller in ("alice", "bob", "carol") for call in opened(calls, caller, 3)]
    await until(lambda: calls._least is not None)
    await asyncio.sleep(idle_calls._ARRIVAL_S)
    resident[0] += 400 << 20
    looked = calls._looked
    time.sleep(0.4)  # noqa: ASYNC251  # The loop, and so its next look, is late.
    await until(lambda: calls._looked != looked)
    assert not ended(waiting)
    await until(lambda: ended(waiting))


async def test_messages_that_arrive_slowly_are_believed_to_go_on(monkeypatch):
    resident, calls = growing(monkeypatch)
    waiting = opened(calls, "alice", 4, may_be_idle=False)
    await until(lambda: calls._least is not None)
    await asyncio.sleep(1.2 * idle_calls._ARRIVAL_S)
    arrived = waiting.pop(0)
    calls.arrived(arrived)
    calls.discard(arrived)
    resident[0] += 400 << 20
    looked = calls._looked
    await until(lambda: calls._looked != looked)
    assert not ended(waiting)
    await until(lambda: ended(waiting))
