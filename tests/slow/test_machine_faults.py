"""A disk without room, or read-only, costs records at most: streams go on, killed services return, and so does the log.

Eight callers stream all the time. A small disk has the run folder, a spool or the database. It is filled, services are
killed meanwhile, and then there is room again: for some seconds, with FULL=1 for a minute and every place and cause.
Each test prints a line of its results.
"""

import asyncio
import time
from collections import Counter
from operator import not_

import pytest

from tests.chaos.load import Client
from tests.chaos.oracle import Oracle, Span
from tests.chaos.records import compare, stored
from tests.scenarios.crowd import Crowd, stories_of
from tests.support.free_ports import start_stack
from tests.support.full import FULL
from tests.support.small_disk import small_disk
from tests.system.calls import serves
from tests.waiting import until

SECONDS = 60 if FULL else 6
CALLERS, TOKENS = 8, 40
BACK_S = 90
WHOLE_S = 15  # After a minute without room a spool is tried again by then.
MEGABYTES = 96  # Records of a minute are 20: a disk that these fill has no room when the inodes are back.

PLACES = {
    "run folder": {},
    "spools": {
        "transformer": {"TRANSFORMER_PAYLOAD_SPOOL": "{disk}/spool"},
        "predictor": {"PREDICTOR_PAYLOAD_SPOOL": "{disk}/spool-predictor"},
    },
    "database": {"logger": {"LOGGER_DATABASE": "{disk}/payloads.sqlite3"}},
}
CASES = [(place, what) for place in PLACES for what in ("bytes", "inodes", "read-only")]
SHORT = [("run folder", "bytes"), ("spools", "inodes"), ("database", "bytes")]
LONG = [pytest.param(*case, marks=pytest.mark.full) for case in CASES if case not in SHORT]

pytestmark = pytest.mark.timeout(900 if FULL else 300)


@pytest.mark.parametrize(("place", "what"), [*SHORT, *LONG])
async def test_streams_go_on_and_all_returns_by_itself(tmp_path, place, what):
    said = []
    with small_disk(tmp_path / "disk", megabytes=MEGABYTES, inodes=400) as disk:
        environment = {
            kind: {name: value.format(disk=disk.path) for name, value in settings.items()}
            for kind, settings in PLACES[place].items()
        }
        folder = disk.path / "run" if place == "run folder" else tmp_path / "run"
        database = environment.get("logger", {}).get("LOGGER_DATABASE", folder / "payloads.sqlite3")
        settings = {"models": "storyteller=models/storyteller", "predictors": 2}
        stack = await start_stack(folder, settings, environment=environment, say=said.append)
        try:
            oracle, excuses = Oracle(), []
            async with Client(stack.gateway) as client:
                await oracle.record_answers(client, stories_of(TOKENS)[:CALLERS])
                async with Crowd(client, stories_of(TOKENS), CALLERS) as crowd:
                    await asyncio.sleep(SECONDS / 3)
                    full = time.monotonic()
                    await asyncio.to_thread(disk.fill, what)
                    await asyncio.sleep(SECONDS / 3)
                    for name in ("logger", "predictor-1", "transformer", "envoy") if FULL else ("transformer",):
                        excuses.append(await kill_and_return(stack, name, may_stay_away=name == "logger"))
                    since = time.monotonic()
                    await until(lambda: crowd.all_have_moved(since), BACK_S)
                    if place != "spools" and what != "inodes":  # An open database needs none.
                        await until(lambda: serves(stack.addresses["logger"]), BACK_S, holds=not_)
                    await asyncio.sleep(SECONDS / 3)
                    await asyncio.to_thread(disk.empty, what)
                    emptied = time.monotonic()
                    await until(lambda: not_serving(stack), BACK_S, holds=not_)
                    back = time.monotonic()
                    await until(lambda: crowd.all_have_moved(back), BACK_S)
                async with Crowd(client, stories_of(TOKENS), CALLERS, "later") as later:
                    await asyncio.sleep(1)
            verdicts = [(call, oracle.judge(call, excuses)) for call in (*crowd.calls, *later.calls)]
            wrong = [(call.request.name, call.status, call.message) for call, it in verdicts if it.outcome == "wrong"]
            assert not wrong
            assert all(oracle.judge(call, ()).outcome == "right" for call in later.calls)
            assert not any(task.done() for task in stack._supervisions)
            names = {call.request.name for call in later.calls}
            await until(lambda: names <= complete(database), BACK_S)
            full_disk = [Span(full, back + WHOLE_S)]
            findings = compare(
                crowd.calls, stored(database), oracle, excuses=excuses, kills=excuses, full_disk=full_disk
            )
            assert not findings.lost
            assert not findings.wrong
            assert place != "database" or not findings.lost_on_full_disk  # The spools have them.
            outcomes = Counter(verdict.outcome for _, verdict in verdicts)
            print(f"{place}, {what}: {dict(outcomes)} streams, all served again after {back - emptied:.1f} s, "
                  f"{findings.lost_on_full_disk} without a record")  # fmt: skip
        except AssertionError:
            print(*said, f"not serving: {await not_serving(stack)}", sep="\n")
            raise
        finally:
            await stack.stop()


async def kill_and_return(stack, name, may_stay_away):
    """Kills a service; returns when it serves again, which the logger may not before there is room."""
    since = time.monotonic()
    await stack.kill(name)
    if name == "envoy":
        await until(lambda: serves(stack.gateway, "ready"), BACK_S)
    elif may_stay_away:
        await asyncio.sleep(3)
    else:
        await until(lambda: serves(stack.addresses[name]), BACK_S)
        await until(lambda: serves(stack.gateway, "ready"), BACK_S)
    return Span(since, time.monotonic() + 1)


async def not_serving(stack):
    """The names of the services that do not serve, "envoy" if nothing can be generated through it."""
    addresses = {name: (stack.addresses[name],) for name in stack.names if name != "envoy"}
    addresses["envoy"] = (stack.gateway, "ready")
    states = await asyncio.gather(*(serves(*address) for address in addresses.values()))
    return [name for name, serves_now in zip(addresses, states, strict=True) if not serves_now]


def complete(database):
    """The requests that have a whole record."""
    return {name for name, records in stored(database).items() if any(not record.incomplete for record in records)}
