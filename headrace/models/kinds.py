"""The kind of a model: how the predictor runs it, and whether the transformer has text to process.

It depends only on the folder's files, so that both services decide the same. The rules, in order:

1. `model.py`, in a local folder: a Python model (code of the hub is never run);
2. `modules.json` (a model of sentence-transformers): classification if it is a cross-encoder, embeddings otherwise;
3. `adapter_config.json` (PEFT's): an adapter of a model that generates text;
4. `config.json` names a class `…ForSequenceClassification`: classification;
5. it names a model without a head (`BertModel`, `Qwen3Model`, `T5EncoderModel`, …): embeddings;
6. it names a class that generates, an encoder-decoder (its head is tied to its embeddings) or none: generation, which
   the predictor refuses by name where the class does not generate text from text.
"""

from enum import StrEnum
from pathlib import Path

from headrace.models.sentence_files import MODULES_FILE, read_sentence_files
from headrace.models.sources import ModelSource, read_config

PYTHON_FILE = "model.py"
ADAPTER_FILE = "adapter_config.json"

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "WithLMHead")


class ModelKind(StrEnum):
    PYTHON = "python"
    ADAPTER = "adapter"
    GENERATION = "generation"
    CLASSIFICATION = "classification"
    EMBEDDING = "embedding"


def kind_of(source: ModelSource, folder: Path) -> ModelKind:
    """The kind of the model whose files lie in `folder`; ValueError where config.json names nothing that is served."""
    if source.is_local and (folder / PYTHON_FILE).is_file():
        return ModelKind.PYTHON
    if (folder / MODULES_FILE).is_file():
        is_cross_encoder = read_sentence_files(folder).is_cross_encoder
        return ModelKind.CLASSIFICATION if is_cross_encoder else ModelKind.EMBEDDING
    if (folder / ADAPTER_FILE).is_file():
        return ModelKind.ADAPTER
    config = read_config(folder, "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return ModelKind.CLASSIFICATION
    if architecture.endswith(_GENERATES) or not architecture:
        return ModelKind.GENERATION
    if architecture.endswith("Model"):
        is_whole = config.get("is_encoder_decoder") and not architecture.endswith("EncoderModel")
        return ModelKind.GENERATION if is_whole else ModelKind.EMBEDDING
    raise ValueError(f"{architecture} is not served; it must generate text, classify or embed")
