"""llama.cpp's server, and the models of bench/architectures.py that it and ours serve, with vocabularies of real size.

`source` is the folder of llama.cpp's source, built in its folder `build` (docs/benchmarks.md): it has the server, the
models' converter and the vocabularies.
"""

import importlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InOrder
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bench.architectures import make
from bench.server_process import LOOPBACK, answers, free_port, server_process, until

# Each model's vocabulary, and the digits that its pre-tokenizer keeps together: the converter knows both families.
_VOCABULARIES = {"qwen3-0.6b": ("qwen2", r"\p{N}"), "llama-3.2-1b": ("llama-bpe", r"\p{N}{1,3}")}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NORMAL = 1  # The gguf format's type of a token that has a text.
_START_TIMEOUT_S = 300.0
_SLOTS, _CONTEXT = 16, 16 * 2560  # Of all slots together.


def make_model(name: str, folder: Path, source: Path) -> None:
    """Writes a model where it is missing, with random weights and a tokenizer of its family.

    Greedy decoding chooses only tokens that are whole text, so a stream has a piece of text for each token.
    """
    if folder.is_dir():
        return
    tokenizer, never = _tokenizer(name, source)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    make(name, unfinished, tokenizer, never)
    unfinished.rename(folder)


def gguf_file(model: Path, weights: str, source: Path) -> Path:
    """The model's file in a format, beside its folder; made where it is missing."""
    file = model.with_name(f"{model.name}-{weights}.gguf")
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        if weights == "bf16":
            convert = (sys.executable, str(source / "convert_hf_to_gguf.py"), str(model), "--outtype", weights)
            command: tuple[str, ...] = (*convert, "--outfile", str(unfinished))
        else:
            full = str(gguf_file(model, "bf16", source))
            command = (str(source / "build" / "bin" / "llama-quantize"), full, str(unfinished), weights)
        subprocess.run(command, check=True, stdout=sys.stderr)
        unfinished.rename(file)
    return file


def weight_bytes(model: Path, weights: str, source: Path) -> int:
    """The size of a model's tensors in a format."""
    return gguf_file(model, weights, source).stat().st_size - _vocabulary(model.name, source).stat().st_size


@asynccontextmanager
async def llama_server(file: Path, name: str, log: Path, source: Path) -> AsyncIterator[tuple[str, int]]:
    """The server on two threads with 16 slots: its address and process id."""
    port = free_port()
    command = (
        *(str(source / "build" / "bin" / "llama-server"), "--model", str(file), "--alias", name),
        *("--host", LOOPBACK, "--port", str(port), "--ctx-size", str(_CONTEXT)),
        *("-t", "2", "-fa", "on", "-np", str(_SLOTS), "--no-kv-unified", "--cache-ram", "0"),
    )
    async with server_process("llama.cpp's server", command, log) as process:
        await until(lambda: answers(port, "/health"), process, _START_TIMEOUT_S)
        yield f"{LOOPBACK}:{port}", process.pid


def _vocabulary(name: str, source: Path) -> Path:
    return source / "models" / f"ggml-vocab-{_VOCABULARIES[name][0]}.gguf"


def _tokenizer(name: str, source: Path) -> tuple[Any, Sequence[int]]:
    """A model's tokenizer, and the ids that are no whole text."""
    sys.path.append(str(source / "gguf-py"))
    fields = importlib.import_module("gguf").GGUFReader(_vocabulary(name, source)).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{field}"].contents() for field in ("tokens", "token_type", "merges")
    )
    family, digits = _VOCABULARIES[name]
    is_llama = family == "llama-bpe"
    normal = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _NORMAL}
    model = BPE(normal, [tuple(merge.split(" ")) for merge in merges], ignore_merges=is_llama)
    tokenizer = Tokenizer(model)
    split = Split(Regex(f"{_WORDS}|{digits}|{_OTHERS}"), "isolated")
    tokenizer.pre_tokenizer = InOrder([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens if token not in normal])
    special = {"eos_token": tokens[fields["tokenizer.ggml.eos_token_id"].contents()]}
    if is_llama:
        special["bos_token"] = tokens[begin := fields["tokenizer.ggml.bos_token_id"].contents()]
        template = f"{special['bos_token']} $A"
        tokenizer.post_processor = TemplateProcessing(template, special_tokens=[(special["bos_token"], begin)])
    else:
        tokenizer.normalizer = NFC()
    decoded = tokenizer.decode_batch([[id_] for id_ in range(len(tokens))], skip_special_tokens=True)
    fast: Any = PreTrainedTokenizerFast
    never = [id_ for id_, text in enumerate(decoded) if not text or "\N{REPLACEMENT CHARACTER}" in text]
    return fast(tokenizer_object=tokenizer, **special), never
