"""Every kind of request gets its right answer while engines, engine hosts, predictors and transformers are killed.

Clients continue by `Last-Event-ID` and `resume_from`, or repeat with the same Idempotency-Key. Each answer is compared
with the one from before the kills. 12 clients for 40 s, with FULL=1 24 for ten minutes. The test prints kills and
answers by kind, and why clients had to come again.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import count

import httpx2
import psutil
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from tests.random_adapters import save_random_adapter
from tests.slow.kinds_of_requests import KINDS, Reader
from tests.support.full import FULL
from tests.support.tool_models import save_tool_model
from tests.system.calls import serves
from tests.waiting import until

SECONDS, CLIENTS = (600, 24) if FULL else (40, 12)
QUIET_S = (1.0, 6.0) if FULL else (1.0, 3.0)
SEED = int(os.environ.get("KILLS_SEED", "0")) or random.randrange(1 << 32)
# Of the kills of predictors after which the next one does not wait; one transformer is always there but after the kill
# of both.
HASTY_SHARE = 0.2
PREDICTORS = 2
BACK_S = 180
# Of a transformer there are two workers: the kill of their parent is that of all transformers.
KILLS = {"engine": 4, "host": 2, "predictor": 2, "transformer's worker": 4, "transformer": 1}

pytestmark = pytest.mark.timeout(SECONDS + 400)


@pytest_asyncio.fixture
async def stack(new_stack, tmp_path):
    base = await asyncio.to_thread(save_tool_model, tmp_path / "teller", "hermes")
    save_random_adapter(tmp_path / "poet", AutoModelForCausalLM.from_pretrained(base), str(base), seed=1)
    return await new_stack(
        models=f"teller={base},poet={tmp_path / 'poet'},normalizer=models/normalizer",
        predictors=PREDICTORS,
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={
            "predictor": {"PREDICTOR_DTYPE": "fp32", "SLOW_MS": "20"},
            "transformer": {"TRANSFORMER_WORKERS": "2"},
        },
    )


class Killer:
    """Kills one process after the other, mostly when all serve again."""

    def __init__(self, stack):
        self._stack, self._dice = stack, random.Random(SEED)
        self.killed = Counter()
        self.longest_away_s: dict[str, float] = {}

    async def run(self):
        places = {kind: len(processes) for kind, processes in self._alive().items()}
        while True:
            await asyncio.sleep(self._dice.uniform(*QUIET_S))
            kinds = [kind for kind in KILLS if not self.killed[kind]] or list(KILLS)
            (kind,) = self._dice.choices(kinds, [KILLS[kind] for kind in kinds])
            if not (victims := self._alive()[kind]):
                continue
            victim, since = self._dice.choice(victims), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            self.killed[kind] += 1
            if kind.startswith("transformer") or self._dice.random() > HASTY_SHARE:
                await until(lambda: self._all_are_back(victim, places), BACK_S)  # noqa: B023
                self.longest_away_s[kind] = max(self.longest_away_s.get(kind, 0), round(time.monotonic() - since, 1))

    def _alive(self):
        """The process ids by kind."""

        def children(processes):
            found = []
            for process in processes:
                with suppress(psutil.Error):
                    found += [each for each in process.children() if each.status() != psutil.STATUS_ZOMBIE]
            return found

        found = {}
        for kind in ("transformer", "predictor"):
            found[kind] = []
            for name in self._stack.names:
                with suppress(ProcessLookupError, psutil.Error):
                    found[kind] += [psutil.Process(self._stack.pid(name))] if name.startswith(kind) else []
        found["transformer's worker"] = children(found["transformer"])
        found["host"] = children(found["predictor"])
        found["engine"] = children(found["host"])
        return {kind: [process.pid for process in processes] for kind, processes in found.items()}

    async def _all_are_back(self, victim, places):
        alive = self._alive()
        if {kind: len(processes) for kind, processes in alive.items()} != places:
            return False
        if any(victim in processes for processes in alive.values()):
            return False
        port = int(self._stack.addresses["transformer"].rpartition(":")[2])
        for worker in alive["transformer's worker"]:
            with suppress(psutil.Error):
                sockets = psutil.Process(worker).net_connections("tcp")
                if (port, psutil.CONN_LISTEN) in {(each.laddr.port, each.status) for each in sockets}:
                    continue
            return False
        addresses = [self._stack.addresses[f"predictor-{number}"] for number in range(PREDICTORS)]
        return all(await asyncio.gather(*(serves(address, "ready") for address in (*addresses, self._stack.gateway))))


async def test_every_kind_of_request_gets_its_answer_while_processes_are_killed(stack):
    print(f"seed {SEED}")
    limits = httpx2.Limits(max_keepalive_connections=0)  # An idle one may be of a transformer that died.
    right, wrong, lost, again, pauses = Counter(), [], [], Counter(), {}
    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=None, limits=limits) as http:
        answers = await asyncio.gather(*(Reader(stack.gateway, http, kind).answer() for kind in KINDS))
        known = dict(zip(KINDS, answers, strict=True))
        killer, numbers, end = Killer(stack), count(), time.monotonic() + SECONDS

        async def client():
            while time.monotonic() < end or (len(killer.killed) < len(KILLS) and not killing.done()):
                kind = list(KINDS)[next(numbers) % len(KINDS)]
                reader = Reader(stack.gateway, http, kind)
                try:
                    answer = await reader.answer()
                except TimeoutError:
                    lost.append((kind, reader.came_again))
                except Exception as error:
                    wrong.append((kind, repr(error)))
                else:
                    if answer == known[kind]:
                        right[kind] += 1
                    else:
                        wrong.append((kind, answer, known[kind]))
                again.update(reader.came_again)
                pauses[kind] = max(pauses.get(kind, 0.0), reader.longest_pause_s)

        killing = asyncio.create_task(killer.run())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        killing.cancel()
    print(f"kills: {dict(killer.killed)}; all served again after at most {killer.longest_away_s} s")
    for kind in KINDS:
        print(f"{kind}: {right[kind]} right, longest pause {pauses.get(kind, 0):.1f} s")
    print(f"{right.total()} right, {len(wrong)} wrong, {len(lost)} lost; came again {again.total()} times:")
    print(*(f"  {times} x {why}" for why, times in again.most_common()), sep="\n")
    with suppress(asyncio.CancelledError):
        await killing
    assert not wrong
    assert not lost
    assert set(right) == set(KINDS)
