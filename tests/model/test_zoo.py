"""Every family of the zoo gives the ids of `generate` in every situation, or is refused by name."""

from collections.abc import Iterable

import pytest
import torch

from docs.generate_models import PAGE, page
from headrace.errors import StartupError
from headrace.models.sources import ModelSource
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.repository.loading import fetch_model
from tests.model.random_crowd import LENGTHS, PROMPTS, generate_crowd, read_all, request, submit_crowd, tight_settings
from tests.support.in_process_engine import submit
from tests.zoo import FAMILIES, Family

CPU = torch.device("cpu")
# Of each runner, and those whose attention or memory is special; the others run with FULL=1.
SLICE = {
    "Llama 4", "Qwen3-Next", "Gemma 2", "Gemma 4", "Mistral", "Qwen2.5-VL", "GPT-2", "BLOOM", "Falcon", "GPT-OSS",
    "DeepSeek V3, R1, Kimi K2", "Mamba", "XLNet", "T5", "BART", "Phi 3, Phi 4 mini: LongRoPE", "Phi 3.5 MoE", "Whisper",
    "GPT",
}  # fmt: skip


def each(families: Iterable[Family]):
    for family in families:
        marks = [] if family.name in SLICE else [pytest.mark.full]
        if family.fault:
            marks.append(pytest.mark.xfail(reason=family.fault, strict=True))
        yield pytest.param(family, id=family.name, marks=marks)


@pytest.mark.parametrize("family", [*each(FAMILIES)])
@pytest.mark.filterwarnings("default")  # Of transformers' own models.
async def test_a_family_gives_the_ids_of_generate_or_is_refused(family, tmp_path):
    model = family.model()
    model.save_pretrained(tmp_path)
    source = ModelSource("m", str(tmp_path))
    if not family.is_served:
        with pytest.raises(StartupError) as refused:
            load(source, model)
        assert family.outcome in str(refused.value)
        return
    expected = generate_crowd(model)
    assert depends_on_context(model, family)
    engine = load(source, model)
    try:
        assert engine.description["runner"] == family.outcome
        assert family.reason in engine.description.get("runner_reason", "")
        # In a crowd of all lengths, in chunks of 32 tokens, past windows and limits; two sampled alike.
        slots = submit_crowd(engine)
        sampled = [submit(engine, request(name, PROMPTS[3], 12, temperature=0.9)) for name in ("one", "two")]
        assert [await read_all(slot) for slot in slots] == expected
        one, two = [await read_all(slot) for slot in sampled]
        assert one == two
        # There are blocks for two of the longest sequences: some had to be computed again.
        assert engine.statistics.preempted > 0
        assert engine.load.blocks_in_use == 0
        # Alone: first with an empty cache, then after a prefix that may be in the cache.
        for name in ("first", "again"):
            assert await read_all(submit(engine, request(name, PROMPTS[-1], LENGTHS[-1]))) == expected[-1]
    finally:
        engine.close()


def load(source, model):
    """The engine of a folder, as the predictor loads it."""
    fetched = fetch_model(source, lambda _: None)
    return load_generation(source.name, fetched.folder, True, tight_settings(model, 240), CPU).engine


def depends_on_context(model, family):
    """Whether the last logits depend on an id before; else any comparison would hold."""
    ids = torch.tensor([PROMPTS[5], PROMPTS[5]])
    ids[1, -6] += 1
    more = {"decoder_input_ids": torch.tensor([[2], [2]])} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        one, two = model(input_ids=ids, **more).logits[:, -1]
    return bool((one - two).abs().max() > 1e-2 * one.abs().max())


def test_the_table_of_models_is_the_zoo():
    assert PAGE.read_text() == page()
