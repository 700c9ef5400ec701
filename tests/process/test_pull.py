"""`headrace pull` fetches from a mirror of the hub, uses its cache without one, and names what is missing."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from headrace_runner.command.__main__ import main
from headrace_runner.settings import ROOT
from tests.hub import COMMIT, PRIVATE, TOKEN, serve_hub

STORY = ROOT / "models" / "storyteller"


@pytest.fixture
def pull(tmp_path, monkeypatch, capsys):
    """Exit code, output and errors of the command; the hub's client has read its other variables already."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def run(*locations):
        code = 0
        try:
            main(["pull", *locations])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_a_model_of_a_mirror_is_fetched_and_then_used_offline(pull, tmp_path, monkeypatch):
    folder = tmp_path / "models--good--story" / "snapshots" / COMMIT
    with serve_hub({"good/story": STORY}) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        code, output, errors = pull("hf://good/story", "good/story@main")
    assert (code, output) == (0, f"{folder}\n{folder}\n"), errors
    assert errors.startswith("hf://good/story: fetching from the hub\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull("hf://good/story")[:2] == (0, f"{folder}\n")
    code, _, errors = pull("hf://good/other")
    assert code == 1
    assert errors.endswith("; containers reach it with MODELS_NETWORK=outer\n")


def test_a_private_model_needs_a_token(pull, monkeypatch):
    with serve_hub({PRIVATE: STORY}) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        code, _, errors = pull(f"hf://{PRIVATE}")
        assert code == 1
        assert errors.endswith("is neither a folder nor on the hub; a private one needs HF_TOKEN\n")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        code, output, errors = pull(f"hf://{PRIVATE}")
    assert code == 0, errors
    assert COMMIT in output
