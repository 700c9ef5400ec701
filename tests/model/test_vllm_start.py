"""An interpreter that cannot run vLLM is one line at the start; needs no vLLM."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.errors import StartupError
from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.engine_process.interpreter import InterpreterHost
from headrace_predictor.engine_process.launch import launch_engine
from headrace_predictor.repository.loading import starter_of
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.vllm_engine.constrained import end_id_of

MODELS = Path(__file__).parents[2] / "models"


async def launched(**given):
    settings = PredictorSettings(engine="vllm", **given)
    starter = starter_of("storyteller", MODELS / "storyteller", settings, EngineHost())
    return await launch_engine(starter, "storyteller", MODELS / "storyteller", True, settings)


async def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(StartupError, match=r"the interpreter of engines cannot be started: .*nowhere"):
        await launched(vllm_python=tmp_path / "nowhere")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this interpreter has vLLM")
async def test_an_interpreter_without_vllm():
    with pytest.raises(StartupError, match=r"has no vLLM: .*PREDICTOR_VLLM_PYTHON"):
        await launched()


def test_decoders_run_on_vllm_and_encoder_decoders_on_the_own_engine():
    host, settings = EngineHost(), PredictorSettings(engine="vllm")
    assert isinstance(starter_of("storyteller", MODELS / "storyteller", settings, host), InterpreterHost)
    assert starter_of("normalizer", MODELS / "normalizer", settings, host) is host


def test_the_end_of_answers_with_a_form_is_the_tokenizers_end_token(tmp_path):
    """Without it, or without a tokenizer that grammars can use, a model starts and has no structured output."""
    assert end_id_of(MODELS / "storyteller") == 2
    assert end_id_of(tmp_path) is None
    shutil.copy(MODELS / "storyteller" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    assert end_id_of(tmp_path) is None
    # As everywhere, the class that the configuration names decides nothing.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Unknown", "eos_token": "</s>"}))
    assert end_id_of(tmp_path) == 2
    (tmp_path / "tokenizer.json").write_text("{}")
    assert end_id_of(tmp_path) is None
