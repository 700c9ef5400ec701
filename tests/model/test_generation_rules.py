"""What a model's generation_config.json says holds as in `generate`, or the load says that it does not."""

import itertools
import json
import logging
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf

from headrace.errors import InvalidRequestError, StartupError
from headrace.models.generation_config import eos_ids_of, read_generation
from headrace.models.tokenizer_files import own_end_ids
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.settings import PredictorSettings
from tests.random_models import random_model
from tests.support.in_process_engine import submit
from tests.support.requests import submission

TOKENIZER = Path(__file__).parents[2] / "models/storyteller/tokenizer.json"
PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 2], [9]]
RULES = {
    "summaries": {
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "min_length": 12,
        "max_length": 24,
        "no_repeat_ngram_size": 2,
        "begin_suppress_tokens": [11, 12],
        "renormalize_logits": True,
    },
    "translation": {"forced_bos_token_id": 77, "max_new_tokens": 20, "repetition_penalty": 1.4, "bad_words_ids": [[1]]},
    "bans": {
        "suppress_tokens": [3, 4],
        "encoder_no_repeat_ngram_size": 1,
        "max_new_tokens": 16,
        "min_new_tokens": 10,
        "min_length": 40,  # Without effect beside min_new_tokens.
        "exponential_decay_length_penalty": [4, 1.3],
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}

    def save(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name), random_model(name)
            folders[name][1].save_pretrained(folders[name][0])
        return folders[name]

    return save


def load(folder, **generation):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_generation("x", folder, True, PredictorSettings(), torch.device("cpu"))


def banned_by(model, prompt, generation):
    """Rules of this model's own tokens: what it would say without rules is what they forbid."""
    plain = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9, min_new_tokens=9)[0].tolist()
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    said = plain[start:]
    own = dict(generation)
    own["bad_words_ids"] = [*own.get("bad_words_ids", []), plain[start - 1 : start + 1], said[1:3], [said[4]]]
    own["sequence_bias"] = [[said[:2], -8.0], [[said[-1]], 3.0]]
    own["suppress_tokens"] = [*own.get("suppress_tokens", []), said[6]]
    return own


async def answer(loaded, prompt, **given):
    limits = loaded.engine.limits
    sampling = loaded.defaults.changed({"temperature": 0, **given})
    sampling = sampling.resolved(limits.room(len(prompt)), limits.default_tokens(len(prompt)))
    slot, ids = submit(loaded.engine, submission("r", list(prompt), sampling)), []
    while (chunk := await slot.read()).finish_reason is None:
        ids += chunk.output_ids
    return ids + chunk.output_ids


# Each rule with a decoder behind an encoder and with a decoder alone; the ids of T5's start and end are others.
USUAL = {("bart", "translation"), ("t5", "bans"), ("t5", "summaries")}
USUAL |= {("llama", rules) for rules in RULES}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.full)
        for case in itertools.product(("bart", "mbart", "m2m", "marian", "t5", "llama", "gpt2"), RULES)
    ],
)
async def test_answers_are_those_of_generate(name, rules, saved):
    folder, model = saved(name)
    stated = {"eos_token_id": 2, "pad_token_id": 1, **RULES[rules]}
    if model.config.is_encoder_decoder:
        stated["decoder_start_token_id"] = model.config.decoder_start_token_id
    for prompt in PROMPTS:
        generation = banned_by(model, prompt, stated)
        loaded = load(folder, **generation)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = model.generate(
                    torch.tensor([prompt]), generation_config=hf.GenerationConfig(do_sample=False, **generation)
                )[0].tolist()
            skipped = 1 if model.config.is_encoder_decoder else len(prompt)
            assert await answer(loaded, prompt) == expected[skipped:]
            assert "generation_config_ignored" not in loaded.engine.description
        finally:
            loaded.engine.close()


@pytest.mark.parametrize("start", [{"bos_token_id": 5}, {"bos_token_id": 6, "decoder_start_token_id": [5]}])
async def test_the_decoder_starts_where_generate_does(start, saved):
    folder, model = saved("bart")
    stated = hf.GenerationConfig(do_sample=False, max_new_tokens=9, decoder_start_token_id=5)
    expected = model.generate(torch.tensor([PROMPTS[0]]), generation_config=stated)[0].tolist()[1:]
    loaded = load(folder, max_new_tokens=9, **start)
    try:
        assert await answer(loaded, PROMPTS[0]) == expected
    finally:
        loaded.engine.close()
    with pytest.raises(StartupError, match=r"decoder_start_token_id=\[5, 6\] in its configuration is no token id"):
        load(folder, decoder_start_token_id=[5, 6])


