"""A generation continues after the loss of its predictor: no token repeated or missing, a limited number of times."""

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing

import pytest

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    HopBrokenError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OtherWeightsError,
    OverloadedError,
    RequestFailedError,
)
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import SamplingParameters
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.predictors.discovery.descriptions import OURS
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.oip.oip_call import BrokenAnswerError
from headrace_transformer.predictors.resume.progress import sampling_json
from headrace_transformer.predictors.resume.resuming import ResumingGenerator
from tests.support.scripted_predictor import (
    ANSWER,
    MODEL,
    TOKEN_S,
    ScriptedPredictor,
    alone,
    breaks,
    breaks_before_its_end,
    dies,
    falls_silent,
    hands_back,
    holds_until,
    is_accepted,
    raises,
    serving,
    whole,
)
from tests.waiting import HANG_S, until

SAMPLING = SamplingParameters(max_tokens=100, seed=7)


def submission_of(prompt, sampling, **fields):
    return Submission(
        model=MODEL, request_id="r", prompt_ids=prompt, sampling=sampling_json(sampling), weight=1, **fields
    )


class Resuming:
    """A generator and the predictor that it calls."""

    def __init__(self, predictor, client, links):
        self.predictor = predictor
        self.client = client
        self.generator = ResumingGenerator(links, client)
        self.resumes = 0

    async def chunks(
        self, prompt=(1, 2, 3), timeout_s=None, sampling=SAMPLING, first_token_ms=None, dialect=None, **fields
    ):
        submission = submission_of(prompt, sampling, **fields)
        metadata = () if first_token_ms is None else (("x-first-token-timeout-ms", str(first_token_ms)),)
        first_token = CallContext("p", "r", metadata).first_token
        with closing(
            self.generator.open(submission, sampling, Deadline.after(timeout_s), first_token, elsewhere=dialect)
        ) as tokens:
            async with first_token.scope():
                chunk = await tokens.read()
            while True:
                self.resumes += chunk.resumed
                yield chunk
                if chunk.finish_reason is not None:
                    return
                chunk = await tokens.read()

    async def generate(self, **arguments):
        async with aclosing(self.chunks(**arguments)) as chunks:
            return [chunk async for chunk in chunks]

    @property
    def continued_after(self):
        """The number of ids in each call."""
        return [len(call.request.output_ids) for call in self.predictor.calls]

    @property
    def were_alone(self):
        return [call.request.alone for call in self.predictor.calls]


@asynccontextmanager
async def linked(*addresses, silence_limit_s=10.0, wait_s=30.0):
    """A client of the first address and links to all of them."""
    client = PredictorClient(addresses[0], wait_s)
    links = Links(addresses, silence_limit_s)
    running = asyncio.create_task(links.run())
    try:
        yield client, links
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


@asynccontextmanager
async def resuming(*script, silence_limit_s=10.0, wait_s=30.0, answer=ANSWER):
    predictor = ScriptedPredictor(*script, answer=answer)
    async with (
        serving(predictor) as address,
        linked(address, silence_limit_s=silence_limit_s, wait_s=wait_s) as (client, links),
    ):
        await until(lambda: links.can_resume(MODEL, ""))
        yield Resuming(predictor, client, links)


def ids_of(chunks):
    return [token for chunk in chunks for token in chunk.token_ids]


async def chunks_of(tokens, chunks):
    """The next chunks, which have so many tokens; tokens that come at once share a chunk."""
    made = []
    while len(ids_of(made)) < tokens:
        made.append(await anext(chunks))
    return made


def check_whole(chunks):
    assert ids_of(chunks) == ANSWER
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == len(ANSWER)


@pytest.mark.parametrize("end", [breaks, hands_back, falls_silent, dies])
@pytest.mark.parametrize("after", [0, 1, 7, 19])
async def test_a_generation_continues_after_its_last_token(end, after):
    # The other ends are noticed at once, however busy the machine.
    async with resuming(end(after), silence_limit_s=0.5 if end is falls_silent else 10) as r:
        check_whole(await r.generate())
        assert r.continued_after == [0, after]
        assert r.resumes == bool(after)


