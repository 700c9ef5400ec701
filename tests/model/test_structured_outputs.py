"""Answers follow their grammars: in a batch, resumed anywhere, and at their ends. The model is the bundled one."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from headrace.errors import InvalidRequestError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.grammar import GrammarCompiler, forbidden_tokens
from headrace_predictor.engine.interface import sampling_of
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.settings import PredictorSettings
from tests.model.fakes import FakeRunner, engines
from tests.support.forms import FORMS, follows
from tests.support.in_process_engine import submit
from tests.support.requests import submission

MODELS = Path("models")
STORIES = Tokenizer.from_file(str(MODELS / "storyteller" / "tokenizer.json"))
PROMPT = STORIES.encode("Once upon a time").ids
EOS = 2


def load(name):
    return load_generation(name, MODELS / name, True, PredictorSettings(), torch.device("cpu")).engine


@pytest.fixture(scope="module")
def engine():
    loaded = load("storyteller")
    yield loaded
    loaded.close()


def request(form, output_ids=(), input_ids=PROMPT, **given):
    values = {"max_tokens": 120, "seed": 1, "structured_outputs": form or "", **given}
    return submission("r", list(input_ids), SamplingParameters().changed(values), list(output_ids))


async def generate(engine, form, output_ids=(), **given):
    """The new ids of an answer and why it ended."""
    slot = submit(engine, request(form, output_ids, **given))
    ids = []
    while True:
        chunk = await slot.read()
        ids += chunk.output_ids
        if chunk.finish_reason is not None:
            assert chunk.usage.completion_tokens == len(output_ids) + len(ids)
            return ids, chunk.finish_reason


async def test_answers_follow_their_forms_alone_and_in_a_batch(engine):
    requests = [(form, {"seed": seed, "temperature": 0.0 if seed == 3 else 1.0}) for form in FORMS for seed in range(4)]
    plain = [(None, {"seed": seed, "temperature": seed % 2}) for seed in range(4)]
    alone = [await generate(engine, form, **given) for form, given in (*requests, *plain)]
    crowd = await asyncio.gather(*(generate(engine, form, **given) for form, given in (*requests, *plain)))
    assert crowd == alone
    ends = [
        follows(form, STORIES.decode(ids))
        for (form, _), (ids, reason) in zip(requests, alone, strict=False)
        if reason == "stop"
    ]
    assert len(ends) > 15
    assert all(ends)


async def test_a_form_whose_tokens_are_not_allowed_is_the_requests_fault(engine):
    with pytest.raises(InvalidRequestError, match="leave no token at this point"):
        await generate(engine, {"choice": ["yes", "no"]}, allowed_token_ids=[STORIES.token_to_id("b")])
    with pytest.raises(
        InvalidRequestError, match="leave no token at this point"
    ):  # The one that it could have ends it.
        await generate(engine, {"choice": ["b"]}, stop_token_ids=[STORIES.token_to_id("b")], min_tokens=5)
    bad = [[token_id] for text, token_id in STORIES.get_vocab().items() if "no".startswith(text)]
    answers = [await generate(engine, {"choice": ["yes", "no"]}, seed=seed, bad_token_ids=bad) for seed in range(8)]
    assert {STORIES.decode(ids) for ids, _ in answers} == {"yes"}


@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:])
async def test_an_answer_continues_from_each_of_its_tokens(engine, form):
    ids, reason = await generate(engine, form)
    for at in range(len(ids) + 1):
        assert await generate(engine, form, ids[:at]) == (ids[at:], reason)


async def test_tokens_that_the_grammar_forces_need_no_step(engine):
    form = FORMS[1]
    before = engine.statistics.steps
    answer = await generate(engine, form)
    assert engine.statistics.steps - before < len(answer[0]) - 10
    # Where each has a step of its own, they are the same.
    assert await generate(engine, form, logprobs=True) == answer
    assert await generate(engine, form, pace=1000.0) == answer
    ids, _ = answer
    assert await generate(engine, form, max_tokens=7) == (ids[:7], "length")
    assert await generate(engine, form, stop_token_ids=[ids[3]]) == (ids[: ids.index(ids[3]) + 1], "stop")


async def test_a_form_may_contain_the_text_of_a_special_token(engine):
    form = {"choice": ["a </s> b <s>"]}
    ids, reason = await generate(engine, form)
    assert (STORIES.decode(ids, skip_special_tokens=False), reason) == ("a </s> b <s>", "stop")
    assert await generate(engine, form, logprobs=True) == (ids, reason)
    for at in range(len(ids)):
        assert await generate(engine, form, ids[:at]) == (ids[at:], reason)


async def test_an_answer_ends_where_its_grammar_does(engine):
    letters = {"regex": "[a-c]{3}"}
    for given in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"stop_token_ids": [EOS]}, {"max_tokens": 3}):
        ids, reason = await generate(engine, letters, **given)
        assert (len(ids), reason) == (3, "stop")
    # Where it may end and may go on, end tokens are allowed, but not below the minimum.
    endless = {"regex": "[a-c]+"}
    strong = {"temperature": 0.0, "min_tokens": 4, "max_tokens": 40}
    ids, _ = await generate(engine, endless, **strong)
    assert EOS not in ids[:4]
    ids, reason = await generate(engine, endless, ignore_eos=True, max_tokens=40)
    assert EOS not in ids
    assert (len(ids), reason) == (40, "length")
    seeds = await asyncio.gather(*(generate(engine, {"regex": "x?"}, seed=seed) for seed in range(64)))
    texts = {STORIES.decode(ids) for ids, _ in seeds}
    assert "" in texts
    assert texts <= {"", "x"}
    assert {reason for _, reason in seeds} == {"stop"}


async def test_log_probabilities_are_those_of_the_models_own_logits(engine):
    slot = submit(engine, request({"choice": ["yes"]}, logprobs=True))
    chunks = [await slot.read()]
    while chunks[-1].finish_reason is None:
        chunks.append(await slot.read())
    values = [each.chosen for chunk in chunks for each in chunk.logprobs]
    assert values
    assert all(value < -0.01 for value in values)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable schema: minLength (5)"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "string", "x-guidance": {"lenient": True}, "not": {}}}, 'Unimplemented keys: ["not"]'),
        (
            {"json": {"type": "integer", "multipleOf": 999_983}},
            "multipleOf: the least common multiple of all is 999983",
        ),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(a{1000}){1000}"}, "too many expressions"),
        ({"grammar": 'root ::= "a"'}, "not EBNF"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": "start: " + "(" * 30_000}, "too deeply nested"),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_refused(engine, form, text):
    with pytest.raises(InvalidRequestError, match="^structured_outputs.*: .*" + re.escape(text)):
        await generate(engine, form)


async def test_an_answer_that_does_not_match_is_not_continued(engine):
    for output_ids in (PROMPT, [*STORIES.encode("no", add_special_tokens=False).ids, 99]):
        with pytest.raises(InvalidRequestError, match="output_ids do not match structured_outputs"):
            await generate(engine, {"choice": ["no"]}, output_ids)


async def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(engine):
    beside = asyncio.create_task(generate(engine, None, max_tokens=200, ignore_eos=True))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs: the grammar (is too complex|takes too much)"):
        await generate(engine, {"grammar": 'start: s\ns: s s s s | "a" | "b" s | '}, max_tokens=500, ignore_eos=True)
    assert await beside == await generate(engine, None, max_tokens=200, ignore_eos=True)


async def test_an_encoder_decoder_model_follows_a_form():
    engine, tokenizer = load("normalizer"), Tokenizer.from_file(str(MODELS / "normalizer" / "tokenizer.json"))
    given = {"input_ids": tokenizer.encode("date: 3 Mar 2021").ids, "temperature": 0}
    try:
        free, _ = await generate(engine, None, **given)
        assert tokenizer.decode(free) == "2021-03-03"
        form = {"regex": "[0-9]{4}/[0-9]{2}/[0-9]{2}"}
        ids, reason = await generate(engine, form, **given)
        assert reason == "stop"
        assert re.fullmatch(form["regex"], tokenizer.decode(ids))
        assert await generate(engine, form, ids[:3], **given) == (ids[3:], "stop")
    finally:
        engine.close()


async def test_an_engine_without_grammars_refuses_them():
    with engines() as make:
        engine = make(FakeRunner())
        with pytest.raises(InvalidRequestError, match="this engine supports no structured_outputs"):
            submit(engine, request({"regex": "a"}))


async def test_a_model_without_a_usable_tokenizer_refuses_grammars(tmp_path):
    with engines() as make:
        engine = make(FakeRunner(), grammars=GrammarCompiler(tmp_path))
        with pytest.raises(InvalidRequestError, match="not supported for the model's tokenizer"):
            await generate(engine, {"regex": "a"})


@pytest.mark.parametrize("vocabulary", [1400, 1536, 1600])
async def test_a_mask_has_the_width_of_the_models_logits(vocabulary):
    asked = request({"regex": "a|[b-z]+"})
    sequence = Sequence(asked, MergingSlot(sampling_of(asked)), frozenset({EOS}))
    compiler, done = GrammarCompiler(MODELS / "storyteller"), asyncio.Event()
    loop = asyncio.get_running_loop()
    compiler.begin(sequence, lambda _: loop.call_soon_threadsafe(done.set), lambda: None)
    await done.wait()
    rows, forbidden = forbidden_tokens([SimpleNamespace(sequence=sequence)], vocabulary)
    allowed = [token_id for token_id, never in enumerate(forbidden[0].tolist()) if not never]
    assert rows == [0]
    assert forbidden.shape == (1, vocabulary)
    assert allowed == [i for i in range(min(1536, vocabulary)) if re.fullmatch("a|[b-z]+", STORIES.decode([i]))]
    compiler.close()
