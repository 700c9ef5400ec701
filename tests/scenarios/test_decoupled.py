"""`decoupled`: one request, many responses, as Triton's unmodified clients use them.

Here their predictor dies. The other uses by these clients (many requests on one stream, ids, final responses, errors
on the stream, a user's model.py) are in tests/conformance, the hour of silence in test_idle_gaps.py, what a chunk holds
in tests/model/test_engine.py.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.conformance.conftest import CHUNKS
from tests.system.own_clients import python_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "clients" / "broken_stream.py"


async def test_tritons_client_sees_only_a_pause_when_its_predictor_dies_during_its_streams(new_stack, tmp_path):
    python = python_of()
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "model.py").write_text(CHUNKS)
    stack = await new_stack(
        models=f"storyteller=models/storyteller,chunks={tmp_path / 'chunks'}",
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": {"SLOW_MS": "40"}},
    )
    client = await asyncio.create_subprocess_exec(
        *(python, str(SCRIPT), stack.gateway), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(100):
            begun = await client.stdout.readline()
            await stack.kill("predictor-0")
            output, errors = await client.communicate(b"\n")
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert (begun, output) == (b"begun\n", b"done\n"), errors.decode()