async def test_the_engine_s_time_is_that_of_all_calls():
    async with resuming(breaks(7), dies(3), dies()) as r:
        chunks = await r.generate()
        so_far = [len(ids_of(chunks[: number + 1])) for number in range(len(chunks))]
        assert [chunk.engine_s for chunk in chunks] == [TOKEN_S * tokens for tokens in so_far]
        assert so_far[-1] == len(ANSWER)


async def test_a_generation_continues_any_number_of_times_if_tokens_arrive_in_between():
    async with resuming(*(breaks(2) for _ in range(9))) as r:
        check_whole(await r.generate())
        assert r.continued_after == [0, *range(2, 20, 2)]
        assert not any(r.were_alone)
        assert r.resumes == 9


async def test_an_answer_that_lacks_only_its_end_gets_it():
    async with resuming(breaks_before_its_end(5)) as r:
        chunks = await r.generate(sampling=SamplingParameters(max_tokens=5, seed=1))
        assert ids_of(chunks) == ANSWER[:5]
        assert (chunks[-1].token_ids, chunks[-1].finish_reason) == ([], "length")
        assert chunks[-1].usage.completion_tokens == 5
        assert r.continued_after == [0, 5]


async def test_a_call_that_breaks_after_its_last_chunk_is_complete():
    async with resuming(breaks(len(ANSWER))) as r:
        check_whole(await r.generate())
        assert len(r.predictor.calls) == 1


async def test_usage_counts_the_prompt_once_and_the_cached_tokens_of_the_first_call():
    async with resuming(breaks(3), hands_back(3)) as r:
        usage = (await r.generate())[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 101, 20)


async def test_log_probabilities_continue_without_a_repeat():
    async with resuming(breaks(3), breaks(4)) as r:
        chunks = await r.generate(sampling=SamplingParameters(max_tokens=100, logprobs=True, seed=1))
        values = [value for chunk in chunks for value in chunk.logprobs]
        assert values == pytest.approx([-position / 10 for position in range(20)])


@pytest.mark.parametrize(("dialect", "limit_s", "silent_s"), [(None, 2.0, 2.5), (OURS, 0.1, 0.5)])
async def test_messages_without_tokens_keep_a_call_alive_and_a_foreign_predictor_may_be_silent(
    dialect, limit_s, silent_s
):
    released = asyncio.Event()
    async with resuming(holds_until(released), silence_limit_s=limit_s) as r:
        asyncio.get_running_loop().call_later(silent_s, released.set)
        check_whole(await r.generate(dialect=dialect))
        assert len(r.predictor.calls) == 1


async def test_a_silent_connection_is_ended_before_the_next_begins():
    async with resuming(falls_silent(4), silence_limit_s=0.5) as r:
        check_whole(await r.generate())
        await r.predictor.calls[0].ended.wait()


# ------------------------------------------------------------------ deaths in a row


async def test_after_two_deaths_in_a_row_a_request_runs_alone_and_then_beside_others_again():
    async with resuming(dies(), dies(), dies(3)) as r:
        check_whole(await r.generate())
        assert r.were_alone == [False, False, True, False]


async def test_a_third_death_in_a_row_ends_a_request_and_its_repetition_is_refused():
    async with resuming(dies(5), dies(), alone(dies())) as r:
        chunks = r.chunks()
        assert ids_of(await chunks_of(5, chunks)) == ANSWER[:5]
        with pytest.raises(RequestFailedError):
            await anext(chunks)
        assert r.were_alone == [False, False, True]
        with pytest.raises(RequestFailedError, match="refused"):
            await r.generate(sampling=SAMPLING.model_copy(update={"seed": 8}))
        assert len(r.predictor.calls) == 3
        check_whole(await r.generate(prompt=(1, 2, 4)))


async def test_a_replica_that_lacks_the_model_of_a_moved_stream_is_away():
    lacks = NotFoundError("no model 'teller'")
    async with resuming(breaks(3), raises(lacks), raises(lacks)) as r:
        check_whole(await r.generate())
    async with resuming(raises(lacks)) as r:
        with pytest.raises(NotFoundError):
            await r.generate()


async def test_drains_do_not_count_as_deaths():
    async with resuming(*(hands_back() for _ in range(6))) as r:
        check_whole(await r.generate())
        assert not any(r.were_alone)


