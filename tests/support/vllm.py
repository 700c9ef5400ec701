"""The interpreter with vLLM, how its engine starts fast enough for tests, its process and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel

PYTHON = Path(__file__).parents[2] / ".venv-bench-vllm" / "bin" / "python"
ARGUMENTS = {"enforce_eager": True}
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no interpreter with vLLM: `make .venv-bench-vllm/.installed`"
)


def vllm_process(predictor: int) -> psutil.Process | None:
    """The process with vLLM of the predictor with this process id."""
    for child in psutil.Process(predictor).children():
        with suppress(psutil.NoSuchProcess):  # Zombies too.
            if "headrace_predictor.vllm_engine" in child.cmdline():
                return child
    return None


async def token_ids(
    gateway: str, timeout_s: float, after_five: Callable[[], None] | None = None, **fields: Any
) -> list[int]:
    """Of one `Generate`; calls `after_five` once when five of them are there."""
    ids: list[int] = []
    async with channel(gateway) as opened:
        stub = headrace_pb2_grpc.TextGenerationStub(opened)
        async for response in stub.Generate(headrace_pb2.GenerateRequest(**fields), timeout=timeout_s):
            ids += response.token_ids
            if after_five and len(ids) >= 5:
                after_five()
                after_five = None
    return ids


async def check_engines(gateway: str) -> None:
    """Checks that vLLM computes the storyteller, and that the normalizer beside it keeps its own runner."""
    runners = []
    async with channel(gateway) as opened:
        for model in ("storyteller", "normalizer"):
            request = inference_pb2.ModelConfigRequest(name=model)
            response = await GRPCInferenceServiceStub(opened).ModelConfig(request, timeout=60)
            runners.append(response.config.parameters["runner"].string_value)
    assert runners[0].startswith("vllm ")
    assert runners[1] == "ragged decoder"
