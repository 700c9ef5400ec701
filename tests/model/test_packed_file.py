"""Packed weights are kept in a file, which later engines map."""

import copy
import errno
import fcntl
import gc
import logging
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import StartupFault
from headrace_predictor.engine.cpu.packed_file import PackedFile, _has_huge_pages
from headrace_predictor.engine.runners import streamed
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.reach import find_reaches
from headrace_predictor.engine.runners.streamed import StreamedDecoder, packed_file
from headrace_predictor.generation import loading
from headrace_predictor.settings import PredictorSettings
from tests.model.test_streamed import CACHES, ERRORS, PROMPT, last_logits
from tests.random_models import random_model
from tests.waiting import until

MOST = 1 << 30
IDS = [id_ % 50 for id_ in PROMPT]


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Small models are kept too."""
    monkeypatch.setattr(streamed, "_LEAST_KEPT_BYTES", 0)


def logits(model, format_, file):
    find_reaches(model.to(CACHES[format_]), 512)
    runner = PagedRunner(model, cache_shape(model), 80, streamed=StreamedDecoder(model, format_, 1, file))
    return last_logits(runner, IDS, [60])[0]


async def files(folder, count=1):
    """Waits for so many files."""
    await until(lambda: len(list(folder.glob("*.weights"))) == count)
    return sorted(folder.glob("*.weights"))


@pytest.mark.parametrize("has_huge_pages", [False, True])
@pytest.mark.parametrize(("architecture", "format_"), [("llama", "bf16"), ("qwen2", "int8"), ("qwen3", "int4")])
async def test_a_later_engine_reads_what_the_first_one_packed(
    architecture, format_, has_huge_pages, tmp_path, monkeypatch
):
    """From the file's own memory, or from a copy where the file system has no huge pages."""
    monkeypatch.setattr("headrace_predictor.engine.cpu.packed_file._has_huge_pages", lambda memory: has_huge_pages)
    model = random_model(architecture)
    own = logits(copy.deepcopy(model), format_, None)
    first, second = (packed_file(model, format_, tmp_path / "m", MOST) for _ in range(2))
    assert not first.is_packed
    assert not second.is_packed
    assert torch.equal(logits(copy.deepcopy(model), format_, first), own)
    (path,) = await files(tmp_path)
    assert torch.equal(logits(copy.deepcopy(model), format_, second), own)  # Packed at the same time.
    later = packed_file(model, format_, tmp_path / "m", MOST)
    assert (later.is_packed, later.is_mapped) == (True, has_huge_pages)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.zero_()  # Not read.
    assert torch.equal(logits(model, format_, later), own)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


