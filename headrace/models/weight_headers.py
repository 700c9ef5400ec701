"""What the headers of a model's weights say, without reading the weights."""

import json
from collections import Counter
from pathlib import Path
from typing import IO, Any

from headrace.models.gguf.reader import read_gguf
from headrace.models.sources import GGUF_SUFFIX, read_config

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit.
_WEIGHTS = "*.safetensors"


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the place of its first tensor; raises ValueError.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError("the header of a safetensors file is too large")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header of a safetensors file is no object")
    return header, 8 + length


def weight_files(folder: Path) -> list[Path]:
    """The safetensors there that transformers reads, in order; Mistral's folders have the same weights once more."""
    single, named = folder / "model.safetensors", read_config(folder, "model.safetensors.index.json")
    if single.is_file():
        return [single]
    listed = {str(file) for file in (named.get("weight_map") or {}).values()}
    return [path for path in sorted(folder.glob(_WEIGHTS)) if not listed or path.name in listed]


def weight_bytes(folder: Path) -> Counter[str]:
    """The bytes of a model's weights by their dtype, in the notation of safetensors or GGUF, such as BF16 or Q4_K."""
    sizes: Counter[str] = Counter()
    # A folder that was made of a file has a link to it; others have such files as models of their own.
    is_other = (folder / "config.json").is_file() and not (folder / f"model{GGUF_SUFFIX}").is_symlink()
    files = [read_gguf(path) for path in folder.glob(f"*{GGUF_SUFFIX}") if not is_other]
    places = {(place.path, place.begin): place for file in files for place in file.tensors.values()}
    for place in places.values():
        sizes[place.type.name] += place.size
    for path in weight_files(folder):
        with path.open("rb") as file:
            header, _ = read_header(file)
        for name in header.keys() - {"__metadata__"}:
            begin, end = header[name]["data_offsets"]
            sizes[header[name]["dtype"]] += end - begin
    return sizes
