"""A key's limits: requests in flight, per second and per minute, and tokens per minute and per month."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clients import Client, Policy
from headrace.errors import InvalidRequestError, NotReadyError, OverloadedError
from headrace.rpc.limits.client_limits import ClientLimits, SlidingMinute
from headrace_transformer.generation.token_quota import READ_AGAIN_S, MonthBudget, TokenQuota


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def alice(**limits):
    return Client("alice", Policy(**limits))


def test_requests_in_flight_and_when_to_retry():
    limits, client = ClientLimits(), alice(streams=1)
    limits.begin(client)
    with pytest.raises(OverloadedError, match="alice has 1 requests in flight") as error:
        limits.begin(client)
    assert error.value.retry_after_ms == 1000
    limits.begin(Client("bob", Policy(streams=1)))


def test_requests_in_a_second_and_when_to_retry():
    clock = Clock()
    limits, client = ClientLimits(clock), alice(requests_per_second=3, requests_per_minute=5)
    for at in (1000.0, 1000.25, 1000.5):
        clock.now = at
        limits.begin(client)
    with pytest.raises(OverloadedError, match="the 3 requests that its key allows in a second") as error:
        limits.begin(client)
    assert error.value.retry_after_ms == 500
    clock.now += 0.5
    limits.begin(client)
    with pytest.raises(OverloadedError):
        limits.begin(client)
    # A changed key counts at once, together with the requests before the change.
    limits.begin(alice(requests_per_second=4, requests_per_minute=5))
    with pytest.raises(OverloadedError, match="in a minute"):
        limits.begin(alice(requests_per_second=10, requests_per_minute=5))


@given(st.lists(st.floats(0, 0.7), max_size=60), st.integers(1, 5))
def test_no_second_has_more_requests_than_the_limit(pauses, limit):
    clock, granted, waits_ms = Clock(), [], []
    limits, client = ClientLimits(clock), alice(requests_per_second=limit)
    for pause in pauses:
        clock.now += pause
        try:
            limits.begin(client)
            granted.append(clock.now)
        except OverloadedError as error:
            waits_ms.append(error.retry_after_ms)
    assert all(0 < wait_ms <= 1000 for wait_ms in waits_ms)
    for start in granted:
        assert sum(start <= at < start + 1 for at in granted) <= limit


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


def test_the_remaining_limit_is_in_the_headers_of_openais_api():
    clock = Clock()
    limits, quota = ClientLimits(clock), TokenQuota(clock=clock)
    limits.add(quota.remaining)
    client = alice(requests_per_minute=3, tokens_per_minute=100)

    def remaining():
        headers = dict(limits.remaining(client))
        return [
            tuple(headers[f"x-ratelimit-{word}-{kind}"] for word in ("limit", "remaining", "reset"))
            for kind in ("requests", "tokens")
        ]

    assert remaining() == [("3", "3", "0s"), ("100", "100", "0s")]
    limits.begin(client)
    clock.now += 20
    limits.begin(client)
    with quota.reserved(client, 10, 50) as reservation:
        assert remaining() == [("3", "1", "1m1s"), ("100", "40", "1m1s")]
        # A limit that has become smaller leaves nothing.
        assert ("x-ratelimit-remaining-requests", "0") in limits.remaining(alice(requests_per_minute=1))
        reservation.used = 5
    clock.now += 41
    assert remaining() == [("3", "2", "20s"), ("100", "85", "20s")]
    clock.now += 20
    assert remaining() == [("3", "3", "0s"), ("100", "100", "0s")]
    assert limits.remaining(alice(streams=3)) == ()
    assert len(limits.remaining(alice(tokens_per_minute=1))) == 3


def test_clients_without_recent_requests_are_forgotten():
    clock = Clock()
    limits = ClientLimits(clock)
    for number in range(3000):
        clock.now += 0.1
        client = Client(f"client-{number}", Policy(requests_per_minute=1))
        limits.begin(client)
        limits.finish(client)
    assert len(limits._clients) <= 1700  # Those of a minute, and those since the last cleaning.


def test_a_client_is_not_forgotten_within_the_second_that_it_is_limited_for():
    clock = Clock()
    limits, client = ClientLimits(clock), alice(requests_per_second=1)
    limits.begin(client)
    limits.finish(client)
    for number in range(1500):
        other = Client(f"client-{number}", Policy(requests_per_second=1))
        limits.begin(other)
        limits.finish(other)
    with pytest.raises(OverloadedError, match="in a second"):
        limits.begin(client)


def test_tokens_are_reserved_and_settled():
    clock = Clock()
    quota, client = TokenQuota(clock=clock), alice(tokens_per_minute=100)
    with quota.reserved(client, 10, 50) as first:
        with pytest.raises(OverloadedError, match="alice has 40 left") as error, quota.reserved(client, 10, 50):
            pass
        assert error.value.retry_after_ms == 61_000
        first.used = 5
    # 15 are charged, 85 are left.
    with quota.reserved(client, 35, 50):
        pass


def test_a_cancelled_generation_is_charged_for_its_tokens_so_far():
    clock = Clock()
    quota, client = TokenQuota(clock=clock), alice(tokens_per_minute=100)

    def generation():
        with quota.reserved(client, 30, 70) as reservation:
            reservation.used = 20
            yield

    cancelled = generation()
    next(cancelled)
    cancelled.close()
    with pytest.raises(OverloadedError, match="alice has 50 left"), quota.reserved(client, 1, 50):
        pass
    clock.now += 61
    with quota.reserved(client, 30, 70):
        pass


def test_a_request_beyond_a_whole_minutes_limit_is_refused_without_retry():
    refusal = pytest.raises(InvalidRequestError, match="up to 101 tokens, the key of alice allows 100")
    with refusal, TokenQuota().reserved(alice(tokens_per_minute=100), 1, 100):
        pass


class Log:
    """The logger's count of tokens, and the queries for it."""

    def __init__(self, used):
        self.used = used
        self.queries = []

    async def __call__(self, client, since):
        self.queries.append((client, since))
        if self.used is None:
            raise NotReadyError("no logger is ready")
        return self.used


MAY = datetime(2026, 5, 31, 23, 0, tzinfo=UTC)


async def test_a_months_tokens_are_those_of_the_log_and_those_since_its_query():
    clock, log = Clock(), Log(60)
    budget, client = MonthBudget(log, lambda: MAY, clock), alice(tokens_per_month=100)
    quota = TokenQuota(budget, clock)
    await quota.check(client)
    with quota.reserved(client, 10, 50) as reservation:
        reservation.used = 30
    with pytest.raises(OverloadedError, match="alice has used the 100 tokens") as error:
        await quota.check(client)
    assert error.value.retry_after_ms == 3_600_000
    assert log.queries == [("alice", datetime(2026, 5, 1, tzinfo=UTC))]
    clock.now += READ_AGAIN_S
    log.used = 99
    await quota.check(client)
    assert len(log.queries) == 2


async def test_a_new_month_begins_with_nothing_used():
    now, log = [MAY], Log(100)
    budget, client = MonthBudget(log, lambda: now[0], Clock()), alice(tokens_per_month=100)
    await budget.check(alice())
    with pytest.raises(OverloadedError):
        await budget.check(client)
    now[0], log.used = datetime(2026, 6, 1, tzinfo=UTC), 0
    await budget.check(client)
    assert [since.month for _, since in log.queries] == [5, 6]


async def test_without_the_logger_generations_are_served():
    log = Log(None)
    budget, client = MonthBudget(log, lambda: MAY, Clock()), alice(tokens_per_month=100)
    await budget.check(client)
    await budget.check(client)
    assert len(log.queries) == 1