async def test_one_request_runs_alone_at_a_time():
    released = asyncio.Event()
    async with resuming(*(dies() for _ in range(4)), holds_until(released), holds_until(released)) as r:
        both = [asyncio.create_task(r.generate(prompt=(number,))) for number in range(2)]
        await r.predictor.wait_for_calls(5)
        await asyncio.sleep(0.2)  # Enough time for a fifth and a sixth call, if they did not wait.
        assert r.were_alone == [False] * 4 + [True]
        released.set()
        for chunks in await asyncio.gather(*both):
            check_whole(chunks)
        assert r.were_alone == [False] * 4 + [True] * 2


async def test_a_call_of_a_replica_with_an_isolated_request_is_retried():
    taken = NotReadyError("another request runs in isolation here", retry_after_ms=100)
    async with resuming(dies(), dies(), raises(taken)) as r:
        check_whole(await r.generate())
        assert r.were_alone == [False, False, True, True]


# ------------------------------------------------------------------ one answer, one model


def with_weights(fingerprint, action):
    """The predictor has other weights since this call."""

    async def answers(predictor, call):
        predictor.fingerprint = fingerprint
        async with aclosing(action(predictor, call)) as counts:
            async for count in counts:
                yield count

    return answers


async def test_a_generation_continues_only_with_the_weights_that_began_it():
    refused = raises(OtherWeightsError("model 'teller' has other weights here"))
    async with resuming(with_weights("a", breaks(3)), refused, refused, refused, breaks(4)) as r:
        chunks = await r.generate()
        check_whole(chunks)
        assert [call.request.fingerprint for call in r.predictor.calls] == ["", *["a"] * 5]
        assert {chunk.fingerprint for chunk in chunks} == {"a"}
        assert not any(r.were_alone)


async def test_tokens_of_other_weights_are_never_used():
    for other in ("b", ""):
        async with resuming(with_weights("a", breaks(3)), with_weights(other, whole), with_weights("a", whole)) as r:
            r.predictor.announced = "a"
            check_whole(await r.generate())
            assert r.continued_after == [0, 3, 3]


async def test_a_stream_whose_weights_are_gone_ends_with_an_error_about_them():
    refused = [raises(OtherWeightsError("other")) for _ in range(1000)]
    async with resuming(with_weights("a", breaks(3)), *refused, wait_s=0.5) as r:
        with pytest.raises(HopBrokenError, match="weights have changed"):
            await r.generate()
    async with resuming(with_weights("a", breaks(3)), wait_s=2) as r:
        r.predictor.announced = "b"
        with pytest.raises(HopBrokenError, match="weights have changed"):
            await r.generate()
        assert len(r.predictor.calls) == 1  # No predictor with other weights was called.


def leaves(action, after=0):
    """The predictor drains, and offers its streams after so many tokens."""

    async def stays(predictor, call):
        async with aclosing(action(predictor, call)) as counts:
            async for count in counts:
                call.is_leaving = len(call.output_ids) >= after
                yield count

    return stays


async def test_a_stream_stays_at_its_predictor_until_another_can_continue_it():
    released = asyncio.Event()
    leaving = ScriptedPredictor(with_weights("a", leaves(holds_until(released, after=7), after=5)))
    other = ScriptedPredictor()
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(predictor)) for predictor in (leaving, other)]
        other.has_model = False
        client, links = await stack.enter_async_context(linked(*addresses))
        await until(lambda: links.can_resume(MODEL, ""))
        r = Resuming(leaving, client, links)
        chunks = r.chunks()
        made = await chunks_of(7, chunks)
        assert (len(leaving.calls), len(other.calls)) == (1, 0)
        other.announced, other.has_model = "b", True
        await until(lambda: links.can_resume(MODEL, "b"))
        assert not links.can_resume(MODEL, "a")
        other.announced = other.fingerprint = "a"
        made += [chunk async for chunk in chunks]
        check_whole(made)
        assert [len(call.request.output_ids) for call in other.calls] == [7]
        await until(leaving.calls[0].ended.is_set)
        assert leaving.calls[0].was_cancelled
        assert r.resumes == 1


