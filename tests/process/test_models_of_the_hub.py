"""Models of the hub: `headrace pull` fetches from a mirror and uses its cache without one; GGUF files by quantisation.

As processes: the hub's client reads its variables when it is imported.
"""

import os
import shutil
import subprocess
import sys

import pytest

from headrace.errors import StartupError
from headrace.models.hub import fetch
from headrace.models.sources import parse_location
from headrace_runner.settings import ROOT
from tests.gguf_files import write_gguf
from tests.hub import COMMIT, PRIVATE, TOKEN, serve_hub
from tests.model.test_gguf import random_model

STORY = ROOT / "models" / "storyteller"


@pytest.fixture
def pull(tmp_path):
    def run(*locations, **environment):
        command = [sys.executable, "-P", "-m", "headrace_runner.command", "pull", *locations]
        own = {**os.environ, "HF_HOME": str(tmp_path), "HF_TOKEN": "", **environment}
        return subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True)

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


NAME = "org/Model-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    model, _ = random_model("llama")
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(folder / f"model-{kind}.gguf", model, kind)
    (folder / "mmproj-model-Q8_0.gguf").write_bytes(b"images")
    return folder


@pytest.fixture
def hub(files, tmp_path, monkeypatch):
    with serve_hub({NAME: files}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield


def fetched(location):
    """What a new process fetches: the hub's client reads its environment once."""
    program = (
        "import sys; from headrace.models.hub import fetch; from headrace.models.sources import parse_location;"
        "print(fetch(parse_location('chat', sys.argv[1]), ('*.json',)))"
    )
    return subprocess.run([sys.executable, "-c", program, location], capture_output=True, text=True)


@pytest.mark.parametrize("quantisation", ["Q8_0", "q4_0"])
def test_a_quantisation_of_the_hub_is_fetched_alone(quantisation, hub, tmp_path):
    done = fetched(f"{NAME}:{quantisation}")
    assert done.returncode == 0, done.stderr
    link = (tmp_path / "hub").rglob("*.gguf")
    assert [path.name for path in link] == [f"model-{quantisation.upper()}.gguf"]
    assert COMMIT in str(next((tmp_path / "hub").rglob("*.gguf")))


@pytest.mark.parametrize(
    ("location", "reason"),
    [(f"{NAME}:Q5_K_M", "no GGUF file of Q5_K_M; it has"), (NAME, "name a quantisation: org/Model-GGUF:Q4_K_M")],
)
def test_what_the_hub_lacks_is_named(location, reason, hub):
    done = fetched(location)
    assert done.returncode
    assert reason in done.stderr


def test_a_folder_may_hold_one_file(files, tmp_path):
    shutil.copy(files / "model-Q4_0.gguf", tmp_path)
    shutil.copy(files / "mmproj-model-Q8_0.gguf", tmp_path)
    assert (fetch(parse_location("chat", str(tmp_path)), ()) / "config.json").is_file()
    with pytest.raises(StartupError, match="several GGUF files; name one"):
        fetch(parse_location("chat", str(files)), ())


@pytest.mark.parametrize("location", ["./missing.gguf", "missing.gguf", "org/missing.gguf"])
def test_a_missing_file_is_no_hub_id(location):
    with pytest.raises(ValueError, match="not a folder or file"):
        parse_location("chat", location)
