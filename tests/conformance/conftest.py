"""One stack for all clients: text, tensors, a model that yields, and one that can be loaded."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.runner_stack import Stack
from tests.support.stacks import Stacks, pytest_runtest_makereport, stacks

__all__ = ["pytest_runtest_makereport", "stack", "stacks"]

# Cuts INPUT into pieces of `size`, an answer each; with `waits` it waits after the last one until its
# caller leaves. With `count` it returns the number of such waiting requests.
CHUNKS = """
import asyncio

import numpy as np

from headrace.errors import InvalidRequestError

INPUTS = {"INPUT": ("BYTES", [1])}
OUTPUTS = {"OUTPUT": ("BYTES", [1])}

waiting = 0


async def execute(request):
    global waiting
    text = request.inputs["INPUT"].ravel()[0].decode()
    size = request.parameters.get("size", 1)
    if size < 1:
        raise InvalidRequestError("size must be positive")
    if size > 1000:
        raise RuntimeError("secret")
    if request.parameters.get("count"):
        text, size = str(waiting), 100
    for start in range(0, len(text), size):
        yield {"OUTPUT": np.array([text[start : start + size]], dtype=object)}
    if request.parameters.get("waits"):
        waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            waiting -= 1
"""

ECHO = """
async def execute(request):
    return request.raw
"""


@pytest_asyncio.fixture(scope="module")
async def stack(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "chunks").mkdir()
    (folder / "chunks" / "model.py").write_text(CHUNKS)
    repository = tmp_path_factory.mktemp("repository")
    (repository / "spare").mkdir()
    (repository / "spare" / "model.py").write_text(ECHO)
    models = {
        "storyteller": "models/storyteller",
        "normalizer": "models/normalizer",
        "identity": "models/identity",
        "chunks": folder / "chunks",
    }
    async with stacks.use(
        models=",".join(f"{name}={where}" for name, where in models.items()),
        environment={"predictor": {"PREDICTOR_MODEL_REPOSITORY": str(repository)}},
    ) as started:
        yield started