async def test_a_stream_goes_on_at_a_predictor_that_stops_until_another_has_begun():
    goes_on, begins = asyncio.Event(), asyncio.Event()

    async def one_more(predictor, call):
        for _ in range(5):
            yield 1
        await goes_on.wait()
        yield 1
        await asyncio.Event().wait()

    scripts = (leaves(one_more, after=4),), (is_accepted(holds_until(begins)),)
    async with hedging(*scripts) as (r, (leaving, other)):
        other.has_model = False
        await until(lambda: sum(bool(link.loads) for link in r.generator.links.all) == 1)
        chunks = r.chunks()
        made = await chunks_of(5, chunks)
        other.has_model = True
        reading = asyncio.create_task(chunks_of(1, chunks))
        await other.wait_for_calls(1)
        goes_on.set()
        made += await reading
        assert [chunk.resumed for chunk in made] == [False] * len(made)
        assert not leaving.calls[0].ended.is_set()
        begins.set()
        made += [chunk async for chunk in chunks]
        check_whole(made)
        assert [len(call.request.output_ids) for call in other.calls] == [5]
        await until(leaving.calls[0].ended.is_set)
        assert leaving.calls[0].was_cancelled
        assert [chunk.resumed for chunk in made].count(True) == r.resumes == 1
        assert len({chunk.predictor for chunk in made if chunk.predictor}) == 2


async def test_a_stream_that_no_other_predictor_can_take_ends_at_its_own():
    async with resuming(with_weights("a", leaves(whole))) as r:
        check_whole(await r.generate())
        assert len(r.predictor.calls) == 1


async def test_a_request_without_tokens_can_use_any_weights():
    async with resuming(with_weights("a", breaks()), with_weights("b", breaks(2)), with_weights("b", whole)) as r:
        chunks = await r.generate()
        check_whole(chunks)
        assert [call.request.fingerprint for call in r.predictor.calls] == ["", "", "b"]
        assert chunks[0].fingerprint == "b"


# ------------------------------------------------------------------ predictors that are away or full


async def test_a_stream_that_no_predictor_takes_ends_as_broken_and_an_unbegun_one_as_not_ready():
    away = NotReadyError("loading")
    async with resuming(breaks(3), *(raises(away) for _ in range(1000)), wait_s=0.5) as r:
        with pytest.raises(HopBrokenError, match="no other one resumed the answer") as raised:
            await r.generate()
        assert raised.value.hop == "predictor"
        with pytest.raises(NotReadyError, match="loading"):
            await r.generate()


async def test_a_predictor_that_falls_silent_after_a_heartbeat_counts_as_dead():
    one_beat = is_accepted(falls_silent())
    async with resuming(*[one_beat] * 4, alone(one_beat), alone(one_beat), silence_limit_s=1.0) as r:
        with pytest.raises(RequestFailedError):
            await r.generate()
        assert r.were_alone == [False] * 4 + [True] * 2


async def test_a_death_without_a_successor_is_reported_as_not_ready():
    async with resuming(*(breaks() for _ in range(2)), wait_s=0) as r:
        with pytest.raises(NotReadyError, match="no predictor answers"):
            await r.generate()


async def test_a_full_queue_refuses_a_new_request_and_keeps_a_moved_one_waiting():
    full = OverloadedError("the queue is full", retry_after_ms=20)
    async with resuming(raises(full)) as r:
        with pytest.raises(OverloadedError, check=lambda error: error.retry_after_ms == 20):
            await r.generate()
    for moved in (breaks(3), breaks(), hands_back()):
        async with resuming(moved, raises(full), raises(full)) as r:
            check_whole(await r.generate())
            assert len(r.predictor.calls) == 4


@pytest.mark.parametrize("error", [InvalidRequestError("no"), RequestFailedError("no")])
async def test_an_error_of_the_request_itself_ends_it(error):
    async with resuming(breaks(3), raises(error)) as r:
        with pytest.raises(type(error)):
            await r.generate()
        assert len(r.predictor.calls) == 2


# ------------------------------------------------------------------ deadlines and cancels


async def test_the_deadline_is_kept_in_a_call_and_between_calls():
    for script in ([falls_silent(2)], [raises(NotReadyError("away")) for _ in range(1000)]):
        async with resuming(*script) as r:
            with pytest.raises(DeadlineError):
                await r.generate(timeout_s=0.3)


