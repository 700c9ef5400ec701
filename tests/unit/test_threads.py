"""Callers have turns at threads, and no caller has all places."""

import threading

from headrace.threads import FairThreads


def order_of(*work):
    """The order in which one thread does work of (caller, cost), which waits until all has come."""
    threads, begins, done = FairThreads(1, 100, "test"), threading.Event(), []
    futures = [threads.submit("first", begins.wait)]
    futures += [threads.submit(caller, done.append, (caller, cost), cost=cost) for caller, cost in work]
    begins.set()
    for future in futures:
        future.result(10)
    threads.close()
    return done


def test_a_caller_with_little_does_not_wait_for_one_with_much():
    many = [("a", 64)] * 8
    assert order_of(*many, ("b", 1), ("b", 1)).index(("b", 1)) <= 1


def test_small_work_passes_large_work_of_its_caller_but_not_for_ever():
    assert order_of(("a", 64), ("a", 1))[0] == ("a", 1)
    assert order_of(("a", 3), *[("a", 1)] * 10).index(("a", 3)) <= 2


def test_no_caller_has_more_than_half_of_the_places():
    threads, begins = FairThreads(1, 6, "test"), threading.Event()
    own = [threads.submit("a", begins.wait) for _ in range(6)]
    assert [future is None for future in own] == [False] * 3 + [True] * 3
    others = [threads.submit(name, begins.wait) for name in ("b", "", "", "")]
    assert [future is None for future in others] == [False, False, False, True]
    begins.set()
    for future in (*own, *others):
        assert future is None or future.result(10)
    assert threads.submit("a", int).result(10) == 0
    threads.close()
