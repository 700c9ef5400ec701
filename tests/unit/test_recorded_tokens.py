"""Tokens of a broken answer come from the payload log if they are the client's; the log never fails a request."""

import pytest

from headrace.errors import DeadlineError, NotReadyError
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import SamplingParameters
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.generation.chunks import Origin
from headrace_transformer.generation.preparation import Prepared
from headrace_transformer.generation.repeating import RecordedTokens
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint, checksum
from headrace_transformer.predictors.discovery.descriptions import Dialect
from headrace_transformer.text.answer_parser import AnswerSyntax

IDS, PROMPT, WEIGHTS = [5, 6, 7, 8, 9], [1, 2, 3], "0" * 32


class Log:
    """Answers every query with its records, then with its error."""

    def __init__(self, *records, error=None):
        self._records, self._error = records, error
        self.queries = []

    async def Query(self, request, timeout):  # noqa: N802
        self.queries.append(request)
        assert 0 < timeout <= 1
        for record in self._records:
            yield record
        if self._error is not None:
            raise self._error


def record(ids=IDS, prompt=PROMPT, weights=WEIGHTS, has_logprobs=False):
    chunks = [PayloadChunk(token_ids=[i], logprobs=[-float(i)] if has_logprobs else []) for i in ids]
    return PayloadRecord(chunks=chunks, prompt_ids=prompt, fingerprint=weights)


async def find(log, tokens=3, stage="", resumes=True, client="", **sampling):
    point = ResumePoint(WEIGHTS, tokens, checksum(IDS[:tokens]), stage)
    call = CallContext("", "r", (("x-headrace-client", client),) if client else ())
    prepared = Prepared(
        submission=Submission(),
        origin=Origin(None, PROMPT),
        sampling=SamplingParameters(**sampling),
        syntax=AnswerSyntax(),
        prompt_end="",
        dialect=None if resumes else Dialect(),
    )
    return await RecordedTokens(log).find(TextRequest(call, "m", resume=point), prepared)


@pytest.mark.parametrize("tokens", [1, 3, 5])
async def test_so_many_tokens_come_as_the_client_has(tokens):
    found = await find(Log(record()), tokens)
    assert (found.token_ids, found.logprobs, found.fingerprint) == (IDS[:tokens], [], WEIGHTS)
    assert found.repeated
    found = await find(Log(record(has_logprobs=True)), tokens, logprobs=True)
    assert found.logprobs == [-float(i) for i in IDS[:tokens]]


async def test_the_query_is_for_the_clients_own_request():
    log = Log(record())
    await find(log)
    await find(log, client="alice")
    assert [(q.request_id, q.client, q.HasField("client")) for q in log.queries] == [
        ("r", "", False),
        ("r", "alice", True),
    ]


async def test_other_records_of_the_same_id_are_passed_over():
    others = [
        record([5, 6]),
        record([5, 6, 8]),
        record(prompt=[1, 2]),
        record(prompt=[]),
        record(weights="1" * 32),
        record([]),
    ]
    for other in others:
        assert await find(Log(other)) is None
    assert (await find(Log(*others, record()))).token_ids == IDS[:3]
    assert await find(Log(record()), logprobs=True) is None


@pytest.mark.parametrize("error", [DeadlineError("late"), NotReadyError("no logger")])
async def test_a_log_that_fails_is_no_failure(error):
    assert await find(Log(error=error)) is None
    assert (await find(Log(record(), error=error))).token_ids == IDS[:3]


async def test_a_complete_answer_and_one_of_another_server_are_generated_again():
    log = Log(record())
    assert await find(log, stage="f") is None
    assert await find(log, resumes=False) is None
    assert not log.queries
