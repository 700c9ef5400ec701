"""The fingerprint of a model. Equal fingerprints: one predictor can resume another's answer token for token.

It is a digest of the weights, of every JSON file beside them (configuration, tokenizer), of the dtype of the
computation and of the sampler's version; for an adapter, of its files and of its base's fingerprint. For a model of the
hub its revision, a commit, replaces the files; for one of a bucket or a registry the digest of its contents.

Weights are not read twice: of a tensor up to 64 KiB all bytes are hashed, of a larger one 16 evenly spread blocks of 4
KiB, each with the tensor's name, dtype and shape. So two trainings, fine-tunes or quantisations differ, and so does any
change to a whole tensor. A manual change of single values inside a large tensor is not detected.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import read_gguf
from headrace.models.weight_headers import read_header
from headrace_predictor.engine.sampling.sampler import SAMPLER_VERSION

_WHOLE_BYTES = 64 * 1024
_BLOCK_BYTES = 4 * 1024
_BLOCKS = 16
_CHARACTERS = 32
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def fingerprint_of(folder: Path, dtype: str, is_local: bool, base: str = "", contents: bytes = b"") -> str:
    """Returns 32 hexadecimal digits. `base`: the fingerprint of an adapter's base. `contents`: if they are known."""
    basis = f"adapter of {base}" if base else SAMPLER_VERSION
    contents = contents or contents_of(folder, is_local)
    return hashlib.sha256(f"{basis}\n{dtype}\n".encode() + contents).hexdigest()[:_CHARACTERS]


def contents_of(folder: Path, is_local: bool) -> bytes:
    """The files' part of a fingerprint, which takes the time."""
    if not is_local and _COMMIT.fullmatch(folder.name):
        return folder.name.encode()
    return b"".join(hashlib.sha256(part).digest() for part in _contents(folder))


def _contents(folder: Path) -> Iterator[bytes]:
    """The parts of the model, in an order that depends on names only."""
    for path in sorted(folder.rglob("*.json")):
        yield path.relative_to(folder).as_posix().encode()
        yield path.read_bytes()
    for path in sorted(folder.rglob("*.safetensors")):
        yield path.relative_to(folder).as_posix().encode()
        with path.open("rb") as file:
            header, length = read_header(file)
            for name in sorted(header.keys() - {"__metadata__"}):
                tensor = header[name]
                begin, end = tensor["data_offsets"]
                yield json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()
                yield from _tensor(file, length + begin, end - begin)
    if (folder / WEIGHTS_FILE).is_symlink():
        for name, place in sorted(read_gguf(folder / WEIGHTS_FILE).tensors.items()):
            yield json.dumps([name, place.type.name, place.shape]).encode()
            with place.path.open("rb") as file:
                yield from _tensor(file, place.begin, place.size)


def _tensor(file: IO[bytes], begin: int, size: int) -> Iterator[bytes]:
    if size <= _WHOLE_BYTES:
        blocks = [(0, size)]
    else:
        blocks = [(i * (size - _BLOCK_BYTES) // (_BLOCKS - 1), _BLOCK_BYTES) for i in range(_BLOCKS)]
    for offset, count in blocks:
        file.seek(begin + offset)
        yield file.read(count)
