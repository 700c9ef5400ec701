"""Wherever an answer breaks off, and however its tokens are chunked then, the rest follows exactly."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HopBrokenError
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.generation.chunks import Assembler, Origin
from headrace_transformer.generation.repeating import RepeatedTokens
from headrace_transformer.generation.resume_ids import ResumePoint, checksum
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.text.detokenizer import Decoder, Detokenizer
from tests.unit.test_detokenizer import CORPUS, byte_level

TOKENIZER = byte_level()
DECODER = Decoder(TOKENIZER)
STORY = TOKENIZER.encode(CORPUS[0]).ids + TOKENIZER.encode(CORPUS[1]).ids
SIZES = st.lists(st.integers(1, 7), max_size=20)


class Tokens:
    """An answer in chunks of the given sizes, then of one token; its end is in the last one, or by itself."""

    def __init__(self, ids, sizes, ends_apart):
        self.chunks, at = [], 0
        sizes = iter(sizes)
        while at < len(ids):
            count = next(sizes, 1)
            new = ids[at : at + count]
            tops = [[(token_id, -0.5)] for token_id in new]
            self.chunks.append(TokenChunk(new, [float(at + i) for i in range(len(new))], tops))
            at += count
        if ends_apart or not self.chunks:
            self.chunks.append(TokenChunk())
        self.chunks[-1].finish_reason = "length"
        self.chunks[-1].usage = Usage(prompt_tokens=1, completion_tokens=len(ids))
        self._left = iter(self.chunks)

    async def read(self):
        return next(self._left)


def assembled(tokens, stop):
    """The text chunks until the end."""

    async def read_all():
        assembler, chunks = Assembler(Detokenizer(DECODER, [], stop), Origin(None, [1]), ()), []
        while not chunks or chunks[-1].end is None:
            chunks.append(assembler.take(await tokens.read(), 0.0))
        return chunks

    return asyncio.run(read_all())


def contents(chunks):
    text, ids, logprobs, tops = "", [], [], []
    for chunk in chunks:
        text += chunk.text
        ids += chunk.tokens.token_ids
        logprobs += chunk.tokens.logprobs
        tops += chunk.tokens.top_logprobs
    return text, ids, logprobs, tops


@given(
    ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=40) | st.just(STORY),
    first=SIZES,
    second=SIZES,
    ends=st.tuples(st.booleans(), st.booleans()),
    stop=st.lists(st.sampled_from(["e", "a dog", "naïve", "京 😀", "zz"]), max_size=2),
)
def test_the_rest_follows_exactly_after_each_chunk(ids, first, second, ends, stop):
    whole = assembled(Tokens(ids, first, ends[0]), stop)
    for count in range(1, len(whole) + 1):
        received = whole[:count]
        got = contents(received)
        stage = "" if received[-1].end is None else "f"
        point = ResumePoint("", len(got[1]), checksum(got[1]), stage)
        repeated = assembled(RepeatedTokens(Tokens(ids, second, ends[1]), point), stop)
        rest = contents([chunk for chunk in repeated if not chunk.tokens.repeated])
        assert tuple(a + b for a, b in zip(got, rest, strict=True)) == contents(whole)
        last = repeated[-1]
        assert last.tokens.repeated is (stage == "f")
        assert (last.end.reason, last.end.stop) == (whole[-1].end.reason, whole[-1].end.stop)
        assert last.end.usage.completion_tokens == whole[-1].end.usage.completion_tokens


@given(sizes=SIZES, count=st.integers(1, len(STORY)), stop=st.sampled_from([[], ["a dog"], ["😃 and"]]))
def test_the_rest_follows_known_tokens(sizes, count, stop):
    whole = assembled(Tokens(STORY, sizes, ends_apart=True), stop)
    total = len(contents(whole)[1])
    count = min(count, total - 1)
    ids, later = STORY[:count], Tokens(STORY[count:], sizes, ends_apart=True)
    known = TokenChunk(ids, [float(i) for i in range(count)], [[(i, -0.5)] for i in ids], repeated=True)
    came = assembled(RepeatedTokens(later, ResumePoint("", count, checksum(ids), ""), known), stop)
    assert [chunk.tokens.repeated for chunk in came] == [True] + [False] * (len(came) - 1)
    assert contents(came)[:2] == contents(whole)[:2]


@pytest.mark.parametrize("stage", ["", "f"])
@pytest.mark.parametrize(
    ("tokens", "sum_of"), [(3, [1, 2, 4]), (5, [1, 2, 3, 4, 5])], ids=["other tokens", "fewer tokens"]
)
def test_an_answer_that_comes_out_differently_is_not_continued(stage, tokens, sum_of):
    point = ResumePoint("", tokens, checksum(sum_of), stage)
    with pytest.raises(HopBrokenError, match="could not be repeated"):
        assembled(RepeatedTokens(Tokens([1, 2, 3, 4], [2], ends_apart=False), point), [])
