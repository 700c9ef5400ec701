"""Prompt lookup: whatever is proposed, every request has the answer that it has without proposals."""

from collections.abc import Sequence as Rows

import pytest
import torch

from headrace.sampling import SamplingParameters
from headrace_predictor.engine import lookup
from headrace_predictor.engine.lookup import PromptLookup, Proposals
from tests.model.random_crowd import PROMPTS, random_engines
from tests.random_models import random_model
from tests.support.in_process_engine import submit
from tests.support.requests import submission
from tests.zoo import VOCABULARY

_LENGTH = 40
_SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 200}
_KINDS = {
    "greedy": {"temperature": 0},
    "sampled": _SAMPLED,
    "penalties": {**_SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 4},
    "min_tokens": {"temperature": 0, "stop_token_ids": [*range(3, 60)], "min_tokens": 9},
    "ends": {**_SAMPLED, "stop_token_ids": [*range(3, 12)]},
    "restrictions": {**_SAMPLED, "logit_bias": {7: 4.0}, "bad_token_ids": [[9], [7, 7]]},
}


# What stops an answer, what counts its tokens, and what has numbers for each of them.
_USUAL = ("ends", "penalties")


@pytest.fixture
def engine_of():
    with random_engines() as make:
        yield make


def _request(number: int, prompt: Rows[int], output_ids: Rows[int] = (), length: int = _LENGTH, **given):
    sampling = SamplingParameters(**{"max_tokens": length, "seed": number, **given})
    return submission(f"{number}", list(prompt), sampling, list(output_ids), prompt_logprobs=2 if number % 3 else None)


async def _answer(slot):
    """Everything but the chunks' borders."""
    chunks = [await slot.read()]
    while chunks[-1].finish_reason is None:
        chunks.append(await slot.read())
    ids = [token_id for chunk in chunks for token_id in chunk.output_ids]
    prompt = chunks[0].prompt
    scores = None if prompt is None else (prompt.chosen.tolist(), prompt.top_ids.tolist())
    usage = chunks[-1].usage
    counts = usage.prompt_tokens, usage.completion_tokens
    return ids, [value for chunk in chunks for value in chunk.logprobs], scores, counts, chunks[-1].finish_reason


@pytest.fixture
def oracle(monkeypatch):
    """Proposes, always and everywhere, the tokens of known texts, with an error in a place that varies."""
    texts: list[list[int]] = []

    def propose(self, ids):
        self.rate = 1.0
        for text in texts:
            if text[: len(ids)] == ids:
                proposed = text[len(ids) : len(ids) + 7]
                wrong = len(ids) % 9
                return [3 + (token_id + (at == wrong)) % VOCABULARY % (VOCABULARY - 3) if at == wrong else token_id
                        for at, token_id in enumerate(proposed)]  # fmt: skip
        return []

    monkeypatch.setattr(Proposals, "propose", propose)
    monkeypatch.setattr(PromptLookup, "_pays", lambda *_: True)
    monkeypatch.setattr(lookup, "_STREAMS", 16)
    return texts


@pytest.mark.parametrize(
    ("architecture", "dtype", "kind"),
    [
        *(
            pytest.param("qwen3", torch.float32, kind, marks=() if kind in _USUAL else pytest.mark.full)
            for kind in _KINDS
        ),
        ("gemma3", torch.float32, "greedy"),
        pytest.param("opt", torch.float32, "penalties", marks=pytest.mark.full),
        ("llama", torch.bfloat16, "logprobs"),
    ],
)
async def test_answers_are_the_same_with_proposals(architecture, dtype, kind, engine_of, oracle):
    model = random_model(architecture).to(dtype)
    plain = engine_of(model, prompt_lookup=False)
    expected = [await _answer(submit(plain, _request(i, prompt, **_KINDS[kind]))) for i, prompt in enumerate(PROMPTS)]
    oracle += [[*prompt, *answer[0]] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    engine = engine_of(model)
    for i, prompt in enumerate(PROMPTS):
        assert await _answer(submit(engine, _request(i, prompt, **_KINDS[kind]))) == expected[i]
    assert 0 < engine.statistics.accepted_tokens < engine.statistics.proposed_tokens
    # In a crowd, with preemptions, and with a cache that has to be right where proposals were wrong.
    for crowded in (engine, engine_of(model, cache_tokens=400)):
        slots = [submit(crowded, _request(i, prompt, **_KINDS[kind])) for i, prompt in enumerate(PROMPTS)]
        assert [await _answer(slot) for slot in slots] == expected
        assert crowded.statistics.accepted_tokens
    for i, prompt in enumerate(PROMPTS):
        output_ids = expected[i][0][:-3]
        rest = await _answer(submit(engine, _request(i, prompt, output_ids, **_KINDS[kind])))
        assert output_ids + rest[0] == expected[i][0]


async def test_a_next_turn_finds_only_what_is_right_in_the_cache(engine_of, oracle):
    model = random_model("llama")
    plain, engine = engine_of(model, prompt_lookup=False), engine_of(model)
    for i, prompt in enumerate(PROMPTS[-3:]):
        before = await _answer(submit(plain, _request(i, prompt, temperature=0)))
        oracle.append([*prompt, *before[0]])
        assert await _answer(submit(engine, _request(i, prompt, temperature=0))) == before
        turn = [*prompt, *before[0], *PROMPTS[0]]
        assert await _answer(submit(engine, _request(i, turn, length=9))) == await _answer(
            submit(plain, _request(i, turn, length=9))
        )
