"""`headrace pull` fetches from a mirror of the hub, uses its cache without one, and names what is missing.

As a process: the hub's client reads its variables when it is imported.
"""

import os
import subprocess
import sys

import pytest

from headrace_runner.settings import ROOT
from tests.hub import COMMIT, PRIVATE, TOKEN, serve_hub

STORY = ROOT / "models" / "storyteller"


@pytest.fixture
def pull(tmp_path):
    def run(*locations, **environment):
        command = [sys.executable, "-P", "-m", "headrace_runner.command", "pull", *locations]
        own = {**os.environ, "HF_HOME": str(tmp_path), "HF_TOKEN": "", **environment}
        return subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=100)

    return run


def test_a_model_of_a_mirror_is_fetched_and_then_used_offline(pull, tmp_path):
    with serve_hub({"good/story": STORY}) as address:
        done = pull("hf://good/story", "good/story@main", HF_ENDPOINT=address)
    folder = tmp_path / "hub" / "models--good--story" / "snapshots" / COMMIT
    assert (done.returncode, done.stdout) == (0, f"{folder}\n{folder}\n"), done.stderr
    assert done.stderr.startswith("hf://good/story: fetching from the hub\n")
    done = pull("hf://good/story", "good/other", HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (1, f"{folder}\n"), done.stderr
    assert done.stderr.endswith("; containers reach it with MODELS_NETWORK=outer\n")


def test_a_private_model_needs_a_token(pull):
    with serve_hub({PRIVATE: STORY}) as address:
        refused = pull(f"hf://{PRIVATE}", HF_ENDPOINT=address)
        done = pull(f"hf://{PRIVATE}", HF_ENDPOINT=address, HF_TOKEN=TOKEN)
    assert refused.returncode == 1
    assert refused.stderr.endswith("is neither a folder nor on the hub; a private one needs HF_TOKEN\n")
    assert done.returncode == 0, done.stderr
    assert COMMIT in done.stdout
