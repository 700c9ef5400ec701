"""Links to predictors: they follow the addresses, track the models and weights of each, and spread generations."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.errors import NotReadyError
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import SamplingParameters
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors.discovery import resolver
from headrace_transformer.predictors.link import link as link_module
from headrace_transformer.predictors.link import links as links_module
from headrace_transformer.predictors.link.link_call import LinkCall
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.predictors.resume.progress import PredictorLostError
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, falls_silent, holds_until, serving
from tests.waiting import until

SUBMISSION = pb.Submission(model=MODEL, request_id="r", prompt_ids=[1, 2, 3])
SAMPLING = SamplingParameters(max_tokens=5, seed=1)


@asynccontextmanager
async def links_at(monkeypatch, *addresses, silence_limit_s=10.0):
    """Links to the addresses of a name, and the list of these addresses."""
    known = list(addresses)

    async def resolve(address):
        return known

    monkeypatch.setattr(resolver, "_resolve", resolve)
    monkeypatch.setattr(links_module, "_RESOLVE_INTERVAL_S", 0.02)
    links = Links(["predictor:9000"], silence_limit_s)
    running = asyncio.create_task(links.run())
    try:
        yield links, known
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def submission():
    return pb.Submission(model=MODEL, prompt_ids=[1, 2, 3], sampling=b'{"max_tokens":5}')


def can_choose(links, fingerprint=""):
    try:
        links.choose(SUBMISSION, fingerprint)
    except NotReadyError:
        return False
    return True


async def test_a_predictor_of_a_higher_rank_gets_calls_while_none_of_a_lower_rank_serves(monkeypatch):
    first, reserve = ScriptedPredictor(), ScriptedPredictor()
    async with (
        serving(first) as address,
        serving(reserve) as other,
        links_at(monkeypatch, address, other) as (links, _),
    ):
        monkeypatch.setattr(links._resolver, "rank", lambda of: int(of == other))
        await until(lambda: links.listed == {address: 0, other: 1} and all(link.loads for link in links.all))
        assert {links.choose(SUBMISSION, "").address for _ in range(20)} == {address}
        first.has_model = False
        await until(lambda: links.choose(SUBMISSION, "").address == other)
        first.has_model = True
        await until(lambda: links.choose(SUBMISSION, "").address == address)
        # The records change places, with the same prompt.
        monkeypatch.setattr(links._resolver, "rank", lambda of: int(of == address))
        await until(lambda: links.listed == {address: 1, other: 0})
        assert {links.choose(SUBMISSION, "").address for _ in range(20)} == {other}


async def test_a_predictor_whose_address_is_removed_gets_no_new_calls_and_its_link_ends_with_its_last(monkeypatch):
    monkeypatch.setattr(links_module, "_UNLISTED_S", 0.2)
    removed, other = ScriptedPredictor(holds_until(asyncio.Event())), ScriptedPredictor()
    async with (
        serving(removed) as first,
        serving(other) as second,
        links_at(monkeypatch, first, second) as (links, known),
    ):
        await until(lambda: len([link for link in links.all if link.loads]) == 2)
        (link,) = (link for link in links.all if link.address == first)
        call = LinkCall(SUBMISSION, SAMPLING, ClientSpan())
        link.submit(call, submission())
        await removed.wait_for_calls(1)
        known.remove(first)
        await until(lambda: call.is_leaving)
        assert {links.choose(SUBMISSION, "").address for _ in range(20)} == {second}
        # It comes back before its call has ended.
        known.append(first)
        await until(lambda: not call.is_leaving)
        others = [one for one in links.all if one is not link]
        assert links.choose(SUBMISSION, "", besides=others) is link
        known.remove(first)
        call.close()
        await until(lambda: [link.address for link in links.all] == [second])
        await until(lambda: not removed.sessions)
        # Without any address the names are not known now: what is up goes on.
        known.clear()
        last = links.all[0].listed_at
        await until(lambda: asyncio.get_running_loop().time() > last + 0.5)
        assert links.choose(SUBMISSION, "").address == second
        # An address that comes gets the first name that is free.
        known[:] = [first, second]
        await until(lambda: [link.address for link in links.all if link.loads] == [first, second])


async def test_a_silent_predictor_is_away_until_its_next_message(monkeypatch):
    predictor = ScriptedPredictor()
    async with serving(predictor) as address, links_at(monkeypatch, address, silence_limit_s=0.3) as (links, _):
        await until(lambda: can_choose(links))
        predictor.is_mute = True
        await until(lambda: not can_choose(links))
        predictor.is_mute = False
        await until(lambda: can_choose(links))


async def test_an_unaccepted_call_is_to_blame_unless_its_predictor_had_hung_before(monkeypatch):
    monkeypatch.setattr(link_module, "_MOST_QUIET_S", 0.5)
    predictor, loop = ScriptedPredictor(falls_silent(), falls_silent()), asyncio.get_running_loop()
    async with serving(predictor) as address, links_at(monkeypatch, address, silence_limit_s=2.0) as (links, _):
        await until(lambda: can_choose(links))
        (link,) = links.all
        suspect, later = (LinkCall(SUBMISSION, SAMPLING, ClientSpan()) for _ in range(2))
        link.submit(suspect, submission())
        await predictor.wait_for_calls(1)
        await until(lambda: loop.time() > link._heard_at + 0.6)
        link.submit(later, submission())
        with pytest.raises(PredictorLostError):
            await suspect.read()
        with pytest.raises(NotReadyError):
            await later.read()


class StalledConnection:
    """A FrameConnection whose transport takes one message, and the next one after `drain`."""

    def __init__(self, drained):
        self.ended = asyncio.get_running_loop().create_future()
        self.can_send = True
        self.sent = []
        self._drained = drained

    def send(self, message):
        assert self.can_send
        self.can_send = False
        self.sent.append(pb.StepsRequest.FromString(message))

    def drain(self):
        self.can_send = True
        self._drained()

    def abort(self):
        self.ended.cancel()


async def test_what_waits_to_be_sent_is_bounded_by_the_calls_in_flight(monkeypatch):
    """Cancelled submissions are left out, and a message takes no submission beyond its size."""
    calls = []

    async def connect(host, port, receive, drained):
        calls.append(StalledConnection(drained))
        return calls[-1]

    monkeypatch.setattr(link_module.FrameConnection, "open", connect)
    monkeypatch.setattr(link_module, "_MESSAGE_BYTES", 20)
    async with links_at(monkeypatch, "127.0.0.1:1") as (links, _):
        await until(lambda: calls)
        (link,), (call,) = links.all, calls
        first, cancelled, *others = (LinkCall(SUBMISSION, SAMPLING, ClientSpan()) for _ in range(5))
        link.submit(first, submission())
        await until(lambda: call.sent)
        for waiting in (cancelled, *others):
            link.submit(waiting, submission())
        link.cancel(cancelled)
        link.cancel(first)
        for _ in range(3):
            call.drain()
    numbers = [[pb.Submission.FromString(one).number for one in request.submissions] for request in call.sent]
    assert numbers == [[first.number], *([other.number] for other in others)]
    assert [list(request.cancelled) for request in call.sent] == [[], [first.number], [], []]


async def test_the_calls_of_a_link_that_is_closed_end(monkeypatch):
    predictor = ScriptedPredictor(falls_silent())
    async with serving(predictor) as address:
        async with links_at(monkeypatch, address) as (links, _):
            await until(lambda: can_choose(links))
            call = LinkCall(SUBMISSION, SAMPLING, ClientSpan())
            links.all[0].submit(call, submission())
            await predictor.wait_for_calls(1)
        with pytest.raises(PredictorLostError):
            await call.read()
