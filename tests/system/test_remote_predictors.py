"""Predictors on other hosts: a cut link is a dead predictor until it heals, a slow and lossy one is not.

The stack has no predictor of its own. Each of the two runs in a network namespace, behind a link that the tests change.
"""

import asyncio
import re
import time
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count

import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.full import FULL
from tests.support.network import Host, why_not
from tests.system.calls import channel, generate, records, rest
from tests.system.predictor_process import predictor_process
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
PREDICTORS = ("predictor-0", "predictor-1")
PORT = 9000
SILENCE_LIMIT_S = 3
START_WAIT_S = 3
TOKENS = 40
STREAMS = 8
ROUNDS = 4 if FULL else 1
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "max_tokens": TOKENS}
DELAY_S, LOSS = 0.1, 0.01
# Of Envoy's cluster, while the links are slow.
FAILURES = r"^cluster\.predictor\.(health_check\.failure|outlier_detection\.ejections_total|upstream_cx_connect_fail)$"


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with Host(seed=1) as one, Host(seed=2) as other:
        yield one, other


@pytest_asyncio.fixture(scope="module")
async def remote_stack(hosts, stacks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predictors")
    async with AsyncExitStack() as running:
        for number, host in enumerate(hosts):
            await running.enter_async_context(
                predictor_process(
                    folder / f"{number}.log",
                    "tests.system.remote_predictor",
                    host.address,
                    NAMESPACE=host.namespace,
                    PREDICTOR_HOST="0.0.0.0",
                    PREDICTOR_PORT=str(PORT),
                    PREDICTOR_DTYPE="fp32",
                    SLOW_MS="40",
                    MODELS=MODELS,
                )
            )
        limits = {
            "TRANSFORMER_SILENCE_LIMIT": str(SILENCE_LIMIT_S),
            "TRANSFORMER_PREDICTOR_START_WAIT": str(START_WAIT_S),
        }
        settings = {
            "models": MODELS,
            "predictors": 0,
            "predictor_endpoints": ",".join(f"{host.address}:{PORT}" for host in hosts),
            "environment": {"transformer": limits},
        }
        started = await running.enter_async_context(stacks.use(**settings))
        started.used = settings
        yield started


@pytest_asyncio.fixture
async def links(hosts, remote_stack):
    """The hosts behind links without faults, both in use at the beginning."""
    yield hosts
    for host in hosts:
        host.delay_s = host.loss = 0.0
    await until(lambda: are_used(remote_stack, PREDICTORS))


async def are_used(stack, names):
    """Whether generations of the next moment go to exactly these predictors."""
    answers = await asyncio.gather(
        *(generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=2) for _ in range(4)),
        return_exceptions=True,
    )
    return {answer[0].predictor for answer in answers if isinstance(answer, list)} == {*names}


def text_stream(stack, number, prefix, came, names):
    """Starts a stream that counts its tokens in `came`, and whose predictors are in `names`; its result: ids, text."""

    async def run():
        ids, text = [], ""
        request = headrace_pb2.GenerateRequest(
            model="storyteller", prompt="Once upon a time", seed=number, request_id=f"{prefix} {number}", **SAMPLED
        )
        async with channel(stack.gateway) as open_channel:
            async for response in headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=100):
                ids += response.token_ids
                text += response.text
                came[number] += len(response.token_ids)
                if response.predictor:
                    names.setdefault(number, []).append(response.predictor)
        return ids, text

    return asyncio.create_task(run())


async def undisturbed(stack):
    streams = [text_stream(stack, number, f"reference {time.time_ns()}", Counter(), {}) for number in range(STREAMS)]
    return await asyncio.gather(*streams)


async def resumes(stack, request_id):
    (record,) = await records(stack.gateway, request_id=request_id)
    return record.resumes


async def counters(stack, names):
    """Envoy's counters of the predictors whose names match."""
    address = f"http://127.0.0.1:{stack.settings.gateway_admin_port}/stats?filter={names}"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=60).read().decode())
    return dict(re.findall(r"(\S+): (\d+)", text))


@pytest.mark.parametrize("lost", range(ROUNDS))
async def test_the_streams_of_a_cut_off_predictor_continue_elsewhere_and_it_serves_again_when_it_is_back(
    remote_stack, links, lost
):
    expected = await undisturbed(remote_stack)
    came, names, prefix = Counter(), {}, f"cut {lost} {time.time_ns()}"
    streams = [text_stream(remote_stack, number, prefix, came, names) for number in range(STREAMS)]
    await until(lambda: all(came[number] >= 5 for number in range(STREAMS)))
    cut = PREDICTORS[lost % 2]
    links[lost % 2].loss = 1.0
    on_it = [number for number in range(STREAMS) if names[number] == [cut]]
    assert 0 < len(on_it) < STREAMS
    assert await asyncio.gather(*streams) == expected  # TCP alone would wait for many minutes.
    for number in range(STREAMS):
        assert (await resumes(remote_stack, f"{prefix} {number}") > 0) == (number in on_it)
        assert names[number][-1] != cut

    for _ in range(3):
        assert await are_used(remote_stack, {*PREDICTORS} - {cut})
    links[lost % 2].loss = 0.0
    await until(lambda: are_used(remote_stack, PREDICTORS))
    assert await undisturbed(remote_stack) == expected


async def test_a_slow_and_lossy_link_moves_no_stream_and_no_predictor_is_marked_dead(remote_stack, links):
    expected = await undisturbed(remote_stack)
    before, lines = await counters(remote_stack, FAILURES), remote_stack.log("transformer").count("\n")
    assert before
    for link in links:
        link.delay_s, link.loss, link.lost = DELAY_S, LOSS, 0
    for round_number in count():
        if round_number >= ROUNDS and all(link.lost for link in links):
            break
        prefix = f"slow {round_number} {time.time_ns()}"
        streams = [text_stream(remote_stack, number, prefix, Counter(), {}) for number in range(STREAMS)]
        assert await asyncio.gather(*streams) == expected
        assert [await resumes(remote_stack, f"{prefix} {number}") for number in range(STREAMS)] == [0] * STREAMS
    assert (await rest(remote_stack.gateway, "GET", "/v2/health/ready")).status == 200
    assert await counters(remote_stack, FAILURES) == before
    new = remote_stack.log("transformer").splitlines()[lines:]
    assert not [line for line in new if "has sent nothing" in line or "broke" in line]