async def test_the_first_token_has_its_own_deadline_over_all_calls():
    away = [raises(NotReadyError("away")) for _ in range(1000)]
    for script in ([falls_silent()], away, [raises(DeadlineError("no token within 299 ms"))]):
        async with resuming(*script) as r:
            with pytest.raises(DeadlineError, match="no token within 300 ms" if script[1:] else "no token within"):
                await r.generate(first_token_ms=300)
            assert r.predictor.calls[0].request.first_token_timeout_s <= 0.3


async def test_the_first_tokens_deadline_does_not_apply_to_the_second():
    released = asyncio.Event()
    async with resuming(holds_until(released, after=1)) as r:
        chunks = r.chunks(first_token_ms=1500)
        made = [await anext(chunks)]
        asyncio.get_running_loop().call_later(1.7, released.set)
        made += [chunk async for chunk in chunks]
        check_whole(made)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "100000000", "", "٣"])
async def test_a_malformed_first_token_deadline_is_refused(value):
    with pytest.raises(InvalidRequestError, match="x-first-token-timeout-ms"):
        _ = CallContext("p", "r", (("x-first-token-timeout-ms", value),)).first_token


CANCELLED_IN = {
    "a call": [falls_silent(1)],
    "a back-off": [raises(NotReadyError("away", retry_after_ms=60_000))],
    "the line for its turn alone": [dies() for _ in range(2)],
}


@pytest.mark.parametrize("script", CANCELLED_IN.values(), ids=list(CANCELLED_IN))
async def test_a_caller_that_leaves_ends_every_call_at_once(script):
    async with resuming(*script) as r:
        await r.generator.isolation.acquire()
        asking = asyncio.create_task(r.generate())
        await r.predictor.wait_for_calls(len(script))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: all(call.ended.is_set() for call in r.predictor.calls))
        r.generator.isolation.release()
        assert len(r.predictor.calls) == len(script)
        check_whole(await r.generate())


async def test_a_caller_that_leaves_during_its_isolated_turn_gives_it_back():
    async with resuming(dies(), dies(), falls_silent()) as r:
        asking = asyncio.create_task(r.generate())
        await r.predictor.wait_for_calls(3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert not r.generator.isolation.locked()


# ------------------------------------------------------------------ others' predictors


async def test_a_predictor_that_cannot_resume_is_called_again_only_before_the_first_token():
    async with resuming(breaks()) as r:
        check_whole(await r.generate(dialect=OURS))
        assert len(r.predictor.calls) == 2
    async with resuming(breaks(1)) as r:
        with pytest.raises(HopBrokenError):
            await r.generate(dialect=OURS)
        assert len(r.predictor.calls) == 1


async def test_a_predictor_that_cannot_isolate_is_not_called_a_third_time():
    async with resuming(breaks(), breaks()) as r:
        with pytest.raises(HopBrokenError):
            await r.generate(dialect=OURS)
        assert len(r.predictor.calls) == 2


# ------------------------------------------------------------------ two predictors at once


@asynccontextmanager
async def hedging(*scripts, silence_limit_s=2.0):
    """A generator with links to predictors with the same weights."""
    predictors = [ScriptedPredictor(*script, fingerprint="a") for script in scripts]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(predictor)) for predictor in predictors]
        client, links = await stack.enter_async_context(linked(*addresses, silence_limit_s=silence_limit_s))
        await until(lambda: sum(bool(link.loads) for link in links._links.values()) == len(predictors))
        yield Resuming(predictors[0], client, links), predictors


HEDGED = SAMPLING.model_copy(update={"hedge": 2})


async def test_the_first_of_two_predictors_to_deliver_wins_and_no_token_is_repeated():
    for scripts in (
        ((), ()),
        ((falls_silent(),), ()),
        ((), (falls_silent(3),)),
        ((breaks(2),), ()),
        ((), (hands_back(7),)),
    ):
        async with hedging(*scripts, silence_limit_s=HANG_S) as (r, predictors):
            started = asyncio.get_running_loop().time()
            check_whole(await r.generate(sampling=HEDGED))
            assert asyncio.get_running_loop().time() - started < HANG_S, "there is no wait for the silent one"
            assert r.resumes == 0
            await until(lambda: all(predictor.calls for predictor in predictors))
            await until(lambda: all(call.ended.is_set() for predictor in predictors for call in predictor.calls))


