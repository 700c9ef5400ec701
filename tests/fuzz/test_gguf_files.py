"""Damaged GGUF files: each is refused with one line that names it, soon, and without memory beyond its size."""

import random
import resource
import struct
import time

import gguf
import numpy as np
import pytest

from headrace.models.gguf.folder import gguf_folder
from headrace.models.gguf.reader import read_gguf
from tests.gguf_files import write_tokens
from tests.support.full import FULL

FILES = 2000 if FULL else 100
KINDS = ("cut", "bit", "count", "length", "word", "offset", "type")
_SLOWEST_S = 5.0
_MEMORY = 300 << 10  # KiB, as getrusage has it.
_HUGE = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


_TENSORS = {"token_embd.weight": (1600, 32), "blk.0.attn_norm.weight": (32,), "output_norm.weight": (32,)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    write_tokens(writer, 1600)
    for name, shape in _TENSORS.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(path).tensors.keys() == _TENSORS.keys()
    assert gguf_folder(path)
    return path.read_bytes()


def damaged(whole, kind, randomness):
    """A file with one fault of a kind, in the part before its tensors more often than in these."""
    data = bytearray(whole)
    header = len(data) - 1600 * 32 * 4
    at = randomness.randrange(header if randomness.random() < 0.9 else len(data))
    if kind == "cut":
        return bytes(data[:at])
    if kind == "bit":
        data[at] ^= 1 << randomness.randrange(8)
    elif kind == "count":
        struct.pack_into("<Q", data, randomness.choice((8, 16)), randomness.choice(_HUGE))
    elif kind == "length":
        struct.pack_into("<Q", data, min(at, len(data) - 8), randomness.choice(_HUGE))
    elif kind == "word":
        struct.pack_into("<I", data, min(at, len(data) - 4), randomness.randrange(2**32))
    elif kind == "offset":  # Of the last tensor.
        struct.pack_into("<Q", data, whole.index(b"output_norm.weight") + 18 + 4 + 8 + 4, randomness.choice(_HUGE))
    elif kind == "type":
        struct.pack_into("<I", data, whole.index(b"output_norm.weight") + 18 + 4 + 8, randomness.randrange(64))
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_cost_little(kind, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    randomness, refused = random.Random(kind), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(FILES):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged(whole, kind, randomness))
        begin = time.process_time()
        text = f"{number}"
        try:
            gguf_folder(path)
        except ValueError as error:
            refused, text = refused + 1, str(error)
        assert f"{number}" in text
        assert len(text.splitlines()) == 1
        assert time.process_time() - begin < _SLOWEST_S
        path.unlink()
    assert refused or kind in ("bit", "word")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY + len(whole) // 1024
