"""What a key allows at once and in a minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.clients import Client, Policy
from millrace.errors import InvalidRequestError, OverloadedError
from millrace.rpc.client_limits import ClientLimits, SlidingMinute
from services.transformer.generation.token_quota import TokenQuota


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def alice(**limits):
    return Client("alice", Policy(**limits))


def test_requests_in_flight():
    limits, client = ClientLimits(), alice(streams=2)
    limits.begin(client)
    limits.begin(client)
    with pytest.raises(OverloadedError, match="alice has 2 requests in flight") as error:
        limits.begin(client)
    assert error.value.retry_after_ms == 1000
    limits.begin(Client("bob", Policy(streams=1)))
    limits.finish(client)
    limits.begin(client)


def test_requests_in_a_minute_and_when_to_retry():
    clock = Clock()
    limits, client = ClientLimits(clock), alice(requests_per_minute=3)
    for at in (1000.0, 1010.0, 1020.0):
        clock.now = at
        limits.begin(client)
        limits.finish(client)
    with pytest.raises(OverloadedError, match="the 3 requests that its key allows in a minute") as error:
        limits.begin(client)
    clock.now += error.value.retry_after_ms / 1000 - 1
    with pytest.raises(OverloadedError):
        limits.begin(client)
    clock.now += 1
    limits.begin(client)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=60), st.integers(1, 20))
def test_no_minute_has_more_than_the_limit(steps, limit):
    minute, now, granted = SlidingMinute(), 100.0, []
    for pause, amount in steps:
        now += pause
        minute.advance(now)
        if minute.used + amount <= limit:
            minute.add(amount)
            granted.append((now, amount))
        else:
            wait = minute.wait_s(amount, limit)
            assert wait > 0
    for start, _ in granted:
        assert sum(amount for at, amount in granted if start <= at <= start + 60) <= limit


def test_clients_that_are_gone_are_forgotten():
    clock = Clock()
    limits = ClientLimits(clock)
    for number in range(3000):
        clock.now += 0.1
        client = Client(f"client-{number}", Policy(requests_per_minute=1))
        limits.begin(client)
        limits.finish(client)
    assert len(limits._clients) <= 1700  # Those of a minute, and what came since the last look.


def test_tokens_are_reserved_and_settled():
    clock = Clock()
    quota, client = TokenQuota(clock), alice(tokens_per_minute=100)
    with quota.reserved(client, 10, 50) as first:
        with pytest.raises(OverloadedError, match="alice has 40 left") as error, quota.reserved(client, 10, 50):
            pass
        assert error.value.retry_after_ms == 61_000
        first.generated = 5
    # 15 are charged: 85 are left.
    with quota.reserved(client, 35, 50):
        pass


def test_a_cancelled_generation_is_charged_for_what_it_had():
    clock = Clock()
    quota, client = TokenQuota(clock), alice(tokens_per_minute=100)

    def generation():
        with quota.reserved(client, 30, 70) as reservation:
            reservation.generated = 20
            yield

    cancelled = generation()
    next(cancelled)
    cancelled.close()
    with pytest.raises(OverloadedError, match="alice has 50 left"), quota.reserved(client, 1, 50):
        pass
    clock.now += 61
    with quota.reserved(client, 30, 70):
        pass


def test_what_no_minute_allows_is_refused_for_good():
    refusal = pytest.raises(InvalidRequestError, match="are 101 tokens, the key of alice allows 100")
    with refusal, TokenQuota().reserved(alice(tokens_per_minute=100), 1, 100):
        pass


def test_together_they_never_exceed_the_limit():
    clock, charged = Clock(), 0
    quota, client = TokenQuota(clock), alice(tokens_per_minute=10_000)
    for _ in range(200):
        try:
            with quota.reserved(client, 100, 400) as reservation:
                reservation.generated = 400
                charged += 500
        except OverloadedError:
            continue
    assert charged == 10_000
