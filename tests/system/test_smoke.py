"""`make smoke`: every endpoint of each bundled model answers or refuses as it must; failures are reported."""

import asyncio
import socket
import sys

import pytest

from headrace_runner.smoke.checks import smoke
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.system.calls import headrace


@pytest.fixture
def proxied(monkeypatch):
    """A proxy in the environment, which accepts connections and says nothing: nobody inside a stack asks it."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http", "https", "all", "grpc"):
            for variable in (f"{name}_proxy", f"{name}_proxy".upper()):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for variable in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(variable, raising=False)
        yield


async def test_without_a_name_every_model_is_checked_by_its_kind_whatever_proxy_there_is(
    proxied, new_stack, tmp_path, capsys
):
    save_random_encoder("bert", tmp_path / "embedder")
    save_words_tokenizer(tmp_path / "embedder", "the", "fox")
    save_random_encoder("bert-classifier", tmp_path / "classifier")
    save_words_tokenizer(tmp_path / "classifier", "the", "fox")
    (tmp_path / "counting").mkdir()
    (tmp_path / "counting" / "model.py").write_text(COUNTING)
    own = ",".join(f"{name}={tmp_path / name}" for name in ("embedder", "classifier", "counting"))
    stack = await new_stack(models=f"identity=models/identity,normalizer=models/normalizer,{own}")
    failed = await asyncio.to_thread(smoke, stack.gateway)
    output = capsys.readouterr().out
    assert failed == 0, output
    assert len([row for row in output.splitlines() if row.startswith("  pass")]) > 45
    for line in (
        "identity: tensors",
        "normalizer: text generation, encoder-decoder, without chat template",
        "embedder: embeddings of texts and ids",
        "classifier: classification of texts and ids",
        "counting: tensors, many answers to a request",
    ):
        assert line in output.splitlines()


COUNTING = """
import numpy as np

INPUTS = {"n": ("INT64", [1])}

async def execute(request):
    for i in range(3):
        yield {"i": np.array([i])}
"""


async def test_a_failing_endpoint_is_named_and_the_exit_code_is_1(new_stack):
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"transformer": (sys.executable, "-m", "tests.system.mute_transformer")},
    )
    done = await headrace("smoke", "--gateway", stack.gateway, "storyteller")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("  FAIL")]
    # An answer without text is not reported. What renders messages fails, whole and streamed.
    paths = [
        path for line in failed for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages") if path in line
    ]
    assert sorted(paths) == ["/v1/chat/completions"] * 2 + ["/v1/messages"] * 2 + ["/v1/responses"] * 2
    assert all("POST /v1/" in line and "500" in line for line in failed)