async def test_a_dead_call_of_a_hedged_request_is_replaced_at_another_predictor():
    released, dies = asyncio.Event(), asyncio.Event()

    async def dies_later(predictor, call):
        await dies.wait()
        raise HopBrokenError("the engine died")
        yield

    async with hedging((holds_until(released, after=5),), (is_accepted(dies_later),), ()) as (r, predictors):
        predictors[2].has_model = False
        links = r.generator.links
        await until(lambda: sum(bool(link.loads) for link in links._links.values()) == 2)
        reading = asyncio.create_task(r.generate(sampling=HEDGED))
        await until(lambda: predictors[1].calls and len(predictors[0].calls[0].output_ids) == 5)
        predictors[2].has_model = True
        await until(lambda: sum(bool(link.loads) for link in links._links.values()) == 3)
        dies.set()
        await until(lambda: sum(len(predictor.calls) for predictor in predictors) == 3)
        released.set()
        check_whole(await reading)
        assert r.resumes == 0


async def test_after_the_death_of_a_predictor_only_few_answers_at_a_time_catch_up_at_another():
    dies, goes_on, released, begins = (asyncio.Event() for _ in range(4))
    answers = 4

    async def dies_later(predictor, call):
        await dies.wait()
        raise HopBrokenError("the engine died")
        yield

    async def one_more(predictor, call):
        for _ in range(5):
            yield 1
        await goes_on.wait()
        yield 1
        await released.wait()
        async for count in whole(predictor, call):
            yield count

    waits = is_accepted(holds_until(begins))
    scripts = [one_more] * answers, [is_accepted(dies_later)] * answers, [waits] * answers
    async with hedging(*scripts) as (r, predictors):
        _, dying, other = predictors
        links = r.generator.links
        other.has_model = False
        await until(lambda: sum(bool(link.loads) for link in links._links.values()) == 2)
        received = [[] for _ in range(answers)]

        async def read(into):
            async for chunk in r.chunks(sampling=HEDGED):
                into.append(chunk)

        readings = [asyncio.create_task(read(into)) for into in received]
        await until(lambda: all(len(ids_of(chunks)) == 5 for chunks in received) and len(dying.calls) == answers)
        dying.has_model, other.has_model = False, True
        (link,) = [link for link in links._links.values() if not link.loads]
        await until(lambda: link.loads and sum(bool(link.loads) for link in links._links.values()) == 2)
        dies.set()
        await other.wait_for_calls(2)
        goes_on.set()
        await until(lambda: all(len(ids_of(chunks)) == 6 for chunks in received))
        assert len(link._calls) == 2, "the others looked for a second predictor again and got none"
        released.set()
        begins.set()
        await asyncio.gather(*readings)
        for chunks in received:
            check_whole(chunks)
        assert r.resumes == 0


async def test_one_predictor_alone_answers_a_hedged_request_too():
    async with hedging((breaks(4),)) as (r, predictors):
        check_whole(await r.generate(sampling=HEDGED))
        assert [len(call.request.output_ids) for call in predictors[0].calls] == [0, 4]


async def test_a_predictor_with_other_weights_is_not_the_second_one():
    async with hedging((), ()) as (r, predictors):
        predictors[1].fingerprint = "b"
        await until(lambda: r.generator.links.can_resume(MODEL, "b"))
        check_whole(await r.generate(sampling=HEDGED))
        assert sum(len(predictor.calls) for predictor in predictors) == 1


async def test_a_caller_that_leaves_ends_both_calls():
    async with hedging((falls_silent(1),), (falls_silent(1),)) as (r, predictors):
        chunks = r.chunks(sampling=HEDGED)
        await anext(chunks)
        await until(lambda: all(predictor.calls for predictor in predictors))
        await chunks.aclose()
        await until(lambda: all(call.ended.is_set() for predictor in predictors for call in predictor.calls))


async def test_an_answer_that_breaks_the_protocol_ends_only_its_call():
    """The log probabilities of the prompt are missing."""
    released = asyncio.Event()
    async with resuming(holds_until(released, after=2), whole) as r:
        beside = asyncio.create_task(r.generate())
        await until(lambda: r.predictor.calls)
        with pytest.raises(BrokenAnswerError):
            await r.generate(prompt=(1, 2, 3), prompt_logprobs=2)
        released.set()
        check_whole(await beside)
        assert (len(r.predictor.calls), r.resumes) == (2, 0)
