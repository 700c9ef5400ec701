"""A GGUF file as a folder in the form that every other part reads: configuration and tokenizer beside a link to it.

The folder is a function of the file: it is made once, in a cache, under a digest of what identifies the file, and gets
its name when it is complete.
"""

import json
import os
import shutil
import tempfile
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.models.downloads import cache_folder
from headrace.models.gguf.configuration import config_of
from headrace.models.gguf.reader import GGUF, read_gguf
from headrace.models.gguf.vocabulary import Vocabulary
from headrace.models.sources import GGUF_SUFFIX

WEIGHTS_FILE = f"model{GGUF_SUFFIX}"  # The link; the other files of a model in several lie beside the target.
_MAX_TEXT = 500
# llama.cpp's names of sampling parameters, and those in generation_config.json.
_SAMPLING = (
    *((name, name) for name in ("top_k", "top_p", "min_p")),
    *(("temp", "temperature"), ("penalty_repeat", "repetition_penalty")),
)


def gguf_folder(path: Path) -> Path:
    """The folder of a file; raises ValueError, which names the file, and OSError."""
    path = Path(os.path.abspath(path))  # A link's own name tells the parts of a model.
    found = path.stat()
    code = b"".join(module.read_bytes() for module in sorted(Path(__file__).parent.glob("*.py")))
    identity = f"{path}\n{found.st_size}\n{found.st_mtime_ns}\n".encode()
    name = sha256(identity + code).hexdigest()[:32]
    failure = OSError(f"there is no folder for what is read from {path}")
    for cache in (cache_folder().with_name("gguf"), Path(tempfile.gettempdir()) / f"headrace-gguf-{os.getuid()}"):
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if cache.stat().st_uid != os.getuid() or not os.access(cache, os.W_OK):
                continue  # Whoever owns it could write other configurations.
            if not (folder := cache / name).is_dir():
                _make(path, folder)
            return folder
        except ValueError as error:  # What it cites may have any characters.
            text = " ".join(str(error).split())
            raise ValueError((text if str(path) in text else f"{path}: {text}")[:_MAX_TEXT]) from None
        except OSError as error:
            failure = error
    raise failure


def _make(path: Path, folder: Path) -> None:
    file = read_gguf(path)
    vocabulary = Vocabulary(file)
    ends = vocabulary.end_ids
    named = {f"{name}_token_id": index for name, index in vocabulary.named_ids.items() if name in ("bos", "pad")}
    generation = named | ({"eos_token_id": ends} if ends else {})
    contents = {
        "config.json": json.dumps(config_of(file, vocabulary.size) | generation),
        "generation_config.json": json.dumps(generation | _sampling(file)),
        "tokenizer_config.json": json.dumps(vocabulary.config()),
        "tokenizer.json": vocabulary.tokenizer(),
    }
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        for name, text in contents.items():
            (making / name).write_text(text, "utf-8")
        (making / WEIGHTS_FILE).symlink_to(file.path)
        making.rename(folder)
    except OSError:
        if not folder.is_dir():  # Else another process was faster.
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _sampling(file: GGUF) -> dict[str, Any]:
    """What the file states of sampling, by the names of generation_config.json."""
    stated = {own: file.get(f"general.sampling.{name}", (int, float)) for name, own in _SAMPLING}
    rounded = {name: round(value, 6) for name, value in stated.items() if value is not None}  # From 32 bits.
    return rounded | {"suppress_tokens": list(file.get("tokenizer.ggml.suppress_tokens", array, ()))}
