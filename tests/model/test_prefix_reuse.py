"""A computed prefix is reused by its own tenant only, and outputs stay the same."""

import pytest

from tests.model.fakes import BLOCK_TOKENS, FakeRunner, expected, read_all, request
from tests.support.in_process_engine import submit

PROMPT = list(range(3, 33))


def cached(chunks):
    return chunks[-1].usage.cached_tokens


async def test_the_second_turn_of_a_chat_computes_only_its_new_tokens(engine_of):
    runner = FakeRunner()
    engine = engine_of(runner)
    answer, chunks = await read_all(submit(engine, request("first", prompt=PROMPT)))
    assert cached(chunks) == 0
    turn = [*PROMPT, *answer, 40, 41, 42]
    ids, chunks = await read_all(submit(engine, request("second", prompt=turn)))
    assert ids == expected(turn)
    # The last id of the answer was never computed: no id came after it.
    held = (len(PROMPT) + len(answer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(chunks) == held == 40
    assert runner.calls["second"] == len(turn) - held + 11
    assert engine.statistics.cached_tokens == held


@pytest.mark.parametrize("cut", [1, 6, 11])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_resumed_stream_computes_only_its_new_tokens(engine_of, cut, temperature):
    runner = FakeRunner()
    engine = engine_of(runner)
    whole, _ = await read_all(submit(engine, request("whole", prompt=PROMPT, temperature=temperature)))
    rest = request("rest", prompt=PROMPT, output_ids=whole[:cut], temperature=temperature)
    ids, chunks = await read_all(submit(engine, rest))
    assert whole[:cut] + ids == whole == expected(PROMPT, temperature=temperature)
    held = (len(PROMPT) + cut - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert runner.calls["rest"] == len(PROMPT) + 11 - held
    # The usage counts tokens of the prompt.
    assert cached(chunks) == min(held, len(PROMPT))
    assert chunks[-1].usage.completion_tokens == 12


async def test_the_last_id_of_a_known_prompt_is_computed_for_its_logits(engine_of):
    runner = FakeRunner()
    engine = engine_of(runner)
    prompt = PROMPT[: 4 * BLOCK_TOKENS]
    await read_all(submit(engine, request("first", prompt=prompt)))
    ids, chunks = await read_all(submit(engine, request("again", prompt=prompt)))
    assert ids == expected(prompt)
    assert cached(chunks) == 3 * BLOCK_TOKENS
    assert runner.calls["again"] == BLOCK_TOKENS + 11


async def test_clients_do_not_share_prompts_and_a_salt_divides_further(engine_of):
    engine = engine_of(FakeRunner())
    steps = [("a", "", 0), ("b", "", 0), ("a", "", 28), ("a", "s", 0), ("b", "s", 0), ("a", "s", 28), ("", "", 0)]
    for client, salt, held in steps:
        ids, chunks = await read_all(submit(engine, request(prompt=PROMPT, cache_salt=salt, client=client)))
        assert ids == expected(PROMPT)
        assert cached(chunks) == held


async def test_models_whose_blocks_cannot_be_shared_compute_everything(engine_of):
    runner = FakeRunner(reuses_prefixes=False)
    engine = engine_of(runner)
    for name in ("first", "second"):
        ids, chunks = await read_all(submit(engine, request(name, prompt=PROMPT)))
        assert ids == expected(PROMPT)
        assert cached(chunks) == 0
        assert runner.calls[name] == len(PROMPT) + 11


async def test_reuse_survives_preemption(engine_of):
    runner = FakeRunner(blocks=1 + 20)
    engine = engine_of(runner, max_running=4, max_waiting=32)
    prompts = [[*PROMPT[:16], number, number] for number in range(40, 48)]
    slots = [submit(engine, request(str(i), prompt=prompt, max_tokens=30, seed=i)) for i, prompt in enumerate(prompts)]
    for i, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        ids, chunks = await read_all(slot)
        assert ids == expected(prompt, 30, seed=i)
        assert cached(chunks) == (16 if i else 0)
    assert engine.statistics.preempted > 0
    assert engine.load.blocks_in_use == 0
    # After a preemption only a part is computed again.
    computed = sum(runner.calls.values())
    without_reuse = len(prompts) * (18 + 29)
    assert computed < without_reuse + engine.statistics.preempted * 18
