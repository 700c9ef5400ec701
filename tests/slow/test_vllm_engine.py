"""vLLM as a model's engine: what docs/engines.md promises of it. Needs an interpreter with vLLM: `.venv-bench-vllm`.

The model has weights of fp32. Answers are compared with those of the predictor's own engine where both are greedy.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.errors import DeadlineError, InvalidRequestError, StartupError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import EngineProcessError
from headrace_predictor.engine_process.interpreter import InterpreterHost
from headrace_predictor.engine_process.launch import launch_engine
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.settings import PredictorSettings
from tests.model.fakes import read_all
from tests.support.forms import FORMS, follows
from tests.support.requests import submission
from tests.support.vllm import ARGUMENTS, PYTHON, needs_vllm
from tests.waiting import until

pytestmark = needs_vllm
FOLDER = Path(__file__).parents[2] / "models" / "storyteller"
PROMPT = [5, 60, 700, 8, 90]
STORIES = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TOKENS = 24
AMBIGUOUS = 'start: s\ns: s s s s | "a" | "b" s | '


def request(prompt=PROMPT, name="r", **fields):
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    sampling |= {key: fields.pop(key) for key in list(fields) if key in SamplingParameters.model_fields}
    return submission(name, list(prompt), SamplingParameters(**sampling).resolved(500), **fields)


def settings(**given):
    usual = {"max_context": 512, "kv_cache_memory": "64MiB", "max_running": 4, "dtype": "fp32", "max_waiting": 8}
    return PredictorSettings(**{"vllm_arguments": ARGUMENTS, **usual, **given})


async def launched(folder=FOLDER, **given):
    host = InterpreterHost(PYTHON, "headrace_predictor.vllm_engine", threads=1)
    return await launch_engine(host, "storyteller", folder, True, settings(**given))


@pytest_asyncio.fixture(scope="module")
async def loaded():
    loaded = await launched()
    yield loaded
    await asyncio.to_thread(loaded.engine.close)


@pytest.fixture
def engine(loaded):
    return loaded.engine


@pytest.fixture(scope="module")
def own():
    loaded = load_generation("storyteller", FOLDER, True, settings(), torch.device("cpu"))
    yield loaded.engine
    loaded.engine.close()


async def answer(engine, **fields):
    ids, chunks = await read_all(engine.submit(request(**fields)))
    return ids, [position for chunk in chunks for position in chunk.logprobs], chunks


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 10, "ignore_eos": False},
        {"logit_bias": {60: 9.0, 700: 12.0, 306: -100.0}, "repetition_penalty": 1.3},
        {"allowed_token_ids": list(range(40, 400))},
        {"output_ids": [9, 80, 7], "moved": True},
    ],
    ids=["plain", "repetition", "presence", "min_tokens", "bias", "allowed", "moved"],
)
async def test_greedy_answers_equal_the_own_engines(engine, own, fields):
    ids, _, chunks = await answer(engine, **fields)
    expected, _, theirs = await answer(own, **fields)
    assert ids == expected
    assert len(set(ids)) > 3
    assert chunks[-1].finish_reason == theirs[-1].finish_reason
    assert chunks[-1].usage.completion_tokens == theirs[-1].usage.completion_tokens


async def test_log_probabilities_equal_the_own_engines(engine, own):
    fields = {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2}
    _, positions, chunks = await answer(engine, **fields)
    _, expected, theirs = await answer(own, **fields)
    assert [each.chosen for each in positions] == pytest.approx([each.chosen for each in expected], abs=1e-3)
    assert [[token for token, _ in each.top] for each in positions] == [
        [token for token, _ in each.top] for each in expected
    ]
    prompt, other = chunks[0].prompt, theirs[0].prompt
    assert prompt.chosen == pytest.approx(other.chosen, abs=1e-3)
    assert prompt.top_ids.tolist() == other.top_ids.tolist()


async def test_stop_ids_end_an_answer_as_its_last_token(engine):
    ids, _, _ = await answer(engine)
    stop = next(token for token in ids[3:] if token not in ids[:3])
    stopped, _, chunks = await answer(engine, stop_token_ids=[stop])
    assert stopped == ids[: ids.index(stop) + 1]
    assert chunks[-1].finish_reason == "stop"


async def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine):
    sampled = {"temperature": 1.0, "seed": 11}
    (ids, *_), (other, *_) = await asyncio.gather(answer(engine, **sampled), answer(engine, temperature=1.0, seed=12))
    assert ids == (await answer(engine, **sampled))[0]
    assert ids != other


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0, "seed": 11}, {"presence_penalty": 1.5}, {"temperature": 1.0, "seed": 2**64 - 1}],
    ids=["greedy", "sampled", "penalty", "largest seed"],
)
@pytest.mark.parametrize("had", [1, 10])
async def test_an_answer_continues_after_the_tokens_that_it_had(engine, fields, had):
    ids, _, _ = await answer(engine, **fields)
    rest, _, chunks = await answer(engine, output_ids=ids[:had], moved=True, **fields)
    assert ids[:had] + rest == ids
    assert chunks[-1].usage.completion_tokens == TOKENS


async def constrained(engine, form, output_ids=(), **fields):
    """The new ids of an answer, and why it ended."""
    fields = {"ignore_eos": False, "max_tokens": 120, **fields}
    ids, _, chunks = await answer(engine, structured_outputs=form, output_ids=list(output_ids), **fields)
    assert chunks[-1].usage.completion_tokens == len(output_ids) + len(ids)
    return ids, chunks[-1].finish_reason


async def test_answers_follow_their_forms_and_greedy_ones_equal_the_own_engines(engine, own):
    sampled = [(form, {"temperature": 1.0, "seed": seed}) for form in FORMS for seed in (1, 2)]
    # In JSON with whitespace, it may repeat with vLLM.
    strict = [{"disable_any_whitespace": True, **form} if "json" in next(iter(form)) else form for form in FORMS]
    greedy = [(form, {}) for form in strict]
    requests = [*greedy, *sampled]
    answers = []
    for first in range(0, len(requests), 4):
        answers += await asyncio.gather(*(constrained(engine, form, **given) for form, given in requests[first:][:4]))
    complete = [
        follows(form, STORIES.decode(ids))
        for (form, _), (ids, reason) in zip(requests, answers, strict=True)
        if reason == "stop"
    ]
    assert len(complete) > len(FORMS)
    assert all(complete)
    assert answers[: len(strict)] == [await constrained(own, form) for form in strict]


@pytest.mark.parametrize("given", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "sampled"])
async def test_an_answer_with_a_form_continues_after_the_tokens_that_it_had(engine, given):
    ids, reason = await constrained(engine, FORMS[0], **given)
    for had in (1, len(ids) // 2, len(ids) - 1):
        assert await constrained(engine, FORMS[0], ids[:had], moved=True, **given) == (ids[had:], reason)


async def test_a_form_that_cannot_be_used_is_the_requests_fault_alone(engine):
    beside = asyncio.create_task(answer(engine, max_tokens=200))
    some = STORIES.encode("abc", add_special_tokens=False).ids
    for form, given, message in (
        ({"regex": "(?=a)b"}, {}, "^structured_outputs: .*look-around"),
        ({"json": {"not": {}}}, {}, "^structured_outputs: .*Unimplemented keys"),
        ({"grammar": "start: x"}, {}, "^structured_outputs: .*unknown name"),
        ({"choice": ["no"]}, {"output_ids": some}, "output_ids do not match"),
        ({"choice": ["no"]}, {"allowed_token_ids": some}, "leave no token at this point"),
        ({"choice": ["no"]}, {"allowed_token_ids": some, "temperature": 1.0}, "leave no token at this point"),
        ({"grammar": AMBIGUOUS}, {"max_tokens": 400, "ignore_eos": True}, "grammar (is too complex|takes too much)"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            await constrained(engine, form, **given)
    assert len((await beside)[0]) == 200


async def test_log_probabilities_of_an_answer_with_a_form_are_numbers(engine):
    fields = {"logprobs": True, "top_logprobs": 5, "structured_outputs": {"choice": ["yes", "no"]}}
    _, positions, _ = await answer(engine, **fields)
    values = [value for each in positions for value in (each.chosen, *(value for _, value in each.top))]
    assert all(-9999 <= value <= 0 for value in values)
    assert all(len(each.top) == 5 for each in positions)


async def test_a_cancel_frees_the_place_and_a_deadline_ends_an_answer(engine):
    slots = [engine.submit(request(max_tokens=400)) for _ in range(4)]
    await asyncio.gather(*(slot.read() for slot in slots))
    waiting = engine.submit(request())
    await until(lambda: engine.load.waiting == 1)
    cancelled = engine.statistics.cancelled
    slots[0].cancel()
    ids, _ = await read_all(waiting)
    assert len(ids) == TOKENS
    for slot in slots[1:]:
        slot.cancel()
    await until(lambda: engine.statistics.cancelled == cancelled + 4 and not engine.load.blocks_in_use)
    with pytest.raises(DeadlineError):
        await read_all(engine.submit(request(max_tokens=400, deadline=time.monotonic() + 0.1)))


async def test_cached_prefixes_are_shared_within_a_client_only(engine):
    prompt = list(range(3, 3 + 256))
    counts = []
    for client in ("first", "first", "second"):
        _, _, chunks = await answer(engine, prompt=prompt, max_tokens=1, client=client)
        counts.append(chunks[-1].usage.cached_tokens)
    assert counts[0] == counts[2] == 0
    assert counts[1] > 0


async def test_the_fingerprint_is_another_engines(loaded):
    assert loaded.engine.description["runner"].startswith("vllm ")
    assert len(loaded.fingerprint) == 32
    assert loaded.fingerprint != fingerprint_of(FOLDER, loaded.dtype, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_paralel_size": 2}, "PREDICTOR_VLLM_ARGUMENTS: vLLM's EngineArgs have no 'tensor_paralel_size'"),
        ({"trust_remote_code": True}, "trust_remote_code is not for this setting"),
        ({"max_model_len": 10_000_000}, "vLLM refuses its arguments: .*max_model_len"),
    ],
    ids=["unknown", "reserved", "refused"],
)
async def test_wrong_arguments_are_one_line_at_start(arguments, message):
    with pytest.raises(StartupError, match=message) as raised:
        await launched(vllm_arguments={**ARGUMENTS, **arguments}, max_context=0)
    assert "\n" not in str(raised.value)


async def test_two_processes_compute_one_model_and_end_with_the_engines_own(tmp_path):
    shape = {"vocab_size": 1536, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    expected = load_generation("half", tmp_path, True, settings(), torch.device("cpu"))
    loaded = await launched(tmp_path, vllm_arguments={**ARGUMENTS, "tensor_parallel_size": 2})
    ids, _, _ = await answer(loaded.engine)
    assert ids == (await answer(expected.engine))[0]
    expected.engine.close()
    with pytest.raises(InvalidRequestError, match="supports no structured_outputs"):  # The folder has no tokenizer.
        await constrained(loaded.engine, {"regex": "a"})
    processes = psutil.Process(loaded.engine.pid).children(recursive=True)
    assert len(processes) >= 2
    os.kill(loaded.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineProcessError):
        await asyncio.wait_for(loaded.engine.died(), 10)
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 60)
    assert alive == []
