"""Fingerprints are equal if answers are, and differ if anything that affects answers differs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_predictor.models import fingerprint
from headrace_predictor.models.fingerprint import fingerprint_of

LARGE = torch.arange(256 * 1024, dtype=torch.float32).reshape(512, 512)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"layers": 2}))
    (made / "tokenizer.json").write_text(json.dumps({"vocabulary": ["a", "b"]}))
    save_file({"large": LARGE, "small": torch.ones(8)}, made / "model.safetensors")
    return made


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_copies_of_a_model_have_one_fingerprint(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert fingerprint_of(folder, "float32", True) == fingerprint_of(copy, "float32", True)


CHANGES = {
    "a tensor as a whole": lambda f: change_weights(f, lambda t: t["large"].mul_(1.0001)),
    "one value of a small tensor": lambda f: change_weights(f, lambda t: t["small"][3].add_(1)),
    "a tensor's name": lambda f: change_weights(f, lambda t: t.update(other=t.pop("small"))),
    "a tensor's shape": lambda f: change_weights(f, lambda t: t.update(small=t["small"].reshape(2, 4))),
    "a tensor's dtype": lambda f: change_weights(f, lambda t: t.update(large=t["large"].half())),
    "the tokenizer": lambda f: (f / "tokenizer.json").write_text(json.dumps({"vocabulary": ["b", "a"]})),
    "the configuration": lambda f: (f / "config.json").write_text(json.dumps({"layers": 1})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_that_affects_answers_changes_the_fingerprint(folder, change):
    before = fingerprint_of(folder, "float32", True)
    change(folder)
    assert fingerprint_of(folder, "float32", True) != before


def test_the_dtype_and_the_sampler_are_part_of_the_fingerprint(folder, monkeypatch):
    before = fingerprint_of(folder, "float32", True)
    assert fingerprint_of(folder, "bfloat16", True) != before
    monkeypatch.setattr(fingerprint, "SAMPLER_VERSION", -1)
    assert fingerprint_of(folder, "float32", True) != before


def test_the_commit_of_a_hub_model_replaces_reading_its_files(folder):
    snapshot = folder.rename(folder.with_name("0123456789abcdef0123456789abcdef01234567"))
    before = fingerprint_of(snapshot, "float32", False)
    (snapshot / "model.safetensors").unlink()
    assert fingerprint_of(snapshot, "float32", False) == before


def test_only_a_small_part_of_large_weights_is_read(folder, monkeypatch):
    seen = 0
    hashed = fingerprint.hashlib.sha256

    def counting(data=b""):
        nonlocal seen
        seen += len(data)
        return hashed(data)

    monkeypatch.setattr(fingerprint.hashlib, "sha256", counting)
    fingerprint_of(folder, "float32", True)
    assert seen < LARGE.nbytes / 4