def test_a_killed_process_leaves_nothing(tmp_path):
    program = f"""
import os
from pathlib import Path
from headrace_predictor.engine.cpu.packed_file import PackedFile
file = PackedFile(Path({str(tmp_path)!r}, "m.weights"), 2 << 20, 1 << 30)
file.take(1 << 20)[:] = 1
os.fsync = lambda file: (print("written", flush=True), input())
file.keep()
input()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"written\n"
    child.kill()
    child.communicate()
    assert not list(tmp_path.iterdir())


async def test_a_damaged_file_is_made_again(tmp_path, caplog):
    model = random_model("qwen3")
    own = logits(copy.deepcopy(model), "int8", packed_file(model, "int8", tmp_path / "m", MOST))
    (path,) = await files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    file = packed_file(model, "int8", tmp_path / "m", MOST)
    assert not file.is_packed
    assert "is damaged" in caplog.text
    assert torch.equal(logits(model, "int8", file), own)
    await until(lambda: path.exists() and path.read_bytes() == whole)


@pytest.mark.parametrize(("kept", "wanted"), [(100, 200), (200, 100)])
async def test_a_file_of_a_smaller_or_larger_model_ends_the_start(kept, wanted, tmp_path):
    path = tmp_path / "m.weights"

    def start(size):
        file = PackedFile(path, 1 << 20, MOST)
        file.take(size)
        file.keep()

    start(kept)
    await files(tmp_path)
    with pytest.raises(StartupFault, match="does not fit its model"):
        start(wanted)
    assert not path.exists()


@pytest.mark.parametrize("room", ["disk", "limit", "folder", "none", "locked"])
def test_without_room_weights_are_in_memory_only(room, tmp_path, monkeypatch, caplog):
    def allocate(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path
    if room == "disk":
        monkeypatch.setattr(os, "posix_fallocate", allocate)
    elif room == "folder":
        (folder := tmp_path / "file").touch()
    elif room == "none":
        monkeypatch.delattr(os, "O_TMPFILE")
    elif room == "locked":
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    file = PackedFile(folder / "m.weights", 1 << 20, 1000 if room == "limit" else MOST)
    file.take(1000)[:] = 7
    file.keep()
    assert not file.is_packed
    assert not list(tmp_path.glob("**/*.weights"))
    assert ("packed weights are not kept" in caplog.text) == (room in ("disk", "limit", "folder"))


async def test_files_used_longest_ago_are_deleted_beyond_the_limit(tmp_path):
    def path(name):
        return tmp_path / f"{name * 32}-x.weights"

    def keep(name):
        file = PackedFile(path(name), 1200, 3500)
        file.take(1000)[:] = 1
        file.keep()

    def kept():
        return sorted(file.name[0] for file in tmp_path.glob("*-x.weights"))

    other = tmp_path / "yolo.weights"
    other.write_bytes(bytes(5000))
    os.utime(other, (0, 0))
    for number, name in enumerate("abc"):
        keep(name)
        await until(path(name).exists)
        os.utime(path(name), (at := time.time() - 100 + number, at))
    assert PackedFile(path("a"), 1200, 3500).is_packed  # Used just now.
    keep("d")
    await until(lambda: kept() == ["a", "c", "d"])
    os.utime(path("a"), (0, 0))
    path("c").unlink()
    keep("e")
    await until(lambda: kept() == ["d", "e"])
    assert other.exists()


async def test_changed_weights_have_a_file_of_their_own_and_the_models_are_not_mapped(tmp_path, caplog):
    model, folder, cache = random_model("qwen3").bfloat16(), tmp_path / "model", tmp_path / "cache"
    settings = PredictorSettings(kv_cache_memory="16MiB", max_context=100, weights="int8", weights_cache=cache)

    def load():
        with caplog.at_level(logging.WARNING):
            loaded = loading.load_generation("m", folder, True, settings, torch.device("cpu"))
        gc.collect()
        mapped = Path("/proc/self/maps").read_text()
        loaded.engine.close()
        assert f"{folder}/model.safetensors" not in mapped
        return loaded.fingerprint

    model.save_pretrained(folder)
    first = load()
    await files(cache)
    assert load() == first
    assert len(await files(cache)) == 1
    with torch.no_grad():
        # Of a tensor that is hashed in part, what is left out: only the time of the change tells.
        model.model.embed_tokens.weight[62] += 1
    model.save_pretrained(folder)
    assert load() == first
    assert len(await files(cache, 2)) == 2


@pytest.mark.parametrize(
    ("format_", "sizes"), [*((format_, (144, 208, 3)) for format_ in ERRORS), ("int4", (1040, 16, 5))]
)
async def test_any_sizes_fit_the_file(format_, sizes, tmp_path):
    hidden, inner, heads = sizes
    model = random_model("llama")
    config = model.config
    config.hidden_size, config.intermediate_size, config.head_dim = hidden, inner, 16
    config.num_attention_heads, config.num_key_value_heads = heads, 1
    config.vocab_size, config.pad_token_id = 77, None
    model = AutoModelForCausalLM.from_config(config).eval()
    file = packed_file(model, format_, tmp_path / "m", MOST)
    with torch.inference_mode():
        logits(model, format_, file)
    await files(tmp_path)


def test_whether_a_file_lies_in_huge_pages_is_what_the_kernel_says(tmp_path):
    (path := tmp_path / "m").write_bytes(bytes(16 << 20))
    found = []
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
        memory.madvise(advice)
        array = np.frombuffer(memory, np.uint8)
        array.sum()
        found.append(_has_huge_pages(array))
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        entry = next(line for line in lines if line.endswith(str(path)))
        assert entry.startswith(f"{array.ctypes.data:x}-")
        said = next(int(line.split()[1]) for line in lines if line.startswith("FilePmdMapped:"))
        assert found[-1] is (said > 12 << 10)
        del array
        memory.close()
    assert found[1] is False
