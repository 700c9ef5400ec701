"""The start of the transformer: several share a port that no other process can take."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from headrace.errors import StartupError
from headrace.rpc.server.listeners import reserved
from tests.support.full import usually


def listener(port, shares=True):
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        held.bind(("127.0.0.1", port))
        held.listen()
    except OSError:
        held.close()
        raise
    return held


def test_a_taken_port_cannot_be_reserved():
    for shares in (False, True):
        with closing(listener(0, shares)) as taken, pytest.raises(StartupError, match="is the port taken"):
            reserved("127.0.0.1", taken.getsockname()[1]).__enter__()
    with reserved("127.0.0.1", 0) as port, pytest.raises(StartupError, match="is the port taken"):
        reserved("127.0.0.1", port).__enter__()


def start(port, http_port=0, **environment):
    own = {"TRANSFORMER_WORKERS": "2", "TRANSFORMER_PORT": str(port), "MODELS": "storyteller=models/storyteller"}
    own |= {"TRANSFORMER_HTTP_PORT": str(http_port)}
    own |= {"TRANSFORMER_PREDICTOR": "127.0.0.1:9", "TRANSFORMER_LOGGER": "127.0.0.1:9"}
    command = (sys.executable, "-m", "headrace_transformer")
    return subprocess.Popen(command, env=os.environ | own | environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("names", usually(("http_port",), ("port", "http_port")))
def test_a_taken_port_is_one_line_at_the_start(names):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        process = start(**{"port": 0} | {names: taken.getsockname()[1]})
        _, error_text = process.communicate()
    assert process.returncode == os.EX_TEMPFAIL
    assert error_text.startswith("transformer: 127.0.0.1:")
    assert error_text.count("\n") == 1


NO_TOKENIZERS = {"MODELS": "identity=models/identity"}


def test_a_worker_that_cannot_start_ends_all_with_its_error_line(tmp_path):
    process = start(0, **NO_TOKENIZERS | {"MODELS": f"x={tmp_path}"})
    _, error_text = process.communicate()
    assert process.returncode == os.EX_CONFIG
    assert "has no config.json" in error_text
    assert "Traceback" not in error_text


STARTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from headrace.models.sources import ModelSource
from headrace_transformer import __main__
from headrace_transformer import transformer
from headrace_transformer.text.model_text import read_text
text = read_text(ModelSource("storyteller", "models/storyteller"), ThreadPoolExecutor(1))
assert text.tokenizer.has_chat_template
assert not {"torch", "transformers", "aiohttp", "opentelemetry.exporter.otlp"} & set(sys.modules)
"""


def test_the_start_imports_no_library_that_this_stack_does_not_need():
    done = subprocess.run((sys.executable, "-c", STARTS), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_for_bodies_imports_no_settings_and_no_telemetry():
    code = "import sys, headrace_transformer.processes.body_processes, headrace_transformer.text.chat_templates\n"
    code += "assert not {'pydantic', 'opentelemetry', 'numpy'} & set(sys.modules)"
    subprocess.run((sys.executable, "-c", code), check=True)