async def test_a_request_has_precedence_over_the_lengths_of_the_file(saved):
    folder, _ = saved("bart")
    loaded = load(folder, eos_token_id=2, decoder_start_token_id=2, min_length=30, max_length=50, forced_eos_token_id=2)
    try:
        assert len(await answer(loaded, PROMPTS[0])) >= 29
        short = await answer(loaded, PROMPTS[0], max_tokens=5)
        assert (len(short), short[-1]) == (5, 2)
        assert loaded.defaults.changed({"min_tokens": 0}).min_tokens == 0
    finally:
        loaded.engine.close()


async def test_a_form_is_not_bound_by_forced_tokens(saved):
    folder, _ = saved("bart")
    shutil.copy(TOKENIZER, folder)
    loaded = load(folder, eos_token_id=2, decoder_start_token_id=2, forced_bos_token_id=0, forced_eos_token_id=2)
    try:
        assert await answer(loaded, PROMPTS[0], structured_outputs='{"regex": "(yes|no)"}', max_tokens=9)
        assert await answer(loaded, PROMPTS[0], max_tokens=1) == [2]  # The end has precedence over the beginning.
    finally:
        loaded.engine.close()
        (folder / "tokenizer.json").unlink()


async def test_rules_and_a_request_that_leave_no_token_are_the_callers_fault(saved):
    folder, _ = saved("bart")
    loaded = load(folder, eos_token_id=2, decoder_start_token_id=2, no_repeat_ngram_size=2)
    try:
        with pytest.raises(InvalidRequestError, match="leave no token at this point"):
            await answer(loaded, PROMPTS[0], allowed_token_ids=[40, 41], max_tokens=9)
    finally:
        loaded.engine.close()


async def test_an_end_token_that_the_model_cannot_choose_has_no_effect(saved):
    folder, _ = saved("llama")
    shutil.copy(TOKENIZER, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')  # Behind the model's vocabulary.
    loaded = load(folder, eos_token_id=[2, -1])
    try:
        for form in ("", '{"regex": "a{9}"}'):
            assert len(await answer(loaded, PROMPTS[0], structured_outputs=form, min_tokens=2, max_tokens=3)) == 3
    finally:
        loaded.engine.close()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()


def test_what_is_not_honoured_is_logged_and_shown(saved, caplog):
    folder, _ = saved("bart")
    with caplog.at_level(logging.WARNING):
        loaded = load(
            folder,
            eos_token_id=2,
            decoder_start_token_id=2,
            num_beams=4,
            length_penalty=2.0,
            early_stopping=True,
            typical_p=0.9,
            epsilon_cutoff=0.0,
            max_new_tokens=33,
            chat_format="chatml",
        )
    loaded.engine.close()
    shown = GenerationModel(loaded).description.parameters
    assert shown["generation_config_ignored"] == "num_beams=4, typical_p=0.9, length_penalty=2.0, early_stopping=true"
    assert shown["max_new_tokens"] == "33"
    assert f"not honoured: {shown['generation_config_ignored']}" in caplog.text


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({}, {"eos_token_id": 7}, {}, {7}),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({"eos_token_id": [5, 6]}, {"temperature": 0.5}, {}, {5, 6}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 9}}, {}, {}, {9}),
        ({}, {"eos_token_id": 7}, {"eos_token": "<|user|>"}, {7, 4}),
        # gpt-oss ends an answer with a call, too.
        ({}, {"eos_token_id": 7}, {"eos_token": "<|user|>", "extra_special_tokens": ["<|call|>"]}, {7, 4, 1536}),
        # tokenizer.json has the token with another id.
        ({}, {}, {"eos_token": "<|user|>", "added_tokens_decoder": {"11": {"content": "<|user|>"}}}, {4}),
    ],
)
def test_the_end_tokens_are_those_of_the_generation_config_and_the_tokenizers_own(
    tmp_path, config, generation, tokenizer, expected
):
    shutil.copy(TOKENIZER, tmp_path)
    for name, values in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    assert eos_ids_of(read_generation(tmp_path), tmp_path, own_end_ids(tmp_path)) == expected
