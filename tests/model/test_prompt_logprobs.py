"""Log probabilities of a prompt's tokens: exact, computed in small portions, without effect on other requests."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import InvalidRequestError
from headrace.oip.prompt_scores import MAX_NUMBERS, check_size
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.runners.paged import PagedRunner
from tests.model.random_crowd import PROMPTS, crowd, model_and_crowd, random_engines, read_all, submit_crowd
from tests.process.test_transformer_resume import SAMPLING, resuming
from tests.random_models import random_model
from tests.support.full import usually
from tests.support.in_process_engine import submit
from tests.support.requests import submission
from tests.support.scripted_predictor import ANSWER, breaks
from tests.zoo import VOCABULARY

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
MOST_A_STEP = 64
LONG = [(31 * i * i + 7 * i + 5) % (VOCABULARY - 3) + 3 for i in range(150)]


@pytest.fixture
def engine_of():
    with random_engines() as make:
        yield make


def scoring(name, prompt, top=3, length=1, output_ids=()):
    sampling = SamplingParameters(max_tokens=length, min_tokens=length, temperature=0, seed=1)
    return submission(name, list(prompt), sampling, list(output_ids), prompt_logprobs=top)


async def prompt_of(slot):
    """The first chunk's log probabilities of the prompt; the other chunks have none."""
    first = chunk = await slot.read()
    while chunk.finish_reason is None:
        chunk = await slot.read()
        assert chunk.prompt is None
    return first.prompt


def transformers_logprobs(model, prompt):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def check_exact(scored, prompt, logprobs, top):
    places = range(len(prompt) - 1)
    wanted = [float(logprobs[place, prompt[place + 1]]) for place in places]
    assert np.allclose(scored.chosen, wanted, atol=1e-4)
    assert scored.top.shape == scored.top_ids.shape == (len(prompt) - 1, top)
    likeliest = logprobs[: len(prompt) - 1].topk(top).values.numpy()
    assert np.allclose(scored.top, likeliest, atol=1e-4)
    assert np.allclose(
        logprobs[: len(prompt) - 1].gather(1, torch.from_numpy(scored.top_ids).long()), likeliest, atol=1e-4
    )


@pytest.fixture
def most_scored(monkeypatch):
    """The number of positions that each step scores."""
    counts = []

    def counting(run):
        def run_and_count(self, rows):
            counts.append(sum(len(row.scores) for row in rows))
            return run(self, rows)

        return run_and_count

    monkeypatch.setattr(PagedRunner, "run", counting(PagedRunner.run))
    return counts


async def test_the_storyteller_scores_as_transformers_does(engine_of, most_scored):
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32).eval()
    prompts = [[924, 410, 263, 453, 402, 263, 933, 19], [i % 1000 + 3 for i in range(0, 900, 3)], [5]]
    expected = [transformers_logprobs(model, prompt) for prompt in prompts]
    engine = engine_of(model, step_tokens=256, max_context=512)
    slots = [submit(engine, scoring(str(i), prompt)) for i, prompt in enumerate(prompts)]
    for slot, prompt, logprobs in zip(slots, prompts, expected, strict=True):
        check_exact(await prompt_of(slot), prompt, logprobs, 3)
    assert max(most_scored) == MOST_A_STEP
    # Each position once, though all of the prompt is in the cache by now.
    assert sum(most_scored) == sum(len(prompt) - 1 for prompt in prompts)
    check_exact(await prompt_of(submit(engine, scoring("again", prompts[1], 0))), prompts[1], expected[1], 0)


@pytest.mark.parametrize("architecture", usually(("gemma3", "bloom"), ["llama", "opt", "gpt2", "gemma3", "bloom"]))
async def test_other_requests_get_the_same_answers_as_alone(architecture, engine_of, most_scored):
    model, expected = model_and_crowd(architecture)
    logprobs = transformers_logprobs(model, LONG)
    # Chunks of all kinds, and so few blocks that sequences are preempted.
    engine = engine_of(model, cache_tokens=320, step_tokens=24, max_running=14, max_context=200)
    slots = submit_crowd(engine)
    scored = [submit(engine, scoring(f"s{i}", LONG, top)) for i, top in enumerate((0, 5))]
    assert [await read_all(slot) for slot in slots] == expected
    for slot, top in zip(scored, (0, 5), strict=True):
        check_exact(await prompt_of(slot), LONG, logprobs, top)
    assert max(most_scored) <= MOST_A_STEP
    assert engine.statistics.preempted > 0
    assert sum(most_scored) == 2 * (len(LONG) - 1)
    assert engine.load.blocks_in_use == 0


async def test_the_cached_blocks_of_a_scored_prompt_serve_others(engine_of):
    model, expected = model_and_crowd("llama")
    engine = engine_of(model)
    check_exact(
        await prompt_of(submit(engine, scoring("s", PROMPTS[-1]))),
        PROMPTS[-1],
        transformers_logprobs(model, PROMPTS[-1]),
        3,
    )
    assert await crowd(engine) == expected
    assert engine.statistics.cached_tokens >= 64


@pytest.mark.parametrize("architecture", ["t5", "bart", "doge", "mamba"])
def test_other_runners_refuse_to_score_prompts(architecture, engine_of):
    assert not engine_of(random_model(architecture)).limits.scores_prompts


def test_too_many_scores_are_refused():
    check_size(MAX_NUMBERS // 2, 1)
    with pytest.raises(InvalidRequestError, match="with 1 likeliest, log probabilities are given for at most 32768"):
        check_size(MAX_NUMBERS // 2 + 1, 1)
    with pytest.raises(InvalidRequestError, match="and 64 choices, log probabilities are given for at most 512"):
        check_size(513, 1, 64)


async def test_scores_are_requested_again_only_after_a_death_before_the_first_token():
    async with resuming(breaks(0), breaks(3)) as running:
        chunks = await running.generate(prompt=(5,), prompt_logprobs=2)
        requested = [call.request.HasField("prompt_logprobs") for call in running.predictor.calls]
    assert requested == [True, True, False]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == ANSWER[: SAMPLING.max_tokens]
    assert chunks[0].prompt.top.shape == (0, 2)
    assert all(chunk.prompt is None for chunk in chunks[1:])
